// SPDX-License-Identifier: Apache-2.0
// The operators of norms on CUDA; ops.h has the contract. call/ says whether a call is valid and
// how kernels read its tensors (check and settle).
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "bindings/cuda/modulation.h"
#include "bindings/cuda/ops.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

using Optional = std::optional<Tensor>;

bool has_groups(const NormArguments& a) { return a.options.num_groups != 0; }
bool is_gated_norm(const NormArguments& a) { return a.options.gate_place != GatePlace::kInput; }
bool is_of_rows(const NormArguments& a) { return !has_groups(a) && !is_gated_norm(a); }

int64_t leading_of(const NormArguments& a) {
  return a.shaped().dim() - (is_gated_norm(a) ? 1 : a.options.normalized_ndim);
}

NormCall describe_call(const NormArguments& a) {
  NormCall call;
  call.options = a.options;
  call.backward = a.backward;
  call.needs = a.needs;
  describe(a, call, [](const Optional& tensor) { return raw(tensor); });
  return call;
}

// The call as it was given. Throws if it is not valid; NoKernel, if kernels cannot count it.
NormCall describe_and_check(const NormArguments& a) {
  NormCall call = describe_call(a);
  call.written = raw(a.shaped());
  if (a.out_dtype) call.written.type = data_type_or_none(*a.out_dtype);
  const Verdict verdict = check(call);
  CHECK_ARGUMENT(verdict.kind != Verdict::kInvalid, verdict.reason);
  if (!verdict) throw NoKernel();
  for (const auto& field : kTensorFields<Optional>) {
    const bool is_statistic = field.name == "mean" || field.name == "rstd";
    if (a.*field.member && !is_statistic) (void)data_type((a.*field.member)->scalar_type());
  }
  if (a.out_dtype) (void)data_type(*a.out_dtype);
  return call;
}

// The tensor itself if it has this type and the other one's strides, else a copy that has.
Tensor as_lies(const Tensor& tensor, const Tensor& other, ScalarType type) {
  if (tensor.scalar_type() == type && have_one_order(raw(tensor), raw(other))) return tensor;
  Tensor copy =
      empty_strided(other, other.sizes().data(), other.strides().data(), other.dim(), type);
  torch::stable::copy_(copy, tensor);
  return copy;
}

// The tensor itself where kernels read it, else a copy; rows are copied later (with_rows), if no
// kernel reads them where they lie.
Tensor conform(const Tensor& given, const Read& read, const Tensor& x, int64_t leading,
               const Tensor& written) {
  const ScalarType type = read.type == kNoDataType ? given.scalar_type() : scalar_type(read.type);
  switch (read.layout) {
    case Layout::kAny:
      return given;
    case Layout::kContiguous:
      return contiguous_of(given);
    case Layout::kColumns:
      return aligned_of(cast(given, type));
    case Layout::kModulation:
      return prepare_modulation(given, read.type, x, leading);
    case Layout::kRows:
      return cast(given, type);
    case Layout::kAsWritten:
      return as_lies(given, written, type);
  }
  return given;
}

// Replaces each tensor of a call, and its description, by function(tensor, how kernels read it).
template <typename Function>
void replace(NormArguments& a, NormCall& call, const Settled& settled, const Function& function) {
  for (size_t i = 0; i < kTensorCount; ++i) {
    Optional& given = a.*kTensorFields<Optional>[i].member;
    if (!given) continue;
    Tensor made = function(*given, settled.read.*kTensorFields<Read>[i].member);
    if (made.get() == given->get()) continue;
    given = std::move(made);
    call.*kTensorFields<RawTensor>[i].member = raw(*given);
  }
}

// The result of x's shape (y or dx), and the memory that kernels write: the result's own, or a
// contiguous tensor where kernels do not write the result's strides.
struct Written {
  const bool keeps_order;
  Tensor result, memory;

  Written(const Tensor& x, const Settled& settled, bool groups)
      : keeps_order(settled.keeps_order),
        result(make(x, scalar_type(settled.written))),
        memory(!groups || group_layout_of(raw(result)) ? result
                                                       : empty_like(x, result.scalar_type())) {}
  // The result, in its own type.
  Tensor finish(DataType type) {
    if (memory.get() != result.get()) torch::stable::copy_(result, memory);
    if (result.scalar_type() == scalar_type(type)) return result;
    Tensor converted = make(result, scalar_type(type));
    torch::stable::copy_(converted, result);
    return converted;
  }

 private:
  Tensor make(const Tensor& like, ScalarType type) const {
    return keeps_order ? empty_in_order(like, type) : empty_like(like, type);
  }
};

// New tensors for mean and rstd, in the arithmetic's type. No kernel runs for x without elements:
// they then have what PyTorch's kernels give.
void allocate_statistics(const NormArguments& a, DataType type, Results& out) {
  const Tensor& x = *a.input;
  std::vector<int64_t> sizes(x.dim());
  sizes.resize(statistics_sizes(a.options, x.sizes().data(), x.dim(), sizes.data()));
  const ScalarType of = scalar_type(statistics_type(type));
  const auto statistic = [&](double of_nothing) {
    Tensor made = empty(x, sizes.data(), static_cast<int64_t>(sizes.size()), of);
    if (x.numel() == 0) torch::stable::fill_(made, of_nothing);
    return made;
  };
  out.mean = a.options.is_rms ? none(x, of) : statistic(0.0);
  out.rstd = statistic(std::numeric_limits<double>::quiet_NaN());
}

// Prepares a call whose tensors conform; copies rows where no kernel reads them as they lie.
bool prepare_or_copy(NormArguments& a, const Settled& settled, std::optional<Written>& written,
                     NormCall& call, Prepared& prepared) {
  const Device device = device_of(a.shaped());
  const auto prepare_now = [&] {
    call.written = written ? raw(written->memory) : RawTensor();
    return prepare(call, device, prepared);
  };
  if (prepare_now()) return true;
  if (has_groups(a)) return false;
  const int64_t leading = leading_of(a);
  if (is_of_rows(a) && a.backward && !a.dresidual && !a.is_modulated() &&
      channel_map_of(call.x, leading)) {
    // Kernels of channels read dy as they read x, or contiguous and aligned.
    const Tensor aligned = aligned_of(*a.dy);
    call.dy = raw(aligned);
    if (prepare_now()) {
      a.dy = aligned;
      return true;
    }
    call.dy = raw(*a.dy);
  }
  replace(a, call, settled, [&](const Tensor& tensor, const Read& read) {
    return read.layout == Layout::kRows ? with_rows(tensor, leading) : tensor;
  });
  if (written && !written->memory.is_contiguous()) {
    written->memory = empty_like(written->result, written->result.scalar_type());
  }
  return prepare_now();
}

// ---- Forward

Results run_forward(const NormArguments& given, const NormCall& as_given) {
  if (is_of_rows(given) && given.is_modulated()) {
    const NormOptions& options = given.options;
    const bool rounds = xhat_rounding_of(options.round_before_weight, given.weight.has_value(),
                                         as_given.input.type) != XhatRounding::kNone;
    if (rounds) return run_rounding(given);
    if (options.weight_offset != 0.0) return run_with_offset(given);
  }
  const Tensor& x = *given.input;
  const CurrentDevice guard(x);
  Settled settled = settle(as_given);
  NormArguments a = given;
  Results out;
  std::optional<Written> y(std::in_place, x, settled, has_groups(a));
  if (settled.adds_first) {
    out.residual_out = add(x, a.gate, *a.residual, scalar_type(settled.read.input.type));
    a.input = out.residual_out;
    settled.read.input.type = settled.kernel.x;
    a.residual.reset();
    a.gate.reset();
  } else if (a.residual) {
    out.residual_out = empty_like(x, a.residual->scalar_type());
  }
  if (a.needs_statistics) allocate_statistics(given, settled.kernel.x, out);
  if (x.numel() > 0) {
    NormCall call = settled.adds_first ? describe_call(a) : as_given;
    replace(a, call, settled, [&](const Tensor& tensor, const Read& read) {
      return conform(tensor, read, x, leading_of(a), y->memory);
    });
    call.rounded_to = as_given.input.type;
    call.affine_rounded_to = as_given.weight.type;
    Prepared prepared;
    if (!prepare_or_copy(a, settled, y, call, prepared)) throw NoKernel();
    const auto address = [](Optional& tensor) {
      return tensor && tensor->numel() > 0 ? tensor->mutable_data_ptr() : nullptr;
    };
    call.to.y = y->memory.mutable_data_ptr();
    if (!settled.adds_first) call.to.residual_out = address(out.residual_out);
    call.to.mean = address(out.mean);
    call.to.rstd = address(out.rstd);
    launch_prepared(prepared, call, x);
  }
  out.y = y->finish(settled.result);
  if (a.needs_statistics) {
    const ScalarType type = scalar_type(statistics_type(as_given.normalized().type));
    out.mean = cast(*out.mean, type);
    out.rstd = cast(*out.rstd, type);
  }
  return out;
}

// ---- Backward

// The gradients of a call's parameters. Those of modulations of rows are written for each group of
// rows, and then summed.
class ParameterGradients {
 public:
  ParameterGradients(const NormArguments& a, const Settled& settled, const Groups& groups)
      : a_(a), settled_(settled) {
    each([&](size_t i, const auto& field) {
      if (!is_of_rows(a) || field.is_wide == nullptr) return;
      of_groups_[i].emplace(a.needs.*field.needed, a.*field.of, groups, *a.x);
    });
  }

  // As kernels write them: as they read the parameters. They are zero where no kernel runs.
  void allocate(NormCall& call) {
    each([&](size_t i, const auto& field) {
      void*& data = call.to.*kGradientFields<void*>[i].member;
      if (auto& of_groups = of_groups_[i]) {
        data = of_groups->allocate(settled_.kernel.weight, statistics_type(settled_.kernel.x));
        call.*field.is_wide = of_groups->is_wide;
        if (a_.x->numel() == 0) of_groups->fill_with_zeros();
      } else if (a_.needs.*field.needed) {
        const Optional& parameter = a_.*field.of;
        const Read& read = settled_.read.*kGradientFields<Read>[i].of;
        Tensor made =
            like(parameter, read.type == kNoDataType ? type_of(parameter) : scalar_type(read.type));
        if (a_.x->numel() == 0) torch::stable::zero_(made);
        data = made.mutable_data_ptr();
        made_.*field.member = std::move(made);
      }
    });
  }

  void give(Results& out) const {
    each([&](size_t i, const auto& field) {
      const Optional& made = made_.*field.member;
      const ScalarType type = type_of(a_.*field.of);
      out.*field.member = of_groups_[i] ? of_groups_[i]->result()
                          : made        ? cast(*made, type)
                                        : none(*a_.x, type);
    });
  }

 private:
  // All but those of x, and of the input of a gated sum.
  template <typename Function>
  static void each(const Function& function) {
    for (size_t i = 0; i < std::size(kGradientFields<Optional>); ++i) {
      const auto& field = kGradientFields<Optional>[i];
      if (field.of != &NormArguments::x && field.of != &NormArguments::input) function(i, field);
    }
  }
  // Rows may have dweight without a weight, and dbias without a bias.
  Tensor like(const Optional& parameter, ScalarType type) const {
    const Tensor& x = *a_.x;
    const int64_t leading = leading_of(a_);
    return parameter ? empty_like(*parameter, type)
                     : empty(x, x.sizes().data() + leading, x.dim() - leading, type);
  }
  ScalarType type_of(const Optional& parameter) const {
    const Optional& other = a_.weight ? a_.weight : a_.bias;
    const Optional& typed = !parameter && is_of_rows(a_) ? other : parameter;
    return typed ? typed->scalar_type() : a_.x->scalar_type();
  }

  const NormArguments& a_;
  const Settled& settled_;
  std::array<std::optional<GroupGradient>, std::size(kGradientFields<Optional>)> of_groups_;
  Results made_;
};

Results run_backward(const NormArguments& given, const NormCall& as_given) {
  const Tensor& x = *given.x;
  const ScalarType type = x.scalar_type();
  const bool is_gated_sum = given.input.has_value(), is_empty = x.numel() == 0;
  if (is_gated_sum && (is_empty || given.input->scalar_type() != type)) {
    return run_gate_apart(given);
  }
  const CurrentDevice guard(x);
  const Groups groups({&as_given.shift, &as_given.scale, &as_given.gate}, as_given.x,
                      std::max<int64_t>(0, leading_of(given)));
  NormArguments asked = given;
  // If each row has a modulation of its own, the modulated kernels take no sums over rows.
  const bool has_columns_apart =
      is_of_rows(given) && given.is_modulated() && groups.rows == 1 && given.needs.columns();
  if (has_columns_apart) asked.needs.dweight = asked.needs.dbias = false;
  const Needs& needs = asked.needs;

  const Settled settled = settle(as_given);
  ParameterGradients gradients(asked, settled, groups);
  std::optional<Written> dx;
  if (needs.dx || (has_groups(asked) && needs.any())) dx.emplace(x, settled, has_groups(asked));
  Results out;
  if (is_gated_sum) out.dinput = needs.dinput ? empty_like(x, type) : none(x, type);
  NormCall call;
  if (is_empty) {
    gradients.allocate(call);
  } else if (needs.any()) {
    NormArguments a = asked;
    call = as_given;
    call.needs = needs;
    replace(a, call, settled, [&](const Tensor& tensor, const Read& read) {
      return conform(tensor, read, x, leading_of(a), dx ? dx->memory : x);
    });
    call.group_rows = groups.rows;
    Prepared prepared;
    if (!prepare_or_copy(a, settled, dx, call, prepared)) {
      if (!is_gated_sum) throw NoKernel();
      return run_gate_apart(given);
    }
    gradients.allocate(call);
    if (dx) call.to.dx = dx->memory.mutable_data_ptr();
    if (needs.dinput) call.to.dinput = out.dinput->mutable_data_ptr();
    launch_prepared(prepared, call, x);
  }
  out.dx = needs.dx ? dx->finish(settled.result) : none(x, type);
  gradients.give(out);
  if (has_columns_apart) add_columns(out, given);
  return out;
}

}  // namespace

Results run(const NormArguments& a) {
  const NormCall call = describe_and_check(a);
  return a.backward ? run_backward(a, call) : run_forward(a, call);
}

void launch_prepared(Prepared& prepared, const NormCall& call, const Tensor& x) {
  const int64_t bytes = prepared.workspace_bytes();
  std::optional<Tensor> workspace;
  if (bytes > 0) workspace = empty(x, &bytes, 1, ScalarType::Byte);
  launch(prepared, call, workspace ? workspace->mutable_data_ptr() : nullptr, current_stream(x));
}

}  // namespace fused_layernorm
