// SPDX-License-Identifier: Apache-2.0
// The schemas of all operators but the private ones of driver.cpp, plan_ops.cpp and
// csrc/per_torch. Loading the library registers the operators.
//
// The operators take a normalized shape as the number of trailing dimensions (`normalized_ndim`):
// the sizes themselves are the input's, so a symbolic shape stays symbolic. Their implementations
// are in bindings/cuda (CUDA), in csrc/per_torch (autograd and autocast) and in fused_layernorm/ops
// (the composite for every other device, the fake implementations, and autograd and autocast in
// Python).

#include <torch/csrc/stable/library.h>

#include <string>

#include "bindings/namespace.h"

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

}  // namespace
}  // namespace fused_layernorm

STABLE_TORCH_LIBRARY(FUSED_LAYERNORM_NAMESPACE, m) {
  // Defines a forward operator, and under a name that ends in _forward the same with the statistics
  // that backward needs behind the other results: mean and rstd. RMSNorm's mean is an empty tensor
  // of shape (0,).
  const auto define_forward = [&m](const std::string& name, const std::string& arguments,
                                   const std::string& results) {
    m.def((name + "(" + arguments + ") -> (" + results + ")").c_str());
    m.def((name + "_forward(" + arguments + ") -> (" + results + ", Tensor, Tensor)").c_str());
  };

  // y = activation(norm(input) * (weight + weight_offset) + bias) * scale; nothing but y is
  // written. The statistic says which norm it is: "layer", or "rms" (RMSNorm), which has no mean.
  // With round_before_weight, norm(input) is rounded to input's dtype before it is multiplied by
  // weight. All operators that follow compute either norm. y is contiguous, or with keeps_order it
  // has the strides of torch.empty_like(input), as a norm over the channels of NCHW wants it.
  define_forward("layer_norm",
                 "Tensor input, int normalized_ndim, Tensor? weight, Tensor? bias, float eps, str? "
                 "activation=None, float scale=1.0, ScalarType? out_dtype=None, str "
                 "statistic=\"layer\", float weight_offset=0.0, bool round_before_weight=False, "
                 "bool keeps_order=False",
                 "Tensor");
  // residual_out = input + residual; y = layer_norm(residual_out): (y, residual_out).
  define_forward("add_layer_norm",
                 "Tensor input, Tensor residual, int normalized_ndim, Tensor? weight, Tensor? "
                 "bias, float eps, str? activation=None, float scale=1.0, ScalarType? "
                 "out_dtype=None, str statistic=\"layer\", float weight_offset=0.0, bool "
                 "round_before_weight=False",
                 "Tensor, Tensor");
  // (dx, dweight, dbias). dresidual, if given, is the gradient that reaches x other than through
  // the norm; dx includes it. A gradient that is not asked for is an empty tensor of shape (0,). dx
  // is contiguous, or with keeps_order it has the strides of torch.empty_like(x).
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, int normalized_ndim, Tensor mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, Tensor? dresidual, str? activation, float scale, bool "
      "needs_dx, bool needs_dweight, bool needs_dbias, str statistic=\"layer\", float "
      "weight_offset=0.0, bool keeps_order=False) -> (Tensor, Tensor, Tensor)");

  // Modulation: y = (norm(input) * weight + bias) * (1 + scale) + shift. shift, scale and gate
  // broadcast against input by PyTorch's rules.
  define_forward("ada_layer_norm",
                 "Tensor input, int normalized_ndim, Tensor? shift, Tensor? scale, Tensor? weight, "
                 "Tensor? bias, float eps, ScalarType? out_dtype=None, str statistic=\"layer\", "
                 "float weight_offset=0.0, bool round_before_weight=False",
                 "Tensor");
  // residual_out = residual + gate * input; y = ada_layer_norm(residual_out): (y, residual_out).
  define_forward("add_ada_layer_norm",
                 "Tensor input, Tensor residual, Tensor? gate, int normalized_ndim, Tensor? shift, "
                 "Tensor? scale, Tensor? weight, Tensor? bias, float eps, ScalarType? "
                 "out_dtype=None, str statistic=\"layer\", float weight_offset=0.0, bool "
                 "round_before_weight=False",
                 "Tensor, Tensor");
  // (dx, dshift, dscale, dweight, dbias), each of the shape and dtype of the argument whose
  // gradient it is. dx includes dresidual, if given. A gradient that is not asked for is an empty
  // tensor of shape (0,).
  m.def(
      "ada_layer_norm_backward(Tensor dy, Tensor x, int normalized_ndim, Tensor mean, Tensor "
      "rstd, Tensor? shift, Tensor? scale, Tensor? weight, Tensor? bias, Tensor? dresidual, bool "
      "needs_dx, bool needs_dshift, bool needs_dscale, bool needs_dweight, bool needs_dbias, str "
      "statistic=\"layer\", float weight_offset=0.0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  // The same for a gated sum x = residual + gate * input, in one launch where there is a kernel for
  // it: (dx, dinput, dgate, dshift, dscale, dweight, dbias). Where derivatives of these gradients
  // are wanted, autograd calls ada_layer_norm_backward and then gate_backward on its dx instead.
  m.def(
      "add_ada_layer_norm_backward(Tensor dy, Tensor x, Tensor input, Tensor gate, int "
      "normalized_ndim, Tensor mean, Tensor rstd, Tensor? shift, Tensor? scale, Tensor? weight, "
      "Tensor? bias, Tensor? dresidual, bool needs_dx, bool needs_dinput, bool needs_dgate, bool "
      "needs_dshift, bool needs_dscale, bool needs_dweight, bool needs_dbias, str "
      "statistic=\"layer\", float weight_offset=0.0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor, Tensor)");
  // Backward of residual_out = residual + gate * input, from the gradient of residual_out:
  // (dinput, dgate).
  m.def(
      "gate_backward(Tensor dresidual_out, Tensor input, Tensor gate, bool needs_dinput, bool "
      "needs_dgate) -> (Tensor, Tensor)");

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
      "inverse, "
      "bool needs_dweight, bool needs_dbias) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Groups of channels: input is (samples, channels, ...), the channels of a sample form num_groups
  // groups, each of which has a mean and a variance of its own. With norm(input) for the
  // normalized groups, y = activation((norm(input) * weight + bias) * (1 + scale) + shift) *
  // output_scale, where weight and bias have a number for each channel, and shift and scale one for
  // each channel of each sample: (samples, channels, 1, ...). y has the strides of
  // torch.empty_like(input), mean and rstd are (samples, num_groups).
  define_forward("group_norm",
                 "Tensor input, int num_groups, Tensor? shift, Tensor? scale, Tensor? weight, "
                 "Tensor? bias, float eps, str? activation=None, float output_scale=1.0, "
                 "ScalarType? out_dtype=None",
                 "Tensor");
  // (dx, dshift, dscale, dweight, dbias), as of ada_layer_norm_backward; dx has the strides of
  // torch.empty_like(x).
  m.def(
      "group_norm_backward(Tensor dy, Tensor x, int num_groups, Tensor mean, Tensor rstd, Tensor? "
      "shift, Tensor? scale, Tensor? weight, Tensor? bias, str? activation, float output_scale, "
      "bool needs_dx, bool needs_dshift, bool needs_dscale, bool needs_dweight, bool needs_dbias) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Gated RMSNorm: y = (norm(input) * (weight + weight_offset) + bias) * activation(gate), or with
  // gate_first y = norm(input * activation(gate)) * (weight + weight_offset) + bias. The activation
  // ("silu" or "sigmoid") is computed in float32. The norm is over the last dimension, or with
  // group_size over that many of its columns in turn; weight and bias have the whole dimension's
  // size. mean is an empty tensor of shape (0,); rstd has a number for each row and group: its last
  // dimension is 1, or columns / group_size.
  define_forward("rms_norm_gated",
                 "Tensor input, Tensor gate, Tensor? weight, Tensor? bias, float eps, bool "
                 "gate_first=False, str gate_activation=\"silu\", int group_size=0, ScalarType? "
                 "out_dtype=None, float weight_offset=0.0, bool round_before_weight=False",
                 "Tensor");
  // (dx, dgate, dweight, dbias), each of the shape and dtype of the argument whose gradient it is;
  // dx and dgate are contiguous. A gradient that is not asked for is an empty tensor of shape (0,).
  m.def(
      "rms_norm_gated_backward(Tensor dy, Tensor x, Tensor gate, Tensor rstd, Tensor? weight, "
      "Tensor? bias, bool gate_first, str gate_activation, int group_size, float weight_offset, "
      "bool needs_dx, bool needs_dgate, bool needs_dweight, bool needs_dbias) -> (Tensor, Tensor, "
      "Tensor, Tensor)");

  // For tests, benchmarks and `python -m fused_layernorm`, not for users.
  m.def("_build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(FUSED_LAYERNORM_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("_build_info", TORCH_BOX(&fused_layernorm::build_info));
}
