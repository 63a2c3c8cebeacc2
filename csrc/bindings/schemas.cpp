// Every operator schema, once, and the empty Python module that loads them.
//
// The operators take a normalized shape as the number of trailing dimensions (`normalized_ndim`):
// the sizes themselves are the input's, so a symbolic shape stays symbolic. Their implementations
// stand in bindings/cuda (CUDA) and in fused_layernorm/ops (the composite for every other
// device, the fake implementations and the autograd formulas).

#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>

#include "plan/plan.h"

namespace fused_layernorm {
namespace {

std::string build_info() {
#ifdef FUSED_LAYERNORM_CUDA
  return "cuda " FUSED_LAYERNORM_CUDA_VERSION "; archs " FUSED_LAYERNORM_ARCHS;
#else
  return "cpu only";
#endif
}

DataType data_type(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Half:
      return DataType::kFloat16;
    case ScalarType::BFloat16:
      return DataType::kBFloat16;
    case ScalarType::Double:
      return DataType::kFloat64;
    default:
      return DataType::kFloat32;
  }
}

std::string describe_plan(int64_t rows, int64_t cols, torch::headeronly::ScalarType dtype,
                          bool backward, bool aligned, int64_t capability, int64_t sms,
                          int64_t shared_memory) {
  Problem problem;
  problem.rows = rows;
  problem.cols = cols;
  problem.x = problem.weight = problem.y = data_type(dtype);
  problem.backward = backward;
  problem.aligned = aligned;
  const Device device = {static_cast<int>(capability), static_cast<int>(sms),
                         static_cast<int>(shared_memory)};
  return describe(make_plan(problem, device));
}

}  // namespace
}  // namespace fused_layernorm

STABLE_TORCH_LIBRARY(fused_layernorm, m) {
  // y = activation(norm(input) * weight + bias) * scale; nothing but y is written.
  m.def(
      "layer_norm(Tensor input, int normalized_ndim, Tensor? weight, Tensor? bias, float eps, "
      "str? activation=None, float scale=1.0, ScalarType? out_dtype=None) -> Tensor");
  // The same, with the statistics that backward needs: (y, mean, rstd).
  m.def(
      "layer_norm_forward(Tensor input, int normalized_ndim, Tensor? weight, Tensor? bias, float "
      "eps, str? activation=None, float scale=1.0, ScalarType? out_dtype=None) -> (Tensor, Tensor, "
      "Tensor)");
  // residual_out = input + residual; y = layer_norm(residual_out): (y, residual_out).
  m.def(
      "add_layer_norm(Tensor input, Tensor residual, int normalized_ndim, Tensor? weight, Tensor? "
      "bias, float eps, str? activation=None, float scale=1.0, ScalarType? out_dtype=None) -> "
      "(Tensor, Tensor)");
  // The same, with statistics: (y, residual_out, mean, rstd).
  m.def(
      "add_layer_norm_forward(Tensor input, Tensor residual, int normalized_ndim, Tensor? weight, "
      "Tensor? bias, float eps, str? activation=None, float scale=1.0, ScalarType? out_dtype=None) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  // (dx, dweight, dbias); dx includes dresidual, the gradient that reaches x past the norm, if
  // given. A gradient that is not asked for comes back as an empty tensor of shape (0,).
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, int normalized_ndim, Tensor mean, Tensor rstd, "
      "Tensor? weight, Tensor? bias, Tensor? dresidual, str? activation, float scale, bool "
      "needs_dx, bool needs_dweight, bool needs_dbias) -> (Tensor, Tensor, Tensor)");

  // For tests, benchmarks and `python -m fused_layernorm`, not for users.
  m.def("_build_info() -> str");
  m.def(
      "_plan(int rows, int cols, ScalarType dtype, bool backward, bool aligned, int capability, "
      "int sms, int shared_memory) -> str");
  m.def("_force(str? options) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fused_layernorm, CompositeExplicitAutograd, m) {
  m.impl("_build_info", TORCH_BOX(&fused_layernorm::build_info));
  m.impl("_plan", TORCH_BOX(&fused_layernorm::describe_plan));
  m.impl("_force", TORCH_BOX(&fused_layernorm::force_plan));
}

// The module holds nothing: importing it loads the library and registers the operators.
extern "C" PyObject* PyInit__C() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
