// SPDX-License-Identifier: Apache-2.0
// Backward of gated RMSNorm; gated/plan.h says how it is laid out. With a = activation(gate) and w
// for weight + weight_offset:
//
//   norm first  dz = dy a, g = dz w, dx = rstd (g - xhat mean(g xhat)),
//               dgate = dy (xhat w + bias) a'
//   gate first  u = x a in x's place, dz = dy, g = dz w, du = rstd (g - xhat mean(g xhat)),
//               dx = du a, dgate = du x a'
//
// dweight is the sum of dz xhat, dbias that of dz. Blocks are persistent and leave partial sums in
// the workspace, [dweight, dbias][sets][columns], which a second kernel adds up; a block that has
// all rows writes dweight itself.
#include "device/async.cuh"
#include "device/pdl.cuh"
#include "gated/row.cuh"
#include "norm/param_grad.cuh"

namespace fused_layernorm {
namespace {

// The partial sums of a block's columns.
template <typename Acc>
FUSED_DEVICE Acc* partial_of(const GatedParams& p, const GatedBlock& block) {
  return static_cast<Acc*>(p.workspace) + dense_at(p, block.set, block.first_col(p));
}

// Adds up what logical warps have at each column, in order, and calls write(column, sum).
template <int kVecs, int kWidth>
FUSED_DEVICE void write_sum_of_teams(float (&sums)[kVecs][kWidth], const Share<kVecs>& share,
                                     const GatedTeam& team, int cols, const auto& write) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* const of_warps = reinterpret_cast<float*>(shared);
  __syncthreads();  // other warps had their rows ahead there
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    for (int offset = team.threads; offset < kWarpSize; offset *= 2) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) sums[k][j] += shuffle_xor(sums[k][j], offset);
    }
    if (threadIdx.x % kWarpSize < team.threads && share.has(k)) {
      store(of_warps + threadIdx.x / kWarpSize * cols + share.vector(k) * kWidth,
            round_to<float>(sums[k]));
    }
  }
  __syncthreads();
  for (int col = threadIdx.x; col < cols; col += blockDim.x) {
    float sum = 0;
    for (int warp = 0; warp < blockDim.x / kWarpSize; ++warp) sum += of_warps[warp * cols + col];
    write(col, sum);
  }
}

// The vectors of x, gate and dy that a thread has of the rows ahead of it, in shared memory. Nobody
// else reads them, so there is no barrier: the thread's copies are of its loads' proxy and ordered
// behind earlier ones (PTX ISA, "Program Order: Asynchronous Operations").
template <typename X, int kVecs>
struct RowsAhead {
  using V = Vec<X, vector_width(sizeof(X))>;
  static constexpr int kVectors = kGatedTensors * kVecs;
  V* own;

  FUSED_DEVICE explicit RowsAhead(void* shared)
      : own(static_cast<V*>(shared) + threadIdx.x / kWarpSize * kWarpSize * kVectors +
            threadIdx.x % kWarpSize) {}
  FUSED_DEVICE V* at(int stage, int tensor, int k) const {
    return own + stage * (blockDim.x * kVectors) + (tensor * kVecs + k) * kWarpSize;
  }
};

// x, the gate and xhat at a vector of a row: computed for the sums, and again for dx.
template <bool kGateFirst, typename X, int kWidth>
struct GatedVector {
  float x[kWidth], value[kWidth], slope[kWidth], xhat[kWidth];

  FUSED_DEVICE GatedVector(const GatedParams& p, Vec<X, kWidth> its_x, Vec<X, kWidth> gate,
                           float rstd) {
    float gates[kWidth];
    unpack(x, its_x);
    unpack(gates, gate);
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      const Gating<X, float> gating(gates[j], p.silu);
      value[j] = gating.value;
      slope[j] = gating.slope;
      xhat[j] = (kGateFirst ? x[j] * value[j] : x[j]) * rstd;
    }
  }
};

template <typename X, int kVecs, bool kGateFirst>
__global__ void __launch_bounds__(kGatedBackwardBlockThreads,
                                  gated_backward_room(kVecs) / kGatedBackwardBlockThreads)
    gated_backward_kernel(const int log2_lanes, const int stages, const GatedParams p) {
  constexpr int kWidth = vector_width(sizeof(X));
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ alignas(16) float scratch[2][kMaxWarps];
  let_next_kernel_start();
  const GatedBlock block(p);
  const GatedTeam team(log2_lanes);
  const int first_col = block.first_col(p);
  const Share<kVecs> share{team.thread, team.threads, p.cols / kWidth};
  const RowsAhead<X, kVecs> ahead(shared);
  // Of one vector the weight stays in registers; of more, it is loaded where it is used.
  constexpr bool kKeepsWeight = kVecs == 1;
  WeightVector<X> kept;
  float weight[kWidth];
  if constexpr (kKeepsWeight) kept = WeightVector<X>(p, first_col, share.template col<kWidth>(0));

  const unsigned rows = p.rows, step = block.sets * team.teams, first = block.set * team.teams;
  // What is missing is zero, and adds zero to all sums.
  const auto fill = [&](int stage, unsigned base) {
    const unsigned row = base + team.index;
    if (row < rows) {
      const X* const from[] = {static_cast<const X*>(p.x) + (p.x_rows(row) + first_col),
                               static_cast<const X*>(p.gate) + (p.gate_rows(row) + first_col),
                               static_cast<const X*>(p.dy) + (p.dy_rows(row) + first_col)};
      FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
        if (!share.has(k)) continue;
        FUSED_UNROLL for (int t = 0; t < kGatedTensors; ++t) {
          copy_async<kVectorBytes>(ahead.at(stage, t, k),
                                   element(from[t], share.vector(k) * kWidth));
        }
      }
    } else {
      FUSED_UNROLL for (int i = 0; i < ahead.kVectors; ++i) * ahead.at(stage, 0, i) = {};
    }
    end_group_of_copies();
  };
  const auto rstd_at = [&](unsigned base) {
    const unsigned row = min(base + team.index, rows - 1);
    return __ldg(static_cast<const float*>(p.rstd) + (int64_t{row} * p.groups + block.group));
  };
  // Of one vector rstd is asked for in front of the rows; of more there is no register for it yet.
  float next_rstd = kKeepsWeight ? rstd_at(first) : 0.0f;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      for (int t = 0; t < kGatedTensors && !share.has(k); ++t) *ahead.at(stage, t, k) = {};
    }
    fill(stage, first + stage * step);
  }
  if (!kKeepsWeight) next_rstd = rstd_at(first);
  if constexpr (kKeepsWeight) kept.unpack_to(weight, p);
  const float inverse_cols = p.inverse_cols.as<float>();
  const bool needs_mean = p.y != nullptr || (kGateFirst && p.dgate != nullptr);

  float dweight[kVecs][kWidth] = {};
  int stage = 0, turn = 0;
  // All lanes of a warp take part in the shuffles, so the bounds are the same for all of them.
  for (unsigned base = first; base < rows; base += step, turn ^= 1) {
    const bool has_row = base + team.index < rows;
    const int64_t at = dense_at(p, has_row ? base + team.index : 0, first_col);
    X* const dx_row = static_cast<X*>(p.y) + at;
    X* const dgate_row = static_cast<X*>(p.dgate) + at;
    const float rstd = next_rstd;
    stages > 1 ? wait_for_groups<kGatedStages - 1>() : wait_for_groups<0>();

    float g[kVecs][kWidth], sum = 0;
    FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
      if (!kKeepsWeight) load_weight<X>(weight, p, first_col + share.template col<kWidth>(k));
      const GatedVector<kGateFirst, X, kWidth> of(p, *ahead.at(stage, 0, k), *ahead.at(stage, 1, k),
                                                  rstd);
      float dy[kWidth], product[kWidth];
      unpack(dy, load<Use::kPlain, kWidth>(ahead.at(stage, 2, k)->at));
      if constexpr (!kGateFirst) {
        float dgate[kWidth];
        const int col = share.template col<kWidth>(k);
        FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
          dgate[j] = dy[j] * (of.xhat[j] * weight[j]) * of.slope[j];
        }
        store_once_if(has_row && share.has(k) && p.dgate != nullptr, element(dgate_row, col),
                      round_to<X, kWidth>(dgate));
      }
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        const float dz = kGateFirst ? dy[j] : dy[j] * of.value[j];
        dweight[k][j] += dz * of.xhat[j];
        g[k][j] = rounded_product(dz, weight[j]);
        product[j] = g[k][j] * of.xhat[j];
      }
      sum += tree_sum(product);
    }
    next_rstd = rstd_at(base + step);
    if (needs_mean) {
      const float mean = team.sum(sum, scratch[turn]) * inverse_cols;
      FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
        const GatedVector<kGateFirst, X, kWidth> of(p, *ahead.at(stage, 0, k),
                                                    *ahead.at(stage, 1, k), rstd);
        float dx[kWidth], dgate[kWidth];
        FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
          const float du = rstd * (g[k][j] - of.xhat[j] * mean);
          dx[j] = kGateFirst ? du * of.value[j] : du;
          dgate[j] = du * of.x[j] * of.slope[j];
        }
        const int col = share.template col<kWidth>(k);
        const bool has = has_row && share.has(k);
        store_once_if(has && p.y != nullptr, element(dx_row, col), round_to<X, kWidth>(dx));
        if (kGateFirst) {
          store_once_if(has && p.dgate != nullptr, element(dgate_row, col),
                        round_to<X, kWidth>(dgate));
        }
      }
    }
    fill(stage, base + stages * step);
    stage = stage + 1 < stages ? stage + 1 : 0;
  }

  if (p.dweight == nullptr) return;
  float* const partial = partial_of<float>(p, block);
  if (!team.is_block) {
    write_sum_of_teams(dweight, share, team, p.cols, [&](int col, float sum) {
      if (kVecs > 1 || block.sets > 1) {
        partial[col] = sum;
      } else {
        const float sums[] = {sum};  // no other block has a part of it
        store_gradient<X>(p.dweight, p.weight_is_float, first_col + col, sums);
      }
    });
    return;
  }
  FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
    if (share.has(k)) store(partial + share.vector(k) * kWidth, round_to<float>(dweight[k]));
  }
}

// A block adds to partial sums of its own in memory, always the same thread to the same columns.
template <typename X, bool kGateFirst>
__global__ void __launch_bounds__(kLoopThreads) gated_backward_loop_kernel(const GatedParams p) {
  using Acc = acc_t<X>;
  __shared__ alignas(16) Acc scratch[2][kMaxWarps];
  const GatedBlock block(p);
  const int first_col = block.first_col(p);
  const Acc inverse_cols = p.inverse_cols.as<Acc>();
  Acc* const dweight = partial_of<Acc>(p, block);
  Acc* const dbias = dweight + dense_at(p, block.sets, 0);
  const bool sums_weight = p.dweight != nullptr || p.dbias != nullptr;
  const auto each_column = [&](const auto& use) {
    for (unsigned col = threadIdx.x; col < static_cast<unsigned>(p.cols); col += blockDim.x) {
      use(static_cast<int>(col));
    }
  };
  each_column([&](int col) {
    if (sums_weight) dweight[col] = 0;
    if (p.dbias != nullptr) dbias[col] = 0;
  });
  const unsigned rows = p.rows;
  int turn = 0;
  for (unsigned row = block.set; row < rows; row += block.sets, turn ^= 1) {
    const X* x_row = static_cast<const X*>(p.x) + (p.x_rows(row) + first_col);
    const X* gate_row = static_cast<const X*>(p.gate) + (p.gate_rows(row) + first_col);
    const X* dy_row = static_cast<const X*>(p.dy) + (p.dy_rows(row) + first_col);
    const Acc rstd = static_cast<const Acc*>(p.rstd)[int64_t{row} * p.groups + block.group];
    // Calls use(col, x, gating, xhat, dy, dz, weight).
    const auto each = [&](const auto& use) {
      each_column([&](int col) {
        const Acc x = to_acc(x_row[col]), dy = to_acc(dy_row[col]);
        const Gating<X, Acc> gating(to_acc(gate_row[col]), p.silu);
        Acc weight[1];
        load_weight<X>(weight, p, first_col + col);
        const Acc xhat = (kGateFirst ? x * gating.value : x) * rstd;
        use(col, x, gating, xhat, dy, kGateFirst ? dy : dy * gating.value, weight[0]);
      });
    };
    Acc sum = 0;
    each([&](int col, Acc, const auto&, Acc xhat, Acc, Acc dz, Acc weight) {
      sum += rounded_product(dz, weight) * xhat;
      if (sums_weight) dweight[col] += dz * xhat;
      if (p.dbias != nullptr) dbias[col] += dz;
    });
    const Acc mean = team_sum(sum, BlockTeam(), scratch[turn]) * inverse_cols;
    const int64_t at = dense_at(p, row, first_col);
    each([&](int col, Acc x, const auto& gating, Acc xhat, Acc dy, Acc dz, Acc weight) {
      const Acc du = rstd * (rounded_product(dz, weight) - xhat * mean);
      const Acc dx = kGateFirst ? du * gating.value : du;
      if (p.y != nullptr) static_cast<X*>(p.y)[at + col] = from_acc<X>(dx);
      if (p.dgate == nullptr) return;
      Acc dgate = du * x;
      if constexpr (!kGateFirst) {
        Acc bias[1];
        load_gated<X>(bias, p.bias, first_col + col, p.weight_is_float, Acc(0));
        dgate = dy * (xhat * weight + bias[0]);
      }
      static_cast<X*>(p.dgate)[at + col] = from_acc<X>(dgate * gating.slope);
    });
  }
}

}  // namespace

cudaError_t launch_gated_backward(const GatedParams& params, DataType x, const GatedPlan& plan,
                                  cudaStream_t stream) {
  const cudaError_t error = dispatch_gated(
      params, x, plan,
      [&](auto type, auto first, auto vecs) {
        return launch(gated_backward_kernel<decltype(type), vecs(), first()>, plan, stream,
                      plan.log2_lanes, plan.stages, params);
      },
      [&](auto type, auto first) {
        return launch(gated_backward_loop_kernel<decltype(type), first()>, plan, stream, params);
      });
  if (error != cudaSuccess) return error;
  BackwardParams sums;
  sums.dweight = params.dweight;
  sums.dbias = params.dbias;
  sums.cols = params.groups * params.cols;
  sums.workspace = params.workspace;
  const DataType weight = params.weight_is_float ? DataType::kFloat32 : x;
  return launch_param_grad(sums, {x, weight, x}, plan.partials, stream);
}

}  // namespace fused_layernorm
