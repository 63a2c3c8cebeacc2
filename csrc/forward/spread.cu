// Forward of few short rows: the vectors that a lane of a logical warp would own are spread over as
// many warps, which work on them side by side. The sums are those of the logical warp
// (forward/warp.cu), in the same order, so y is the same in any batch.
#include "forward/row.cuh"
#include "launch.cuh"

namespace fused_layernorm {
namespace {

struct SpreadWarp {
  static constexpr int kMostEarlyWords = 32;
  static constexpr Use kEarlyUse = Use::kAhead;  // ahead of the barrier in sum()
  static constexpr bool kWalks = false;
  BlockTeam team;

  // Warp number k has the k-th vector of each lane. A vector is one piece, or several where rows
  // are moved by elements: the logical warp's lanes have these pieces one after the other.
  template <int kPieces>
  __device__ __forceinline__ int first_piece() const {
    return team.warp() * kPieces * kWarpSize + team.lane();
  }
  __device__ __forceinline__ int step() const { return kWarpSize; }
  template <typename, int kPieces, int>
  static constexpr int kTogether = kPieces;

  // First the sums of each lane's vectors are added, in order, then those of the lanes.
  template <typename Acc>
  __device__ __forceinline__ Acc sum(Acc v, int n) const {
    __shared__ Acc scratch[2][kMostSpreadVecs][kWarpSize];
    auto& parts = scratch[n];
    parts[team.warp()][team.lane()] = v;
    __syncthreads();
    v = parts[0][team.lane()];
#pragma unroll
    for (int k = 1; k < kMostSpreadVecs; ++k) {
      if (k < team.warps()) v += parts[k][team.lane()];
    }
    return warp_sum(v);
  }

  template <typename N, int kVecs, bool kShifted>
  static constexpr bool kPivotFirst = true;

  template <int kPieces, int kVecs, typename Words>
  using Seams = BlockSeams<kPieces, kMostSpreadVecs, Words>;
};

template <typename N, Moves kMoves>
__global__ void __launch_bounds__(kMostSpreadVecs* kWarpThreads)
    layer_norm_forward_spread_kernel(const ForwardParams p) {
  forward_row<N, 1, kMoves, true, false>(p, SpreadWarp(), blockIdx.x);
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
    if constexpr (!kMaySpread<BareForward<T>>) {
      return cudaErrorInvalidValue;
    } else {
      return dispatch_moves<T>(plan.moves, [&](auto moves) {
        return launch(layer_norm_forward_spread_kernel<BareForward<T>, moves()>, plan, stream,
                      params);
      });
    }
  });
}

}  // namespace fused_layernorm
