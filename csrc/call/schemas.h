// SPDX-License-Identifier: Apache-2.0
// The schemas of the operators of norms. They are the one place that lists these operators'
// arguments: the positions on the dispatcher's stack follow from them (arguments.h). The operators
// of heads and the private ones are in bindings/schemas.cpp, driver.cpp, plan_ops.cpp and
// csrc/per_torch.
//
// The operators take a normalized shape as the number of trailing dimensions (`normalized_ndim`):
// the sizes themselves are the input's, so a symbolic shape stays symbolic. Their implementations
// are in bindings/cuda (CUDA), in csrc/per_torch (autograd and autocast) and in fused_layernorm/ops
// (the composite for every other device, the fake implementations, and autograd and autocast in
// Python).
//
// A forward operator gives y, and beside a residual residual_out. Under a name that ends in
// _forward it also gives the statistics that backward needs, after the other results: mean and
// rstd. RMSNorm's mean is an empty tensor of shape (0,).
//
// A backward operator gives a gradient for each of its flags `needs_...`, in their order, of the
// shape and dtype of the argument whose gradient it is. One that is not asked for is an empty
// tensor of shape (0,). dresidual, if given, is the gradient that reaches x other than through the
// norm; dx includes it.
#pragma once

#include <string_view>

namespace fused_layernorm {
namespace schemas {

// The activations and the statistics are named in arguments.h. dx is contiguous, or with
// keeps_order it has the strides of torch.empty_like(x).
struct LayerNormBackward {
  static constexpr const char* kName = "layer_norm_backward";
  static constexpr std::string_view kSchema =
      "Tensor dy, Tensor x, int normalized_ndim, Tensor mean, Tensor rstd, Tensor? weight, Tensor? "
      "bias, Tensor? dresidual, str? activation, float scale, bool needs_dx, bool needs_dweight, "
      "bool needs_dbias, str statistic=\"layer\", float weight_offset=0.0, bool keeps_order=False";
};

// y = activation(norm(input) * (weight + weight_offset) + bias) * scale; nothing but y is written.
// The statistic says which norm it is: "layer", or "rms" (RMSNorm), which has no mean. With
// round_before_weight, norm(input) is rounded to input's dtype before it is multiplied by weight.
// Operators over rows compute either norm. y is contiguous, or with keeps_order it has the strides
// of torch.empty_like(input), as a norm over the channels of NCHW wants it.
struct LayerNorm {
  using Backward = LayerNormBackward;
  static constexpr const char* kName = "layer_norm";
  static constexpr const char* kNode = "FusedLayerNormBackward";
  static constexpr std::string_view kSchema =
      "Tensor input, int normalized_ndim, Tensor? weight, Tensor? bias, float eps, str? "
      "activation=None, float scale=1.0, ScalarType? out_dtype=None, str statistic=\"layer\", "
      "float weight_offset=0.0, bool round_before_weight=False, bool keeps_order=False";
};

// residual_out = input + residual; y = layer_norm(residual_out).
struct AddLayerNorm {
  using Backward = LayerNormBackward;
  static constexpr const char* kName = "add_layer_norm";
  static constexpr const char* kNode = "FusedAddLayerNormBackward";
  static constexpr std::string_view kSchema =
      "Tensor input, Tensor residual, int normalized_ndim, Tensor? weight, Tensor? bias, float "
      "eps, str? activation=None, float scale=1.0, ScalarType? out_dtype=None, str "
      "statistic=\"layer\", float weight_offset=0.0, bool round_before_weight=False";
};

struct AdaLayerNormBackward {
  static constexpr const char* kName = "ada_layer_norm_backward";
  static constexpr std::string_view kSchema =
      "Tensor dy, Tensor x, int normalized_ndim, Tensor mean, Tensor rstd, Tensor? shift, Tensor? "
      "scale, Tensor? weight, Tensor? bias, Tensor? dresidual, bool needs_dx, bool needs_dshift, "
      "bool needs_dscale, bool needs_dweight, bool needs_dbias, str statistic=\"layer\", float "
      "weight_offset=0.0";
};

// Modulation: y = (norm(input) * weight + bias) * (1 + scale) + shift. shift, scale and gate
// broadcast against input by PyTorch's rules.
struct AdaLayerNorm {
  using Backward = AdaLayerNormBackward;
  static constexpr const char* kName = "ada_layer_norm";
  static constexpr const char* kNode = "FusedAdaLayerNormBackward";
  static constexpr std::string_view kSchema =
      "Tensor input, int normalized_ndim, Tensor? shift, Tensor? scale, Tensor? weight, Tensor? "
      "bias, float eps, ScalarType? out_dtype=None, str statistic=\"layer\", float "
      "weight_offset=0.0, bool round_before_weight=False";
};

// residual_out = residual + gate * input; y = ada_layer_norm(residual_out).
struct AddAdaLayerNorm {
  using Backward = AdaLayerNormBackward;  // without a gate
  static constexpr const char* kName = "add_ada_layer_norm";
  static constexpr const char* kNode = "FusedAddAdaLayerNormBackward";
  static constexpr std::string_view kSchema =
      "Tensor input, Tensor residual, Tensor? gate, int normalized_ndim, Tensor? shift, Tensor? "
      "scale, Tensor? weight, Tensor? bias, float eps, ScalarType? out_dtype=None, str "
      "statistic=\"layer\", float weight_offset=0.0, bool round_before_weight=False";
};

// Of a gated sum x = residual + gate * input, in one launch where there is a kernel for it. Where
// derivatives of these gradients are wanted, autograd calls ada_layer_norm_backward and then
// gate_backward on its dx instead.
struct AddAdaLayerNormBackward {
  static constexpr const char* kName = "add_ada_layer_norm_backward";
  static constexpr std::string_view kSchema =
      "Tensor dy, Tensor x, Tensor input, Tensor gate, int normalized_ndim, Tensor mean, Tensor "
      "rstd, Tensor? shift, Tensor? scale, Tensor? weight, Tensor? bias, Tensor? dresidual, bool "
      "needs_dx, bool needs_dinput, bool needs_dgate, bool needs_dshift, bool needs_dscale, bool "
      "needs_dweight, bool needs_dbias, str statistic=\"layer\", float weight_offset=0.0";
};

// Of residual_out = residual + gate * input alone, from the gradient of residual_out.
struct GateBackward {
  static constexpr const char* kName = "gate_backward";
  static constexpr std::string_view kSchema =
      "Tensor dresidual_out, Tensor input, Tensor gate, bool needs_dinput, bool needs_dgate";
};

// dx has the strides of torch.empty_like(x).
struct GroupNormBackward {
  static constexpr const char* kName = "group_norm_backward";
  static constexpr std::string_view kSchema =
      "Tensor dy, Tensor x, int num_groups, Tensor mean, Tensor rstd, Tensor? shift, Tensor? "
      "scale, Tensor? weight, Tensor? bias, str? activation, float output_scale, bool needs_dx, "
      "bool needs_dshift, bool needs_dscale, bool needs_dweight, bool needs_dbias";
};

// Groups of channels: input is (samples, channels, ...), the channels of a sample form num_groups
// groups, each of which has a mean and a variance of its own. With norm(input) for the normalized
// groups, y = activation((norm(input) * weight + bias) * (1 + scale) + shift) * output_scale, where
// weight and bias have a number for each channel, and shift and scale one for each channel of each
// sample: (samples, channels, 1, ...). y has the strides of torch.empty_like(input), mean and rstd
// are (samples, num_groups).
struct GroupNorm {
  using Backward = GroupNormBackward;
  static constexpr const char* kName = "group_norm";
  static constexpr const char* kNode = "FusedGroupNormBackward";
  static constexpr std::string_view kSchema =
      "Tensor input, int num_groups, Tensor? shift, Tensor? scale, Tensor? weight, Tensor? bias, "
      "float eps, str? activation=None, float output_scale=1.0, ScalarType? out_dtype=None";
};

// dx and dgate are contiguous.
struct RmsNormGatedBackward {
  static constexpr const char* kName = "rms_norm_gated_backward";
  static constexpr std::string_view kSchema =
      "Tensor dy, Tensor x, Tensor gate, Tensor rstd, Tensor? weight, Tensor? bias, bool "
      "gate_first, str gate_activation, int group_size, float weight_offset, bool needs_dx, bool "
      "needs_dgate, bool needs_dweight, bool needs_dbias";
};

// Gated RMSNorm: y = (norm(input) * (weight + weight_offset) + bias) * activation(gate), or with
// gate_first y = norm(input * activation(gate)) * (weight + weight_offset) + bias. The activation
// ("silu" or "sigmoid") is computed in float32. The norm is over the last dimension, or with
// group_size over that many of its columns in turn; weight and bias have the whole dimension's
// size. rstd has a number for each row and group: its last dimension is 1, or columns / group_size.
struct RmsNormGated {
  using Backward = RmsNormGatedBackward;
  static constexpr const char* kName = "rms_norm_gated";
  static constexpr const char* kNode = "FusedRMSNormGatedBackward";
  static constexpr std::string_view kSchema =
      "Tensor input, Tensor gate, Tensor? weight, Tensor? bias, float eps, bool gate_first=False, "
      "str gate_activation=\"silu\", int group_size=0, ScalarType? out_dtype=None, float "
      "weight_offset=0.0, bool round_before_weight=False";
};

}  // namespace schemas
}  // namespace fused_layernorm
