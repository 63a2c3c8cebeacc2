// SPDX-License-Identifier: Apache-2.0
// Forward of few short rows: the vectors that a lane of a logical warp would own are spread over as
// many warps, which work on them side by side. One or two whole vectors stay with the lane of a
// logical warp that is not a whole warp. The sums are those of the logical warp (forward/warp.cu),
// in the same order, so y is the same in any batch.
//
// A call on few rows takes as long as its longest chain of waits and instructions. So this kernel
// has a body of its own, in which all loads stand in front of the first wait, and most of its
// instances know the lanes of a logical warp.
#include "base/launch.cuh"
#include "forward/row.cuh"
#include "forward/spread.h"

namespace fused_layernorm {
namespace {

// kWarps warps on the rows of one warp's logical warps. They are a block; but a warp that has rows
// of its own (kStays) is one of several in a block. kLanes: the lanes of a logical warp, or 0 if
// they are the kernel's argument.
template <int kLanes, int kWarps>
struct SpreadWarps {
  static constexpr bool kStays = kWarps == 1;
  static constexpr bool kWholeWarps = kLanes == kWarpSize;
  int log2_lanes;  // of a logical warp
  int warp = kStays ? 0 : threadIdx.x / kWarpSize;
  int lane = threadIdx.x % kWarpSize;

  __device__ __forceinline__ explicit SpreadWarps(int its_log2_lanes)
      : log2_lanes(kLanes > 0 ? log2_of(kLanes) : its_log2_lanes) {}
  __device__ __forceinline__ int lanes() const { return 1 << log2_lanes; }
  __device__ __forceinline__ int first_row() const {
    const int own_warp =
        kStays ? blockIdx.x * (kForwardWarpThreads / kWarpSize) + threadIdx.x / kWarpSize
               : blockIdx.x;
    return own_warp * (kWarpSize >> log2_lanes);
  }
  __device__ __forceinline__ int row() const { return first_row() + (lane >> log2_lanes); }
  // Warp number k has the k-th vector of each lane.
  __device__ __forceinline__ int first_vector() const {
    return (warp << log2_lanes) + (lane & (lanes() - 1));
  }

  // The sums n = 0 and n = 1 of a row have scratch memory of their own. First the sums of each
  // lane's vectors are added, in order, then those of the lanes, in the order of
  // logical_warp_sum(): pairs of neighbours, pairs of these pairs, and so on. Each thread takes the
  // first three of these steps by itself, for eight lanes at once, which takes less time than three
  // shuffles.
  template <typename Acc>
  __device__ __forceinline__ Acc sum(Acc v, int n) const {
    if constexpr (kWarps == 1) return logical_warp_sum(v, lanes());
    __shared__ alignas(16) Acc scratch[2][kWarps][kWarpSize];
    auto& parts = scratch[n];
    parts[warp][lane] = v;
    __syncthreads();
    Acc sums[8];
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      const auto* fours = reinterpret_cast<const Four<Acc>*>(&parts[k][lane & -8]);
      const Four<Acc> low = fours[0], high = fours[1];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[j] = k == 0 ? low.at[j] : sums[j] + low.at[j];
        sums[4 + j] = k == 0 ? high.at[j] : sums[4 + j] + high.at[j];
      }
    }
    // A lane keeps the sum of its own logical warp.
#pragma unroll
    for (int step = 0; step < 3; ++step) {
      const bool adds = kWholeWarps || step < log2_lanes;
      const bool second = lane >> step & 1;
#pragma unroll
      for (int j = 0; j < 8 >> (step + 1); ++j) {
        const Acc left = sums[2 * j], right = sums[2 * j + 1];
        sums[j] = adds ? left + right : second ? right : left;
      }
    }
    v = sums[0];
#pragma unroll
    for (int offset = 8; offset < kWarpSize; offset *= 2) {
      if (!kWholeWarps && lanes() <= offset) break;
      v += shuffle_xor(v, offset);
    }
    return v;
  }
};

// The least number of blocks on a multiprocessor. Without this bound the compiler saves registers,
// and moves loads of weight and bias behind the wait for the row.
constexpr int kSpreadBlocks = 6;

// kVecs: the vectors of a thread.
template <typename N, int kLanes, int kWarps, int kVecs>
__global__ void __launch_bounds__(spread_threads(kWarps), kSpreadBlocks)
    layer_norm_forward_spread_kernel(const int log2_lanes, const ForwardParams p) {
  using Acc = typename N::Acc;
  using X = typename N::X;
  using W = typename N::W;
  constexpr int kWidth = kVectorWidth<typename N::Types>;
  const SpreadWarps<kLanes, kWarps> warps(log2_lanes);
  const int row = warps.row();
  // If whole warps share a row, each block has a row.
  const bool has_row = kLanes == kWarpSize || row < static_cast<int>(p.rows);
  // A logical warp without a row of its own reads the last row, but stores nothing.
  const ForwardRow<N> place(p, has_row ? row : static_cast<int>(p.rows) - 1, 0);
  const Share<kVecs> share = {warps.first_vector(), warps.lanes(), p.cols / kWidth};

  const Acc pivot = N::Statistic::template pivot<X>(place.x.first_elements(kWidth));
  Vec<X, kWidth> x[kVecs];
  place.x.template load<Use::kReadOnly>(x, share);
  Vec<W, kWidth> weight[kVecs], bias[kVecs];
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    weight[k] = load_given<kWidth, W>(p.weight, Absent::kOnes, share, k);
    bias[k] = load_given<kWidth, W>(p.bias, Absent::kZeros, share, k);
  }
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    hold(weight[k]);
    hold(bias[k]);
  }

  const Reciprocal<Acc> inverse_cols(p.inverse_cols);
  const auto [mean, m2] = N::Statistic::template measure<1>(
      p.is_rms, x, share, pivot, [&] { return inverse_cols; },
      [&](Acc v, int n) { return warps.sum(v, n); }, [] {});
  const Acc rstd = N::Statistic::rstd(m2, inverse_cols.rounded, p.eps.as<Acc>());
  // What follows has no branches: behind a branch, the addresses of the stores would be computed
  // only after rstd is known.
  store_statistics_if(has_row && share.first == 0, p, row, mean, rstd);
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const auto y = N::template finish<typename N::Epilogue, typename N::Affine>(p, x[k], mean, rstd,
                                                                                weight[k], bias[k]);
    store_once_if(has_row && share.has(k), element(place.y, share.vector(k) * kWidth), y);
  }
}

}  // namespace

// There are kernels only for what is bare and of one type.
cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Spread& plan, cudaStream_t stream) {
  if (params.residual != nullptr || params.is_modulated || params.has_epilogue) {
    return cudaErrorInvalidValue;
  }
  return dispatch_types(types, [&](auto t) -> cudaError_t {
    using T = decltype(t);
    if constexpr (!kIsBareOfOneType<BareForward<T>>) {
      return cudaErrorInvalidValue;
    } else {
      constexpr int kXSize = sizeof(typename T::X);
      const int known = known_lanes(plan.lanes, plan.warps);
      return dispatch_vecs(SpreadLanes{}, known, [&](auto lanes) {
        return dispatch_vecs(SpreadWarpCounts{}, plan.warps, [&](auto warps) {
          return dispatch_vecs(StayingVecs{}, plan.thread_vecs, [&](auto vecs) -> cudaError_t {
            if constexpr (!has_spread_kernel(kXSize, lanes(), warps(), vecs())) {
              return cudaErrorInvalidValue;
            } else {
              return launch(
                  layer_norm_forward_spread_kernel<BareForward<T>, lanes(), warps(), vecs()>, plan,
                  stream, log2_of(plan.lanes), params);
            }
          });
        });
      });
    }
  });
}

}  // namespace fused_layernorm
