// SPDX-License-Identifier: Apache-2.0
// Backward of heads; heads/plan.h says how it is laid out.
#include "heads/plan.h"

#include "base/launch.cuh"
#include "device/pdl.cuh"
#include "heads/rotation.cuh"
#include "norm/param_grad.cuh"

namespace fused_layernorm {

namespace {

using backward::kHeadThreads;
using backward::kHeadWarps;

// Adds up what the lanes of a block have at each column, in a fixed order, and writes it.
template <typename Lane>
FUSED_DEVICE void write_partial(const HeadsCall& p, const Lane& lane, typename Lane::Values& sums,
                                float* partial, float (&scratch)[kHeadWarps][kMostHeadCols]) {
  FUSED_UNROLL for (int v = 0; v < Lane::kVecs; ++v) {
    FUSED_UNROLL for (int j = 0; j < Lane::kWidth; ++j) {
      for (int offset = p.lanes; offset < kWarpSize; offset *= 2) {
        sums[v][j] += shuffle_xor(sums[v][j], offset);
      }
    }
  }
  __syncthreads();
  if (lane.first == 0) {
    lane.each(
        [&](int v, int j) { scratch[threadIdx.x / kWarpSize][lane.col[v] + j] = sums[v][j]; });
  }
  __syncthreads();
  for (int col = threadIdx.x; col < p.cols; col += kHeadThreads) {
    float sum = 0;
    FUSED_UNROLL for (int warp = 0; warp < kHeadWarps; ++warp) sum += scratch[warp][col];
    partial[col] = sum;
  }
}

// Copies the rows of every step-th task, from the task `number` on.
template <typename Lane, typename Side>
FUSED_DEVICE void copy_rows(const Side& of, const HeadSide& side, const Lane& lane, unsigned number,
                            unsigned step) {
  using X = typename Lane::X;
  constexpr int kAtOnce = 4;  // tasks whose loads are issued at once
  for (; number < static_cast<unsigned>(side.tasks); number += kAtOnce * step) {
    Vec<X, Lane::kWidth> row[kAtOnce][Lane::kVecs];
    X* to[kAtOnce];
    bool has[kAtOnce];
    FUSED_UNROLL for (int i = 0; i < kAtOnce; ++i) {
      const HeadTask task(of.p, side, 1, number + i * step);
      has[i] = task.has_row(side, 0);
      to[i] = of.row(static_cast<X*>(side.y), side.y_strides, task, task.head,
                     &PackedHeadsParams::y_group);
      lane.template load_row<Use::kOnce>(
          row[i], head_row(static_cast<const X*>(side.dy), side.dy_strides, task, task.head),
          has[i] && side.dy != nullptr);
    }
    FUSED_UNROLL for (int i = 0; i < kAtOnce; ++i) {
      if (has[i]) lane.copy_row(to[i], row[i]);
    }
  }
}

template <typename Lane, typename Params>
__global__ void __launch_bounds__(kHeadThreads, backward::kHeadBlocks)
    heads_backward_kernel(const Params p) {
  using X = typename Lane::X;
  using Values = typename Lane::Values;
  constexpr int kRounds = backward::task_rounds(Lane::kWidth);
  __shared__ float scratch[kHeadWarps][kMostHeadCols];
  const SideOfBlock<Params> of(p);
  const HeadSide& side = of.side();
  const Lane lane(p);
  const unsigned block = of.block();
  const unsigned step = side.blocks * kHeadWarps;
  if constexpr (of.kPacked) {
    const unsigned number = block * kHeadWarps + threadIdx.x / kWarpSize;
    if (of.copies(side.dy)) return copy_rows(of, side, lane, number, step);
  }
  const float inverse_cols = p.inverse_cols.template as<float>();
  Values weight;
  lane.load_weight(weight, p, side);
  Values dweight = {}, dbias = {};
  for (unsigned number = block * kHeadWarps + threadIdx.x / kWarpSize;
       number < static_cast<unsigned>(side.tasks); number += step) {
    const HeadTask task(p, side, kRounds, number);
    Vec<X, Lane::kWidth> x[kRounds][Lane::kVecs], dy[kRounds][Lane::kVecs];
    FUSED_UNROLL for (int round = 0; round < kRounds; ++round) {
      const unsigned head = task.head_of(side, round);
      const bool has = task.has_row(side, round);
      lane.template load_row<Use::kOnce>(
          dy[round], head_row(static_cast<const X*>(side.dy), side.dy_strides, task, head), has);
      lane.template load_row<Use::kOnce>(x[round],
                                         of.row(static_cast<const X*>(side.x), side.x_strides, task,
                                                head, &PackedHeadsParams::x_group),
                                         has);
    }
    const Rotation<Lane> rotation(p, lane, task.batch, task.seq);
    FUSED_UNROLL for (int round = 0; round < kRounds; ++round) {
      Values d, dz;
      FUSED_UNROLL for (int v = 0; v < Lane::kVecs; ++v) {
        unpack(d[v], x[round][v]);
        unpack(dz[v], dy[round][v]);
      }
      if (p.rotary > 0) rotation.apply(dz);
      lane.center(p, d);
      // With g = dz * weight, the sums over the row that dx needs: of d * d and g * d, and of g.
      Pair<float> sums{lane.squares(d)};
      float sum = 0;
      lane.each([&](int v, int j) {
        const float g = dz[v][j] * weight[v][j];
        sums.second += g * d[v][j];
        sum += g;
      });
      sums = logical_warp_sum(sums, p.lanes);
      const float rstd = MeanAndVariance::rstd(sums.first, inverse_cols, p.eps);
      const float along = sums.second * rstd * inverse_cols;  // the mean of g * xhat
      float mean = 0;
      if (p.statistic == HeadStatistic::kLayer)
        mean = logical_warp_sum(sum, p.lanes) * inverse_cols;
      if (task.has_row(side, round)) {
        lane.each([&](int v, int j) {
          const float xhat = d[v][j] * rstd;
          dweight[v][j] += dz[v][j] * xhat;
          dbias[v][j] += dz[v][j];
          d[v][j] = rstd * (dz[v][j] * weight[v][j] - mean - xhat * along);
        });
        X* row = of.row(static_cast<X*>(side.y), side.y_strides, task, task.head_of(side, round),
                        &PackedHeadsParams::y_group);
        lane.store_row(row, d);
      }
    }
  }
  if (side.dweight == nullptr && side.dbias == nullptr) return;
  float* partial =
      static_cast<float*>(p.workspace) + int64_t{blockIdx.x} * backward::kHeadSums * p.cols;
  write_partial(p, lane, dweight, partial, scratch);
  write_partial(p, lane, dbias, partial + p.cols, scratch);
}

// The dweight and dbias of q and k from the partial sums of all blocks, added up in a fixed order.
// A block has kWarpSize columns of one gradient.
constexpr int kHeadGradients = 2 * backward::kHeadSums;
template <typename X>
__global__ void __launch_bounds__(kHeadThreads) head_sums_kernel(const HeadsParams p) {
  __shared__ float scratch[kHeadWarps][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int number = blockIdx.x % kHeadGradients;
  const bool of_k = number / backward::kHeadSums, of_bias = number % backward::kHeadSums;
  const int col = blockIdx.x / kHeadGradients * kWarpSize + lane;
  const HeadSide& side = p.side[of_k];
  void* const gradient = of_bias ? side.dbias : side.dweight;
  wait_for_previous_kernel();
  if (gradient == nullptr) return;
  const int first = of_k ? p.side[0].blocks : 0;
  const float* partial = static_cast<const float*>(p.workspace) + of_bias * p.cols + col;
  float sum = 0;
  if (col < p.cols) {
#pragma unroll 8
    for (int i = first + warp; i < first + side.blocks; i += kHeadWarps) {
      sum += partial[int64_t{i} * backward::kHeadSums * p.cols];
    }
  }
  scratch[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || col >= p.cols) return;
  sum = 0;
  FUSED_UNROLL for (int w = 0; w < kHeadWarps; ++w) sum += scratch[w][lane];
  const float sums[] = {sum};
  store_gradient<X>(gradient, of_bias ? side.bias_is_float : side.weight_is_float, col, sums);
}

template <typename Params>
cudaError_t launch_both(const Params& params, const backward::Heads& plan, cudaStream_t stream) {
  return dispatch_heads(params, plan.width, [&](auto of) {
    using Lane = typename decltype(of)::Lane;
    const cudaError_t error = launch(heads_backward_kernel<Lane, Params>, plan, stream, params);
    const bool needs = params.side[0].dweight != nullptr || params.side[0].dbias != nullptr ||
                       params.side[1].dweight != nullptr || params.side[1].dbias != nullptr;
    if (error != cudaSuccess || !needs) return error;
    Launch own;
    own.threads = kHeadThreads;
    own.blocks = ((params.cols - 1) / kWarpThreads + 1) * kHeadGradients;
    return launch_early(plan.starts_early, head_sums_kernel<typename Lane::X>, own, stream,
                        q_and_k(params));
  });
}

}  // namespace

cudaError_t launch_heads_backward(const HeadsParams& params, const backward::Heads& plan,
                                  cudaStream_t stream) {
  return launch_both(params, plan, stream);
}

cudaError_t launch_heads_backward(const PackedHeadsParams& params, const backward::Heads& plan,
                                  cudaStream_t stream) {
  return launch_both(params, plan, stream);
}

}  // namespace fused_layernorm
