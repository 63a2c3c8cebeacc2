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
// the workspace, [dweight, dbias][sets][columns], which a second kernel adds up.
#include "base/launch.cuh"
#include "device/dependency.cuh"
#include "gated/row.cuh"

namespace fused_layernorm {
namespace {

// The partial sums of a block's columns.
template <typename Acc>
__device__ __forceinline__ Acc* partial_of(const GatedParams& p, const GatedBlock& block) {
  return static_cast<Acc*>(p.workspace) + dense_at(p, block.set, block.first_col(p));
}

// Adds up what the logical warps of a block have at each column, in a fixed order, and writes it.
template <int kVecs, int kWidth>
__device__ __forceinline__ void write_sum_of_teams(float (&sums)[kVecs][kWidth],
                                                   const Share<kVecs>& share, const GatedTeam& team,
                                                   int cols, float* partial) {
  extern __shared__ __align__(16) float of_warps[];
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      for (int offset = team.threads; offset < kWarpSize; offset *= 2) {
        sums[k][j] += shuffle_xor(sums[k][j], offset);
      }
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
    partial[col] = sum;
  }
}

// The gradients at one vector of columns of a row. x, gate and dy are all that is kept of it
// between the sum over the row and dx, so they are computed twice.
template <bool kGateFirst, typename X, int kWidth>
struct GatedGradients {
  float x[kWidth], dy[kWidth], value[kWidth], slope[kWidth], xhat[kWidth], dz[kWidth], g[kWidth];

  template <typename Y>
  __device__ __forceinline__ GatedGradients(const GatedParams& p, const Vec<X, kWidth>& its_x,
                                            const Vec<X, kWidth>& gate,
                                            const Vec<Y, kWidth>& its_dy, float rstd,
                                            const float (&weight)[kWidth]) {
    float gates[kWidth];
    unpack(x, its_x);
    unpack(gates, gate);
    unpack(dy, its_dy);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const Gating<X, float> gating(gates[j], p.silu);
      value[j] = gating.value;
      slope[j] = gating.slope;
      xhat[j] = (kGateFirst ? x[j] * value[j] : x[j]) * rstd;
      dz[j] = kGateFirst ? dy[j] : dy[j] * value[j];
      g[j] = rounded_product(dz[j], weight[j]);
    }
  }
};

template <typename X, typename Y, int kVecs, bool kGateFirst>
__global__ void __launch_bounds__(
    kVecs == 1 ? kGatedBackwardWarpThreads : kGatedBackwardBlockThreads,
    kVecs == 1 ? gated_backward_room(1, sizeof(Y) > sizeof(X)) / kGatedBackwardWarpThreads : 1)
    gated_backward_kernel(const int log2_lanes, const GatedParams p) {
  constexpr int kWidth = vector_width(sizeof(X));
  __shared__ alignas(16) float scratch[2][kMaxWarps];
  const GatedBlock block(p);
  const GatedTeam team(log2_lanes);
  const int first_col = block.first_col(p);
  const Share<kVecs> share{team.thread, team.threads, p.cols / kWidth};
  const float inverse_cols = p.inverse_cols.as<float>();
  // Of one vector the weight stays in registers; of more, it is loaded where it is used.
  constexpr bool kKeepsWeight = kVecs == 1;
  float weight[kWidth];
  const auto weight_at = [&](int k) {
    load_weight<X>(weight, p, first_col + share.template col<kWidth>(k));
  };
  if (kKeepsWeight) weight_at(0);
  // There are no registers to keep a dy wider than x.
  constexpr bool kReadsAgain = sizeof(Y) > sizeof(X);

  float dweight[kVecs][kWidth] = {};
  const unsigned rows = p.rows, step = block.sets * team.teams;
  int turn = 0;
  // All lanes of a warp take part in the shuffles, so the bounds are the same for all of them.
  for (unsigned base = block.set * team.teams; base < rows; base += step, turn ^= 1) {
    const bool has_row = base + team.index < rows;
    const unsigned row = has_row ? base + team.index : rows - 1;
    const X* x_row = static_cast<const X*>(p.x) + (p.x_rows(row) + first_col);
    const X* gate_row = static_cast<const X*>(p.gate) + (p.gate_rows(row) + first_col);
    const Y* dy_row = static_cast<const Y*>(p.dy) + (p.dy_rows(row) + first_col);
    // What is missing is zero, and adds zero to all sums.
    Vec<X, kWidth> x[kVecs] = {}, gate[kVecs] = {};
    Vec<Y, kWidth> dy[kVecs] = {};
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (!has_row || !share.has(k)) continue;
      const int col = share.vector(k) * kWidth;
      x[k] = load<Use::kOnce, kWidth>(element(x_row, col));
      gate[k] = load<Use::kOnce, kWidth>(element(gate_row, col));
      dy[k] = load<Use::kOnce, kWidth>(element(dy_row, col));
    }
    const float rstd = static_cast<const float*>(p.rstd)[int64_t{row} * p.groups + block.group];
    const int64_t at = dense_at(p, row, first_col);

    float sum = 0;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (!kKeepsWeight) weight_at(k);
      const GatedGradients<kGateFirst, X, kWidth> of(p, x[k], gate[k], dy[k], rstd, weight);
      float product[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        dweight[k][j] += of.dz[j] * of.xhat[j];
        product[j] = of.g[j] * of.xhat[j];
      }
      sum += tree_sum(product);
    }
    if (p.y == nullptr && p.dgate == nullptr) continue;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      hold(x[k]);
      hold(gate[k]);
      if (!kReadsAgain) hold(dy[k]);
    }
    const float mean = team.sum(sum, scratch[turn]) * inverse_cols;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (!has_row || !share.has(k)) continue;
      const int col = share.vector(k) * kWidth;
      if (!kKeepsWeight) weight_at(k);
      if (kReadsAgain) dy[k] = load<Use::kReadOnly, kWidth>(element(dy_row, col));
      const GatedGradients<kGateFirst, X, kWidth> of(p, x[k], gate[k], dy[k], rstd, weight);
      float dx[kWidth], dgate[kWidth], bias[kWidth];
      if (!kGateFirst) load_gated<X>(bias, p.bias, first_col + col, p.weight_is_float, 0.0f);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float du = rstd * (of.g[j] - of.xhat[j] * mean);
        dx[j] = kGateFirst ? du * of.value[j] : du;
        dgate[j] = (kGateFirst ? du * of.x[j] : of.dy[j] * (of.xhat[j] * weight[j] + bias[j])) *
                   of.slope[j];
      }
      if (p.y != nullptr) store_once(static_cast<X*>(p.y) + at + col, round_to<X, kWidth>(dx));
      if (p.dgate != nullptr)
        store_once(static_cast<X*>(p.dgate) + at + col, round_to<X, kWidth>(dgate));
    }
  }

  let_next_kernel_start();
  if (p.dweight == nullptr) return;
  float* const partial = partial_of<float>(p, block);
  if (!team.is_block) {
    write_sum_of_teams(dweight, share, team, p.cols, partial);
    return;
  }
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
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
    for (int col = threadIdx.x; col < p.cols; col += blockDim.x) use(col);
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
    const bool wide_dy = p.y_type != kTypeOf<X>;
    const void* dy_row = static_cast<const char*>(p.dy) +
                         (p.dy_rows(row) + first_col) * (wide_dy ? sizeof(float) : sizeof(X));
    const Acc rstd = static_cast<const Acc*>(p.rstd)[int64_t{row} * p.groups + block.group];
    // Calls use(col, x, gating, xhat, dy, dz, weight).
    const auto each = [&](const auto& use) {
      each_column([&](int col) {
        const Acc x = to_acc(x_row[col]);
        const Gating<X, Acc> gating(to_acc(gate_row[col]), p.silu);
        Acc dy[1], weight[1];
        load_gated<X>(dy, dy_row, col, wide_dy, Acc(0));
        load_weight<X>(weight, p, first_col + col);
        const Acc xhat = (kGateFirst ? x * gating.value : x) * rstd;
        use(col, x, gating, xhat, dy[0], kGateFirst ? dy[0] : dy[0] * gating.value, weight[0]);
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

template <typename X, bool kGateFirst>
cudaError_t launch_held(const GatedParams& params, const GatedPlan& plan, cudaStream_t stream) {
  if constexpr (sizeof(X) > sizeof(float)) {
    return cudaErrorInvalidValue;
  } else {
    return dispatch_vecs(GatedVecs<true>{}, plan.vecs, [&](auto vecs) {
      return dispatch_bool<sizeof(X) == 2>(params.y_type != kTypeOf<X>, [&](auto wide) {
        using Y = std::conditional_t<wide(), float, X>;
        return launch(gated_backward_kernel<X, Y, vecs(), kGateFirst>, plan, stream,
                      plan.log2_lanes, params);
      });
    });
  }
}

}  // namespace

cudaError_t launch_gated_backward(const GatedParams& params, const DataTypes& types,
                                  const GatedPlan& plan, cudaStream_t stream) {
  const cudaError_t error = dispatch_gated(types.x, [&](auto type) {
    using X = decltype(type);
    return dispatch_bool(params.gate_first, [&](auto first) {
      return plan.held ? launch_held<X, first()>(params, plan, stream)
                       : launch(gated_backward_loop_kernel<X, first()>, plan, stream, params);
    });
  });
  if (error != cudaSuccess) return error;
  BackwardParams sums;
  sums.dweight = params.dweight;
  sums.dbias = params.dbias;
  sums.cols = params.groups * params.cols;
  sums.workspace = params.workspace;
  return launch_param_grad(sums, {types.x, types.weight, types.x}, plan.partials, stream);
}

}  // namespace fused_layernorm
