// SPDX-License-Identifier: Apache-2.0
// Forward over the channels of planes: channels.h has the plan.
#include "launch.cuh"

#include "device/planes.cuh"
#include "forward/channels.h"
#include "norm/norm.cuh"

namespace fused_layernorm {
namespace {

// For each pixel of the tile the sum of what all groups have left in `sums`, given to then(pixel,
// sum).
template <typename Acc, typename Then>
__device__ __forceinline__ void sum_groups(const Acc* sums, int groups, int tile_pixels,
                                           const Then& then) {
  __syncthreads();
  for (int pixel = threadIdx.x; pixel < tile_pixels; pixel += blockDim.x) {
    Acc sum = sums[pixel];
#pragma unroll 8
    for (int g = 1; g < groups; ++g) sum += sums[g * tile_pixels + pixel];
    then(pixel, sum);
  }
  __syncthreads();
}

template <typename N, int kWidth>
__global__ void __launch_bounds__(kTileThreads)
    channels_kernel(const forward::Channels plan, const ForwardParams p) {
  using X = typename N::X;
  using Y = typename N::Y;
  using W = typename N::W;
  using Acc = typename N::Acc;
  using Statistic = typename N::Statistic;
  extern __shared__ uint4 shared[];
  auto* const tile = reinterpret_cast<X*>(shared);
  auto* const sums = reinterpret_cast<Acc*>(reinterpret_cast<char*>(shared) + plan.sums_offset);
  const Tiles& tiles = plan.tiles;
  const int tile_pixels = tiles.tile_pixels;
  Acc* const means = sums + tiles.groups * tile_pixels;
  Acc* const rstds = means + tile_pixels;

  const int sample = blockIdx.x / tiles.tiles;
  const int first = (blockIdx.x - sample * tiles.tiles) * tile_pixels;
  const int pixels = static_cast<int>(plan.planes.pixels);
  const int in_tile = min(tile_pixels, pixels - first);
  const TileThread<kWidth> thread(p.cols, tile_pixels, tiles.groups, in_tile);
  const int64_t row = int64_t{sample} * pixels + first;

  const X* const x = static_cast<const X*>(p.input) + sample * plan.planes.sample_stride + first;
  if (tiles.is_run) {
    load_run(tile, x, p.cols * pixels);
  } else {
    load_planes(tile, x, plan.planes.channel_stride, thread);
  }
  wait_for_copies();
  __syncthreads();

  // The mean of each pixel, then the squared deviations from it.
  const auto loaded = [&](Acc(&values)[kWidth], const auto* from, int at) {
    unpack(values, load<Use::kPlain, kWidth>(from + at));
  };
  Acc sum[kWidth], mean[kWidth], rstd[kWidth];
  const auto leave = [&] {
    if (thread.works())
      store<Acc, kWidth>(sums + thread.group * tile_pixels + thread.pixel(), round_to<Acc>(sum));
  };
  const auto pivot_of = [&](int pixel) {
    const int second = p.cols > 1 ? tile_pixels : 0;
    return Statistic::template pivot<X>(
        Pair<Acc>{to_acc(tile[pixel]), to_acc(tile[second + pixel])});
  };
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum[j] = mean[j] = 0;
  if (!p.is_rms) {
    if (thread.works()) {
      Acc pivot[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) pivot[j] = pivot_of(thread.pixel() + j);
      thread.each([&](int, int at) {
        Acc values[kWidth];
        loaded(values, tile, at);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] += values[j] - pivot[j];
      });
    }
    leave();
    const Reciprocal<Acc> inverse(p.inverse_cols);
    sum_groups(sums, min(tiles.groups, p.cols), tile_pixels, [&](int pixel, Acc total) {
      means[pixel] = Statistic::mean_of(false, inverse, pivot_of(pixel), total);
    });
    if (thread.works()) loaded(mean, means, thread.pixel());
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] = 0;
  }
  thread.each([&](int, int at) {
    Acc values[kWidth];
    loaded(values, tile, at);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const Acc d = values[j] - mean[j];
      sum[j] += d * d;
    }
  });
  leave();
  sum_groups(sums, min(tiles.groups, p.cols), tile_pixels, [&](int pixel, Acc m2) {
    const Acc found = Statistic::rstd(m2, p.inverse_cols.as<Acc>(), p.eps.as<Acc>());
    rstds[pixel] = found;
    if (pixel < in_tile) {
      store_statistics(p, row + pixel, p.is_rms ? Acc(0) : means[pixel], found);
    }
  });

  // y goes to its place in memory, or takes that of x in the tile.
  constexpr bool kMayStage = sizeof(X) == sizeof(Y);
  const bool staged = kMayStage && (plan.channels_last || tiles.is_run);
  Y* const y_tile = reinterpret_cast<Y*>(tile);
  Y* const y = static_cast<Y*>(p.y);
  const int64_t sample_at = int64_t{sample} * p.cols * pixels;
  if (thread.works()) {
    loaded(rstd, rstds, thread.pixel());
    const Parameter<W> weights(p.weight, 0, Absent::kOnes);
    const Parameter<W> biases(p.bias, 0, Absent::kZeros);
    Y* at_channel = y + sample_at + int64_t{thread.group} * pixels + first + thread.pixel();
    const int64_t step = int64_t{thread.groups} * pixels;
    thread.each([&](int c, int at) {
      const Acc weight = to_acc(weights.template load<1>(c).at[0]);
      const Acc bias = to_acc(biases.template load<1>(c).at[0]);
      Acc values[kWidth], w[kWidth], b[kWidth];
      loaded(values, tile, at);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values[j] = Statistic::normalize(values[j], mean[j], rstd[j]);
        w[j] = weight;
        b[j] = bias;
      }
      N::Epilogue::template prepare<X>(p, values, w);
      N::Affine::apply(p, values, w, b, NoColumns{});
      N::Epilogue::template apply<Y>(p, values);
      if (staged) {
        store<Y, kWidth>(y_tile + at, round_to<Y>(values));
      } else {
        store_once<Y, kWidth>(at_channel, round_to<Y>(values));
        at_channel += step;
      }
    });
  }
  if constexpr (kMayStage) {
    if (!staged) return;
    __syncthreads();
    if (plan.channels_last) {
      Transposed<Y>::store(y + row * p.cols, y_tile, p.cols, tile_pixels, in_tile);
    } else {
      store_run(y + sample_at, y_tile, p.cols * pixels);
    }
  }
}

// Whole vectors; in half precision also 8 bytes, of which planes of 14 x 14 pixels are made; single
// elements.
template <typename T, typename Then>
cudaError_t dispatch_plane_width(int width, const Then& then) {
  constexpr int kMost = kVectorWidth<T>;
  if constexpr (kMost == 8) return dispatch_vecs(VecsList<8, 4, 1>{}, width, then);
  return dispatch_vecs(VecsList<kMost, 1>{}, width, then);
}

}  // namespace

cudaError_t launch_layer_norm_forward(const ForwardParams& params, const DataTypes& types,
                                      const forward::Channels& plan, cudaStream_t stream) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    return dispatch_plane_width<T>(plan.tiles.width, [&](auto width) {
      // Types and widths that few models have share one kernel for a bare norm and an epilogue.
      constexpr bool kHasBare = kIsCommon<T> && width() == kVectorWidth<T>;
      return dispatch_bool<kHasBare>(!params.has_epilogue, [&](auto bare) {
        using N = std::conditional_t<bare(), BareForward<T>, NormOf<T, Plain, MayActivate>>;
        return launch(channels_kernel<N, width()>, plan, stream, plan, params);
      });
    });
  });
}

}  // namespace fused_layernorm
