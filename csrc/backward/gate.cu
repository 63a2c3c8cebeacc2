// Backward of the gated sum residual + gate * input, from dsum, the gradient of its result:
// dinput = gate * dsum, and dgate, the sum of dsum * input over the rows of a group. A warp has a
// line of vectors in some columns of one row after the other; where a group ends, the warps of a
// block add up what they have.
#include "launch.cuh"
#include "norm/param_grad.cuh"

namespace fused_layernorm {
namespace {

// Rows that a warp has on their way at once.
constexpr int kAtOnce = 4;

template <typename T, int kWidth, bool kOfRows>
__global__ void __launch_bounds__(kGateThreads)
    gate_backward_kernel(const GateParams p, const int chunks, const int sets) {
  using Acc = typename T::Acc;
  using In = typename T::In;
  using W = typename T::W;
  using X = typename T::X;
  __shared__ Vec<Acc, kWidth> scratch[kGateWarps][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int col = (static_cast<int>(blockIdx.x % chunks) * kWarpSize + lane) * kWidth;
  const bool has_cols = col < p.cols;
  const int set = blockIdx.x / chunks;
  const GroupRange range(p.rows, p.group_rows, set, sets);
  const auto* dsum = static_cast<const X*>(p.dsum) + col;
  const auto* input = static_cast<const In*>(p.input) + col;
  auto* dinput = static_cast<In*>(p.dinput) + col;

  int64_t part = set + range.group_of(range.begin);
  for (uint32_t from = range.begin; from < range.end; ++part) {
    const uint32_t to = kOfRows ? range.end : range.end_of_group(from);
    Acc running[kWidth] = {};
    for (uint32_t first = from + warp; has_cols && first < to; first += kAtOnce * kGateWarps) {
      Vec<X, kWidth> gradient[kAtOnce] = {};
      Vec<In, kWidth> summand[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t row = first + i * kGateWarps;
        if (row >= to) continue;  // A row that does not exist adds zero.
        gradient[i] = load<Use::kOnce, kWidth>(dsum + p.dsum_rows(row));
        if (p.dgate) summand[i] = load<Use::kOnce, kWidth>(input + p.input_rows(row));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t row = first + i * kGateWarps;
        if (row >= to) continue;
        Acc values[kWidth], summands[kWidth], gate[kWidth];
        unpack(values, gradient[i]);
        unpack(summands, summand[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) summands[j] *= values[j];
        if constexpr (kOfRows) {
          if (p.dgate) store_gradient<W>(p.dgate, p.dgate_is_wide, row * p.cols + col, summands);
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) running[j] += summands[j];
        }
        if (p.dinput) {
          const auto of_row = row_parameter<W>(p.gate, p.gate_rows, row, 0, Absent::kOnes);
          unpack(gate, of_row.template load<kWidth>(col));
#pragma unroll
          for (int j = 0; j < kWidth; ++j) values[j] *= gate[j];
          store_once<In, kWidth>(dinput + row * p.cols, round_to<In>(values));
        }
      }
    }
    if (!kOfRows && p.dgate) {
      scratch[warp][lane] = round_to<Acc>(running);
      __syncthreads();
      if (warp == 0 && has_cols) {
#pragma unroll
        for (int w = 1; w < kGateWarps; ++w) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) running[j] += scratch[w][lane].at[j];
        }
        store<Acc, kWidth>(static_cast<Acc*>(p.workspace) + part * p.cols + col,
                           round_to<Acc>(running));
      }
      __syncthreads();
    }
    from = to;
  }
}

}  // namespace

cudaError_t launch_gate_backward(const GateParams& params, const DataTypes& types,
                                 const backward::Gate& plan, cudaStream_t stream) {
  const cudaError_t error = dispatch_types(types, [&](auto t) -> cudaError_t {
    using T = decltype(t);
    // Of the types that differ in y alone, one has kernels.
    if constexpr (std::is_same_v<typename T::Y, typename T::In>) {
      return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
        return dispatch_bool(params.group_rows == 1, [&](auto of_rows) {
          return launch(gate_backward_kernel<T, width(), of_rows()>, plan, stream, params,
                        plan.chunks, plan.parts.sets);
        });
      });
    } else {
      return cudaErrorInvalidValue;
    }
  });
  return error != cudaSuccess ? error : launch_gate_grad(params, types, plan.parts, stream);
}

}  // namespace fused_layernorm
