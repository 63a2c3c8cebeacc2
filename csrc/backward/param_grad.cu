// dweight and dbias from the partial sums that the persistent blocks of backward have left, added
// up in a fixed order.
#include "device/reduce.cuh"
#include "launch.cuh"
#include "norm/types.cuh"

namespace fused_layernorm {
namespace {

// Of a warp, so many lanes side by side are on columns, kWidth each. The other lanes, and the other
// warps, are on other partial sums.
constexpr int kColumnLanes = 8;
constexpr int kLanesOfColumn = kWarpSize / kColumnLanes;
constexpr int kMostWarps = 8;

template <typename Acc, typename W, int kWidth>
__global__ void __launch_bounds__(kMostWarps* kWarpSize)
    param_grad_kernel(const BackwardParams p, const backward::PartialSums partials) {
  using Sum = Vec<Acc, kWidth>;
  __shared__ Sum sums[2][kMostWarps][kColumnLanes];
  const int lane = threadIdx.x % kColumnLanes, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  const int col = (blockIdx.x * kColumnLanes + lane) * kWidth;
  const auto* partial =
      reinterpret_cast<const Acc*>(static_cast<const char*>(p.workspace) + partials.offset) + col;
  const int64_t all = int64_t{partials.count} * p.cols;

  Acc dweight[kWidth] = {}, dbias[kWidth] = {};
  if (col < p.cols) {
#pragma unroll 4
    for (int i = threadIdx.x / kColumnLanes; i < partials.count; i += warps * kLanesOfColumn) {
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
  // The first lanes add up dweight, the next ones dbias.
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
                              const backward::PartialSums& partials, cudaStream_t stream) {
  if (partials.count == 1 || (params.dweight == nullptr && params.dbias == nullptr)) {
    return cudaSuccess;
  }
  return dispatch_types(types, [&](auto t) {
    using Acc = typename decltype(t)::Acc;
    using W = typename decltype(t)::W;
    constexpr int kMostWidth = vector_width(sizeof(Acc));
    return dispatch_bool(params.cols % kMostWidth == 0, [&](auto aligned) {
      constexpr int kWidth = aligned() ? kMostWidth : 1;
      int warps = 1;
      while (warps < kMostWarps && warps * kLanesOfColumn * 4 < partials.count) warps *= 2;
      const Launch own = {(params.cols - 1) / (kColumnLanes * kWidth) + 1, kWarpSize * warps};
      return launch(param_grad_kernel<Acc, W, kWidth>, own, stream, params, partials);
    });
  });
}

}  // namespace fused_layernorm
