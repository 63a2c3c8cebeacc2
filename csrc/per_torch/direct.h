// SPDX-License-Identifier: Apache-2.0
// Direct calls: the kernels' library is called by its table of C functions (kernel_table.h), past
// the dispatcher and the stable ABI's conversions, and outputs are allocated as at::empty allocates
// them, without a dispatch.
//
// A call is direct if the dispatcher would reach CUDA's kernel next, by the key sets alone; if all
// tensors are on one device; if they are contiguous, also without keeps_order, or modulations that
// kernels read where they lie; and if one launch computes it without a conversion. Modes,
// transforms and subclasses of tensors show in the key sets. Every other call takes the operators,
// as all do with FUSED_LAYERNORM_DIRECT=0. Both ways give and save the same tensors.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
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

// Null where direct calls are switched off, and without CUDA kernels of this table. It is asked for
// when nothing but CUDA's kernel would be next, for a mode would see the operator that gives it.
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

inline void* address_to_write(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
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

// Each may be undefined.
struct Parameters {
  const Tensor &weight, &bias, &shift, &scale, &gate;
};

inline RawTensor raw(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr(), tensor.sizes().data(), tensor.strides().data(), tensor.dim()};
}

// The norm of the rows of x, but for forward's own arguments; points into the arguments. False if x
// and the parameters do not fit together, or are not contiguous where they have to be.
inline bool describe(const Tensor& x, const Options& options, const Parameters& parameters,
                     at::ScalarType y_type, DirectNorm& norm) {
  const auto sizes = x.sizes();
  const int64_t leading = x.dim() - options.normalized_ndim;
  if (options.normalized_ndim < 1 || leading < 0 || x.numel() == 0) return false;
  norm.x = raw(x);
  norm.leading = leading;
  norm.rows = c10::multiply_integers(sizes.slice(0, leading));
  norm.cols = x.numel() / norm.rows;
  const auto columns = sizes.slice(leading);
  const auto& [weight, bias, shift, scale, gate] = parameters;
  if (!is_contiguous_of(weight, columns) || !is_contiguous_of(bias, columns)) return false;
  const Tensor* first = nullptr;
  for (const Tensor* each : {&weight, &bias, &shift, &scale, &gate}) {
    if (!each->defined()) continue;
    if (first == nullptr) first = each;
    if (!is_beside(*each, x) || each->scalar_type() != first->scalar_type()) return false;
  }
  norm.device = x.device().index();
  norm.input_type = norm.x_type = static_cast<int32_t>(x.scalar_type());
  if (first != nullptr) norm.weight_type = static_cast<int32_t>(first->scalar_type());
  norm.y_type = static_cast<int32_t>(y_type);
  if (options.activation) norm.activation = options.activation->c_str();
  norm.output_scale = options.output_scale;
  norm.is_rms = options.is_rms;
  norm.weight_offset = options.weight_offset;
  norm.weight = address_of(weight);
  norm.bias = address_of(bias);
  norm.shift = raw(shift);
  norm.scale = raw(scale);
  norm.gate = raw(gate);
  return true;
}

template <typename Direct, typename Launch>
void launch_directly(const Direct& call, const DirectLaunch& prepared, int64_t workspace_bytes,
                     const Launch& launch) {
  Tensor workspace;
  if (workspace_bytes > 0) workspace = allocate({workspace_bytes}, at::kByte);
  const char* const wrong = launch(&call, &prepared, address_to_write(workspace));
  TORCH_CHECK(wrong == nullptr, wrong);
  direct_calls.fetch_add(1, std::memory_order_relaxed);
}

struct DirectOutputs {
  Tensor y, residual_out, mean, rstd;  // RMSNorm's mean is undefined
};

// Runs a forward operator, given the keys of a kernel at an Autograd key or below. False if the
// call is none for the table; nothing has then been allocated or launched.
template <class Op>
bool forward_directly(DispatchKeySet keys, const IValue* arguments, const Options& options,
                      bool needs_statistics, DirectOutputs& out) {
  if (!is_next(keys, c10::DispatchKey::CUDA)) return false;
  const KernelTable* const table = kernel_table();
  if (table == nullptr || !options.names_statistic || options.keeps_order) return false;
  static const Tensor none;
  const auto tensor_if = [&](bool has, size_t i) -> const Tensor& {
    return has ? tensor_of(arguments[i]) : none;
  };
  const Tensor& input = arguments[Op::kInput].toTensor();
  const Tensor& residual = tensor_if(Op::kHasResidual, Op::kResidual);
  const Tensor& x = Op::kHasResidual ? residual : input;
  const Parameters parameters = {tensor_of(arguments[Op::kWeight]), tensor_of(arguments[Op::kBias]),
                                 tensor_if(Op::kHasModulation, Op::kShift),
                                 tensor_if(Op::kHasModulation, Op::kScale),
                                 tensor_if(Op::kHasGate, Op::kGate)};
  DirectForward f;
  const auto sizes = input.sizes();
  const at::ScalarType y_type = dtype_of(arguments[Op::kOutDtype]).value_or(input.scalar_type());
  if (!is_beside(residual, input) || !is_contiguous_of(input, sizes) ||
      !is_contiguous_of(residual, sizes) || !describe(x, options, parameters, y_type, f.norm)) {
    return false;
  }
  f.norm.input_type = static_cast<int32_t>(input.scalar_type());
  f.norm.eps = arguments[Op::kEps].toDouble();
  f.norm.round_before_weight = arguments[Op::kRoundBeforeWeight].toBool();
  f.input = input.const_data_ptr();
  f.residual = address_of(residual);

  const c10::DeviceGuard guard(input.device());
  DirectLaunch prepared;
  const int64_t workspace_bytes = table->prepare_forward(&f, &prepared);
  if (workspace_bytes < 0) return false;
  out.y = allocate(sizes, y_type);
  if (Op::kHasResidual) out.residual_out = allocate(sizes, x.scalar_type());
  if (needs_statistics) {
    const auto of_rows = statistics_shape(sizes, options.normalized_ndim);
    const at::ScalarType type = statistics_type(x.scalar_type());
    if (f.norm.is_rms) {
      out.rstd = allocate(of_rows, type);
    } else {
      allocate_two(of_rows, f.norm.rows, type, out.mean, out.rstd);
    }
  }
  f.y = address_to_write(out.y);
  f.residual_out = address_to_write(out.residual_out);
  f.mean = address_to_write(out.mean);
  f.rstd = address_to_write(out.rstd);
  launch_directly(f, prepared, workspace_bytes, table->launch_forward);
  return true;
}

// Puts what the direct call gave in the place of an operator's arguments.
template <class Op>
void replace_arguments(Stack* stack, DirectOutputs& out) {
  torch::jit::drop(*stack, Op::kArguments);
  stack->emplace_back(std::move(out.y));
  if constexpr (Op::kHasResidual) stack->emplace_back(std::move(out.residual_out));
}

// What backward has of a norm. dy, x and rstd are always defined; RMSNorm's mean is not. A gate is
// there with the input that it multiplied, where the gradient of either is wanted.
struct SavedNorm {
  Tensor dy, x, mean, rstd, weight, bias, dresidual, shift, scale, input, gate;
};

struct GradientsOfNorm {
  Tensor dx, dweight, dbias, dshift, dscale, dinput, dgate;
};

// Runs a backward operator of a norm, outside any dispatch. False as above.
inline bool backward_directly(const SavedNorm& saved, const Options& options,
                              const NeedsOfNorm& needs, GradientsOfNorm& out) {
  if (options.keeps_order || at::GradMode::is_enabled()) return false;
  const auto& [dy, x, mean, rstd, weight, bias, dresidual, shift, scale, input, gate] = saved;
  DispatchKeySet keys;
  for (const Tensor* each :
       {&dy, &x, &mean, &rstd, &weight, &bias, &dresidual, &shift, &scale, &input, &gate}) {
    if (!each->defined()) continue;
    keys = keys | each->key_set();
    if (!is_beside(*each, x) || each->_fw_grad(/*level=*/0).defined()) return false;
  }
  if (!is_cuda_alone(keys) || !needs.any()) return false;
  const KernelTable* const table = kernel_table();
  if (table == nullptr) return false;

  DirectBackward b;
  const auto sizes = x.sizes();
  for (const Tensor* each : {&dy, &x, &dresidual, &input}) {
    if (!is_contiguous_of(*each, sizes)) return false;
  }
  if (!describe(x, options, {weight, bias, shift, scale, gate}, dy.scalar_type(), b.norm) ||
      (dresidual.defined() && dresidual.scalar_type() != x.scalar_type())) {
    return false;
  }
  const auto is_statistic = [&](const Tensor& t) {
    return t.defined() && t.numel() == b.norm.rows && t.is_contiguous() &&
           t.scalar_type() == statistics_type(x.scalar_type());
  };
  if (!is_statistic(rstd) || (!options.is_rms && !is_statistic(mean))) return false;
  if (input.defined()) b.norm.input_type = static_cast<int32_t>(input.scalar_type());
  b.dy = dy.const_data_ptr();
  b.x = x.const_data_ptr();
  b.mean = options.is_rms ? nullptr : mean.const_data_ptr();
  b.rstd = rstd.const_data_ptr();
  b.dresidual = address_of(dresidual);
  b.input = address_of(input);
  b.needs = needs;

  const c10::DeviceGuard guard(x.device());
  DirectLaunch prepared;
  const int64_t workspace_bytes = table->prepare_backward(&b, &prepared);
  if (workspace_bytes < 0) return false;
  const auto output = [](bool needed, const Tensor& like, Tensor& into) {
    if (needed) into = allocate(like.sizes(), like.scalar_type());
    return address_to_write(into);
  };
  const Tensor& parameter = weight.defined() ? weight : bias;
  b.dx = output(needs.dx, x, out.dx);
  b.dweight = output(needs.dweight, parameter, out.dweight);
  b.dbias = output(needs.dbias, parameter, out.dbias);
  b.dshift = output(needs.dshift, shift, out.dshift);
  b.dscale = output(needs.dscale, scale, out.dscale);
  b.dinput = output(needs.dinput, input, out.dinput);
  b.dgate = output(needs.dgate, gate, out.dgate);
  launch_directly(b, prepared, workspace_bytes, table->launch_backward);
  return true;
}

// The same by the operator: layer_norm_backward, ada_layer_norm_backward, or with a gate
// add_ada_layer_norm_backward.
template <bool kHasModulation>
GradientsOfNorm call_backward(const SavedNorm& saved, const Options& options,
                              const NeedsOfNorm& needs) {
  static const OperatorHandle of_norm =
      find_operator(kHasModulation ? "ada_layer_norm_backward" : "layer_norm_backward");
  static const OperatorHandle of_gated_norm = find_operator("add_ada_layer_norm_backward");
  const bool is_gated = saved.gate.defined();
  const OperatorHandle& op = is_gated ? of_gated_norm : of_norm;
  Stack stack;
  stack.reserve(op.schema().arguments().size());
  torch::jit::push(stack, saved.dy, saved.x);
  if (is_gated) torch::jit::push(stack, saved.input, saved.gate);
  torch::jit::push(stack, options.normalized_ndim,
                   saved.mean.defined() ? saved.mean : saved.rstd.new_empty({0}), saved.rstd);
  if (kHasModulation) torch::jit::push(stack, value_of(saved.shift), value_of(saved.scale));
  torch::jit::push(stack, value_of(saved.weight), value_of(saved.bias), value_of(saved.dresidual));
  if (!kHasModulation) {
    torch::jit::push(stack, options.activation ? IValue(*options.activation) : IValue(),
                     options.output_scale);
  }
  stack.emplace_back(needs.dx);
  if (is_gated) torch::jit::push(stack, needs.dinput, needs.dgate);
  if (kHasModulation) torch::jit::push(stack, needs.dshift, needs.dscale);
  torch::jit::push(stack, needs.dweight, needs.dbias, statistic_of(options), options.weight_offset);
  if (!kHasModulation) stack.emplace_back(options.keeps_order);
  call(op, &stack);
  GradientsOfNorm found;
  size_t next = 0;
  const auto take = [&](bool needed, Tensor& into) {
    IValue& given = stack[next++];
    if (needed) into = std::move(given).toTensor();
  };
  take(needs.dx, found.dx);
  if (is_gated) take(needs.dinput, found.dinput);
  if (is_gated) take(needs.dgate, found.dgate);
  if (kHasModulation) take(needs.dshift, found.dshift);
  if (kHasModulation) take(needs.dscale, found.dscale);
  take(needs.dweight, found.dweight);
  take(needs.dbias, found.dbias);
  return found;
}

// The gradients of a norm, either way.
template <bool kHasModulation>
GradientsOfNorm gradients_of(const SavedNorm& saved, const Options& options,
                             const NeedsOfNorm& needs) {
  GradientsOfNorm found;
  if (backward_directly(saved, options, needs, found)) return found;
  return call_backward<kHasModulation>(saved, options, needs);
}

// The kernel at BackendSelect of a forward operator without statistics: it serves the calls that
// autograd does not see, as those under inference_mode.
template <class Op>
void select_backend(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const IValue* arguments = stack->data() + stack->size() - Op::kArguments;
  DirectOutputs out;
  if (forward_directly<Op>(keys, arguments, options_of<Op>(arguments), false, out)) {
    return replace_arguments<Op>(stack, out);
  }
  op.redispatchBoxed(keys & kBelowSelect, stack);
}

}  // namespace fused_layernorm
