// SPDX-License-Identifier: Apache-2.0
// The gradients of a gated sum residual + gate * input on CUDA; ops.h has the contract.
#include "bindings/cuda/modulation.h"
#include "bindings/cuda/ops.h"
#include "call/types.h"

namespace fused_layernorm {

std::tuple<Tensor, Tensor> run_gate_backward(const Tensor& dsum, const Tensor& input,
                                             const Tensor& gate, bool needs_dinput,
                                             bool needs_dgate) {
  const RawTensor of_input = raw(input), of_gate = raw(gate);
  const int64_t leading = input.dim() - 1;
  CHECK_ARGUMENT(leading >= 0, "cannot normalize the last 1 of 0 dimensions");
  const int64_t cols = input.sizes()[leading], row_count = numel_of(of_input, 0, leading);
  if (row_count > kMostExtent || cols > kMostExtent) throw NoKernel();
  CHECK_ARGUMENT(have_one_shape(raw(dsum), of_input),
                 "dresidual_out must have the shape of the input");
  CHECK_ARGUMENT(is_beside(dsum, input), "dresidual_out must be on the input's device");
  CHECK_ARGUMENT(broadcasts_to(of_gate, of_input), "gate must broadcast to the shape of the input");
  CHECK_ARGUMENT(is_beside(gate, input), "gate must be on the input's device");
  // Kernels take dsum of input's type, or float32 dsum beside half-precision input. Other types are
  // converted: all to float64 if either is float64, else dsum to float32.
  const DataType in = data_type(input.scalar_type()), given = data_type(dsum.scalar_type());
  const bool wide = in == DataType::kFloat64 || given == DataType::kFloat64;
  const DataType x = wide ? DataType::kFloat64 : given == in ? in : DataType::kFloat32;
  const DataType summand = wide ? DataType::kFloat64 : in;
  const DataTypes types = kernel_types(x, data_type(gate.scalar_type()), summand);
  const CurrentDevice guard(input);

  const Groups groups({&of_gate}, of_input, leading);
  const std::optional<Tensor> given_gate(gate);
  GroupGradient dgate(needs_dgate, given_gate, groups, input);
  Tensor dinput =
      needs_dinput ? empty_like(input, scalar_type(summand)) : none(input, input.scalar_type());
  NormCall call;
  call.to.dgate = dgate.allocate(types.weight, statistics_type(x));
  call.dgate_is_wide = dgate.is_wide;
  if (row_count == 0 || cols == 0) {
    dgate.fill_with_zeros();
  } else if (needs_dinput || needs_dgate) {
    const Tensor sum = with_rows(cast(dsum, scalar_type(x)), leading);
    const Tensor rows = with_rows(cast(input, scalar_type(summand)), leading);
    const Tensor read = prepare_modulation(gate, types.weight, input, leading);
    const auto gate_rows = rows_in_place(raw(read), raw(rows), leading);
    Prepared prepared;
    prepared.types = types;
    auto& kernel = prepared.kernel.emplace<Kernel<GateParams, backward::Gate>>();
    GateParams& params = kernel.params;
    Problem problem;
    problem.aligned = are_aligned(types, cols);
    const bool is_ready =
        gate_rows &&
        place_rows(raw(sum), leading, params.dsum, params.dsum_rows, problem.aligned) &&
        place_rows(raw(rows), leading, params.input, params.input_rows, problem.aligned);
    if (!is_ready || !has_kernels(types) || is_formula_forced()) throw NoKernel();
    params.gate = read.const_data_ptr();
    params.gate_rows = *gate_rows;
    if (needs_dinput) call.to.dinput = dinput.mutable_data_ptr();
    problem.rows = params.rows = row_count;
    problem.cols = params.cols = static_cast<int32_t>(cols);
    problem.group_rows = params.group_rows = groups.rows;
    problem.x = types.x;
    problem.needs_dparams = needs_dgate;
    problem.modulated = true;
    kernel.plan = backward::Gate::make(problem, device_of(input));
    launch_prepared(prepared, call, input);
  }
  return {cast(dinput, input.scalar_type()), dgate.result()};
}

}  // namespace fused_layernorm
