// SPDX-License-Identifier: Apache-2.0
// A tile of planes in shared memory, [channels][tile_pixels], and how its elements come from and go
// to global memory: plane by plane, as one run of memory, or transposed, where the channels of a
// pixel lie side by side. All threads of a block call; a barrier must follow.
#pragma once

#include <cstdint>

#include "base/planes.h"
#include "device/vec.cuh"
#include "norm/types.cuh"

namespace fused_layernorm {

// Copies kBytes (4, 8 or 16) to shared memory. The copies of a thread have come when
// wait_for_copies() returns.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(kBytes)
                 : "memory");
  }
#else
  using Piece = typename detail::Piece<kBytes>::type;
  *static_cast<Piece*>(to) = *static_cast<const Piece*>(from);
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The places of a thread in a tile: `unit` is its vector of kWidth pixels, and it has the channels
// from `group` on, `groups` apart. A thread that has none has a group behind the last channel.
template <int kWidth>
struct TileThread {
  int unit, group, groups;
  int channels, tile_pixels;

  __device__ __forceinline__ TileThread(int all_channels, int pixels, int all_groups, int in_tile)
      : groups(all_groups), channels(all_channels), tile_pixels(pixels) {
    const int units = pixels / kWidth;
    group = threadIdx.x / units;
    unit = threadIdx.x - group * units;
    if (group >= groups || unit * kWidth >= in_tile) group = channels;
  }
  __device__ __forceinline__ int pixel() const { return unit * kWidth; }
  __device__ __forceinline__ bool works() const { return group < channels; }
  // Calls body(channel, place of its vector in the tile).
  template <typename Body>
  __device__ __forceinline__ void each(const Body& body) const {
    const int step = groups * tile_pixels;
    int at = group * tile_pixels + unit * kWidth;
#pragma unroll 4
    for (int c = group; c < channels; c += groups, at += step) body(c, at);
  }
};

// The pixels of a thread in a tile: `kWidth` neighbours, or as many pixels `units` apart.
template <int kWidth, bool kScattered>
struct ThreadPixels {
  int first, step, count;

  __device__ __forceinline__ ThreadPixels(int unit, int units, int in_tile)
      : first(kScattered ? unit : unit * kWidth),
        step(units),
        count(kScattered ? (in_tile - unit + units - 1) / units : kWidth) {}
  __device__ __forceinline__ int at(int j) const { return kScattered ? j * step : j; }
  __device__ __forceinline__ bool has(int j) const { return !kScattered || j < count; }

  // Zeros for missing pixels.
  template <typename V>
  __device__ __forceinline__ Vec<V, kWidth> load(const V* from) const {
    if constexpr (!kScattered) {
      return fused_layernorm::load<Use::kPlain, kWidth>(from);
    } else {
      Vec<V, kWidth> v;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v.at[j] = has(j) ? from[at(j)] : from_acc<V>(acc_t<V>(0));
      return v;
    }
  }
  template <typename V>
  __device__ __forceinline__ void store(V* to, const Vec<V, kWidth>& v) const {
    if constexpr (!kScattered) {
      fused_layernorm::store<V, kWidth>(to, v);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (has(j)) to[at(j)] = v.at[j];
      }
    }
  }
};

// From planes `channel_stride` elements apart; `from` is the tile's first pixel of channel 0.
template <int kWidth, typename V>
__device__ __forceinline__ void load_planes(V* tile, const V* from, int64_t channel_stride,
                                            const TileThread<kWidth>& thread) {
  const V* at_channel = from + thread.group * channel_stride + thread.pixel();
  const int64_t step = thread.groups * channel_stride;
  thread.each([&](int, int at) {
    constexpr int kBytes = kWidth * sizeof(V), kPiece = kBytes < 16 ? kBytes : 16;
    if constexpr (kBytes >= 4) {
#pragma unroll
      for (int i = 0; i < kBytes; i += kPiece) {
        copy_async<kPiece>(reinterpret_cast<char*>(tile + at) + i,
                           reinterpret_cast<const char*>(at_channel) + i);
      }
    } else {
      tile[at] = __ldg(at_channel);
    }
    at_channel += step;
  });
}

// To planes, the reverse.
template <int kWidth, typename V>
__device__ __forceinline__ void store_planes(V* to, const V* tile, int64_t channel_stride,
                                             const TileThread<kWidth>& thread) {
  V* at_channel = to + thread.group * channel_stride + thread.pixel();
  const int64_t step = thread.groups * channel_stride;
  thread.each([&](int, int at) {
    store_once<V, kWidth>(at_channel, load<Use::kPlain, kWidth>(tile + at));
    at_channel += step;
  });
}

// One run of memory of `elements` elements, which begins at a multiple of 16 bytes.
template <typename V>
__device__ __forceinline__ void load_run(V* tile, const V* from, int elements) {
  constexpr int kWidth = 16 / sizeof(V);
  const int vectors = elements / kWidth;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    copy_async<16>(tile + i * kWidth, from + i * kWidth);
  }
  for (int i = vectors * kWidth + threadIdx.x; i < elements; i += blockDim.x) tile[i] = from[i];
}
template <typename V>
__device__ __forceinline__ void store_run(V* to, const V* tile, int elements) {
  constexpr int kWidth = 16 / sizeof(V);
  const int vectors = elements / kWidth;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    store_once<V, kWidth>(to + i * kWidth, load<Use::kPlain, kWidth>(tile + i * kWidth));
  }
  for (int i = vectors * kWidth + threadIdx.x; i < elements; i += blockDim.x) to[i] = tile[i];
}

// The transposed tile [pixels][channels] in global memory, which is one run. A thread moves the 16
// bytes that neighbouring channels of a pixel have there, in half precision of two pixels at once.
// Four neighbouring lanes have neighbouring vectors of channels: whole sectors of memory, and at
// most four of a warp's words lie in one bank. Where channels or pixels do not allow it, elements
// move one by one.
template <typename V>
struct Transposed {
  static constexpr int kChannels = 16 / sizeof(V);
  static constexpr int kPixels = sizeof(V) == 2 ? 2 : 1;
  static constexpr int kLanes = 4;
  // The pixels of a channel that a thread has at once.
  using Word = typename detail::Piece<kPixels * sizeof(V)>::type;

  template <typename Vectors, typename Elements>
  static __device__ __forceinline__ void each(int channels, int tile_pixels, int pixels,
                                              const Vectors& vectors, const Elements& elements) {
    const bool whole =
        channels % kChannels == 0 && tile_pixels % kPixels == 0 && pixels % kPixels == 0;
    if (whole) {
      const int units = pixels / kPixels, rows = channels / kChannels;
      const int all = (rows + kLanes - 1) / kLanes * kLanes * units;
      for (int i = threadIdx.x; i < all; i += blockDim.x) {
        const int quad = i / kLanes, high = quad / units;
        const int row = high * kLanes + i % kLanes;
        if (row < rows) vectors(row * kChannels, (quad - high * units) * kPixels);
      }
    } else {
      for (int i = threadIdx.x; i < pixels * channels; i += blockDim.x) {
        const int pixel = i / channels;
        elements(i, (i - pixel * channels) * tile_pixels + pixel);
      }
    }
  }

  static __device__ __forceinline__ void store(V* to, const V* tile, int channels, int tile_pixels,
                                               int pixels) {
    each(
        channels, tile_pixels, pixels,
        [&](int c, int pixel) {
          Word words[kChannels];
#pragma unroll
          for (int i = 0; i < kChannels; ++i) {
            words[i] = *reinterpret_cast<const Word*>(tile + (c + i) * tile_pixels + pixel);
          }
          V* const at = to + pixel * channels + c;
          if constexpr (sizeof(V) == 2) {
            uint32_t first[4], second[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              first[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
              second[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
            }
            __stcs(reinterpret_cast<uint4*>(at), *reinterpret_cast<uint4*>(first));
            __stcs(reinterpret_cast<uint4*>(at + channels), *reinterpret_cast<uint4*>(second));
          } else {
            __stcs(reinterpret_cast<uint4*>(at), *reinterpret_cast<uint4*>(words));
          }
        },
        [&](int i, int at) { to[i] = tile[at]; });
  }

  static __device__ __forceinline__ void load(V* tile, const V* from, int channels, int tile_pixels,
                                              int pixels) {
    each(
        channels, tile_pixels, pixels,
        [&](int c, int pixel) {
          const V* const at = from + pixel * channels + c;
          alignas(16) Word words[kChannels];
          if constexpr (sizeof(V) == 2) {
            const uint4 first = __ldg(reinterpret_cast<const uint4*>(at));
            const uint4 second = __ldg(reinterpret_cast<const uint4*>(at + channels));
            const uint32_t a[4] = {first.x, first.y, first.z, first.w};
            const uint32_t b[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              words[2 * i] = __byte_perm(a[i], b[i], 0x5410);
              words[2 * i + 1] = __byte_perm(a[i], b[i], 0x7632);
            }
          } else {
            *reinterpret_cast<uint4*>(words) = __ldg(reinterpret_cast<const uint4*>(at));
          }
#pragma unroll
          for (int i = 0; i < kChannels; ++i) {
            *reinterpret_cast<Word*>(tile + (c + i) * tile_pixels + pixel) = words[i];
          }
        },
        [&](int i, int at) { tile[at] = from[i]; });
  }
};

// Calls launch(types, bare, width, scattered) with how a thread of these tiles has its pixels, for
// all types but a y narrower than x, which nobody asks of images. `bare`: the norm has no epilogue.
// Types and widths that few models have share one kernel for norms with and without one.
template <typename Launch>
cudaError_t dispatch_channels(const DataTypes& types, bool has_epilogue, const Tiles& tiles,
                              const Launch& launch) {
  return dispatch_types(types, [&](auto t) {
    using T = decltype(t);
    constexpr int kMost = kVectorWidth<T>;
    if constexpr (kIsNarrowed<T>) {
      return cudaErrorInvalidValue;
    } else {
      const std::integral_constant<int, kMost> most;
      if (tiles.width == 1) return launch(t, std::false_type{}, most, std::true_type{});
      if constexpr (kMost == 8) {
        const std::integral_constant<int, 4> four;
        if (tiles.width == 4) return launch(t, std::false_type{}, four, std::false_type{});
      }
      return dispatch_bool<kIsCommon<T>>(
          !has_epilogue, [&](auto bare) { return launch(t, bare, most, std::false_type{}); });
    }
  });
}

}  // namespace fused_layernorm
