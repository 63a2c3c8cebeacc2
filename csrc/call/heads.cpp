// SPDX-License-Identifier: Apache-2.0
// From the description of a call for heads to its launch; heads.h has the contract.
#include "call/heads.h"

#include <sstream>
#include <stdexcept>

namespace fused_layernorm {
namespace {

// The strides of three dimensions; a dimension that is not there, or of size 1, has none.
HeadStrides strides_of(const RawTensor& x, int64_t batch, int64_t position, int64_t head) {
  const auto at = [&](int64_t d) { return d >= 0 && x.sizes[d] > 1 ? x.strides[d] : 0; };
  return {at(batch), at(position), at(head)};
}

// The address of a tensor's rows. Clears `aligned` unless all begin at multiples of 16 bytes.
const void* placed(const RawTensor& tensor, const HeadStrides& strides, bool& aligned) {
  const int64_t bytes = size_of(tensor.type);
  aligned = aligned && reinterpret_cast<uintptr_t>(tensor.data) % kVectorBytes == 0 &&
            strides.batch * bytes % kVectorBytes == 0 &&
            strides.position * bytes % kVectorBytes == 0 &&
            strides.head * bytes % kVectorBytes == 0;
  return tensor.data;
}

bool is_float(const RawTensor& tensor) { return tensor.type == DataType::kFloat32; }

HeadsParams params_of(const HeadsCall& call) {
  const RawTensor& q = call.q.x;
  const int64_t seq = q.sizes[call.seq_dim], cols = q.sizes[3], head_dim = 3 - call.seq_dim;
  HeadsParams params;
  params.type = q.type;
  params.positions = static_cast<int32_t>(q.sizes[0] * seq);
  params.seq = static_cast<int32_t>(seq);
  params.cols = static_cast<int32_t>(cols);
  params.rotary = static_cast<int32_t>(call.rotary_dim);
  params.statistic = call.statistic;
  params.interleaved = call.interleaved;
  params.sin_sign = call.inverse ? -1.0f : 1.0f;
  params.weight_offset = static_cast<float>(call.weight_offset);
  params.eps = static_cast<float>(call.eps);
  params.inverse_cols = Scalar(1.0 / static_cast<double>(cols));
  const auto place = [&](const RawTensor& x, HeadStrides& strides) {
    strides = strides_of(x, 0, call.seq_dim, head_dim);
    return placed(x, strides, params.aligned);
  };
  if (call.cos) {
    const int64_t last = call.cos.dims - 1;
    params.cos_strides = strides_of(call.cos, last - 2, last - 1, -1);
    params.sin_strides = strides_of(call.sin, last - 2, last - 1, -1);
    params.cos = placed(call.cos, params.cos_strides, params.aligned);
    params.sin = placed(call.sin, params.sin_strides, params.aligned);
    params.angles_are_float = is_float(call.cos);
    params.doubled = call.cos.sizes[last] == call.rotary_dim;
  }
  const HeadTensors* const given[] = {&call.q, &call.k};
  for (int i = 0; i < 2; ++i) {
    const HeadTensors& tensors = *given[i];
    HeadSide& side = params.side[i];
    if (!tensors.x) continue;
    side.heads = static_cast<int32_t>(tensors.x.sizes[head_dim]);
    side.x = place(tensors.x, side.x_strides);
    if (tensors.dy) side.dy = place(tensors.dy, side.dy_strides);
    side.y = const_cast<void*>(tensors.y.data);
    side.y_strides = strides_of(tensors.y, 0, call.seq_dim, head_dim);
    side.weight = tensors.weight.data;
    side.bias = tensors.bias.data;
    side.weight_is_float = tensors.weight && is_float(tensors.weight);
    side.bias_is_float = tensors.bias && is_float(tensors.bias);
    side.rounds = call.round_before_weight && tensors.weight;
    side.dweight = tensors.dweight;
    side.dbias = tensors.dbias;
  }
  return params;
}

template <typename Plan>
bool has_plan(std::optional<Plan> found, Plan& into) {
  if (found) into = *found;
  return found.has_value();
}

void check_launch(cudaError_t error, const HeadsParams& params, const char* direction) {
  if (error == cudaSuccess) return;
  std::ostringstream message;
  message << "fused_layernorm: CUDA error: " << cudaGetErrorString(error) << ", at the launch of "
          << direction << " for " << params.positions << " positions of " << params.side[0].heads
          << " and " << params.side[1].heads << " heads of " << params.cols << " columns of "
          << name_of(params.type);
  throw std::runtime_error(message.str());
}

}  // namespace

bool has_rows(const RawTensor& x) {
  bool fits = x.strides[3] == 1;
  for (int d = 0; d < 3; ++d) fits = fits && (x.sizes[d] <= 1 || x.strides[d] != 0);
  return fits;
}

bool prepare(const HeadsCall& call, PreparedHeadsForward& into) {
  into.params = params_of(call);
  return has_plan(forward::make_heads_plan(into.params), into.plan);
}

bool prepare(const HeadsCall& call, const Device& device, PreparedHeadsBackward& into) {
  into.params = params_of(call);
  return has_plan(backward::make_heads_plan(into.params, device), into.plan);
}

void launch(const PreparedHeadsForward& prepared, cudaStream_t stream) {
  check_launch(launch_heads_forward(prepared.params, prepared.plan, stream), prepared.params,
               "forward");
}

void launch(PreparedHeadsBackward& prepared, void* workspace, cudaStream_t stream) {
  prepared.params.workspace = workspace;
  check_launch(launch_heads_backward(prepared.params, prepared.plan, stream), prepared.params,
               "backward");
}

}  // namespace fused_layernorm
