// SPDX-License-Identifier: Apache-2.0
// Backward over channels: backward.h has the plan.
#include "base/launch.cuh"

#include "channels/backward.h"
#include "channels/tiles.cuh"
#include "device/pdl.cuh"
#include "norm/param_grad.cuh"

namespace fused_layernorm {
namespace {

// kWidth neighbouring pixels are moved at once, or (kScattered) one by one, and lie apart.
template <typename N, int kWidth, bool kScattered>
__global__ void __maxnreg__(backward::tile_registers(kWidth * sizeof(typename N::X)))
    channels_backward_kernel(const backward::Channels plan, const BackwardParams p) {
  using X = typename N::X;
  using Y = typename N::Y;
  using W = typename N::W;
  using Acc = typename N::Acc;
  constexpr int kMoved = kScattered ? 1 : kWidth;
  // A transposed load waits for memory, as it goes through registers. So it comes from L2, and
  // several vectors at once, where there are registers for that.
  constexpr bool kPrefetches = kWidth * sizeof(X) == kVectorBytes && sizeof(X) < 8;
  constexpr int kTransposedAtOnce = sizeof(X) == 4 ? 4 : kPrefetches ? 2 : 1;
  constexpr int kChannelsAtOnce = kLoadsAtOnce / (N::Epilogue::kMayActivate ? 2 : 1);
  extern __shared__ uint4 shared[];
  char* const memory = reinterpret_cast<char*>(shared);
  auto* const x_tile = reinterpret_cast<X*>(memory);
  auto* const dy_tile = reinterpret_cast<Y*>(memory + plan.dy_offset);
  auto* const params = reinterpret_cast<Acc*>(memory + plan.params_offset);
  auto* const left = reinterpret_cast<Acc*>(memory + plan.sums_offset);
  const Tiles& tiles = plan.tiles;
  const int tile_pixels = tiles.tile_pixels, channel_step = tiles.channel_step, channels = p.cols;
  const int units = (tile_pixels + kWidth - 1) / kWidth;
  const int room =
      units * kWidth;  // pixels, with those that scattered threads have behind the tile
  const PixelSums<Acc, 2, kWidth, kScattered> sums = {left, units, channel_step};
  Acc* const means = left + 2 * kWidth * (blockDim.x + units);
  Acc* const rstds = means + room;
  Acc* const g_means = rstds + room;
  Acc* const g_xhat_means = g_means + room;
  auto* const weights = reinterpret_cast<W*>(memory + plan.weights_offset);
  auto* const biases = reinterpret_cast<W*>(memory + plan.weights_offset + plan.weight_bytes);

  const int first_channel = threadIdx.x / units, unit = threadIdx.x - first_channel * units;
  const int pixels = static_cast<int>(plan.x.pixels);
  const bool activates = N::Epilogue::kMayActivate && p.has_epilogue;
  load_parameter(weights, p.weight, 1, channels);
  if (activates) load_parameter(biases, p.bias, 0, channels);
  if (first_channel < channel_step) {
    for (int c = first_channel, number = threadIdx.x; c < channels;
         c += channel_step, number += blockDim.x) {
      store_pair(params + 2 * number, Pair<Acc>{});
    }
  }
  for (int pixel = threadIdx.x; p.is_rms && pixel < room; pixel += blockDim.x) means[pixel] = 0;

  // Where a tile lies: its sample, its pixels of that sample, and its first row.
  struct Place {
    int sample, first, in_tile;
    int64_t row;
  };
  const auto place_of = [&](int tile) {
    const int sample = tile / tiles.tiles, first = (tile - sample * tiles.tiles) * tile_pixels;
    return Place{sample, first, min(tile_pixels, pixels - first), int64_t{sample} * pixels + first};
  };
  const auto mover_of = [&](const Place& place) {
    return TileThread<kMoved>(channels, tile_pixels,
                              kScattered ? blockDim.x / tile_pixels : channel_step, place.in_tile);
  };
  const auto load_tile = [&](auto* to, const auto* from, const ChannelMap& map,
                             const Place& place) {
    const auto* const at = from + place.sample * map.sample_stride + place.first;
    if (tiles.is_run) {
      load_run(to, at, channels * pixels);
    } else {
      load_by_channels<kChannelsAtOnce>(to, at, map.channel_stride, mover_of(place));
    }
  };
  const auto load_x = [&](const Place& place) {
    load_tile(x_tile, static_cast<const X*>(p.x), plan.x, place);
  };
  const auto load_dy = [&](const Place& place) {
    if (plan.dy_channels_last) {
      Transposed<Y, kScattered>::template load<kTransposedAtOnce>(
          dy_tile, static_cast<const Y*>(p.dy) + place.row * channels, channels, tile_pixels,
          place.in_tile);
    } else {
      load_tile(dy_tile, static_cast<const Y*>(p.dy), plan.dy, place);
    }
  };
  const auto load_means = [&](const Place& place) {
    for (int pixel = threadIdx.x; pixel < place.in_tile; pixel += blockDim.x) {
      const int64_t row = place.row + pixel;
      if (!p.is_rms) copy_vector<1>(means + pixel, static_cast<const Acc*>(p.mean) + row);
      copy_vector<1>(rstds + pixel, static_cast<const Acc*>(p.rstd) + row);
    }
  };
  // What a thread alone brings to a tile and reads there, it can bring for the next tile as soon as
  // it has read this one for the last time.
  const bool ahead = !kScattered && !tiles.is_run && p.dx != nullptr;
  const bool x_ahead = ahead && !plan.dx_channels_last, dy_ahead = ahead && !plan.dy_channels_last;

  for (int tile = blockIdx.x; tile < plan.all_tiles; tile += gridDim.x) {
    const Place place = place_of(tile);
    const bool is_first = tile == static_cast<int>(blockIdx.x);
    const bool is_last = tile + static_cast<int>(gridDim.x) >= plan.all_tiles;
    if (is_first || !ahead) load_means(place);
    if (is_first || !x_ahead) load_x(place);
    if (is_first || !dy_ahead) load_dy(place);
    wait_for_copies();
    __syncthreads();
    if (is_last) let_next_kernel_start();
    if (kPrefetches && plan.dy_channels_last && !is_last) {
      const Place next = place_of(tile + static_cast<int>(gridDim.x));
      prefetch_to_l2(static_cast<const Y*>(p.dy) + next.row * channels,
                     int64_t{next.in_tile} * channels * static_cast<int>(sizeof(Y)));
    }

    const ThreadPixels<kWidth, kScattered> own(unit, units, place.in_tile);
    const bool works = first_channel < channel_step && own.first < place.in_tile;
    Acc mean[kWidth], rstd[kWidth];
    if (works) {
      unpack(mean, own.load(means + own.first));
      unpack(rstd, own.load(rstds + own.first));
    }
    // Calls body(place in the tile, number among the thread's channels, the gradients of pixel j).
    const auto each = [&](const auto& body) {
      if (!works) return;
      int at = first_channel * tile_pixels + own.first, number = threadIdx.x;
#pragma unroll(kScattered ? 1 : 2)
      for (int c = first_channel; c < channels; c += channel_step) {
        Acc x[kWidth], dy[kWidth];
        unpack(x, own.load(x_tile + at));
        unpack(dy, own.load(dy_tile + at));
        const auto weight = one_element(weights[c]);
        const auto bias = one_element(activates ? biases[c] : from_acc<W>(Acc(0)));
        body(at, number, [&](int j) {
          return Gradients<N, 1>(p, one_element(x[j]), one_element(dy[j]), mean[j], rstd[j], weight,
                                 bias);
        });
        at += channel_step * tile_pixels;
        number += blockDim.x;
      }
    };

    Pair<Acc> sum[kWidth];
    each([&](int, int number, const auto& gradients_of) {
      Acc dweight[1] = {}, dbias[1] = {};
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        const auto gradients = gradients_of(j);
        gradients.add_sums(sum[j]);
        gradients.add_dparams(dweight, dbias);
      }
      Pair<Acc> running = load_pair(params + 2 * number);
      running += Pair<Acc>{dweight[0], dbias[0]};
      store_pair(params + 2 * number, running);
    });
    if (p.dx != nullptr) {
      if (works) sums.leave(sum);
      __syncthreads();
      sums.add_up(place.in_tile, [&](int pixel, const Pair<Acc>& total) {
        const Pair<Acc> found = means_of(p, total);
        g_means[pixel] = found.first;
        g_xhat_means[pixel] = found.second;
      });
      __syncthreads();
      Acc g_mean[kWidth], g_xhat_mean[kWidth];
      if (works) {
        unpack(g_mean, own.load(g_means + own.first));
        unpack(g_xhat_mean, own.load(g_xhat_means + own.first));
      }
      const Place next = place_of(is_last ? tile : tile + static_cast<int>(gridDim.x));
      const bool brings = ahead && !is_last;
      const bool brings_own = brings && works && own.first < next.in_tile;
      const auto place_in = [&](const auto* from, const ChannelMap& map) {
        return from + next.sample * map.sample_stride + first_channel * map.channel_stride +
               next.first + own.first;
      };
      const X* next_x = place_in(static_cast<const X*>(p.x), plan.x);
      const Y* next_dy = place_in(static_cast<const Y*>(p.dy), plan.dy);
      if (brings) load_means(next);
      // dx goes to its place in memory, or takes that of x in the tile.
      const bool staged = kScattered || plan.dx_channels_last;
      X* const dx = static_cast<X*>(p.dx) + int64_t{place.sample} * channels * pixels;
      X* at_channel = dx + int64_t{first_channel} * pixels + place.first + own.first;
      each([&](int at, int, const auto& gradients_of) {
        Acc values[kWidth];
        FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
          const auto gradients = gradients_of(j);
          values[j] = N::Statistic::dx(gradients.xhat[0], gradients.g[0],
                                       Pair<Acc>{g_mean[j], g_xhat_mean[j]}, rstd[j]);
        }
        if (staged) {
          own.store(x_tile + at, round_to<X>(values));
        } else {
          store_once<X, kWidth>(at_channel, round_to<X>(values));
          at_channel += int64_t{channel_step} * pixels;
        }
        if constexpr (!kScattered) {
          if (brings_own && x_ahead) copy_vector<kWidth>(x_tile + at, next_x);
          if (brings_own && dy_ahead) copy_vector<kWidth>(dy_tile + at, next_dy);
          next_x += channel_step * plan.x.channel_stride;
          next_dy += channel_step * plan.dy.channel_stride;
        }
      });
      if (brings && !works) {
        if (x_ahead) load_x(next);
        if (dy_ahead) load_dy(next);
      }
      if (staged) {
        __syncthreads();
        if (plan.dx_channels_last) {
          Transposed<X, kScattered>::store(static_cast<X*>(p.dx) + place.row * channels, x_tile,
                                           channels, tile_pixels, place.in_tile);
        } else if (tiles.is_run) {
          store_run(dx, x_tile, channels * pixels);
        } else {
          store_by_channels(dx + place.first, x_tile, pixels, mover_of(place));
        }
      }
    }
    if (!x_ahead || !dy_ahead) __syncthreads();
  }

  // The running sums of the threads that have the same channel, in an order of its own, so that
  // neighbouring channels meet in no bank.
  const ParamGradSink<N> sink(p, plan.partials, blockIdx.x);
  if (!sink.wanted()) return;
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    const Acc* const of_channel =
        params + 2 * (c / channel_step * blockDim.x + c % channel_step * units);
    Pair<Acc> total;
    for (int i = 0, u = c % units; i < units; ++i) {
      total += load_pair(of_channel + 2 * u);
      if (++u == units) u = 0;
    }
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
