// SPDX-License-Identifier: Apache-2.0
// A tile in shared memory, [channels][tile_pixels], and how its elements come from and go
// to global memory: channel by channel, as one run of memory, or transposed, where the channels of
// a pixel lie side by side. All threads of a block call; a barrier must follow.
#pragma once

#include <cstdint>

#include "channels/tiles.h"
#include "device/async.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "norm/types.cuh"

namespace fused_layernorm {

// The places of a thread in a tile: `unit` is its vector of kWidth pixels, and it has the channels
// from `first` on, `step` apart. For a thread that has none, `first` is past the last channel.
template <int kWidth>
struct TileThread {
  int unit, first, step;
  int channels, tile_pixels;

  FUSED_DEVICE TileThread(int all_channels, int pixels, int channel_step, int in_tile)
      : step(channel_step), channels(all_channels), tile_pixels(pixels) {
    const int units = pixels / kWidth;
    first = threadIdx.x / units;
    unit = threadIdx.x - first * units;
    if (first >= step || unit * kWidth >= in_tile) first = channels;
  }
  FUSED_DEVICE int pixel() const { return unit * kWidth; }
  FUSED_DEVICE bool works() const { return first < channels; }
  // Calls body(channel, place of its vector in the tile).
  FUSED_DEVICE void each(const auto& body) const {
    const int tile_step = step * tile_pixels;
    int at = first * tile_pixels + unit * kWidth;
#pragma unroll 4
    for (int c = first; c < channels; c += step, at += tile_step) body(c, at);
  }
};

// The pixels of a thread in a tile: `kWidth` neighbours, or as many pixels `units` apart.
template <int kWidth, bool kScattered>
struct ThreadPixels {
  int first, step, count;

  FUSED_DEVICE ThreadPixels(int unit, int units, int in_tile)
      : first(kScattered ? unit : unit * kWidth),
        step(units),
        count(kScattered ? (in_tile - unit + units - 1) / units : kWidth) {}
  FUSED_DEVICE int at(int j) const { return kScattered ? j * step : j; }
  FUSED_DEVICE bool has(int j) const { return !kScattered || j < count; }

  // Zeros for missing pixels.
  template <typename V>
  FUSED_DEVICE Vec<V, kWidth> load(const V* from) const {
    if constexpr (!kScattered) {
      return fused_layernorm::load<Use::kPlain, kWidth>(from);
    } else {
      Vec<V, kWidth> v;
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        v.at[j] = has(j) ? from[at(j)] : from_acc<V>(acc_t<V>(0));
      }
      return v;
    }
  }
  template <typename V>
  FUSED_DEVICE void store(V* to, const Vec<V, kWidth>& v) const {
    if constexpr (!kScattered) {
      fused_layernorm::store<V, kWidth>(to, v);
    } else {
      FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
        if (has(j)) to[at(j)] = v.at[j];
      }
    }
  }
};

// A vector of one element.
template <typename V>
FUSED_DEVICE Vec<V, 1> one_element(V value) {
  Vec<V, 1> v;
  v.at[0] = value;
  return v;
}

// Pairs of numbers in shared memory, moved at once.
template <typename Acc>
FUSED_DEVICE Pair<Acc> load_pair(const Acc* from) {
  const Vec<Acc, 2> v = load<Use::kPlain, 2>(from);
  return {v.at[0], v.at[1]};
}
template <typename Acc>
FUSED_DEVICE void store_pair(Acc* to, Pair<Acc> pair) {
  const Acc values[2] = {pair.first, pair.second};
  store(to, round_to<Acc>(values));
}

// Sums over all channels of each pixel of a tile, of one number or of a pair (kNumbers). A thread
// leaves what it has of its pixels in shared memory, [kWidth][threads + units]; so neither those
// who leave it nor those who add it up meet in a bank.
template <typename Acc, int kNumbers, int kWidth, bool kScattered>
struct PixelSums {
  using Value = std::conditional_t<kNumbers == 1, Acc, Pair<Acc>>;
  Acc* left;
  int units, threads;  // threads that share a pixel

  FUSED_DEVICE Acc* place(int j, int thread) const {
    return left + (j * (static_cast<int>(blockDim.x) + units) + thread) * kNumbers;
  }
  FUSED_DEVICE void leave(const Value (&values)[kWidth]) const {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) {
      if constexpr (kNumbers == 1) {
        *place(j, threadIdx.x) = values[j];
      } else {
        store_pair(place(j, threadIdx.x), values[j]);
      }
    }
  }
  // Calls then(pixel, sum) for each of the first `pixels` pixels, by one thread, whose sum several
  // lanes add up. All threads call, and a barrier must stand before and after.
  FUSED_DEVICE void add_up(int pixels, const auto& then) const {
    constexpr int kAtOnce = 8, kParts = kWarpSize / kAtOnce;  // pixels of a warp, lanes of a pixel
    const int lane = threadIdx.x % kWarpSize, part = lane / kAtOnce;
    for (int first = threadIdx.x / kWarpSize * kAtOnce; first < units * kWidth;
         first += blockDim.x / kWarpSize * kAtOnce) {
      const int at = first + lane % kAtOnce, j = at / units, unit = at - j * units;
      const int pixel = kScattered ? at : unit * kWidth + j;
      const bool is_pixel = j < kWidth && pixel < pixels;
      Value sum{};
      if (is_pixel) {
#pragma unroll 4
        for (int of_pixel = part; of_pixel < threads; of_pixel += kParts) {
          const Acc* const from = place(j, of_pixel * units + unit);
          if constexpr (kNumbers == 1) {
            sum += *from;
          } else {
            sum += load_pair(from);
          }
        }
      }
      FUSED_UNROLL for (int offset = kAtOnce; offset < kWarpSize; offset *= 2) {
        sum += shuffle_xor(sum, offset);
      }
      if (part == 0 && is_pixel) then(pixel, sum);
    }
  }
};

// Channel by channel, `channel_stride` elements apart, from the tile's first pixel of channel 0 on.
// Two bytes are too few for an asynchronous copy: a thread has kAtOnce of them on their way.
template <int kAtOnce, int kWidth, typename V>
FUSED_DEVICE void load_by_channels(V* tile, const V* from, int64_t channel_stride,
                                   const TileThread<kWidth>& thread) {
  const V* at_channel = from + thread.first * channel_stride + thread.pixel();
  const int64_t step = thread.step * channel_stride;
  if constexpr (kWidth * sizeof(V) >= 4) {
    thread.each([&](int, int at) {
      copy_vector<kWidth>(tile + at, at_channel);
      at_channel += step;
    });
  } else {
    const int tile_step = thread.step * thread.tile_pixels;
    V* at = tile + thread.first * thread.tile_pixels + thread.pixel();
    for (int c = thread.first; c < thread.channels; c += kAtOnce * thread.step) {
      V loaded[kAtOnce];
      FUSED_UNROLL for (int n = 0; n < kAtOnce; ++n) {
        if (c + n * thread.step < thread.channels) loaded[n] = __ldg(at_channel + n * step);
      }
      FUSED_UNROLL for (int n = 0; n < kAtOnce; ++n) {
        if (c + n * thread.step < thread.channels) at[n * tile_step] = loaded[n];
      }
      at += kAtOnce * tile_step;
      at_channel += kAtOnce * step;
    }
  }
}

// The reverse.
template <int kWidth, typename V>
FUSED_DEVICE void store_by_channels(V* to, const V* tile, int64_t channel_stride,
                                    const TileThread<kWidth>& thread) {
  V* at_channel = to + thread.first * channel_stride + thread.pixel();
  const int64_t step = thread.step * channel_stride;
  thread.each([&](int, int at) {
    store_once<V, kWidth>(at_channel, load<Use::kPlain, kWidth>(tile + at));
    at_channel += step;
  });
}

// One run of memory of `elements` elements, which begins at a multiple of 16 bytes.
template <typename V>
FUSED_DEVICE void load_run(V* tile, const V* from, int elements) {
  constexpr int kWidth = 16 / sizeof(V);
  const int vectors = elements / kWidth;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    copy_async<16>(tile + i * kWidth, from + i * kWidth);
  }
  for (int i = vectors * kWidth + threadIdx.x; i < elements; i += blockDim.x) tile[i] = from[i];
}
template <typename V>
FUSED_DEVICE void store_run(V* to, const V* tile, int elements) {
  constexpr int kWidth = 16 / sizeof(V);
  const int vectors = elements / kWidth;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    store_once<V, kWidth>(to + i * kWidth, load<Use::kPlain, kWidth>(tile + i * kWidth));
  }
  for (int i = vectors * kWidth + threadIdx.x; i < elements; i += blockDim.x) to[i] = tile[i];
}

// A parameter of all channels, or its `absent` value.
template <typename V>
FUSED_DEVICE void load_parameter(V* to, const void* given, float absent, int channels) {
  if (given != nullptr) {
    load_run(to, static_cast<const V*>(given), channels);
  } else {
    for (int c = threadIdx.x; c < channels; c += blockDim.x) to[c] = from_acc<V>(acc_t<V>(absent));
  }
}

// The transposed tile [pixels][channels] in global memory, which is one run. A thread moves 16
// bytes of neighbouring channels of a pixel or, in half precision and not kScattered, of two
// pixels. Four neighbouring lanes have neighbouring vectors: whole sectors, and at most four of a
// warp's words lie in one bank. Where channels do not allow it, elements move one by one.
template <typename V, bool kScattered>
struct Transposed {
  static constexpr int kChannels = 16 / sizeof(V);
  static constexpr int kPixels = sizeof(V) == 2 && !kScattered ? 2 : 1;
  static constexpr int kLanes = 4;
  // The pixels of a channel that a thread has at once.
  using Word = detail::Piece<kPixels * sizeof(V)>;

  // The vectors of a tile that has whole ones alone, and the first channel and pixel of each.
  struct Vectors {
    int rows, units, count;

    FUSED_DEVICE Vectors(int channels, int pixels)
        : rows(channels / kChannels),
          units(pixels / kPixels),
          count((rows + kLanes - 1) / kLanes * kLanes * units) {}
    struct Place {
      int channel, pixel;
      bool exists;
    };
    FUSED_DEVICE Place operator[](int i) const {
      const int quad = i / kLanes, high = quad / units, row = high * kLanes + i % kLanes;
      return {row * kChannels, (quad - high * units) * kPixels, i < count && row < rows};
    }
  };
  static FUSED_DEVICE bool are_whole(int channels, int tile_pixels, int pixels) {
    return channels % kChannels == 0 && tile_pixels % kPixels == 0 && pixels % kPixels == 0;
  }
  // Calls body(place in the transposed tile, place in the tile) for each element.
  static FUSED_DEVICE void each_element(int channels, int tile_pixels, int pixels,
                                        const auto& body) {
    for (int i = threadIdx.x; i < pixels * channels; i += blockDim.x) {
      const int pixel = i / channels;
      body(i, (i - pixel * channels) * tile_pixels + pixel);
    }
  }

  static FUSED_DEVICE void store(V* to, const V* tile, int channels, int tile_pixels, int pixels) {
    if (!are_whole(channels, tile_pixels, pixels)) {
      return each_element(channels, tile_pixels, pixels, [&](int i, int at) { to[i] = tile[at]; });
    }
    const Vectors vectors(channels, pixels);
    for (int i = threadIdx.x; i < vectors.count; i += blockDim.x) {
      const auto place = vectors[i];
      if (!place.exists) continue;
      Word words[kChannels];
      FUSED_UNROLL for (int j = 0; j < kChannels; ++j) {
        words[j] =
            *reinterpret_cast<const Word*>(tile + (place.channel + j) * tile_pixels + place.pixel);
      }
      V* const at = to + place.pixel * channels + place.channel;
      if constexpr (kPixels == 2) {
        uint32_t first[4], second[4];
        FUSED_UNROLL for (int j = 0; j < 4; ++j) {
          first[j] = __byte_perm(words[2 * j], words[2 * j + 1], 0x5410);
          second[j] = __byte_perm(words[2 * j], words[2 * j + 1], 0x7632);
        }
        __stcs(reinterpret_cast<uint4*>(at), *reinterpret_cast<uint4*>(first));
        __stcs(reinterpret_cast<uint4*>(at + channels), *reinterpret_cast<uint4*>(second));
      } else {
        alignas(16) Word whole[kChannels];
        FUSED_UNROLL for (int j = 0; j < kChannels; ++j) whole[j] = words[j];
        __stcs(reinterpret_cast<uint4*>(at), *reinterpret_cast<uint4*>(whole));
      }
    }
  }

  // kAtOnce vectors of a thread are loaded before it stores one, so that it waits once.
  template <int kAtOnce>
  static FUSED_DEVICE void load(V* tile, const V* from, int channels, int tile_pixels, int pixels) {
    if (!are_whole(channels, tile_pixels, pixels)) {
      return each_element(channels, tile_pixels, pixels,
                          [&](int i, int at) { tile[at] = from[i]; });
    }
    const Vectors vectors(channels, pixels);
    const int threads = blockDim.x;
    for (int first = threadIdx.x; first < vectors.count; first += kAtOnce * threads) {
      uint4 loaded[kAtOnce][kPixels];
      typename Vectors::Place places[kAtOnce];
      FUSED_UNROLL for (int n = 0; n < kAtOnce; ++n) {
        const auto place = places[n] = vectors[first + n * threads];
        const V* const at = from + place.pixel * channels + place.channel;
        FUSED_UNROLL for (int j = 0; j < kPixels; ++j) {
          if (place.exists) loaded[n][j] = __ldg(reinterpret_cast<const uint4*>(at + j * channels));
        }
      }
      FUSED_UNROLL for (int n = 0; n < kAtOnce; ++n) {
        const auto place = places[n];
        if (!place.exists) continue;
        const auto* const a = reinterpret_cast<const uint32_t*>(loaded[n]);
        FUSED_UNROLL for (int j = 0; j < kChannels; ++j) {
          Word word;
          if constexpr (kPixels == 2) {
            word = __byte_perm(a[j / 2], a[4 + j / 2], j % 2 == 0 ? 0x5410 : 0x7632);
          } else {
            word = reinterpret_cast<const Word*>(loaded[n])[j];
          }
          *reinterpret_cast<Word*>(tile + (place.channel + j) * tile_pixels + place.pixel) = word;
        }
      }
    }
  }
};

// Calls launch(types, bare, width, scattered) with how a thread of these tiles has its pixels, for
// all types but a y narrower than x, which nobody asks of images. `bare`: the norm has no epilogue;
// types that few models have share one kernel for norms with and without one.
cudaError_t dispatch_channels(const DataTypes& types, bool has_epilogue, const Tiles& tiles,
                              const auto& launch) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    constexpr int kMost = kVectorWidth<T>;
    if constexpr (kIsNarrowed<T>) {
      return cudaErrorInvalidValue;
    } else {
      const auto with = [&](auto width, auto scattered) {
        return dispatch_bool<kIsCommon<T>>(
            !has_epilogue, [&](auto bare) { return launch(t, bare, width, scattered); });
      };
      constexpr int kApart = thread_pixels(1, sizeof(typename T::X));
      if (tiles.width == 1) return with(std::integral_constant<int, kApart>(), std::true_type{});
      if constexpr (kMost == 8) {
        if (tiles.width == 4) return with(std::integral_constant<int, 4>(), std::false_type{});
      }
      return with(std::integral_constant<int, kMost>(), std::false_type{});
    }
  });
}

}  // namespace fused_layernorm
