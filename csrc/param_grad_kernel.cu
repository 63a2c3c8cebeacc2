// dweight and dbias from the partial sums that the persistent blocks of backward left, added in a
// fixed order; and the choice of a strategy's launch function.
#include "dispatch.h"
#include "launch.cuh"
#include "rows.cuh"

namespace fused_layernorm {
namespace {

constexpr int kMaxRowsOfThreads = 32;

// A block sums kWarpSize columns; thread (x, y) adds the partials y, y + blockDim.y, ...
template <typename T>
__global__ void __launch_bounds__(kWarpSize* kMaxRowsOfThreads)
    param_grad_kernel(const BackwardParams p, const int partials, const int64_t dparams_offset) {
  using Acc = typename T::Acc;
  using W = typename T::W;
  __shared__ Pair<Acc> sums[kMaxRowsOfThreads][kWarpSize];
  const int threads_y = blockDim.x / kWarpSize;
  const int x = threadIdx.x % kWarpSize, y = threadIdx.x / kWarpSize;
  const int col = blockIdx.x * kWarpSize + x;
  const auto* dweight_partial =
      reinterpret_cast<const Acc*>(static_cast<const char*>(p.workspace) + dparams_offset);
  const auto* dbias_partial = dweight_partial + int64_t{partials} * p.cols;

  Pair<Acc> sum;
  if (col < p.cols) {
#pragma unroll 4
    for (int i = y; i < partials; i += threads_y) {
      sum.first += dweight_partial[int64_t{i} * p.cols + col];
      sum.second += dbias_partial[int64_t{i} * p.cols + col];
    }
  }
  sums[y][x] = sum;
  __syncthreads();
  if (y != 0 || col >= p.cols) return;
  for (int i = 1; i < threads_y; ++i) {
    sum.first += sums[i][x].first;
    sum.second += sums[i][x].second;
  }
  if (p.dweight != nullptr) static_cast<W*>(p.dweight)[col] = from_acc<W>(sum.first);
  if (p.dbias != nullptr) static_cast<W*>(p.dbias)[col] = from_acc<W>(sum.second);
}

}  // namespace

cudaError_t launch_param_grad(const BackwardParams& params, const DataTypes& types,
                              const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    int threads_y = 1;
    while (threads_y < kMaxRowsOfThreads && threads_y * 4 < plan.partials) threads_y *= 2;
    Plan own;
    own.blocks = (params.cols + kWarpSize - 1) / kWarpSize;
    return launch(param_grad_kernel<T>, own, kWarpSize * threads_y, stream, params, plan.partials,
                  plan.dparams_offset);
  });
}

cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const Plan& plan, cudaStream_t stream) {
  switch (plan.strategy) {
    case Strategy::kWarp:
      return launch_layer_norm_forward_warp(params, types, plan, stream);
    case Strategy::kBlock:
      return launch_layer_norm_forward_block(params, types, plan, stream);
    case Strategy::kSplit:
      return launch_layer_norm_forward_split(params, types, plan, stream);
    case Strategy::kStream:
      return launch_layer_norm_forward_stream(params, types, plan, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const Plan& plan, cudaStream_t stream) {
  if (plan.few_rows) return launch_layer_norm_backward_few_rows(params, types, plan, stream);
  const auto rows = [&] {
    switch (plan.strategy) {
      case Strategy::kWarp:
        return launch_layer_norm_backward_warp(params, types, plan, stream);
      case Strategy::kBlock:
      case Strategy::kSplit:
        return launch_layer_norm_backward_block(params, types, plan, stream);
      case Strategy::kStream:
        return launch_layer_norm_backward_stream(params, types, plan, stream);
    }
    return cudaErrorInvalidValue;
  };
  const cudaError_t error = rows();
  const bool sums_left = plan.partials > 1 && (params.dweight || params.dbias);
  if (error != cudaSuccess || !sums_left) return error;
  return launch_param_grad(params, types, plan, stream);
}

}  // namespace fused_layernorm
