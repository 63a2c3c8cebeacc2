// SPDX-License-Identifier: Apache-2.0
// Prepares modulations for kernels; modulation.h has the contract.
#include "bindings/cuda/modulation.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

namespace fused_layernorm {
namespace {

// The size along x's dimension d of a tensor that broadcasts to x.
int64_t size_along(const Tensor& tensor, const Tensor& x, int64_t d) {
  const int64_t own = d - (x.dim() - tensor.dim());
  return own < 0 ? 1 : tensor.sizes()[own];
}

// The stride along x's dimension d of a tensor that broadcasts to x: zero where it is broadcast.
int64_t stride_along(const Tensor& tensor, const Tensor& x, int64_t d) {
  const int64_t own = d - (x.dim() - tensor.dim());
  return own < 0 || tensor.sizes()[own] == 1 ? 0 : tensor.strides()[own];
}

// Whether no normalized dimension is broadcast.
bool has_all_columns(const Tensor& tensor, const Tensor& x, int64_t leading) {
  for (int64_t d = leading; d < x.dim(); ++d) {
    if (size_along(tensor, x, d) != x.sizes()[d]) return false;
  }
  return true;
}

std::optional<RowMap> map_of(const std::vector<int64_t>& strides, const Tensor& x,
                             int64_t leading) {
  return row_map(x.sizes().data(), strides.data(), x.dim(), leading);
}

// A copy whose rows are contiguous and begin at multiples of 16 bytes. Sets `strides` to the copy's
// strides along x's dimensions. With `expands`, the copy has a row of its own for every row of x.
Tensor copy_rows(const Tensor& tensor, ScalarType type, const Tensor& x, int64_t leading,
                 bool expands, std::vector<int64_t>& strides) {
  const int64_t dims = x.dim();
  std::vector<int64_t> sizes(dims), own_strides(dims);
  int64_t stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    if (d == leading - 1) {
      const int64_t vector = vector_width(size_of(data_type(type)));
      stride = (stride + vector - 1) / vector * vector;
    }
    const bool whole = d >= leading || expands;
    sizes[d] = whole ? x.sizes()[d] : size_along(tensor, x, d);
    own_strides[d] = stride;
    strides[d] = sizes[d] == 1 ? 0 : stride;
    stride *= sizes[d];
  }
  const Tensor buffer = empty(x, &stride, 1, type);
  Tensor rows = view(buffer, sizes.data(), own_strides.data(), dims);
  torch::stable::copy_(rows, tensor);
  return rows;
}

}  // namespace

void check_broadcast(const std::optional<Tensor>& tensor, const char* name, const Tensor& x) {
  if (!tensor) return;
  bool fits = tensor->dim() <= x.dim();
  for (int64_t d = 0; fits && d < x.dim(); ++d) {
    const int64_t size = size_along(*tensor, x, d);
    fits = size == 1 || size == x.sizes()[d];
  }
  CHECK_ARGUMENT(fits, name, " must broadcast to the shape of the input");
  CHECK_ARGUMENT(is_beside(*tensor, x), name, " must be on the input's device");
}

std::optional<ScalarType> type_of(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<ScalarType>(tensor->scalar_type()) : std::nullopt;
}

std::optional<ScalarType> common_type(std::initializer_list<std::optional<ScalarType>> types) {
  std::optional<ScalarType> common;
  for (const auto& type : types) {
    if (!type) continue;
    common = !common || *common == *type ? *type : ScalarType::Float;
  }
  return common;
}

ModulationRows::ModulationRows(const std::optional<Tensor>& given, ScalarType type, const Tensor& x,
                               int64_t leading) {
  if (!given) return;
  std::vector<int64_t> strides(x.dim());
  for (int64_t d = 0; d < x.dim(); ++d) strides[d] = stride_along(*given, x, d);
  if (given->scalar_type() == type && has_all_columns(*given, x, leading)) {
    if (const auto found = map_of(strides, x, leading); found && is_aligned(*given, *found)) {
      tensor = *given;
      map = *found;
      return;
    }
  }
  tensor = copy_rows(*given, type, x, leading, false, strides);
  auto found = map_of(strides, x, leading);
  if (!found) {
    tensor = copy_rows(*given, type, x, leading, true, strides);
    found = map_of(strides, x, leading);
  }
  map = *found;
}

Groups::Groups(std::initializer_list<const std::optional<Tensor>*> modulations, const Tensor& x,
               int64_t leading)
    : sizes(x.sizes().data(), x.sizes().data() + x.dim()) {
  for (int64_t d = leading - 1; d >= 0; --d) {
    for (const auto* modulation : modulations) {
      if (*modulation && size_along(**modulation, x, d) != 1 && x.sizes()[d] != 1) return;
    }
    rows *= sizes[d];
    sizes[d] = 1;
  }
}

GroupGradient::GroupGradient(bool needed, const std::optional<Tensor>& modulation,
                             const Groups& groups, ScalarType type, ScalarType wide_type,
                             const Tensor& x) {
  if (!needed) return;
  for (int64_t d = 0; d < x.dim(); ++d) {
    is_wide |= groups.sizes[d] != size_along(*modulation, x, d);
  }
  of_groups = empty(x, groups.sizes.data(), x.dim(), is_wide ? wide_type : type);
}

Tensor GroupGradient::result(const std::optional<Tensor>& modulation, const Tensor& x) const {
  const ScalarType type = modulation ? modulation->scalar_type() : x.scalar_type();
  if (!of_groups) return none(x, type);
  Tensor sum = *of_groups;
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (sum.sizes()[d] != size_along(*modulation, x, d)) dims.push_back(d);
  }
  if (!dims.empty()) {
    sum = torch::stable::sum(
        sum, torch::headeronly::IntHeaderOnlyArrayRef(dims.data(), dims.size()), true);
  }
  sum = contiguous_of(cast(sum, type));
  std::vector<int64_t> strides(modulation->dim());
  int64_t stride = 1;
  for (int64_t d = modulation->dim() - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= std::max<int64_t>(1, modulation->sizes()[d]);
  }
  return view(sum, modulation->sizes().data(), strides.data(), modulation->dim());
}

Tensor product(const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 2> stack{torch::stable::detail::from(a), torch::stable::detail::from(b)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::mul", "Tensor", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor plus(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

Tensor scaled(const Tensor& x, const std::optional<Tensor>& scale, ScalarType type) {
  if (!scale) return x;
  const Tensor wide = cast(x, type);
  return plus(wide, product(wide, cast(*scale, type)));
}

Tensor none(const Tensor& like, ScalarType type) {
  const int64_t size = 0;
  return empty(like, &size, 1, type);
}

}  // namespace fused_layernorm
