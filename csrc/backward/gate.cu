// SPDX-License-Identifier: Apache-2.0
// Backward of the gated sum residual + gate * input: dinput = gate * dsum, and dgate, the sum of
// dsum * input over the rows of a group, from dsum, the gradient of the sum.
#include "backward/gate.h"
#include "base/launch.cuh"
#include "norm/param_grad.cuh"

namespace fused_layernorm {
namespace {

template <typename T, int kWidth, bool kOfRows>
__global__ void __launch_bounds__(kGateThreads)
    gate_backward_kernel(const int chunks, const int sets, const GateParams p) {
  using Acc = typename T::Acc;
  using In = typename T::In;
  using W = typename T::W;
  using X = typename T::X;
  constexpr int kVecs = gate_vecs(kWidth);
  constexpr int kAtOnce = 4 / (kVecs > 1 ? 4 : 1);  // rows that a warp loads at once
  __shared__ Vec<Acc, kWidth> scratch[kGateWarps][kVecs][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int first_col = static_cast<int>(blockIdx.x % chunks) * gate_cols(kWidth);
  const Share<kVecs> share = {lane, kWarpSize, (p.cols - first_col) / kWidth};
  const int set = blockIdx.x / chunks;
  const GroupRange range(p.rows, p.group_rows, set, sets);
  const auto* dsum = static_cast<const X*>(p.dsum) + first_col;
  const auto* input = static_cast<const In*>(p.input) + first_col;
  auto* dinput = static_cast<In*>(p.dinput) + first_col;

  int64_t part = set + range.group_of(range.begin);
  for (uint32_t from = range.begin; from < range.end; ++part) {
    const uint32_t to = kOfRows ? range.end : range.end_of_group(from);
    Acc running[kVecs][kWidth] = {};
    for (uint32_t first = from + warp; first < to; first += kAtOnce * kGateWarps) {
      Vec<X, kWidth> gradient[kAtOnce][kVecs] = {};
      Vec<In, kWidth> summand[kAtOnce][kVecs] = {};
      FUSED_UNROLL for (int i = 0; i < kAtOnce; ++i) {
        const int64_t row = first + i * kGateWarps;
        if (row >= to) continue;  // A row that does not exist adds zero.
        FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
          if (!share.has(k)) continue;
          const int col = share.vector(k) * kWidth;
          gradient[i][k] = load<Use::kReadOnly, kWidth>(dsum + p.dsum_rows(row) + col);
          if (p.dgate)
            summand[i][k] = load<Use::kReadOnly, kWidth>(input + p.input_rows(row) + col);
        }
      }
      FUSED_UNROLL for (int i = 0; i < kAtOnce; ++i) {
        const int64_t row = first + i * kGateWarps;
        if (row >= to) continue;
        const auto gate_row = row_parameter<W>(p.gate, p.gate_rows, row, first_col, Absent::kOnes);
        FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
          if (!share.has(k)) continue;
          const int col = share.vector(k) * kWidth;
          Acc values[kWidth], products[kWidth];
          unpack(values, gradient[i][k]);
          unpack(products, summand[i][k]);
          FUSED_UNROLL for (int j = 0; j < kWidth; ++j) products[j] *= values[j];
          if constexpr (kOfRows) {
            if (p.dgate) {
              store_gradient<W>(p.dgate, p.dgate_is_wide, row * p.cols + first_col + col, products);
            }
          } else {
            FUSED_UNROLL for (int j = 0; j < kWidth; ++j) running[k][j] += products[j];
          }
          if (p.dinput) {
            Acc gate[kWidth];
            unpack(gate, gate_row.template load<kWidth>(col));
            FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] *= gate[j];
            store_once<In, kWidth>(dinput + row * p.cols + col, round_to<In>(values));
          }
        }
      }
    }
    if (!kOfRows && p.dgate) {
      FUSED_UNROLL for (int k = 0; k < kVecs; ++k) {
        scratch[warp][k][lane] = round_to<Acc>(running[k]);
      }
      __syncthreads();
      // Warp k adds up the k-th vectors of all warps.
      if (warp < kVecs && share.has(warp)) {
        Acc sum[kWidth] = {};
        FUSED_UNROLL for (int w = 0; w < kGateWarps; ++w) {
          FUSED_UNROLL for (int j = 0; j < kWidth; ++j) sum[j] += scratch[w][warp][lane].at[j];
        }
        store<Acc, kWidth>(static_cast<Acc*>(p.workspace) + part * p.cols + first_col +
                               share.vector(warp) * kWidth,
                           round_to<Acc>(sum));
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
    // There are kernels only for y of the input's type, because the kernels do not touch y.
    if constexpr (std::is_same_v<typename T::Y, typename T::In>) {
      return dispatch_width<kVectorWidth<T>>(plan.width, [&](auto width) {
        return dispatch_bool(params.group_rows == 1, [&](auto of_rows) {
          return launch(gate_backward_kernel<T, width(), of_rows()>, plan, stream, plan.chunks,
                        plan.parts.sets, params);
        });
      });
    } else {
      return cudaErrorInvalidValue;
    }
  });
  return error != cudaSuccess ? error : launch_gate_grad(params, types, plan.parts, stream);
}

}  // namespace fused_layernorm
