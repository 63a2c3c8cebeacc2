// SPDX-License-Identifier: Apache-2.0
// Where the rows and columns of a tensor lie, from its sizes and strides. The first `leading`
// dimensions count rows, the others columns.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "base/params.h"
#include "call/description.h"
#include "channels/tiles.h"
#include "groups/params.h"

namespace fused_layernorm {

// The number of elements, in all dimensions or in those from `first` to `last`.
int64_t numel_of(const RawTensor& tensor, int64_t first, int64_t last);
inline int64_t numel_of(const RawTensor& tensor) { return numel_of(tensor, 0, tensor.dims); }

bool have_one_shape(const RawTensor& a, const RawTensor& b);

// Whether every row of a tensor at this address, placed as `map` says, begins at a multiple of 16
// bytes.
bool is_aligned(const void* data);
bool is_aligned(const void* data, DataType type, const RowMap& map);

// Where the rows of a tensor begin. std::nullopt unless each row is contiguous inside and the rows
// stand at no more than two strides.
std::optional<RowMap> rows_of(const RawTensor& tensor, int64_t leading);

// Sets where the rows of a tensor begin, if kernels find them. Clears `aligned` unless every row
// begins at a multiple of 16 bytes.
bool place_rows(const RawTensor& tensor, int64_t leading, const void*& data, RowMap& rows,
                bool& aligned);

// Where the rows of a tensor lie whose neighbouring rows, not columns, are adjacent in memory, as
// where the channels of NCHW are normalized. std::nullopt for other tensors, among them those of
// one column.
std::optional<ChannelMap> channel_map_of(const RawTensor& tensor, int64_t leading);

// Whether the tensor has as many samples and pixels as `map` says, and no gaps between channels.
bool has_dense_channels(const RawTensor& tensor, const ChannelMap& map, int64_t leading);

// The greatest power of two, of at most the elements of 16 bytes, such that every channel begins at
// an address that is a multiple of so many elements.
int64_t unit_of(const RawTensor& tensor, const ChannelMap& map);

// Whether each sample is one run of memory that begins at a multiple of 16 bytes.
bool is_run(const RawTensor& tensor, const ChannelMap& map, int64_t cols);

// ---- Groups of channels

// How a tensor of (samples, channels, ...) lies. std::nullopt unless the samples lie one after
// another without gaps, each of them channel after channel (kPlanes) or position after position
// (kChannelsLast); the positions may have any order.
std::optional<GroupLayout> group_layout_of(const RawTensor& tensor);

// Whether two tensors of one shape lie at the same strides.
bool have_one_order(const RawTensor& a, const RawTensor& b);

// ---- Modulations, which broadcast to x

// The size along x's dimension d of a tensor that broadcasts to x, which has `dims` dimensions.
inline int64_t size_along(const RawTensor& tensor, int64_t dims, int64_t d) {
  const int64_t own = d - (dims - tensor.dims);
  return own < 0 ? 1 : tensor.sizes[own];
}

bool broadcasts_to(const RawTensor& tensor, const RawTensor& x);

// The row of a modulation for each row of x, if kernels can read it in place: its rows are
// contiguous inside and begin at multiples of 16 bytes, and a RowMap describes where.
std::optional<RowMap> rows_in_place(const RawTensor& modulation, const RawTensor& x,
                                    int64_t leading);

// Groups of consecutive rows of x that share all of the given modulations. (Not GroupNorm's groups
// of channels.)
struct Groups {
  int64_t rows = 1;   // of a group
  int64_t first_dim;  // from here on the leading dimensions are inside a group
  int64_t leading;

  Groups(std::initializer_list<const RawTensor*> modulations, const RawTensor& x, int64_t leading);
  // The size along x's dimension d of a tensor that has one row of columns for each group.
  int64_t size_along(const RawTensor& x, int64_t d) const {
    return d >= first_dim && d < leading ? 1 : x.sizes[d];
  }
  // Whether the modulation has one row of columns for each group.
  bool are_of(const RawTensor& modulation, const RawTensor& x) const;
};

}  // namespace fused_layernorm
