// SPDX-License-Identifier: Apache-2.0
// Direct calls: the kernels' library is called by its table of C functions (call/description.h),
// past the dispatcher and the stable ABI's conversions, and outputs are allocated as at::empty
// allocates them, without a dispatch.
//
// A call is direct if the dispatcher would reach CUDA's kernel next, by the key sets alone; if all
// tensors are on one device; and if one launch computes it from its tensors as they are and lie.
// Modes, transforms and subclasses of tensors show in the key sets. Every other call takes the
// operators, as all do with FUSED_LAYERNORM_DIRECT=0. Both ways give and save the same tensors.
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

#include "bindings/data_types.h"
#include "call/description.h"
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
inline c10::Allocator* allocator() { return at::detail::getCUDAHooks().getCUDADeviceAllocator(); }
inline Tensor allocate(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_generic(sizes, allocator(), kCudaKeys, type, std::nullopt);
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

inline void* address_to_write(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

inline int16_t device_index(const Tensor& t) {
  return t.is_cuda() ? t.device().index() : kNoDevice;
}

inline RawTensor raw(const Tensor& t) {
  return t.defined() ? raw_of(t, device_index(t)) : RawTensor();
}

// What is written of x's shape, from the description to the tensor: contiguous, or in x's order, as
// torch.empty_like(x) has it.
struct LikeX {
  const Tensor& x;
  const bool keeps_order;

  // Whether that is the order of x's own strides.
  bool is_dense() const { return !keeps_order || x.is_non_overlapping_and_dense(); }
  RawTensor describe(at::ScalarType type) const {
    return {nullptr,
            x.sizes().data(),
            x.strides().data(),
            x.dim(),
            data_type_or_none(type),
            device_index(x),
            !keeps_order || x.is_contiguous()};
  }
  Tensor allocate(at::ScalarType type) const {
    if (!keeps_order) return fused_layernorm::allocate(x.sizes(), type);
    return at::detail::empty_strided_generic(x.sizes(), x.strides(), allocator(), kCudaKeys, type);
  }
};

inline void launch_directly(const KernelTable& table, const NormCall& call, DirectLaunch& prepared,
                            int64_t workspace_bytes) {
  Tensor workspace;
  if (workspace_bytes > 0) workspace = allocate({workspace_bytes}, at::kByte);
  const char* const wrong = table.launch(&call, &prepared, address_to_write(workspace));
  TORCH_CHECK(wrong == nullptr, wrong);
  direct_calls.fetch_add(1, std::memory_order_relaxed);
}

struct ForwardOutputs {
  Tensor y, residual_out, mean, rstd;  // RMSNorm's mean is undefined, or where given empty

  // Calls a function with each that an operator gives, in order.
  template <class Op, class Function>
  void each(bool gives_statistics, const Function& function) {
    function(y);
    if (Op::kHasResidual) function(residual_out);
    if (!gives_statistics) return;
    function(mean);
    function(rstd);
  }
};

// Whether a call computes the statistics; for autograd, or as an operator gives them: a tensor
// each.
enum class Statistics { kNone, kSaved, kGiven };

// Runs a forward operator, given the keys of a kernel at an Autograd key or below. False if the
// call is none for the table; nothing has then been allocated or launched.
inline bool forward_directly(DispatchKeySet keys, const ForwardCall& given, Statistics statistics,
                             ForwardOutputs& out) {
  if (!is_next(keys, c10::DispatchKey::CUDA)) return false;
  const KernelTable* const table = kernel_table();
  if (table == nullptr) return false;
  const NormOptions& options = given.options;
  const Tensor& input = *given.input;
  const LikeX like_x = {input, options.keeps_order};
  if (!like_x.is_dense()) return false;
  const at::ScalarType y_type = given.out_dtype.value_or(input.scalar_type());
  const at::ScalarType x_type = (given.residual ? *given.residual : input).scalar_type();
  NormCall call;
  describe(given, call, [](const Tensor* tensor) { return tensor ? raw(*tensor) : RawTensor(); });
  call.options = options;
  call.device = device_index(input);
  call.written = like_x.describe(y_type);

  const c10::DeviceGuard guard(input.device());
  DirectLaunch prepared;
  const int64_t workspace_bytes = table->prepare(&call, &prepared);
  if (workspace_bytes < 0) return false;
  out.y = like_x.allocate(y_type);
  if (given.residual) out.residual_out = allocate(input.sizes(), x_type);
  if (statistics != Statistics::kNone) {
    c10::SmallVector<int64_t, 8> of_rows(input.dim());
    of_rows.resize(statistics_sizes(options, input.sizes().data(), input.dim(), of_rows.data()));
    const at::ScalarType type = statistics_type(x_type);
    if (options.is_rms || statistics == Statistics::kGiven) {
      out.rstd = allocate(of_rows, type);
      if (statistics == Statistics::kGiven) {
        out.mean = options.is_rms ? allocate({0}, type) : allocate(of_rows, type);
      }
    } else {
      allocate_two(of_rows, c10::multiply_integers(of_rows), type, out.mean, out.rstd);
    }
  }
  call.to.y = address_to_write(out.y);
  call.to.residual_out = address_to_write(out.residual_out);
  call.to.mean = address_to_write(out.mean);
  call.to.rstd = address_to_write(out.rstd);
  launch_directly(*table, call, prepared, workspace_bytes);
  return true;
}

// Ends a forward operator's call: its outputs, on the stack.
template <class Op>
void push_outputs(Stack* stack, ForwardOutputs& out, bool gives_statistics) {
  out.each<Op>(gives_statistics, [&](Tensor& each) { stack->emplace_back(std::move(each)); });
}

// What backward has of a norm. dy, x and rstd are always defined; RMSNorm's mean is not. A gate is
// there with the input that it multiplied, where the gradient of either is wanted.
using SavedNorm = NormTensors<Tensor>;
using GradientsOfNorm = NormResults<Tensor>;

// Runs a backward operator of a norm, outside any dispatch. False as above.
inline bool backward_directly(const SavedNorm& saved, const NormOptions& options,
                              const Needs& needs, GradientsOfNorm& out) {
  if (at::GradMode::is_enabled()) return false;
  const Tensor& x = saved.x;
  DispatchKeySet keys;
  for (const auto& field : kTensorFields<Tensor>) {
    const Tensor& each = saved.*field.member;
    if (!each.defined()) continue;
    keys = keys | each.key_set();
    if (each._fw_grad(/*level=*/0).defined()) return false;
  }
  if (!is_cuda_alone(keys) || !needs.any()) return false;
  const KernelTable* const table = kernel_table();
  if (table == nullptr) return false;

  const LikeX like_x = {x, options.keeps_order};
  if (!like_x.is_dense()) return false;
  NormCall call;
  describe(saved, call, [](const Tensor& tensor) { return raw(tensor); });
  call.options = options;
  call.backward = true;
  call.device = device_index(x);
  call.needs = needs;
  if (needs.dx || options.num_groups > 0) call.written = like_x.describe(x.scalar_type());

  const c10::DeviceGuard guard(x.device());
  DirectLaunch prepared;
  const int64_t workspace_bytes = table->prepare(&call, &prepared);
  if (workspace_bytes < 0) return false;
  Tensor dx;
  if (call.written) dx = like_x.allocate(x.scalar_type());
  call.to.dx = address_to_write(dx);
  if (needs.dx) out.dx = dx;
  for (size_t i = 0; i < std::size(kGradientFields<Tensor>); ++i) {
    const auto& field = kGradientFields<Tensor>[i];
    if (!(needs.*field.needed) || field.member == &GradientsOfNorm::dx) continue;
    // Rows may have dweight without a weight, and dbias without a bias.
    const Tensor& own = saved.*field.of;
    const Tensor& like = own.defined() ? own : saved.weight.defined() ? saved.weight : saved.bias;
    out.*field.member = allocate(like.sizes(), like.scalar_type());
    call.to.*kGradientFields<void*>[i].member = address_to_write(out.*field.member);
  }
  launch_directly(*table, call, prepared, workspace_bytes);
  return true;
}

// Runs a backward operator that a compiled graph calls, from the stack. False as above.
template <class Op>
bool backward_directly(Stack* stack) {
  const IValue* arguments = arguments_on<Op>(stack);
  SavedNorm saved;
  Needs needs;
  each_tensor<Op, Tensor>(
      [&](size_t position, bool, auto member) { saved.*member = tensor_of(arguments[position]); });
  const NormOptions options = options_of<Op>(arguments);
  if (options.is_rms) saved.mean = Tensor();
  each_gradient<Op, Tensor>([&](size_t position, const auto& field) {
    needs.*field.needed = arguments[position].toBool();
  });
  // Rows may have gradients of parameters that are not there.
  const bool has_all = (!needs.columns() || saved.weight.defined() || saved.bias.defined()) &&
                       (!needs.dgate || saved.gate.defined()) &&
                       (!needs.dinput || saved.input.defined());
  GradientsOfNorm found;
  if (!has_all || !backward_directly(saved, options, needs, found)) return false;
  torch::jit::drop(*stack, Op::kArguments);
  each_gradient<Op, Tensor>([&](size_t, const auto& field) {
    Tensor& gradient = found.*field.member;
    if (!gradient.defined()) gradient = allocate({0}, saved.x.scalar_type());
    stack->emplace_back(std::move(gradient));
  });
  return true;
}

// The same by a backward operator.
template <class Op>
GradientsOfNorm call_backward(const SavedNorm& saved, const NormOptions& options,
                              const Needs& needs) {
  static_assert(is_backward<Op>(), "every backward operator has these arguments");
  static const OperatorHandle op = find_operator(Op::kName);
  Stack stack = stack_of<Op>(saved, options);
  if constexpr (Op::kMean != kAbsent) {
    if (!saved.mean.defined()) stack[Op::kMean] = saved.rstd.new_empty({0});
  }
  each_gradient<Op, Tensor>(
      [&](size_t position, const auto& field) { stack[position] = needs.*field.needed; });
  call(op, &stack);
  GradientsOfNorm found;
  each_gradient<Op, Tensor>([&](size_t position, const auto& field) {
    if (needs.*field.needed) {
      found.*field.member = std::move(stack[position - Op::kNeedsDx]).toTensor();
    }
  });
  return found;
}

// The gradients of a norm of this forward operator, either way.
template <class Op>
GradientsOfNorm gradients_of(const SavedNorm& saved, const NormOptions& options,
                             const Needs& needs) {
  GradientsOfNorm found;
  if (backward_directly(saved, options, needs, found)) return found;
  if constexpr (Op::kGatesSum) {
    if (saved.gate.defined()) {
      return call_backward<Operator<schemas::AddAdaLayerNormBackward>>(saved, options, needs);
    }
  }
  return call_backward<Operator<typename Op::Backward>>(saved, options, needs);
}

// The kernel at BackendSelect of a forward operator without statistics: it serves the calls that
// autograd does not see, as those under inference_mode.
template <class Op>
void select_backend(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const ForwardCall call = call_of<Op>(arguments_on<Op>(stack));
  ForwardOutputs out;
  if (forward_directly(keys, call, Statistics::kNone, out)) {
    torch::jit::drop(*stack, Op::kArguments);
    return push_outputs<Op>(stack, out, /*gives_statistics=*/false);
  }
  op.redispatchBoxed(keys & kBelowSelect, stack);
}

}  // namespace fused_layernorm
