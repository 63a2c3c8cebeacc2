// SPDX-License-Identifier: Apache-2.0
// Data types, for which of their combinations there are kernels, and the vectors that rows of them
// are moved in.
#pragma once

#include <cstdint>

namespace fused_layernorm {

enum class DataType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

constexpr int size_of(DataType type) {
  return type == DataType::kFloat64 ? 8 : type == DataType::kFloat32 ? 4 : 2;
}
constexpr bool is_half(DataType type) {
  return type == DataType::kFloat16 || type == DataType::kBFloat16;
}
inline const char* name_of(DataType type) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float64"};
  return kNames[static_cast<int>(type)];
}

// Whether x, the parameters and y (dy in backward) are of one type, and it is not float64.
constexpr bool is_one_type(DataType x, DataType weight, DataType y) {
  return x == weight && x == y && x != DataType::kFloat64;
}

// Whether y is of half precision beside a float32 x, as in models whose residual stream is float32.
// Such rows have kernels of their own only where they are common: rows that a block's team keeps.
constexpr bool is_narrowed(DataType x, DataType y) { return size_of(y) < size_of(x); }

// The types of x, of weight and bias, and of y (dy in backward) for which there are kernels. The
// bindings convert others to one of them (a weight to float32, an output from float32), which gives
// the same result to the bit. A developer may trim a build to float32 and bfloat16 (setup.py).
constexpr DataType kTypesWithKernels[][3] = {
    {DataType::kFloat32, DataType::kFloat32, DataType::kFloat32},
#ifndef FUSED_LAYERNORM_TRIMMED
    {DataType::kFloat32, DataType::kFloat32, DataType::kFloat16},
    {DataType::kFloat32, DataType::kFloat32, DataType::kBFloat16},
    {DataType::kFloat16, DataType::kFloat16, DataType::kFloat16},
    {DataType::kFloat16, DataType::kFloat32, DataType::kFloat16},
    {DataType::kFloat16, DataType::kFloat32, DataType::kFloat32},
#endif
    {DataType::kBFloat16, DataType::kBFloat16, DataType::kBFloat16},
    {DataType::kBFloat16, DataType::kFloat32, DataType::kBFloat16},
#ifndef FUSED_LAYERNORM_TRIMMED
    {DataType::kBFloat16, DataType::kFloat32, DataType::kFloat32},
    {DataType::kFloat64, DataType::kFloat64, DataType::kFloat64},
#endif
};

constexpr bool has_kernels(DataType x, DataType weight, DataType y) {
  for (const auto& types : kTypesWithKernels) {
    if (types[0] == x && types[1] == weight && types[2] == y) return true;
  }
  return false;
}

// Whether modulated norms have forward kernels that keep a row of these types on the chip: not for
// float64, and for unaligned rows (`shifted`) only if all types are the same. All others are
// streamed, because each kernel takes some 20 KB of the binary.
constexpr bool has_modulated_forward(DataType x, DataType weight, DataType y, bool shifted) {
  return x != DataType::kFloat64 && (!shifted || (x == weight && x == y));
}

// The size of the type that sums are taken in: float32, or float64 for float64.
constexpr int acc_size_of(int x_size) { return x_size == 8 ? 8 : 4; }
constexpr int acc_size_of(DataType x) { return acc_size_of(size_of(x)); }

// A vector is what a thread moves with one instruction.
constexpr int kVectorBytes = 16;
constexpr int vector_width(int element_size) { return kVectorBytes / element_size; }

// The least number of columns that takes whole vectors in x, y and the parameters alike. Slices of
// rows begin at multiples of it, and rings have room for a multiple of it, because bulk copies
// begin and end at multiples of 16 bytes.
constexpr int aligned_cols(int x_size, int y_size) {
  return vector_width(x_size < y_size ? x_size : y_size);
}
constexpr bool slices_are_aligned() {
  for (const auto& types : kTypesWithKernels) {
    const int cols = aligned_cols(size_of(types[0]), size_of(types[2]));
    for (const DataType type : types) {
      if (cols * size_of(type) % kVectorBytes != 0) return false;
    }
  }
  return true;
}
static_assert(slices_are_aligned(),
              "a slice of weight and bias begins at a multiple of 16 bytes wherever one of x does");

// A thread has `vecs` vectors of a row, each as many columns as 16 bytes of x hold. It moves them
// in pieces of so many columns that none takes more than 16 bytes of x, of a parameter or of y: a
// warp then moves whole lines of all three. (Whole vectors of x and halves of them, bfloat16 beside
// float32 parameters: 16384 x 8192 143 us, 136.) But with five and more vectors of a row and
// something fused there are no registers for halves, and whole vectors are moved unless y is wide
// (8192 x 16384 with a residual and a gate 281, 296; with a residual and a float32 y 394, 339).
constexpr int row_width(int x_size, int weight_size, int y_size, int vecs, bool bare) {
  const bool splits = y_size > x_size || (weight_size > x_size && (vecs < 5 || bare));
  return splits ? vector_width(y_size > weight_size ? y_size : weight_size) : vector_width(x_size);
}
}  // namespace fused_layernorm
