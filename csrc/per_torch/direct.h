// SPDX-License-Identifier: Apache-2.0
// Direct calls: the kernels' library is called by its table of C functions (kernel_table.h), past
// the dispatcher and the stable ABI's conversions, and outputs are allocated as at::empty allocates
// them, without a dispatch.
//
// A call is direct if the dispatcher would reach CUDA's kernel next, by the key sets alone; if all
// tensors are on one device; and if they are contiguous, also without keeps_order, and need no
// conversion. Modes, transforms and subclasses of tensors show in the key sets. Every other call
// takes the operators, as all do with FUSED_LAYERNORM_DIRECT=0. Both ways give and save the same
// tensors.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "../bindings/kernel_table.h"
#include "node.h"
#include "operators.h"

namespace fused_layernorm {

inline std::atomic<bool> direct_enabled = [] {
  const char* const given = std::getenv("FUSED_LAYERNORM_DIRECT");
  return given == nullptr || std::string_view(given) != "0";
}();
inline std::atomic<int64_t> direct_calls = 0;  // for tests

// Null where direct calls are switched off, and without CUDA kernels of this table.
inline const KernelTable* kernel_table() {
  static const KernelTable* const found = []() -> const KernelTable* {
    Stack stack;
    find_operator("_kernel_table").callBoxed(&stack);
    const auto* const table = reinterpret_cast<const KernelTable*>(stack[0].toInt());
    const bool is_known = table != nullptr && table->version == kKernelTableVersion &&
                          table->size == sizeof(KernelTable);
    return is_known ? table : nullptr;
  }();
  return direct_enabled.load(std::memory_order_relaxed) ? found : nullptr;
}

// Whether a dispatch below autograd, given the keys of a kernel above or below it, would reach the
// kernel of this backend next.
inline bool is_next(DispatchKeySet keys, c10::DispatchKey backend) {
  return ((keys & c10::after_ADInplaceOrView_keyset) - kSelects).highestPriorityTypeId() == backend;
}

// The same for a call that has not been dispatched, of tensors with these keys: nothing but
// autograd and autocast would see it first.
inline bool is_cuda_alone(DispatchKeySet of_tensors) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const DispatchKeySet keys = ((of_tensors | local.included_) - local.excluded_) -
                              c10::autograd_dispatch_keyset_with_ADInplaceOrView -
                              c10::autocast_dispatch_keyset - kSelects;
  return keys.highestPriorityTypeId() == c10::DispatchKey::CUDA;
}

constexpr DispatchKeySet kCudaKeys(c10::DispatchKey::CUDA);

// On the current device, uninitialized. The allocator is asked for at each call: it may change.
inline Tensor allocate(at::IntArrayRef sizes, at::ScalarType type) {
  c10::Allocator* const allocator = at::detail::getCUDAHooks().getCUDADeviceAllocator();
  return at::detail::empty_generic(sizes, allocator, kCudaKeys, type, std::nullopt);
}

// Two tensors of these sizes in one allocation.
inline void allocate_two(at::IntArrayRef sizes, int64_t numel, at::ScalarType type, Tensor& first,
                         Tensor& second) {
  constexpr int64_t kAligned = 64;
  const int64_t offset = (numel + kAligned - 1) / kAligned * kAligned;
  first = allocate({offset + numel}, type);
  first.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  second = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(first.storage()), kCudaKeys,
                                                    first.dtype());
  second.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  second.unsafeGetTensorImpl()->set_storage_offset(offset);
}

inline at::ScalarType statistics_type(at::ScalarType x) {
  return x == at::kDouble ? at::kDouble : at::kFloat;
}

inline const void* address_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

inline bool is_beside(const Tensor& tensor, const Tensor& x) {
  return !tensor.defined() || tensor.device() == x.device();
}

inline bool is_contiguous_of(const Tensor& tensor, at::IntArrayRef sizes) {
  return !tensor.defined() || (tensor.sizes() == sizes && tensor.is_contiguous());
}

// The shape of mean and rstd.
inline c10::SmallVector<int64_t, 8> statistics_shape(at::IntArrayRef sizes,
                                                     size_t normalized_ndim) {
  c10::SmallVector<int64_t, 8> shape(sizes.begin(), sizes.end());
  std::fill(shape.end() - normalized_ndim, shape.end(), 1);
  return shape;
}

// The norm of the rows of x, but for forward's own arguments; points into the options. False if x
// and the parameters do not fit together, or are not contiguous.
inline bool describe(const Tensor& x, const Options& options, const Tensor& weight,
                     const Tensor& bias, at::ScalarType y_type, DirectNorm& norm) {
  const auto sizes = x.sizes();
  const int64_t leading = x.dim() - options.normalized_ndim;
  if (options.normalized_ndim < 1 || leading < 0 || x.numel() == 0) return false;
  norm.rows = c10::multiply_integers(sizes.slice(0, leading));
  norm.cols = x.numel() / norm.rows;
  const auto columns = sizes.slice(leading);
  if (!is_contiguous_of(weight, columns) || !is_contiguous_of(bias, columns)) return false;
  if (weight.defined() && bias.defined() && weight.scalar_type() != bias.scalar_type()) {
    return false;
  }
  norm.device = x.device().index();
  norm.x_type = static_cast<int32_t>(x.scalar_type());
  const Tensor& parameter = weight.defined() ? weight : bias;
  if (parameter.defined()) norm.weight_type = static_cast<int32_t>(parameter.scalar_type());
  norm.y_type = static_cast<int32_t>(y_type);
  if (options.activation) norm.activation = options.activation->c_str();
  norm.scale = options.output_scale;
  norm.is_rms = options.is_rms;
  norm.weight_offset = options.weight_offset;
  return true;
}

template <typename Call>
void launch_directly(int64_t workspace_bytes, const DirectLaunch& prepared, const Call& call) {
  Tensor workspace;
  if (workspace_bytes > 0) workspace = allocate({workspace_bytes}, at::kByte);
  const char* const wrong =
      call(&prepared, workspace_bytes > 0 ? workspace.mutable_data_ptr() : nullptr);
  TORCH_CHECK(wrong == nullptr, wrong);
  direct_calls.fetch_add(1, std::memory_order_relaxed);
}

struct DirectOutputs {
  Tensor y, residual_out, mean, rstd;  // RMSNorm's mean is undefined
};

// Runs a forward operator without a modulation, given the keys of a kernel at an Autograd key or
// below. False if the call is none for the table; nothing has then been launched.
template <class Op>
bool forward_directly(DispatchKeySet keys, const IValue* arguments, bool needs_statistics,
                      DirectOutputs& out) {
  const KernelTable* const table = kernel_table();
  if (Op::kHasModulation || table == nullptr || !is_next(keys, c10::DispatchKey::CUDA))
    return false;
  const Options options = options_of<Op>(arguments);
  if (options.keeps_order) return false;
  static const Tensor none;
  const Tensor& input = arguments[Op::kInput].toTensor();
  const Tensor& residual = Op::kHasResidual ? arguments[Op::kResidual].toTensor() : none;
  const Tensor& x = Op::kHasResidual ? residual : input;
  const Tensor& weight = tensor_of(arguments[Op::kWeight]);
  const Tensor& bias = tensor_of(arguments[Op::kBias]);
  if (!is_beside(residual, input) || !is_beside(weight, input) || !is_beside(bias, input)) {
    return false;
  }
  DirectForward f;
  const auto sizes = input.sizes();
  const at::ScalarType y_type = dtype_of(arguments[Op::kOutDtype]).value_or(input.scalar_type());
  if (!is_contiguous_of(input, sizes) || !is_contiguous_of(residual, sizes) ||
      !describe(x, options, weight, bias, y_type, f.norm)) {
    return false;
  }
  f.norm.input_type = static_cast<int32_t>(input.scalar_type());
  f.norm.eps = arguments[Op::kEps].toDouble();
  f.norm.round_before_weight = arguments[Op::kRoundBeforeWeight].toBool();

  const c10::DeviceGuard guard(input.device());
  out.y = allocate(sizes, y_type);
  if (Op::kHasResidual) out.residual_out = allocate(sizes, x.scalar_type());
  if (needs_statistics) {
    const auto of_rows = statistics_shape(sizes, options.normalized_ndim);
    const at::ScalarType type = statistics_type(x.scalar_type());
    if (f.norm.is_rms) {
      out.rstd = allocate(of_rows, type);
    } else {
      allocate_two(of_rows, f.norm.rows, type, out.mean, out.rstd);
      f.mean = out.mean.mutable_data_ptr();
    }
    f.rstd = out.rstd.mutable_data_ptr();
  }
  f.input = input.const_data_ptr();
  f.residual = address_of(residual);
  f.weight = address_of(weight);
  f.bias = address_of(bias);
  f.y = out.y.mutable_data_ptr();
  if (Op::kHasResidual) f.residual_out = out.residual_out.mutable_data_ptr();
  DirectLaunch prepared;
  const int64_t workspace_bytes = table->prepare_forward(&f, &prepared);
  if (workspace_bytes < 0) return false;
  launch_directly(workspace_bytes, prepared, table->launch_forward);
  return true;
}

// Puts what the direct call gave in the place of an operator's arguments.
template <class Op>
void replace_arguments(Stack* stack, DirectOutputs& out) {
  torch::jit::drop(*stack, Op::kArguments);
  stack->emplace_back(std::move(out.y));
  if constexpr (Op::kHasResidual) stack->emplace_back(std::move(out.residual_out));
}

// What backward has of a norm without a modulation. dy, x and rstd are always defined; RMSNorm's
// mean is not.
struct SavedNorm {
  Tensor dy, x, mean, rstd, weight, bias, dresidual;
};

struct NeedsOfNorm {
  bool dx, dweight, dbias;
};

struct GradientsOfNorm {
  Tensor dx, dweight, dbias;
};

// Runs layer_norm_backward, outside any dispatch. False as above.
inline bool backward_directly(const SavedNorm& saved, const Options& options, NeedsOfNorm needs,
                              GradientsOfNorm& out) {
  const KernelTable* const table = kernel_table();
  if (table == nullptr || options.keeps_order || at::GradMode::is_enabled()) return false;
  const auto& [dy, x, mean, rstd, weight, bias, dresidual] = saved;
  DispatchKeySet keys;
  for (const Tensor* each : {&dy, &x, &mean, &rstd, &weight, &bias, &dresidual}) {
    if (!each->defined()) continue;
    keys = keys | each->key_set();
    if (!is_beside(*each, x) || each->_fw_grad(/*level=*/0).defined()) return false;
  }
  if (!is_cuda_alone(keys) || !(needs.dx || needs.dweight || needs.dbias)) return false;

  DirectBackward b;
  const auto sizes = x.sizes();
  if (!is_contiguous_of(x, sizes) || !is_contiguous_of(dy, sizes) ||
      !is_contiguous_of(dresidual, sizes) ||
      !describe(x, options, weight, bias, dy.scalar_type(), b.norm) ||
      (dresidual.defined() && dresidual.scalar_type() != x.scalar_type())) {
    return false;
  }
  const auto is_statistic = [&](const Tensor& t) {
    return t.defined() && t.numel() == b.norm.rows && t.is_contiguous() &&
           t.scalar_type() == statistics_type(x.scalar_type());
  };
  if (!is_statistic(rstd) || (!options.is_rms && !is_statistic(mean))) return false;

  const c10::DeviceGuard guard(x.device());
  const auto columns = sizes.slice(sizes.size() - options.normalized_ndim);
  const Tensor& parameter = weight.defined() ? weight : bias;
  const at::ScalarType type = parameter.defined() ? parameter.scalar_type() : x.scalar_type();
  const auto output = [](bool needed, at::IntArrayRef of, at::ScalarType t, Tensor& into) {
    if (needed) into = allocate(of, t);
    return needed ? into.mutable_data_ptr() : nullptr;
  };
  b.dx = output(needs.dx, sizes, x.scalar_type(), out.dx);
  b.dweight = output(needs.dweight, columns, type, out.dweight);
  b.dbias = output(needs.dbias, columns, type, out.dbias);
  b.dy = dy.const_data_ptr();
  b.x = x.const_data_ptr();
  b.mean = options.is_rms ? nullptr : mean.const_data_ptr();
  b.rstd = rstd.const_data_ptr();
  b.weight = address_of(weight);
  b.bias = address_of(bias);
  b.dresidual = address_of(dresidual);
  DirectLaunch prepared;
  const int64_t workspace_bytes = table->prepare_backward(&b, &prepared);
  if (workspace_bytes < 0) return false;
  launch_directly(workspace_bytes, prepared, table->launch_backward);
  return true;
}

// The same by the operator layer_norm_backward.
inline GradientsOfNorm call_backward(const SavedNorm& saved, const Options& options,
                                     NeedsOfNorm needs) {
  static const OperatorHandle op = find_operator("layer_norm_backward");
  Stack stack;
  stack.reserve(op.schema().arguments().size());
  torch::jit::push(stack, saved.dy, saved.x, options.normalized_ndim,
                   saved.mean.defined() ? saved.mean : at::empty({0}, saved.rstd.options()),
                   saved.rstd, value_of(saved.weight), value_of(saved.bias),
                   value_of(saved.dresidual),
                   options.activation ? IValue(*options.activation) : IValue(),
                   options.output_scale, needs.dx, needs.dweight, needs.dbias,
                   statistic_of(options), options.weight_offset, options.keeps_order);
  call(op, &stack);
  const auto take = [&](size_t i, bool needed) {
    return needed ? std::move(stack[i]).toTensor() : Tensor();
  };
  return {take(0, needs.dx), take(1, needs.dweight), take(2, needs.dbias)};
}

// The gradients of a norm without a modulation, either way.
inline GradientsOfNorm gradients_of(const SavedNorm& saved, const Options& options,
                                    NeedsOfNorm needs) {
  GradientsOfNorm found;
  if (!backward_directly(saved, options, needs, found))
    found = call_backward(saved, options, needs);
  return found;
}

// The kernel at BackendSelect of a forward operator without statistics: it serves the calls that
// autograd does not see, as those under inference_mode.
template <class Op>
void select_backend(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  DirectOutputs out;
  if (forward_directly<Op>(keys, stack->data() + stack->size() - Op::kArguments, false, out)) {
    return replace_arguments<Op>(stack, out);
  }
  constexpr DispatchKeySet kBelow(DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  op.redispatchBoxed(keys & kBelow, stack);
}

}  // namespace fused_layernorm
