// Backward on CUDA: check, settle the types, allocate, plan, launch. Tensors stop here.
#include <torch/csrc/stable/ops.h>

#include "bindings/cuda/checks.h"
#include "bindings/cuda/ops.h"

namespace fused_layernorm {
namespace {

void check(const BackwardArguments& a, const Shape& shape, const KernelTypes& types) {
  check_shape(a.weight, "weight", a.x, shape.leading);
  check_shape(a.bias, "bias", a.x, shape.leading);
  check_shape(a.dy, "dy", a.x, 0);
  check_shape(a.dresidual, "dresidual", a.x, 0);
  CHECK_ARGUMENT(!a.dresidual || a.dresidual->scalar_type() == a.x.scalar_type(),
                 "dresidual must be of x's dtype");
  for (const Tensor* each : {&a.mean, &a.rstd}) {
    CHECK_ARGUMENT(each->numel() == shape.rows && each->scalar_type() == types.statistics() &&
                       each->is_cuda() && each->get_device_index() == a.x.get_device_index(),
                   "mean and rstd must be those of the forward pass");
  }
}

Tensor none(const Tensor& like, ScalarType type) {
  const int64_t size = 0;
  return empty(like, &size, 1, type);
}

void launch(const BackwardArguments& a, const Shape& shape, const KernelTypes& types,
            Activation activation, Tensor& dx, Tensor& dweight, Tensor& dbias) {
  const Rows x(a.x, shape.leading);
  const Rows dy(cast(a.dy, types.y), shape.leading);
  std::optional<Rows> dresidual;
  if (a.dresidual) dresidual.emplace(*a.dresidual, shape.leading);
  const auto weight = prepare_parameter(a.weight, types.weight);
  const auto bias = prepare_parameter(a.bias, types.weight);
  const Tensor mean = contiguous_of(a.mean);
  const Tensor rstd = contiguous_of(a.rstd);

  const DataTypes data_types = types.data_types();
  Problem problem;
  problem.rows = shape.rows;
  problem.cols = shape.cols;
  problem.x = data_types.x;
  problem.weight = data_types.weight;
  problem.y = data_types.y;
  problem.residual = a.dresidual.has_value();
  problem.needs_dparams = a.needs_dweight || a.needs_dbias;
  problem.has_epilogue = activation != Activation::kNone || a.scale != 1.0;
  problem.aligned = x.aligned() && dy.aligned() && (!dresidual || dresidual->aligned()) &&
                    types.aligned(shape.cols);
  const backward::Plan plan = make_backward_plan(problem, device_of(a.x));
  const Workspace workspace(a.x, launch_of(plan).workspace_bytes);

  BackwardParams params;
  params.dy = dy.data();
  params.dy_rows = dy.map;
  params.x = x.data();
  params.x_rows = x.map;
  params.mean = mean.const_data_ptr();
  params.rstd = rstd.const_data_ptr();
  params.weight = data_of(weight);
  params.bias = data_of(bias);
  if (dresidual) {
    params.dresidual = dresidual->data();
    params.dresidual_rows = dresidual->map;
  }
  params.dx = a.needs_dx ? dx.mutable_data_ptr() : nullptr;
  params.dweight = a.needs_dweight ? dweight.mutable_data_ptr() : nullptr;
  params.dbias = a.needs_dbias ? dbias.mutable_data_ptr() : nullptr;
  params.rows = shape.rows;
  params.cols = static_cast<int32_t>(shape.cols);
  params.inverse_cols = Scalar(1.0 / static_cast<double>(shape.cols));
  params.scale = Scalar(a.scale);
  params.has_epilogue = problem.has_epilogue;
  params.activation = activation;
  params.workspace = workspace.data();
  check_cuda(launch_layer_norm_backward(params, data_types, plan, current_stream(a.x)));
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> run_backward(const BackwardArguments& a) {
  const Shape shape(a.x, a.normalized_ndim);
  const auto parameters = type_of_parameters(a.weight, a.bias);
  const KernelTypes types(a.x.scalar_type(), parameters, a.dy.scalar_type());
  check(a, shape, types);
  const Activation activation = activation_of(a.activation);
  const CurrentDevice guard(a.x);

  const ScalarType dparameter_type = parameters.value_or(a.x.scalar_type());
  const auto new_dparameter = [&](bool needed) {
    return needed ? empty(a.x, a.x.sizes().data() + shape.leading, a.normalized_ndim, types.weight)
                  : none(a.x, dparameter_type);
  };
  Tensor dx = a.needs_dx ? empty_like(a.x, types.x) : none(a.x, types.x);
  Tensor dweight = new_dparameter(a.needs_dweight);
  Tensor dbias = new_dparameter(a.needs_dbias);
  if (shape.empty()) {
    if (a.needs_dweight) torch::stable::zero_(dweight);
    if (a.needs_dbias) torch::stable::zero_(dbias);
  } else if (a.needs_dx || a.needs_dweight || a.needs_dbias) {
    launch(a, shape, types, activation, dx, dweight, dbias);
  }
  return {dx, cast(dweight, dparameter_type), cast(dbias, dparameter_type)};
}

}  // namespace fused_layernorm
