// SPDX-License-Identifier: Apache-2.0
// Prepares modulations for kernels; modulation.h has the contract.
#include "bindings/cuda/modulation.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

namespace fused_layernorm {
namespace {

// The size along x's dimension d of a tensor that broadcasts to x, which has `dims` dimensions.
int64_t size_along(const RawTensor& tensor, int64_t dims, int64_t d) {
  const int64_t own = d - (dims - tensor.dims);
  return own < 0 ? 1 : tensor.sizes[own];
}

// The strides along x's dimensions of a tensor that broadcasts to x: zero where it is broadcast.
std::vector<int64_t> strides_along(const RawTensor& tensor, int64_t dims) {
  std::vector<int64_t> strides(dims, 0);
  for (int64_t own = 0; own < tensor.dims; ++own) {
    if (tensor.sizes[own] != 1) strides[dims - tensor.dims + own] = tensor.strides[own];
  }
  return strides;
}

std::optional<RowMap> map_of(const std::vector<int64_t>& strides, const RawTensor& x,
                             int64_t leading) {
  return row_map(x.sizes, strides.data(), x.dims, leading);
}

// A copy whose rows are contiguous and begin at multiples of 16 bytes. Sets `strides` to the copy's
// strides along x's dimensions. With `expands`, the copy has a row of its own for every row of x.
Tensor copy_rows(const Tensor& tensor, ScalarType type, const Tensor& x, int64_t leading,
                 bool expands, std::vector<int64_t>& strides) {
  const int64_t dims = x.dim();
  const RawTensor original = raw(tensor);
  std::vector<int64_t> sizes(dims), own_strides(dims);
  int64_t stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    if (d == leading - 1) {
      const int64_t vector = vector_width(size_of(data_type(type)));
      stride = (stride + vector - 1) / vector * vector;
    }
    const bool whole = d >= leading || expands;
    sizes[d] = whole ? x.sizes()[d] : size_along(original, dims, d);
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

bool broadcasts_to(const RawTensor& tensor, const RawTensor& x) {
  bool fits = tensor.dims <= x.dims;
  for (int64_t d = 0; fits && d < x.dims; ++d) {
    const int64_t size = size_along(tensor, x.dims, d);
    fits = size == 1 || size == x.sizes[d];
  }
  return fits;
}

void check_broadcast(const std::optional<Tensor>& tensor, const char* name, const Tensor& x) {
  if (!tensor) return;
  CHECK_ARGUMENT(broadcasts_to(raw(*tensor), raw(x)), name,
                 " must broadcast to the shape of the input");
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

std::optional<RowMap> rows_in_place(const RawTensor& modulation, ScalarType type,
                                    const RawTensor& x, int64_t leading) {
  const auto found = map_of(strides_along(modulation, x.dims), x, leading);
  return found && is_aligned(modulation.data, size_of(data_type(type)), *found) ? found
                                                                                : std::nullopt;
}

ModulationRows::ModulationRows(const std::optional<Tensor>& given, ScalarType type, const Tensor& x,
                               int64_t leading) {
  if (!given) return;
  tensor = given;
  std::optional<RowMap> found;
  if (given->scalar_type() == type) {
    found = rows_in_place(raw(*given), type, raw(x), leading);
  }
  for (const bool expands : {false, true}) {
    if (found) break;
    std::vector<int64_t> strides(x.dim());
    tensor = copy_rows(*given, type, x, leading, expands, strides);
    found = map_of(strides, raw(x), leading);
  }
  map = *found;
}

Groups::Groups(std::initializer_list<RawTensor> modulations, const RawTensor& x, int64_t leading)
    : sizes(x.sizes, x.sizes + x.dims) {
  for (int64_t d = leading - 1; d >= 0; --d) {
    for (const RawTensor& modulation : modulations) {
      if (modulation.sizes && size_along(modulation, x.dims, d) != 1 && x.sizes[d] != 1) return;
    }
    rows *= sizes[d];
    sizes[d] = 1;
  }
}

bool Groups::are_of(const RawTensor& modulation) const {
  const auto dims = static_cast<int64_t>(sizes.size());
  bool same = true;
  for (int64_t d = 0; d < dims; ++d) same &= sizes[d] == size_along(modulation, dims, d);
  return same;
}

GroupGradient::GroupGradient(bool needed, const std::optional<Tensor>& modulation,
                             const Groups& groups, ScalarType type, ScalarType wide_type,
                             const Tensor& x) {
  if (!needed) return;
  is_wide = !groups.are_of(raw(*modulation));
  of_groups = empty(x, groups.sizes.data(), x.dim(), is_wide ? wide_type : type);
}

Tensor GroupGradient::result(const std::optional<Tensor>& modulation, const Tensor& x) const {
  const ScalarType type = modulation ? modulation->scalar_type() : x.scalar_type();
  if (!of_groups) return none(x, type);
  Tensor sum = *of_groups;
  const RawTensor own = raw(*modulation);
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (sum.sizes()[d] != size_along(own, x.dim(), d)) dims.push_back(d);
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
