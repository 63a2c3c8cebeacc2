// SPDX-License-Identifier: Apache-2.0
// Where rows and columns lie; layout.h has the contract.
#include "call/layout.h"

#include <algorithm>

namespace fused_layernorm {
namespace {

uintptr_t address_of(const RawTensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data); }

// The rows of a tensor of these sizes, whose stride along dimension d is stride(d). A single row
// has no stride, and gets that of contiguous rows, or zero if it `broadcasts`.
template <typename Stride>
std::optional<RowMap> find_rows(const int64_t* sizes, int64_t dims, int64_t leading,
                                bool broadcasts, const Stride& stride) {
  int64_t expected = 1;
  for (int64_t d = dims - 1; d >= leading; --d) {
    if (sizes[d] != 1 && stride(d) != expected) return std::nullopt;
    expected *= sizes[d];
  }
  int levels = 0;
  int64_t inner_stride = broadcasts ? 0 : expected, outer_stride = 0;
  int64_t inner_rows = 1, outer_rows = 1;
  for (int64_t d = leading - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (levels == 0) {
      inner_stride = stride(d);
      inner_rows = sizes[d];
      levels = 1;
    } else if (levels == 1 && stride(d) == inner_stride * inner_rows) {
      inner_rows *= sizes[d];
    } else if (levels == 1) {
      outer_stride = stride(d);
      outer_rows = sizes[d];
      levels = 2;
    } else if (stride(d) == outer_stride * outer_rows) {
      outer_rows *= sizes[d];
    } else {
      return std::nullopt;
    }
  }
  return levels == 2 ? RowMap(inner_rows, inner_stride, outer_stride) : RowMap(inner_stride);
}

}  // namespace

int64_t numel_of(const RawTensor& tensor, int64_t first, int64_t last) {
  int64_t numbers = 1;
  for (int64_t d = first; d < last; ++d) numbers *= tensor.sizes[d];
  return numbers;
}

bool have_one_shape(const RawTensor& a, const RawTensor& b) {
  return a.dims == b.dims && (a.sizes == b.sizes || std::equal(a.sizes, a.sizes + a.dims, b.sizes));
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; }

bool is_aligned(const void* data, DataType type, const RowMap& map) {
  const int64_t bytes = size_of(type);
  return is_aligned(data) && map.stride * bytes % kVectorBytes == 0 &&
         map.jump * bytes % kVectorBytes == 0;
}

std::optional<RowMap> rows_of(const RawTensor& tensor, int64_t leading) {
  if (!tensor.is_contiguous) {
    return find_rows(tensor.sizes, tensor.dims, leading, /*broadcasts=*/false,
                     [&](int64_t d) { return tensor.strides[d]; });
  }
  return RowMap(numel_of(tensor, leading, tensor.dims));
}

bool place_rows(const RawTensor& tensor, int64_t leading, const void*& data, RowMap& rows,
                bool& aligned) {
  const auto found = rows_of(tensor, leading);
  if (!found) return false;
  data = tensor.data;
  rows = *found;
  aligned = aligned && is_aligned(data, tensor.type, rows);
  return true;
}

std::optional<ChannelMap> channel_map_of(const RawTensor& tensor, int64_t leading) {
  if (tensor.is_contiguous) return std::nullopt;
  const int64_t *sizes = tensor.sizes, *strides = tensor.strides;
  ChannelMap map;
  int64_t cols = 1, d = tensor.dims - 1;
  for (; d >= leading; --d) {
    if (sizes[d] == 1) continue;
    if (cols == 1) map.channel_stride = strides[d];
    if (strides[d] != map.channel_stride * cols) return std::nullopt;
    cols *= sizes[d];
  }
  for (; d >= 0 && (sizes[d] == 1 || strides[d] == map.pixels); --d) map.pixels *= sizes[d];
  for (; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (map.samples == 1) map.sample_stride = strides[d];
    if (strides[d] != map.sample_stride * map.samples) return std::nullopt;
    map.samples *= sizes[d];
  }
  if (map.pixels == 1 || map.channel_stride <= 1) return std::nullopt;
  return map;
}

bool has_dense_channels(const RawTensor& tensor, const ChannelMap& map, int64_t leading) {
  const auto found = channel_map_of(tensor, leading);
  if (!found || found->pixels != map.pixels || found->samples != map.samples ||
      found->channel_stride != map.pixels) {
    return false;
  }
  const int64_t sample = map.pixels * numel_of(tensor, leading, tensor.dims);
  return map.samples == 1 || found->sample_stride == sample;
}

int64_t unit_of(const RawTensor& tensor, const ChannelMap& map) {
  const int64_t size = size_of(tensor.type);
  int64_t unit = kVectorBytes / size;
  while (address_of(tensor) % (unit * size) != 0 || map.sample_stride % unit != 0 ||
         map.channel_stride % unit != 0) {
    unit /= 2;
  }
  return unit;
}

bool is_run(const RawTensor& tensor, const ChannelMap& map, int64_t cols) {
  const int64_t bytes = size_of(tensor.type);
  return map.channel_stride == map.pixels && is_aligned(tensor.data) &&
         cols * map.pixels * bytes % kVectorBytes == 0 &&
         map.sample_stride * bytes % kVectorBytes == 0;
}

std::optional<GroupLayout> group_layout_of(const RawTensor& tensor) {
  if (tensor.is_contiguous) return GroupLayout::kPlanes;
  const int64_t *sizes = tensor.sizes, *strides = tensor.strides;
  const auto is_at = [&](int64_t d, int64_t stride) {
    return sizes[d] == 1 || strides[d] == stride;
  };
  // The number of positions, if they lie densely, one every `step` elements.
  const auto positions_by = [&](int64_t step) -> std::optional<int64_t> {
    int64_t found = 1, left = 0;
    for (int64_t d = 2; d < tensor.dims; ++d) left += sizes[d] != 1;
    while (left > 0) {
      int64_t d = 2;
      while (d < tensor.dims && (sizes[d] == 1 || strides[d] != step * found)) ++d;
      if (d == tensor.dims) return std::nullopt;
      found *= sizes[d];
      --left;
    }
    return found;
  };
  const int64_t channels = sizes[1];
  const auto in_planes = positions_by(1);
  if (in_planes && is_at(1, *in_planes) && is_at(0, channels * *in_planes)) {
    return GroupLayout::kPlanes;
  }
  const auto in_last = positions_by(channels);
  if (in_last && is_at(1, 1) && is_at(0, channels * *in_last)) return GroupLayout::kChannelsLast;
  return std::nullopt;
}

bool have_one_order(const RawTensor& a, const RawTensor& b) {
  bool same = true;
  for (int64_t d = 0; d < a.dims; ++d) same &= a.sizes[d] <= 1 || a.strides[d] == b.strides[d];
  return same;
}

bool broadcasts_to(const RawTensor& tensor, const RawTensor& x) {
  bool fits = tensor.dims <= x.dims;
  for (int64_t d = 0; fits && d < x.dims; ++d) {
    const int64_t size = size_along(tensor, x.dims, d);
    fits = size == 1 || size == x.sizes[d];
  }
  return fits;
}

std::optional<RowMap> rows_in_place(const RawTensor& modulation, const RawTensor& x,
                                    int64_t leading) {
  const int64_t added = x.dims - modulation.dims;
  const auto stride = [&](int64_t d) {
    const bool is_broadcast = d < added || modulation.sizes[d - added] == 1;
    return is_broadcast ? 0 : modulation.strides[d - added];
  };
  const auto found = find_rows(x.sizes, x.dims, leading, /*broadcasts=*/true, stride);
  return found && is_aligned(modulation.data, modulation.type, *found) ? found : std::nullopt;
}

Groups::Groups(std::initializer_list<const RawTensor*> modulations, const RawTensor& x,
               int64_t leading)
    : first_dim(leading), leading(leading) {
  for (; first_dim > 0; --first_dim) {
    const int64_t d = first_dim - 1;
    for (const RawTensor* modulation : modulations) {
      const bool has_rows = *modulation && fused_layernorm::size_along(*modulation, x.dims, d) != 1;
      if (has_rows && x.sizes[d] != 1) return;
    }
    rows *= x.sizes[d];
  }
}

bool Groups::are_of(const RawTensor& modulation, const RawTensor& x) const {
  bool same = true;
  for (int64_t d = 0; d < x.dims; ++d) {
    same &= size_along(x, d) == fused_layernorm::size_along(modulation, x.dims, d);
  }
  return same;
}

}  // namespace fused_layernorm
