// SPDX-License-Identifier: Apache-2.0
// Prepares modulations for kernels; modulation.h has the contract.
#include "bindings/cuda/modulation.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <vector>

namespace fused_layernorm {
namespace {

// A copy whose rows are contiguous and begin at multiples of 16 bytes. With `expands`, the copy has
// a row of its own for every row of x.
Tensor copy_rows(const Tensor& tensor, DataType type, const Tensor& x, int64_t leading,
                 bool expands) {
  const int64_t dims = x.dim();
  const RawTensor original = raw(tensor);
  std::vector<int64_t> sizes(dims), strides(dims);
  int64_t stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    if (d == leading - 1) stride = round_up(stride, vector_width(size_of(type)));
    const bool whole = d >= leading || expands;
    sizes[d] = whole ? x.sizes()[d] : size_along(original, dims, d);
    strides[d] = stride;
    stride *= sizes[d];
  }
  const Tensor buffer = empty(x, &stride, 1, scalar_type(type));
  Tensor rows = view(buffer, sizes.data(), strides.data(), dims);
  torch::stable::copy_(rows, tensor);
  return rows;
}

}  // namespace

Tensor prepare_modulation(const Tensor& modulation, DataType type, const Tensor& x,
                          int64_t leading) {
  const RawTensor of_x = raw(x), given = raw(modulation);
  if (given.type == type && rows_in_place(given, of_x, leading)) return modulation;
  const Tensor rows = copy_rows(modulation, type, x, leading, /*expands=*/false);
  if (rows_in_place(raw(rows), of_x, leading)) return rows;
  return copy_rows(modulation, type, x, leading, /*expands=*/true);
}

GroupGradient::GroupGradient(bool needed, const std::optional<Tensor>& modulation,
                             const Groups& groups, const Tensor& x)
    : is_wide(needed && !groups.are_of(raw(*modulation), raw(x))),
      needed_(needed),
      modulation_(modulation),
      groups_(groups),
      x_(x) {}

void* GroupGradient::allocate(DataType type, DataType wide_type) {
  if (!needed_) return nullptr;
  const RawTensor of_x = raw(x_);
  std::vector<int64_t> sizes(x_.dim());
  for (int64_t d = 0; d < x_.dim(); ++d) sizes[d] = groups_.size_along(of_x, d);
  of_groups_ = empty(x_, sizes.data(), x_.dim(), scalar_type(is_wide ? wide_type : type));
  return of_groups_->mutable_data_ptr();
}

void GroupGradient::fill_with_zeros() {
  if (of_groups_) torch::stable::zero_(*of_groups_);
}

Tensor GroupGradient::result() const {
  if (!of_groups_) return none(x_, modulation_ ? modulation_->scalar_type() : x_.scalar_type());
  const ScalarType type = modulation_->scalar_type();
  Tensor sum = *of_groups_;
  const RawTensor own = raw(*modulation_);
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < x_.dim(); ++d) {
    if (sum.sizes()[d] != size_along(own, x_.dim(), d)) dims.push_back(d);
  }
  if (!dims.empty()) {
    sum = torch::stable::sum(
        sum, torch::headeronly::IntHeaderOnlyArrayRef(dims.data(), dims.size()), true);
  }
  sum = contiguous_of(cast(sum, type));
  std::vector<int64_t> strides(modulation_->dim());
  int64_t stride = 1;
  for (int64_t d = modulation_->dim() - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= std::max<int64_t>(1, modulation_->sizes()[d]);
  }
  return view(sum, modulation_->sizes().data(), strides.data(), modulation_->dim());
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

}  // namespace fused_layernorm
