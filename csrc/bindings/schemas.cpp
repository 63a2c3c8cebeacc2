// SPDX-License-Identifier: Apache-2.0
// Defines the operators. Loading the library registers them. Those of norms have their schemas in
// call/schemas.h, those of heads here; the private ones are in driver.cpp, plan_ops.cpp and
// csrc/per_torch.

#include <torch/csrc/stable/library.h>

#include <string>

#include "bindings/namespace.h"
#include "call/arguments.h"

namespace fused_layernorm {
namespace {

std::string build_info() {
#ifdef FUSED_LAYERNORM_CUDA
#ifdef FUSED_LAYERNORM_TRIMMED
  return "cuda " FUSED_LAYERNORM_CUDA_VERSION
         ", trimmed to float32 and bfloat16; archs " FUSED_LAYERNORM_ARCHS;
#else
  return "cuda " FUSED_LAYERNORM_CUDA_VERSION "; archs " FUSED_LAYERNORM_ARCHS;
#endif
#else
  return "cpu only";
#endif
}

// A schema with so many tensors as results.
std::string schema_of(const std::string& name, std::string_view arguments, size_t results) {
  std::string schema = name + "(" + std::string(arguments) + ") -> (Tensor";
  for (size_t i = 1; i < results; ++i) schema += ", Tensor";
  return schema + ")";
}

}  // namespace
}  // namespace fused_layernorm

STABLE_TORCH_LIBRARY(FUSED_LAYERNORM_NAMESPACE, m) {
  using namespace fused_layernorm;
  const auto define = [&m](const std::string& name, std::string_view arguments, size_t results) {
    m.def(schema_of(name, arguments, results).c_str());
  };
  ForwardOperators::each([&](auto op) {
    using Op = decltype(op);
    define(Op::kName, Op::kSchema, kOutputs<Op>);
    define(name_with_statistics<Op>(), Op::kSchema, kOutputs<Op> + kStatistics);
  });
  const auto define_backward = [&](auto op) {
    define(op.kName, op.kSchema, flag_count(op.kSchema));
  };
  BackwardOperators::each(define_backward);
  define_backward(schemas::GateBackward());

  // Heads: every row (the last dimension) of q and k is normalized, unless the statistic is None,
  // and its first rotary_dim columns are rotated by the cos and sin of its position, unless
  // rotary_dim is 0. q and k are (batch, positions, heads, columns), or with seq_dim=2 (batch,
  // heads, positions, columns). With `inverse` the rotation is the reverse one. The results have
  // the order of memory of q and k: (q_out, k_out). Without k, k_out is an empty tensor of shape
  // (0,), and so is each gradient below that is not asked for.
  m.def(
      "qk_norm_rope(Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, "
      "Tensor? k_bias, Tensor? cos, Tensor? sin, int rotary_dim, int seq_dim, float eps, str? "
      "statistic, float weight_offset, bool round_before_weight, bool interleaved, bool inverse) "
      "-> (Tensor, Tensor)");
  // (dq, dk, dq_weight, dk_weight, dq_bias, dk_bias), for a statistic other than None.
  m.def(
      "qk_norm_rope_backward(Tensor dq_out, Tensor? dk_out, Tensor q, Tensor? k, Tensor? q_weight, "
      "Tensor? k_weight, Tensor? q_bias, Tensor? k_bias, Tensor? cos, Tensor? sin, int rotary_dim, "
      "int seq_dim, float eps, str? statistic, float weight_offset, bool interleaved, bool "
      "inverse, bool needs_dweight, bool needs_dbias) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor)");

  // The same of q and k that are parts of one tensor, qkv: (batch, positions, heads, columns),
  // first all heads of q, then num_kv_heads of k, then as many of v; with by_head, for each head of
  // k the heads of q that belong to it, then itself, then that of v. No result is v, which is a
  // view.
  m.def(
      "qkv_norm_rope(Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? "
      "k_bias, Tensor? cos, Tensor? sin, int rotary_dim, int seq_dim, float eps, str? statistic, "
      "float weight_offset, bool round_before_weight, bool interleaved, int num_kv_heads, bool "
      "by_head) -> (Tensor, Tensor)");
  // (dqkv, dq_weight, dk_weight, dq_bias, dk_bias). dqkv has this size and stride, and zeros where
  // a gradient is None, of which one is there. Without a statistic qkv is not needed.
  m.def(
      "qkv_norm_rope_backward(Tensor? dq_out, Tensor? dk_out, Tensor? dv, Tensor? qkv, Tensor? "
      "q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias, Tensor? cos, Tensor? sin, int "
      "rotary_dim, int seq_dim, float eps, str? statistic, float weight_offset, bool interleaved, "
      "int num_kv_heads, bool by_head, SymInt[] size, SymInt[] stride, bool needs_dweight, bool "
      "needs_dbias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");

  // For tests, benchmarks and `python -m fused_layernorm`, not for users.
  m.def("_build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(FUSED_LAYERNORM_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("_build_info", TORCH_BOX(&fused_layernorm::build_info));
}
