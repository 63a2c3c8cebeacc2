// SPDX-License-Identifier: Apache-2.0
// Backward over the channels of planes: channels.h has the plan.
#include "base/launch.cuh"

#include "backward/channels.h"
#include "device/dependency.cuh"
#include "device/planes.cuh"
#include "norm/param_grad.cuh"

namespace fused_layernorm {
namespace {

// kWidth neighbouring pixels are moved at once. With kScattered they are moved one by one, and lie
// apart.
template <typename N, int kWidth, bool kScattered>
__global__ void __launch_bounds__(kTileThreads)
    channels_backward_kernel(const backward::Channels plan, const BackwardParams p) {
  using X = typename N::X;
  using Y = typename N::Y;
  using W = typename N::W;
  using Acc = typename N::Acc;
  constexpr int kMoved = kScattered ? 1 : kWidth;
  extern __shared__ uint4 shared[];
  char* const memory = reinterpret_cast<char*>(shared);
  auto* const x_tile = reinterpret_cast<X*>(memory);
  auto* const dy_tile = reinterpret_cast<Y*>(memory + plan.dy_offset);
  auto* const params = reinterpret_cast<Pair<Acc>*>(memory + plan.params_offset);
  auto* const sums = reinterpret_cast<Acc*>(memory + plan.sums_offset);
  const Tiles& tiles = plan.tiles;
  const int tile_pixels = tiles.tile_pixels, groups = tiles.groups, channels = p.cols;
  const int units = (tile_pixels + kWidth - 1) / kWidth;
  const int room =
      units * kWidth;  // pixels, with those that scattered threads have behind the tile
  Acc* const second_sums = sums + groups * room;
  Acc* const means = second_sums + groups * room;
  Acc* const rstds = means + room;
  Acc* const g_means = rstds + room;
  Acc* const g_xhat_means = g_means + room;

  const int group = threadIdx.x / units, unit = threadIdx.x - group * units;
  const int pixels = static_cast<int>(plan.x.pixels);
  const Parameter<W> weights(p.weight, 0, Absent::kOnes);
  const Parameter<W> biases(N::Epilogue::kMayActivate && p.has_epilogue ? p.bias : nullptr, 0,
                            Absent::kZeros);
  for (int at = threadIdx.x; group < groups && at < (channels + groups - 1) / groups * blockDim.x;
       at += blockDim.x) {
    params[at] = Pair<Acc>{};
  }

  for (int tile = blockIdx.x; tile < plan.all_tiles; tile += gridDim.x) {
    const int sample = tile / tiles.tiles;
    const int first = (tile - sample * tiles.tiles) * tile_pixels;
    const int in_tile = min(tile_pixels, pixels - first);
    const int64_t row = int64_t{sample} * pixels + first;
    const TileThread<kMoved> mover(channels, tile_pixels,
                                   kScattered ? blockDim.x / tile_pixels : groups, in_tile);
    const auto load_tile = [&](auto* to, const auto* from, const Planes& planes) {
      const auto* const at = from + sample * planes.sample_stride + first;
      if (tiles.is_run) {
        load_run(to, at, channels * pixels);
      } else {
        load_planes(to, at, planes.channel_stride, mover);
      }
    };
    load_tile(x_tile, static_cast<const X*>(p.x), plan.x);
    if (plan.dy_channels_last) {
      Transposed<Y>::load(dy_tile, static_cast<const Y*>(p.dy) + row * channels, channels,
                          tile_pixels, in_tile);
    } else {
      load_tile(dy_tile, static_cast<const Y*>(p.dy), plan.dy);
    }
    for (int pixel = threadIdx.x; pixel < room; pixel += blockDim.x) {
      Pair<Acc> statistics;
      if (pixel < in_tile) statistics = load_statistics<Acc>(p, row + pixel);
      means[pixel] = statistics.first;
      rstds[pixel] = statistics.second;
    }
    wait_for_copies();
    __syncthreads();
    if (tile + static_cast<int>(gridDim.x) >= plan.all_tiles) let_next_kernel_start();

    const ThreadPixels<kWidth, kScattered> own(unit, units, in_tile);
    const bool works = group < groups && own.first < in_tile;
    Acc mean[kWidth], rstd[kWidth];
    if (works) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        mean[j] = means[own.first + own.at(j)];
        rstd[j] = rstds[own.first + own.at(j)];
      }
    }
    // Calls body(place in the tile, number among the thread's channels, the gradients of pixel j).
    const auto each = [&](const auto& body) {
      if (!works) return;
      int at = group * tile_pixels + own.first, slot = threadIdx.x;
#pragma unroll 2
      for (int c = group; c < channels; c += groups) {
        const Vec<X, kWidth> x = own.load(x_tile + at);
        const Vec<Y, kWidth> dy = own.load(dy_tile + at);
        const Vec<W, 1> weight = weights.template load<1>(c), bias = biases.template load<1>(c);
        body(at, slot, [&](int j) {
          Vec<X, 1> one_x;
          Vec<Y, 1> one_dy;
          one_x.at[0] = x.at[j];
          one_dy.at[0] = dy.at[j];
          return Gradients<N, 1>(p, one_x, one_dy, mean[j], rstd[j], weight, bias);
        });
        at += groups * tile_pixels;
        slot += blockDim.x;
      }
    };

    Pair<Acc> sum[kWidth];
    each([&](int, int slot, const auto& gradients_of) {
      Acc dweight[1] = {}, dbias[1] = {};
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const auto gradients = gradients_of(j);
        gradients.add_sums(sum[j]);
        gradients.add_dparams(dweight, dbias);
      }
      params[slot] += Pair<Acc>{dweight[0], dbias[0]};
    });
    if (p.dx != nullptr) {
      if (works) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const int at = group * room + own.first + own.at(j);
          sums[at] = sum[j].first;
          second_sums[at] = sum[j].second;
        }
      }
      __syncthreads();
      const int parts = min(groups, channels);
      for (int pixel = threadIdx.x; pixel < in_tile; pixel += blockDim.x) {
        Pair<Acc> total{sums[pixel], second_sums[pixel]};
#pragma unroll 4
        for (int g = 1; g < parts; ++g) {
          total += Pair<Acc>{sums[g * room + pixel], second_sums[g * room + pixel]};
        }
        const Pair<Acc> found = means_of(p, total);
        g_means[pixel] = found.first;
        g_xhat_means[pixel] = found.second;
      }
      __syncthreads();
      Pair<Acc> g_mean[kWidth];
      if (works) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const int at = own.first + own.at(j);
          if (own.has(j)) g_mean[j] = {g_means[at], g_xhat_means[at]};
        }
      }
      // dx goes to its place in memory, or takes that of x in the tile.
      const bool staged = kScattered || plan.dx_channels_last;
      X* const dx = static_cast<X*>(p.dx) + int64_t{sample} * channels * pixels;
      X* at_channel = dx + int64_t{group} * pixels + first + own.first;
      each([&](int at, int, const auto& gradients_of) {
        Acc values[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const auto gradients = gradients_of(j);
          values[j] = N::Statistic::dx(gradients.xhat[0], gradients.g[0], g_mean[j], rstd[j]);
        }
        if (staged) {
          own.store(x_tile + at, round_to<X>(values));
        } else {
          store_once<X, kWidth>(at_channel, round_to<X>(values));
          at_channel += int64_t{groups} * pixels;
        }
      });
      if (staged) {
        __syncthreads();
        if (plan.dx_channels_last) {
          Transposed<X>::store(static_cast<X*>(p.dx) + row * channels, x_tile, channels,
                               tile_pixels, in_tile);
        } else if (tiles.is_run) {
          store_run(dx, x_tile, channels * pixels);
        } else {
          store_planes(dx + first, x_tile, pixels, mover);
        }
      }
    }
    __syncthreads();
  }

  // The running sums of the threads that have the same channel, in order.
  const ParamGradSink<N> sink(p, plan.partials, blockIdx.x);
  if (!sink.wanted()) return;
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    const Pair<Acc>* const of_channel = params + c / groups * blockDim.x + c % groups * units;
    Pair<Acc> total;
    for (int u = 0; u < units; ++u) total += of_channel[u];
    const Acc dweight[1] = {total.first}, dbias[1] = {total.second};
    sink.template store<1>(c, dweight, dbias);
  }
}

}  // namespace

cudaError_t launch_layer_norm_backward(const BackwardParams& params, const DataTypes& types,
                                       const backward::Channels& plan, cudaStream_t stream) {
  const cudaError_t error = dispatch_channels(
      types, params.has_epilogue, plan.tiles, [&](auto t, auto bare, auto width, auto scattered) {
        using T = decltype(t);
        using N =
            std::conditional_t<bare(), BareBackward<T>, NormOf<T, NoOtherGradient, MayActivate>>;
        return launch(channels_backward_kernel<N, width(), scattered()>, plan, stream, plan,
                      params);
      });
  return error == cudaSuccess ? launch_param_grad(params, types, plan.partials, stream) : error;
}

}  // namespace fused_layernorm
