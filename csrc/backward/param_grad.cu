// SPDX-License-Identifier: Apache-2.0
// The gradients of parameters from the partial sums that blocks have left, added up in a fixed
// order: dweight and dbias of all rows; dscale, dshift and dgate of groups of rows.
#include "base/launch.cuh"
#include "base/partial_sums.h"
#include "device/pdl.cuh"
#include "device/reduce.cuh"
#include "norm/param_grad.cuh"

namespace fused_layernorm {
namespace {

// kColumnLanes neighbouring lanes of a warp have neighbouring columns, kWidth each. The other
// lanes, and the other warps, have other partial sums of the same columns.
constexpr int kColumnLanes = 8;
constexpr int kLanesOfColumn = kWarpSize / kColumnLanes;
constexpr int kMostWarps = 8;
// With more partial sums than this, as blocks on small tiles of channels leave them, a block has up
// to so many warps.
constexpr int kManyParts = 160, kMostWarpsOfMany = 32;

// Adds up partial sums at the kWidth columns of each lane. There are kSums sums, each with `count`
// rows of partial sums, `cols` elements apart; the rows of the next sum lie `all` elements further.
// factor(factors, row) sets by what a row is multiplied. Only the first `wanted` sums are taken,
// the others are zero. Thread n * kColumnLanes + lane gets sum n.
template <int kSums, int kWarps = kMostWarps, typename Acc, int kWidth, typename Count>
FUSED_DEVICE void sum_parts(Acc (&result)[kWidth], const Acc* partial, Count count, int64_t cols,
                            int64_t all, bool has_cols, const auto& factor, int wanted = kSums) {
  using Sum = Vec<Acc, kWidth>;
  __shared__ Sum sums[kSums][kWarps][kColumnLanes];
  const int lane = threadIdx.x % kColumnLanes, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  Acc running[kSums][kWidth] = {};
  wait_for_previous_kernel();
  if (has_cols) {
#pragma unroll 4
    for (Count i = threadIdx.x / kColumnLanes; i < count; i += warps * kLanesOfColumn) {
      Acc factors[kWidth];
      factor(factors, i);
      FUSED_UNROLL for (int n = 0; n < kSums; ++n) {
        if (n >= wanted) continue;
        // Plain loads: the kernel that writes these may still have run when this one started.
        const Sum part = load<Use::kPlain, kWidth>(partial + n * all + i * cols);
        FUSED_UNROLL for (int j = 0; j < kWidth; ++j) running[n][j] += factors[j] * part.at[j];
      }
    }
  }
  FUSED_UNROLL for (int n = 0; n < kSums; ++n) {
    FUSED_UNROLL for (int offset = kColumnLanes; offset < kWarpSize; offset *= 2) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        running[n][j] += shuffle_xor(running[n][j], offset);
      }
    }
    if (threadIdx.x % kWarpSize < kColumnLanes) sums[n][warp][lane] = round_to<Acc>(running[n]);
  }
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  const int n = min(static_cast<int>(threadIdx.x) / kColumnLanes, kSums - 1);
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) result[j] = 0;
  // In chains of eight additions: one chain of 32 has two thirds more rounding error.
#pragma unroll 1
  for (int first = 0; first < kWarps && first < warps; first += kMostWarps) {
    Acc chain[kWidth] = {};
    const int end = kWarps > kMostWarps ? min(first + kMostWarps, warps) : warps;
#pragma unroll 4
    for (int w = first; w < end; ++w) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) chain[j] += sums[n][w][lane].at[j];
    }
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) result[j] += chain[j];
  }
}

template <typename Acc, int kWidth>
FUSED_DEVICE void no_factor(Acc (&factors)[kWidth], int64_t) {
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) factors[j] = 1;
}

// The first part of a group and the number of its parts (GroupParts in base/partial_sums.h).
struct PartsOfGroup {
  int64_t first, count;

  FUSED_DEVICE PartsOfGroup(int64_t group, int64_t group_rows, int64_t rows, int sets)
      : first(set_of(group * group_rows, rows, sets) + group),
        count(set_of((group + 1) * group_rows - 1, rows, sets) + group - first + 1) {}

 private:
  static FUSED_DEVICE int64_t set_of(int64_t row, int64_t rows, int sets) {
    return ((row + 1) * sets - 1) / rows;
  }
};

// The group that a block of the kernels below works on, and the first column of a thread.
template <int kWidth>
struct GradColumns {
  int64_t group;
  int col;

  FUSED_DEVICE explicit GradColumns(int chunks)
      : group(blockIdx.x / chunks),
        col((static_cast<int>(blockIdx.x % chunks) * kColumnLanes +
             static_cast<int>(threadIdx.x) % kColumnLanes) *
            kWidth) {}
};

// Stores what sum_parts() found of dweight and of dbias, as far as they are wanted.
template <typename W, typename Acc, int kWidth>
FUSED_DEVICE void store_param_grads(const BackwardParams& p, const GradColumns<kWidth>& at,
                                    const Acc (&sum)[kWidth]) {
  if (threadIdx.x >= 2 * kColumnLanes || at.col >= p.cols) return;
  auto* const gradient = static_cast<W*>(threadIdx.x >= kColumnLanes ? p.dbias : p.dweight);
  if (gradient != nullptr) store_once<W, kWidth>(gradient + at.col, round_to<W>(sum));
}

// dweight and dbias of all rows.
template <typename Acc, typename W, int kWidth>
__global__ void __launch_bounds__(kMostWarpsOfMany* kWarpSize, 1)
    param_grad_kernel(const backward::PartialSums partials, const BackwardParams p) {
  const GradColumns<kWidth> at(gridDim.x);
  const auto* partial =
      reinterpret_cast<const Acc*>(static_cast<const char*>(p.workspace) + partials.offset);
  Acc sum[kWidth];
  sum_parts<2, kMostWarpsOfMany>(sum, partial + at.col, partials.count, p.cols,
                                 int64_t{partials.count} * p.cols, at.col < p.cols,
                                 no_factor<Acc, kWidth>, p.dbias != nullptr ? 2 : 1);
  store_param_grads<W>(p, at, sum);
}

// dscale = weight * a + bias * c and dshift = c of every group, where a is the sum of dy * xhat and
// c that of dy over its rows; and dgate, with a gate. Where dweight or dbias is asked for, a and c
// stay in the workspace. A block has some columns of one group.
template <typename Acc, typename W, int kWidth, int kSums>
__global__ void __launch_bounds__(kMostWarps* kWarpSize)
    modulation_grad_kernel(const backward::GroupParts parts, const int chunks,
                           const BackwardParams p) {
  const GradColumns<kWidth> at(chunks);
  const PartsOfGroup own(at.group, p.group_rows, p.rows, parts.sets);
  char* const workspace = static_cast<char*>(p.workspace);
  const auto* partial = reinterpret_cast<const Acc*>(workspace + parts.partials.offset);
  const bool has_cols = at.col < p.cols;
  Acc sum[kWidth];
  sum_parts<kSums>(sum, partial + own.first * p.cols + at.col, own.count, p.cols,
                   int64_t{parts.partials.count} * p.cols, has_cols, no_factor<Acc, kWidth>);
  if (threadIdx.x >= kWarpSize) return;
  Acc of_shift[kWidth];
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) of_shift[j] = shuffle_xor(sum[j], kColumnLanes);
  if (threadIdx.x >= kSums * kColumnLanes || !has_cols) return;
  const bool is_shift = threadIdx.x >= kColumnLanes;
  const int64_t place = at.group * p.cols + at.col;
  if (kSums > 2 && threadIdx.x >= 2 * kColumnLanes) {
    if (p.dgate != nullptr) store_gradient<W>(p.dgate, p.dgate_is_wide, place, sum);
    return;
  }
  if (p.dweight != nullptr || p.dbias != nullptr) {
    auto* kept = reinterpret_cast<Acc*>(workspace + parts.sums_offset);
    store<Acc, kWidth>(kept + (is_shift ? p.rows / p.group_rows * p.cols : 0) + place,
                       round_to<Acc>(sum));
  }
  if (is_shift) {
    if (p.dshift != nullptr) store_gradient<W>(p.dshift, p.dshift_is_wide, place, sum);
  } else if (p.dscale != nullptr) {
    if (p.weight != nullptr || p.bias != nullptr) {
      Acc weight[kWidth], bias[kWidth];
      unpack(weight, Parameter<W>(p.weight, at.col, Absent::kOnes).template load<kWidth>(0));
      unpack(bias, Parameter<W>(p.bias, at.col, Absent::kZeros).template load<kWidth>(0));
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        sum[j] = weight[j] * sum[j] + bias[j] * of_shift[j];
      }
    }
    store_gradient<W>(p.dscale, p.dscale_is_wide, place, sum);
  }
}

// dweight and dbias under a modulation: the sums of (1 + scale) * a and (1 + scale) * c.
template <typename Acc, typename W, int kWidth>
__global__ void __launch_bounds__(kMostWarps* kWarpSize)
    modulated_param_grad_kernel(const int64_t sums_offset, const BackwardParams p) {
  const GradColumns<kWidth> at(gridDim.x);
  const int64_t groups = p.rows / p.group_rows;
  const auto* kept =
      reinterpret_cast<const Acc*>(static_cast<const char*>(p.workspace) + sums_offset);
  Acc sum[kWidth];
  sum_parts<2>(sum, kept + at.col, groups, p.cols, groups * p.cols, at.col < p.cols,
               [&](Acc(&factors)[kWidth], int64_t group) {
                 const auto scale = row_parameter<W>(p.modulation.scale, p.modulation.scale_rows,
                                                     group * p.group_rows, at.col, Absent::kZeros);
                 unpack(factors, scale.template load<kWidth>(0));
                 FUSED_UNROLL for (int j = 0; j < kWidth; ++j) factors[j] += Acc(1);
               });
  store_param_grads<W>(p, at, sum);
}

// dgate of every group.
template <typename Acc, typename W, int kWidth>
__global__ void __launch_bounds__(kMostWarps* kWarpSize)
    gate_grad_kernel(const backward::GroupParts parts, const int chunks, const GateParams p) {
  const GradColumns<kWidth> at(chunks);
  const PartsOfGroup own(at.group, p.group_rows, p.rows, parts.sets);
  const auto* partial = static_cast<const Acc*>(p.workspace);
  const bool has_cols = at.col < p.cols;
  Acc sum[kWidth];
  sum_parts<1>(sum, partial + own.first * p.cols + at.col, own.count, p.cols, 0, has_cols,
               no_factor<Acc, kWidth>);
  if (threadIdx.x >= kColumnLanes || !has_cols) return;
  store_gradient<W>(p.dgate, p.dgate_is_wide, at.group * p.cols + at.col, sum);
}

// The launch of one of these kernels: `chunks` blocks for the columns of each group.
Launch grad_launch(int chunks, int64_t groups, int64_t parts_of_group, int most = kMostWarps) {
  int warps = 1;
  while (warps < most && warps * kLanesOfColumn * 4 < parts_of_group) warps *= 2;
  return {groups * chunks, kWarpSize * warps};
}

// Calls then(types, width, chunks) with the columns of a thread, and the blocks of a row.
cudaError_t dispatch_grads(const DataTypes& types, int cols, const auto& then) {
  return dispatch_types(types, [&](auto t) {
    constexpr int kMostWidth = vector_width(sizeof(typename decltype(t)::Acc));
    return dispatch_bool(cols % kMostWidth == 0, [&](auto aligned) {
      constexpr int kWidth = aligned() ? kMostWidth : 1;
      return then(t, std::integral_constant<int, kWidth>{},
                  (cols - 1) / (kColumnLanes * kWidth) + 1);
    });
  });
}

}  // namespace

cudaError_t launch_param_grad(const BackwardParams& params, const DataTypes& types,
                              const backward::PartialSums& partials, cudaStream_t stream) {
  if (partials.count == 1 || (params.dweight == nullptr && params.dbias == nullptr)) {
    return cudaSuccess;
  }
  return dispatch_grads(types, params.cols, [&](auto t, auto width, int chunks) {
    using T = decltype(t);
    const int most = partials.count > kManyParts ? kMostWarpsOfMany : kMostWarps;
    return launch_early(partials.starts_early,
                        param_grad_kernel<typename T::Acc, typename T::W, width()>,
                        grad_launch(chunks, 1, partials.count, most), stream, partials, params);
  });
}

cudaError_t launch_modulation_grad(const BackwardParams& params, const DataTypes& types,
                                   const backward::GroupParts& parts, cudaStream_t stream) {
  const bool needs_columns = params.dweight != nullptr || params.dbias != nullptr;
  const bool wanted = params.dshift != nullptr || params.dscale != nullptr ||
                      params.dgate != nullptr || needs_columns;
  if (params.group_rows == 1 || !wanted) return cudaSuccess;
  return dispatch_grads(types, params.cols, [&](auto t, auto width, int chunks) {
    using Acc = typename decltype(t)::Acc;
    using W = typename decltype(t)::W;
    const int64_t groups = params.rows / params.group_rows;
    const Launch per_group = grad_launch(chunks, groups, parts.sets / groups + 1);
    const bool early = parts.partials.starts_early;
    const cudaError_t error = dispatch_bool(params.modulation.gate != nullptr, [&](auto gated) {
      constexpr int kSums = gated() ? 3 : 2;
      return launch_early(early, modulation_grad_kernel<Acc, W, width(), kSums>, per_group, stream,
                          parts, chunks, params);
    });
    if (error != cudaSuccess || !needs_columns) return error;
    return launch_early(early, modulated_param_grad_kernel<Acc, W, width()>,
                        grad_launch(chunks, 1, groups), stream, parts.sums_offset, params);
  });
}

cudaError_t launch_gate_grad(const GateParams& params, const DataTypes& types,
                             const backward::GroupParts& parts, cudaStream_t stream) {
  if (params.group_rows == 1 || params.dgate == nullptr) return cudaSuccess;
  return dispatch_grads(types, params.cols, [&](auto t, auto width, int chunks) {
    using T = decltype(t);
    const int64_t groups = params.rows / params.group_rows;
    return launch_early(
        parts.partials.starts_early, gate_grad_kernel<typename T::Acc, typename T::W, width()>,
        grad_launch(chunks, groups, parts.sets / groups + 1), stream, parts, chunks, params);
  });
}

}  // namespace fused_layernorm
