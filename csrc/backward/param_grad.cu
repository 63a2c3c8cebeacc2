// dweight and dbias from the partial sums that the persistent blocks of backward left, added in a
// fixed order; and the choice of a strategy's launch function.
#include "dispatch.h"
#include "launch.cuh"
#include "norm/rows.cuh"

namespace fused_layernorm {
namespace {

// Lanes side by side on columns, kWidth each; the others of a warp, and the other warps, are on
// other partial sums.
constexpr int kColumnLanes = 8;
constexpr int kLanesOfColumn = kWarpSize / kColumnLanes;
constexpr int kMostWarps = 8;

template <typename Acc, typename W, int kWidth>
__global__ void __launch_bounds__(kMostWarps* kWarpSize)
    param_grad_kernel(const BackwardParams p, const int partials, const int64_t dparams_offset) {
  using Sum = Vec<Acc, kWidth>;
  __shared__ Sum sums[2][kMostWarps][kColumnLanes];
  const int lane = threadIdx.x % kColumnLanes, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  const int col = (blockIdx.x * kColumnLanes + lane) * kWidth;
  const auto* partial =
      reinterpret_cast<const Acc*>(static_cast<const char*>(p.workspace) + dparams_offset) + col;
  const int64_t all = int64_t{partials} * p.cols;

  Acc dweight[kWidth] = {}, dbias[kWidth] = {};
  if (col < p.cols) {
#pragma unroll 4
    for (int i = threadIdx.x / kColumnLanes; i < partials; i += warps * kLanesOfColumn) {
      const Sum dw = load<Use::kOnce, kWidth>(partial + int64_t{i} * p.cols);
      const Sum db = load<Use::kOnce, kWidth>(partial + all + int64_t{i} * p.cols);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        dweight[j] += dw.at[j];
        dbias[j] += db.at[j];
      }
    }
  }
#pragma unroll
  for (int offset = kColumnLanes; offset < kWarpSize; offset *= 2) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      dweight[j] += shuffle_xor(dweight[j], offset);
      dbias[j] += shuffle_xor(dbias[j], offset);
    }
  }
  if (threadIdx.x % kWarpSize < kColumnLanes) {
    sums[0][warp][lane] = round_to<Acc>(dweight);
    sums[1][warp][lane] = round_to<Acc>(dbias);
  }
  __syncthreads();
  if (threadIdx.x >= 2 * kColumnLanes || col >= p.cols) return;
  // The first lanes add up dweight, the next dbias.
  const bool of_bias = threadIdx.x >= kColumnLanes;
  Acc sum[kWidth] = {};
#pragma unroll 4
  for (int w = 0; w < warps; ++w) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] += sums[of_bias][w][lane].at[j];
  }
  auto* const gradient = static_cast<W*>(of_bias ? p.dbias : p.dweight);
  if (gradient != nullptr) store_once<W, kWidth>(gradient + col, round_to<W>(sum));
}

}  // namespace

cudaError_t launch_param_grad(const BackwardParams& params, const DataTypes& types,
                              const Plan& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using Acc = typename decltype(t)::Acc;
    using W = typename decltype(t)::W;
    constexpr int kMostWidth = 16 / static_cast<int>(sizeof(Acc));
    return dispatch_bool<true>(params.cols % kMostWidth == 0, [&](auto aligned) {
      constexpr int kWidth = aligned() ? kMostWidth : 1;
      int warps = 1;
      while (warps < kMostWarps && warps * kLanesOfColumn * 4 < plan.partials) warps *= 2;
      Plan own;
      own.blocks = (params.cols - 1) / (kColumnLanes * kWidth) + 1;
      return launch(param_grad_kernel<Acc, W, kWidth>, own, kWarpSize * warps, stream, params,
                    plan.partials, plan.dparams_offset);
    });
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
