// SPDX-License-Identifier: Apache-2.0
// Forward over channels: forward.h has the plan.
#include "base/launch.cuh"

#include "channels/forward.h"
#include "channels/tiles.cuh"
#include "norm/norm.cuh"

namespace fused_layernorm {
namespace {

// kWidth neighbouring pixels are moved at once, or (kScattered) one by one, and lie apart.
template <typename N, int kWidth, bool kScattered>
__global__ void __maxnreg__(forward::tile_registers(kWidth * sizeof(typename N::X), kIsBare<N>))
    channels_kernel(const forward::Channels plan, const ForwardParams p) {
  using X = typename N::X;
  using Y = typename N::Y;
  using W = typename N::W;
  using Acc = typename N::Acc;
  using Statistic = typename N::Statistic;
  constexpr int kMoved = kScattered ? 1 : kWidth;
  extern __shared__ uint4 shared[];
  auto* const tile = reinterpret_cast<X*>(shared);
  auto* const left = reinterpret_cast<Acc*>(reinterpret_cast<char*>(shared) + plan.sums_offset);
  const Tiles& tiles = plan.tiles;
  const int tile_pixels = tiles.tile_pixels, channel_step = tiles.channel_step, channels = p.cols;
  const int units = (tile_pixels + kWidth - 1) / kWidth, room = units * kWidth;
  const PixelSums<Acc, 1, kWidth, kScattered> sums = {left, units, channel_step};
  Acc* const means = left + kWidth * (blockDim.x + units);
  Acc* const rstds = means + room;
  auto* const weights = reinterpret_cast<W*>(reinterpret_cast<char*>(shared) + plan.weights_offset);
  auto* const biases = reinterpret_cast<W*>(reinterpret_cast<char*>(weights) + plan.weight_bytes);

  const int sample = blockIdx.x / tiles.tiles;
  const int first = (blockIdx.x - sample * tiles.tiles) * tile_pixels;
  const int pixels = static_cast<int>(plan.map.pixels);
  const int in_tile = min(tile_pixels, pixels - first);
  const int64_t row = int64_t{sample} * pixels + first;

  const TileThread<kMoved> mover(channels, tile_pixels,
                                 kScattered ? blockDim.x / tile_pixels : channel_step, in_tile);
  const X* const x = static_cast<const X*>(p.input) + sample * plan.map.sample_stride + first;
  if (tiles.is_run) {
    load_run(tile, x, channels * pixels);
  } else {
    load_by_channels<kLoadsAtOnce>(tile, x, plan.map.channel_stride, mover);
  }
  load_parameter(weights, p.weight, 1, channels);
  load_parameter(biases, p.bias, 0, channels);
  const int first_channel = threadIdx.x / units, unit = threadIdx.x - first_channel * units;
  const ThreadPixels<kWidth, kScattered> own(unit, units, in_tile);
  const bool works = first_channel < channel_step && own.first < in_tile;
  wait_for_copies();
  __syncthreads();

  // Calls body(channel, place in the tile).
  const auto each = [&](const auto& body) {
    if (!works) return;
    int at = first_channel * tile_pixels + own.first;
#pragma unroll(kScattered ? 1 : 4)
    for (int c = first_channel; c < channels; c += channel_step, at += channel_step * tile_pixels)
      body(c, at);
  };
  const auto add_up = [&](const Acc(&values)[kWidth], const auto& then) {
    if (works) sums.leave(values);
    __syncthreads();
    sums.add_up(in_tile, then);
    __syncthreads();
  };
  const auto pivot_of = [&](int pixel) {
    const int second = channels > 1 ? tile_pixels : 0;
    return Statistic::template pivot<X>(
        Pair<Acc>{to_acc(tile[pixel]), to_acc(tile[second + pixel])});
  };
  // The mean of each pixel, then the squared deviations from it.
  Acc mean[kWidth] = {};
  if (!p.is_rms) {
    Acc sum[kWidth] = {}, pivot[kWidth] = {};
    if (works) {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        if (own.has(j)) pivot[j] = pivot_of(own.first + own.at(j));
      }
    }
    each([&](int, int at) {
      Acc values[kWidth];
      unpack(values, own.load(tile + at));
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) sum[j] += values[j] - pivot[j];
    });
    const Reciprocal<Acc> inverse(p.inverse_cols);
    add_up(sum, [&](int pixel, Acc total) {
      means[pixel] = Statistic::mean_of(false, inverse, pivot_of(pixel), total);
    });
    if (works) unpack(mean, own.load(means + own.first));
  }
  Acc m2[kWidth] = {};
  each([&](int, int at) {
    Acc values[kWidth];
    unpack(values, own.load(tile + at));
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      const Acc d = values[j] - mean[j];
      m2[j] += d * d;
    }
  });
  add_up(m2, [&](int pixel, Acc total) {
    const Acc found = Statistic::rstd(total, p.inverse_cols.as<Acc>(), p.eps.as<Acc>());
    rstds[pixel] = found;
    store_statistics(p, row + pixel, p.is_rms ? Acc(0) : means[pixel], found);
  });

  // y goes to memory, or through shared memory, where one as wide as x takes x's place.
  constexpr bool kTakesPlaceOfX = sizeof(X) == sizeof(Y);
  const bool staged = plan.channels_last || (kTakesPlaceOfX && (kScattered || tiles.is_run));
  Y* const y_tile =
      reinterpret_cast<Y*>(reinterpret_cast<char*>(shared) + (kTakesPlaceOfX ? 0 : plan.y_offset));
  Y* const y = static_cast<Y*>(p.y) + int64_t{sample} * channels * pixels;
  Acc rstd[kWidth] = {};
  if (works) unpack(rstd, own.load(rstds + own.first));
  Y* at_channel = y + int64_t{first_channel} * pixels + first + own.first;
  each([&](int c, int at) {
    const Acc weight = to_acc(weights[c]), bias = to_acc(biases[c]);
    Acc values[kWidth], w[kWidth], b[kWidth];
    unpack(values, own.load(tile + at));
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      values[j] = Statistic::normalize(values[j], mean[j], rstd[j]);
      w[j] = weight;
      b[j] = bias;
    }
    N::Epilogue::template before_affine<X>(p, values, w);
    N::Affine::apply(p, values, w, b, NoColumns{});
    N::Epilogue::template apply<Y>(p, values);
    if (staged) {
      own.store(y_tile + at, round_to<Y>(values));
    } else {
      if constexpr (kScattered) {
        own.store(at_channel, round_to<Y>(values));
      } else {
        store_once<Y, kWidth>(at_channel, round_to<Y>(values));
      }
      at_channel += int64_t{channel_step} * pixels;
    }
  });
  if (!staged) return;
  __syncthreads();
  if (plan.channels_last) {
    Transposed<Y, kScattered>::store(static_cast<Y*>(p.y) + row * channels, y_tile, channels,
                                     tile_pixels, in_tile);
  } else if constexpr (kTakesPlaceOfX) {
    if (tiles.is_run) {
      store_run(y, y_tile, channels * pixels);
    } else {
      store_by_channels(y + first, y_tile, pixels, mover);
    }
  }
}

}  // namespace

cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Channels& plan, cudaStream_t stream) {
  return dispatch_channels(
      types, params.has_epilogue, plan.tiles, [&](auto t, auto bare, auto width, auto scattered) {
        using T = decltype(t);
        using N = std::conditional_t<bare(), BareForward<T>, NormOf<T, Plain, MayActivate>>;
        return launch(channels_kernel<N, width(), scattered()>, plan, stream, plan, params);
      });
}

}  // namespace fused_layernorm
