// SPDX-License-Identifier: Apache-2.0
// Backward of many short rows that begin anywhere in memory: each thread has one row. Persistent
// blocks copy rows of x and dy to shared memory. There most threads have one column of some of the
// rows, and keep the column's running dweight and dbias. Then each thread takes one row, and writes
// the row's dx in the place of x, from where the block stores it.
//
// Where rows are fewer, a logical warp has such a row (backward/warp.cu, backward/few_rows.cu). The
// thread emulates the lanes of that logical warp: it takes the same sums in the same order, so dx
// is the same in any batch.
#include "device/rows_in_shared.cuh"
#include "launch.cuh"
#include "norm/param_grad.cuh"

namespace fused_layernorm {
namespace {

// The running dweight and dbias of one column. `parts` threads share the column, and each has every
// `parts`-th row; threads that are left over have none.
template <typename N>
struct RunningColumn {
  using Acc = typename N::Acc;
  const int cols, parts, part, col;
  Acc dweight[1] = {}, dbias[1] = {};

  __device__ __forceinline__ explicit RunningColumn(int row_cols)
      : cols(row_cols),
        parts(kBackwardThreadThreads / cols),
        part(threadIdx.x / cols),
        col(threadIdx.x - part * cols) {}

  __device__ __forceinline__ void add(const RowsInShared<typename N::X>& x,
                                      const RowsInShared<typename N::Y>& dy,
                                      const Pair<Acc>* statistics, int rows) {
    if (part >= parts) return;
    // The rows in shared memory have sums of their own, which are added to the running sums: one
    // chain over all rows would be rounded as often as there are rows.
    Acc by_xhat = 0, alone = 0;
#pragma unroll 4
    for (int row = part; row < rows; row += parts) {
      const Acc dz = to_acc(dy.rows[row * cols + col]);
      const Acc xhat = N::Statistic::normalize(to_acc(x.rows[row * cols + col]),
                                               statistics[row].first, statistics[row].second);
      by_xhat += dz * xhat;
      alone += dz;
    }
    dweight[0] += by_xhat;
    dbias[0] += alone;
  }

  // Adds up the sums of the threads that share a column, and stores the totals. `shared` has room
  // for two numbers of each thread of the block. All threads call.
  __device__ __forceinline__ void store(const ParamGradSink<N>& sink, Acc* shared) {
    __syncthreads();
    shared[threadIdx.x] = dweight[0];
    shared[kBackwardThreadThreads + threadIdx.x] = dbias[0];
    __syncthreads();
    if (part > 0) return;
    for (int i = 1; i < parts; ++i) {
      dweight[0] += shared[i * cols + col];
      dbias[0] += shared[kBackwardThreadThreads + i * cols + col];
    }
    sink.store(col, dweight, dbias);
  }
};

template <typename N, int kLanes>
__global__ void __launch_bounds__(kBackwardThreadThreads, 1)
    layer_norm_backward_thread_kernel(const int dy_offset, const int partials,
                                      const int64_t partials_offset, const BackwardParams p) {
  using Acc = typename N::Acc;
  using W = typename N::W;
  using X = typename N::X;
  using Y = typename N::Y;
  constexpr int kMostCols = kLanes * kBackwardThreadVecs;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Acc weight[kMostCols];
  __shared__ Pair<Acc> statistics[kBackwardThreadThreads];
  const int thread = threadIdx.x;
  if (thread < p.cols) {
    const Parameter<W> given(p.weight, 0, Absent::kOnes);
    weight[thread] = to_acc(given.template load<1>(thread).at[0]);
  }
  const ParamGradSink<N> sink(p, {partials, partials_offset}, blockIdx.x);
  RunningColumn<N> column(p.cols);

  const int64_t step = int64_t{gridDim.x} * kBackwardThreadThreads;
  for (int64_t first_row = int64_t{blockIdx.x} * kBackwardThreadThreads; first_row < p.rows;
       first_row += step) {
    const int rows = static_cast<int>(min(int64_t{kBackwardThreadThreads}, p.rows - first_row));
    const bool has_row = thread < rows;
    const RowsInShared<X> x(shared, p.x, p.x_rows, p.cols, first_row, rows);
    const RowsInShared<Y> dy(shared + dy_offset, p.dy, p.dy_rows, p.cols, first_row, rows);
    Pair<Acc> own;
    if (has_row) {
      own = load_statistics<Acc>(p, first_row + thread);
      statistics[thread] = own;
    }
    wait_for_rows();
    __syncthreads();
    if (sink.wanted()) column.add(x, dy, statistics, rows);
    if (p.dx != nullptr) {
      X* const x_row = x.rows + thread * p.cols;
      const Y* const dy_row = dy.rows + thread * p.cols;
      const auto gradients_at = [&](int col) {
        Vec<X, 1> x_at;
        Vec<Y, 1> dy_at;
        Vec<Acc, 1> weight_at;
        x_at.at[0] = x_row[col];
        dy_at.at[0] = dy_row[col];
        weight_at.at[0] = weight[col];
        return Gradients<N, 1>(p, x_at, dy_at, own.first, own.second, weight_at, {});
      };
      Pair<Acc> means;
      if (has_row) {
        const auto sums = sum_over_lanes<kLanes, kLanes, Pair<Acc>>([&](int lane) {
          Pair<Acc> sum;
#pragma unroll
          for (int col = lane; col < kMostCols; col += kLanes) {
            if (col < p.cols) gradients_at(col).add_sums(sum);
          }
          return sum;
        });
        means = means_of(p, sums);
      }
      __syncthreads();
      if (has_row) {
        const DxRow<N> dx_row(p, 0, 0);
#pragma unroll 4
        for (int col = 0; col < p.cols; ++col) {
          const auto gradients = gradients_at(col);
          x_row[col] =
              dx_row.vector(gradients.xhat, gradients.g, means, own.second, Vec<X, 1>()).at[0];
        }
      }
      __syncthreads();
      store_elements(static_cast<X*>(p.dx) + first_row * p.cols, x.rows, rows * p.cols);
    }
    __syncthreads();
  }
  if (sink.wanted()) column.store(sink, reinterpret_cast<Acc*>(shared));
}

}  // namespace

// There are kernels only for what is common in such rows: nothing fused.
cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Thread& plan, cudaStream_t stream) {
  if (params.dresidual != nullptr || params.is_modulated || params.has_epilogue) {
    return cudaErrorInvalidValue;
  }
  return dispatch_types_but_float64(types, [&](auto t) {
    return dispatch_vecs(BackwardThreadLanes{}, plan.lanes, [&](auto lanes) {
      return launch(layer_norm_backward_thread_kernel<BareBackward<decltype(t)>, lanes()>, plan,
                    stream, plan.dy_offset, plan.partials.count, plan.partials.offset, params);
    });
  });
}

}  // namespace fused_layernorm
