// SPDX-License-Identifier: Apache-2.0
// Vectors of elements: loads and stores by cache intent, and conversion to the arithmetic's type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/macros.cuh"

namespace fused_layernorm {

// Arithmetic is in float32, for float64 data in float64.
template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

FUSED_DEVICE float to_acc(float v) { return v; }
FUSED_DEVICE double to_acc(double v) { return v; }
FUSED_DEVICE float to_acc(__half v) { return __half2float(v); }
FUSED_DEVICE float to_acc(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T, typename Acc>
FUSED_DEVICE T from_acc(Acc v) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(static_cast<float>(v));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(v));
  } else {
    return static_cast<T>(v);
  }
}

namespace detail {

// What moves so many bytes at once.
template <int kBytes>
using Piece = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

}  // namespace detail

// `kWidth` neighbouring elements, moved in pieces of at most 16 bytes.
template <typename T, int kWidth>
struct Vec {
  static constexpr int kBytes = kWidth * static_cast<int>(sizeof(T));
  static constexpr int kPieceBytes = kBytes < 16 ? kBytes : 16;
  static_assert(kBytes % kPieceBytes == 0 && (kPieceBytes & (kPieceBytes - 1)) == 0);
  using Piece = detail::Piece<kPieceBytes>;

  alignas(kPieceBytes) T at[kWidth];

  // A vector is copied in pieces, too. The compiler would copy single elements: in half precision
  // it would unpack and pack them right after a load, and so wait for memory there.
  Vec() = default;
  FUSED_DEVICE Vec(const Vec& other) { *this = other; }
  FUSED_DEVICE Vec& operator=(const Vec& other) {
    const auto* from = reinterpret_cast<const Piece*>(other.at);
    auto* to = reinterpret_cast<Piece*>(at);
    FUSED_UNROLL for (int i = 0; i < kBytes / kPieceBytes; ++i) to[i] = from[i];
    return *this;
  }
};

template <typename V>
using piece_t = typename V::Piece;

// Makes the compiler hold the vector in registers here, in the form in which it was loaded. The
// compiler then cannot delay the load, and keeps no earlier results from the vector for later use.
template <typename T, int kWidth>
FUSED_DEVICE void hold(Vec<T, kWidth>& v) {
  static_assert(sizeof(v) % sizeof(uint32_t) == 0);
  auto* words = reinterpret_cast<uint32_t*>(v.at);
  FUSED_UNROLL for (int i = 0; i < static_cast<int>(sizeof(v) / sizeof(uint32_t)); ++i) {
    asm volatile("" : "+r"(words[i]));
  }
}

// Negative zeros, which change no value that they are added to, not even a zero of either sign.
template <typename T, int kWidth>
FUSED_DEVICE Vec<T, kWidth> negative_zeros() {
  Vec<T, kWidth> v;
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) v.at[j] = from_acc<T>(acc_t<T>(-0.0));
  return v;
}

// How data is loaded.
enum class Use {
  kReadOnly,  // This kernel does not write it.
  kAhead,     // The same, and the load stays in front of a barrier that stands behind it. The
              // compiler may move a load of kReadOnly across a barrier.
  kOnce,      // It is read once, by a forward kernel, and L1 is left to data that is read again
              // (by plain loads and so, bfloat16: 32768 x 4096 133.3 us, 131.0; 4096 x 1024 6.31,
              // 6.17).
  kInOrder,   // The same, and the load stays behind a __syncwarp() that stands before it. The
              // compiler may move a load of kOnce across a __syncwarp().
  kPlain,     // It lies in shared memory, or in memory that this kernel writes.
};

// What becomes in L2 of data that is read or written once: it is evict_first.
struct EvictFirst {};

// It is evict_first, or evict_normal as other data: the plan decides. (PTX has such cache policies
// from capability 8.0 on. On older chips it is always evict_first.)
struct L2Policy {
  uint64_t bits = 0;

  FUSED_DEVICE explicit L2Policy(bool stays) {
#if __CUDA_ARCH__ >= 800
    uint64_t normal, first;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    bits = stays ? normal : first;
#endif
  }
};

namespace detail {

#if __CUDA_ARCH__ >= 800
#define FUSED_LAYERNORM_HINT ".L2::cache_hint"
#define FUSED_LAYERNORM_HINT_OPERAND(operand) ", " operand
#else
#define FUSED_LAYERNORM_HINT ""
#define FUSED_LAYERNORM_HINT_OPERAND(operand) ""
#endif

// Loads of kOnce and kInOrder.
template <bool kInOrder>
FUSED_DEVICE uint4 load_once(const uint4* p, EvictFirst) {
  uint4 v;
  if constexpr (kInOrder) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
  } else {
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
  }
  return v;
}
template <bool kInOrder>
FUSED_DEVICE uint4 load_once(const uint4* p, L2Policy policy) {
  uint4 v;
  if constexpr (kInOrder) {
    asm volatile("ld.global.L1::no_allocate" FUSED_LAYERNORM_HINT
                 ".v4.u32 {%0, %1, %2, %3}, [%4]" FUSED_LAYERNORM_HINT_OPERAND("%5") ";"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy.bits));
  } else {
    asm("ld.global.nc.L1::no_allocate" FUSED_LAYERNORM_HINT
        ".v4.u32 {%0, %1, %2, %3}, [%4]" FUSED_LAYERNORM_HINT_OPERAND("%5") ";"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p), "l"(policy.bits));
  }
  return v;
}
template <bool kInOrder>
FUSED_DEVICE uint2 load_once(const uint2* p, EvictFirst) {
  uint2 v;
  if constexpr (kInOrder) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(p));
  } else {
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  }
  return v;
}
template <bool kInOrder>
FUSED_DEVICE uint2 load_once(const uint2* p, L2Policy policy) {
  uint2 v;
  if constexpr (kInOrder) {
    asm volatile("ld.global.L1::no_allocate" FUSED_LAYERNORM_HINT
                 ".v2.u32 {%0, %1}, [%2]" FUSED_LAYERNORM_HINT_OPERAND("%3") ";"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(p), "l"(policy.bits));
  } else {
    asm("ld.global.nc.L1::no_allocate" FUSED_LAYERNORM_HINT
        ".v2.u32 {%0, %1}, [%2]" FUSED_LAYERNORM_HINT_OPERAND("%3") ";"
        : "=r"(v.x), "=r"(v.y)
        : "l"(p), "l"(policy.bits));
  }
  return v;
}

FUSED_DEVICE void store_once(uint4* p, const uint4& v, EvictFirst) { __stcs(p, v); }
FUSED_DEVICE void store_once(uint2* p, const uint2& v, EvictFirst) { __stcs(p, v); }
FUSED_DEVICE void store_once(uint4* p, const uint4& v, L2Policy policy) {
#if __CUDA_ARCH__ >= 800
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy.bits));
#else
  __stcs(p, v);
#endif
}
FUSED_DEVICE void store_once(uint2* p, const uint2& v, L2Policy policy) {
#if __CUDA_ARCH__ >= 800
  asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(p), "r"(v.x), "r"(v.y),
               "l"(policy.bits));
#else
  __stcs(p, v);
#endif
}

#undef FUSED_LAYERNORM_HINT
#undef FUSED_LAYERNORM_HINT_OPERAND

}  // namespace detail

// `policy` counts for kOnce and kInOrder.
template <Use kUse, int kWidth, typename T, typename Policy = EvictFirst>
FUSED_DEVICE Vec<T, kWidth> load(const T* p, Policy policy = Policy{}) {
  using V = Vec<T, kWidth>;
  V v;
  const auto* from = reinterpret_cast<const piece_t<V>*>(p);
  auto* to = reinterpret_cast<piece_t<V>*>(v.at);
  FUSED_UNROLL for (int i = 0; i < V::kBytes / V::kPieceBytes; ++i) {
    if constexpr (kUse == Use::kPlain || kUse == Use::kAhead) {
      to[i] = from[i];
    } else if constexpr (kUse != Use::kReadOnly && V::kPieceBytes >= 8) {
      to[i] = detail::load_once<kUse == Use::kInOrder>(from + i, policy);
    } else {
      to[i] = __ldg(from + i);
    }
  }
  return v;
}

template <typename T, int kWidth>
FUSED_DEVICE void store(T* p, const Vec<T, kWidth>& v) {
  *reinterpret_cast<Vec<T, kWidth>*>(p) = v;
}

// Stores data that is written once and not read by this kernel. Pieces below 8 bytes are stored
// plainly, so that parts of a sector stay in L2 until the rest of it has come.
template <typename T, int kWidth, typename Policy = EvictFirst>
FUSED_DEVICE void store_once(T* p, const Vec<T, kWidth>& v, Policy policy = Policy{}) {
  using V = Vec<T, kWidth>;
  auto* to = reinterpret_cast<piece_t<V>*>(p);
  const auto* from = reinterpret_cast<const piece_t<V>*>(v.at);
  FUSED_UNROLL for (int i = 0; i < V::kBytes / V::kPieceBytes; ++i) {
    if constexpr (V::kPieceBytes >= 8) {
      detail::store_once(to + i, from[i], policy);
    } else {
      to[i] = from[i];
    }
  }
}

// The same, if `wanted`. Pieces of 16 bytes are stored under a predicate: with a branch, the
// arithmetic of each vector would wait for that of the vector before.
template <typename T, int kWidth>
FUSED_DEVICE void store_once_if(bool wanted, T* p, const Vec<T, kWidth>& v) {
  using V = Vec<T, kWidth>;
  if constexpr (V::kPieceBytes == 16) {
    auto* to = reinterpret_cast<uint4*>(p);
    const auto* from = reinterpret_cast<const uint4*>(v.at);
    FUSED_UNROLL for (int i = 0; i < V::kBytes / V::kPieceBytes; ++i) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "setp.ne.s32 p, %0, 0;\n"
          "@p st.global.cs.v4.u32 [%1], {%2, %3, %4, %5};\n"
          "}\n" ::"r"(static_cast<int>(wanted)),
          "l"(to + i), "r"(from[i].x), "r"(from[i].y), "r"(from[i].z), "r"(from[i].w));
    }
  } else if (wanted) {
    store_once(p, v);
  }
}

// The elements in the type that the arithmetic is done in.
template <typename T, int kWidth>
FUSED_DEVICE void unpack(acc_t<T> (&values)[kWidth], const Vec<T, kWidth>& v) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kWidth % 2 == 0) {
    // A bfloat16 is the upper half of a float32: one instruction each.
    const auto* words = reinterpret_cast<const uint32_t*>(v.at);
    FUSED_UNROLL for (int i = 0; i < kWidth / 2; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
    FUSED_UNROLL for (int j = 0; j < kWidth; ++j) values[j] = to_acc(v.at[j]);
  }
}

template <typename T, int kWidth, typename Acc>
FUSED_DEVICE Vec<T, kWidth> round_to(const Acc (&values)[kWidth]) {
  Vec<T, kWidth> v;
  FUSED_UNROLL for (int j = 0; j < kWidth; ++j) v.at[j] = from_acc<T>(values[j]);
  return v;
}

}  // namespace fused_layernorm
