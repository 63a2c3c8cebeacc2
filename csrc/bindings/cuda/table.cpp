// SPDX-License-Identifier: Apache-2.0
// The functions of the kernel table (bindings/kernel_table.h). A call that needs a conversion or a
// copy, or that is not valid, is declined: the operator takes it.
#include "bindings/kernel_table.h"

#include <cmath>
#include <exception>
#include <new>
#include <string>
#include <type_traits>

#include "bindings/cuda/launches.h"
#include "bindings/cuda/modulation.h"
#include "bindings/driver.h"

namespace fused_layernorm {
namespace {

ScalarType type_of(int32_t number) { return static_cast<ScalarType>(number); }

bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

// A launch between prepare and launch.
template <typename Params, typename Plan>
struct Prepared {
  Params params;
  DataTypes types;
  Planned<Plan> planned;
  int32_t device;

  static const Prepared& in(const DirectLaunch& launch) {
    return *std::launder(reinterpret_cast<const Prepared*>(launch.bytes));
  }
};
using PreparedForward = Prepared<ForwardParams, forward::Plan>;
using PreparedBackward = Prepared<BackwardParams, backward::Plan>;
static_assert(sizeof(PreparedForward) <= sizeof(DirectLaunch) &&
              sizeof(PreparedBackward) <= sizeof(DirectLaunch));
static_assert(std::is_trivially_destructible_v<PreparedForward> &&
              std::is_trivially_destructible_v<PreparedBackward>);

std::optional<ScalarType> type_of_parameters(const DirectNorm& n) {
  const bool has_any = n.weight != nullptr || n.bias != nullptr || n.is_modulated();
  return has_any ? std::optional(type_of(n.weight_type)) : std::nullopt;
}

// Whether kernels take these numbers, and parameters of these types without a conversion.
bool takes(const DirectNorm& n, const KernelTypes& types) {
  return n.rows > 0 && n.cols > 0 && n.rows <= kMostExtent && n.cols <= kMostExtent &&
         std::isfinite(n.output_scale) && std::isfinite(n.weight_offset) &&
         (n.weight != nullptr || n.weight_offset == 0.0) && types.y == type_of(n.y_type) &&
         types.weight == type_of_parameters(n).value_or(types.weight) && is_aligned(n.weight) &&
         is_aligned(n.bias) && driver_problem().empty();
}

// Sets the parameters that both directions share. False if a modulation does not broadcast to x, or
// kernels cannot read it where it lies.
template <typename Params>
bool set_norm(Params& params, const DirectNorm& n) {
  params.weight = n.weight;
  params.bias = n.bias;
  params.rows = n.rows;
  params.cols = static_cast<int32_t>(n.cols);
  const auto set = [&](const RawTensor& given, const void*& data, RowMap& rows) {
    if (given.sizes == nullptr) return true;
    if (!broadcasts_to(given, n.x)) return false;
    const auto found = rows_in_place(given, type_of(n.weight_type), n.x, n.leading);
    data = given.data;
    if (found) rows = *found;
    return found.has_value();
  };
  Modulation& m = params.modulation;
  return set(n.shift, m.shift, m.shift_rows) && set(n.scale, m.scale, m.scale_rows) &&
         set(n.gate, m.gate, m.gate_rows);
}

Computation computation_of(const DirectNorm& n) {
  Computation computation;
  computation.activation =
      n.activation == nullptr ? Activation::kNone : activation_of(std::string(n.activation));
  computation.scale = n.output_scale;
  computation.is_rms = n.is_rms;
  computation.weight_offset = n.weight_offset;
  computation.eps = n.eps;
  return computation;
}

// -1 for a call that is refused.
template <typename Prepare>
int64_t unless_refused(const Prepare& prepare) {
  try {
    return prepare();
  } catch (const std::exception&) {
    return -1;
  }
}

int64_t prepare_forward(const DirectForward* call, DirectLaunch* into) {
  const DirectForward& f = *call;
  const DirectNorm& n = f.norm;
  return unless_refused([&]() -> int64_t {
    const ScalarType input = type_of(n.input_type), x = type_of(n.x_type);
    const bool has_residual = f.residual != nullptr;
    Computation computation = computation_of(n);
    computation.xhat_rounding = xhat_rounding_of(n.round_before_weight, n.weight != nullptr, input);
    const ForwardTypes types =
        settle_types(input, has_residual ? std::optional(x) : std::nullopt, type_of_parameters(n),
                     type_of(n.y_type), computation.xhat_rounding != XhatRounding::kNone);
    ForwardParams params;
    if (!takes(n, types.kernel) || std::isnan(n.eps) || types.adds_first ||
        types.summand != input || !set_norm(params, n)) {
      return -1;
    }
    params.input = f.input;
    params.residual = f.residual;
    params.input_rows = params.residual_rows = RowMap(n.cols);
    const DataTypes data_types = types.kernel.data_types();
    const bool aligned =
        is_aligned(f.input) && is_aligned(f.residual) && types.kernel.aligned(n.cols);
    const Problem problem = complete(params, data_types, computation, aligned);
    if (problem.modulated && !params.plain_weight) return -1;  // it takes more than one kernel
    const auto planned = plan_forward(problem, n.device);
    params.stays_in_l2 = stays_in_l2(planned.plan);
    const auto* const prepared =
        new (into->bytes) PreparedForward{params, data_types, planned, n.device};
    return workspace_bytes_of(prepared->planned);
  });
}

int64_t prepare_backward(const DirectBackward* call, DirectLaunch* into) {
  const DirectBackward& b = *call;
  const DirectNorm& n = b.norm;
  return unless_refused([&]() -> int64_t {
    const KernelTypes types(type_of(n.x_type), type_of_parameters(n), type_of(n.y_type));
    const bool is_gated = b.input != nullptr;
    BackwardParams params;
    if (!takes(n, types) || (is_gated && n.input_type != n.x_type) || !set_norm(params, n)) {
      return -1;
    }
    // What would follow the launch, further sums or that of the columns, is the operator's.
    const NeedsOfNorm& needs = b.needs;
    const Groups groups({n.shift, n.scale, n.gate}, n.x, n.leading);
    const auto sums = [&](bool needed, const RawTensor& m) { return needed && !groups.are_of(m); };
    if (sums(needs.dshift, n.shift) || sums(needs.dscale, n.scale) || sums(needs.dgate, n.gate) ||
        (n.is_modulated() && groups.rows == 1 && needs.columns())) {
      return -1;
    }
    params.group_rows = groups.rows;
    params.dy = b.dy;
    params.x = b.x;
    params.dresidual = b.dresidual;
    params.input = b.input;
    params.dy_rows = params.x_rows = params.dresidual_rows = params.input_rows = RowMap(n.cols);
    params.mean = b.mean;
    params.rstd = b.rstd;
    const DataTypes data_types = types.data_types();
    const bool aligned = is_aligned(b.x) && is_aligned(b.dy) && is_aligned(b.dresidual) &&
                         is_aligned(b.input) && types.aligned(n.cols);
    const Problem problem = complete(params, data_types, computation_of(n), aligned,
                                     needs.columns(), needs.dshift || needs.dscale);
    const auto gated = is_gated ? make_gated_plan(problem, device_of(n.device)) : std::nullopt;
    if (is_gated && !gated) return -1;
    const auto planned =
        gated ? Planned<backward::Plan>{*gated, std::nullopt} : plan_backward(problem, n.device);
    const auto* const prepared =
        new (into->bytes) PreparedBackward{params, data_types, planned, n.device};
    return workspace_bytes_of(prepared->planned);
  });
}

void set_outputs(ForwardParams& params, const DirectForward& f) {
  params.y = f.y;
  params.residual_out = f.residual_out;
  params.mean = f.mean;
  params.rstd = f.rstd;
}

void set_outputs(BackwardParams& params, const DirectBackward& b) {
  params.dx = b.dx;
  params.dweight = b.dweight;
  params.dbias = b.dbias;
  params.dshift = b.dshift;
  params.dscale = b.dscale;
  params.dinput = b.dinput;
  params.dgate = b.dgate;
}

template <typename Prepared, typename Direct>
const char* launch_prepared(const Direct* call, const DirectLaunch* prepared, void* workspace) {
  thread_local std::string wrong;
  const auto& [given, types, planned, device] = Prepared::in(*prepared);
  try {
    auto params = given;
    set_outputs(params, *call);
    params.workspace = workspace;
    launch(params, types, planned, current_stream(device));
    return nullptr;
  } catch (const std::exception& error) {
    wrong = error.what();
    return wrong.c_str();
  }
}

constexpr KernelTable kTable = {kKernelTableVersion, sizeof(KernelTable),
                                &prepare_forward,    &launch_prepared<PreparedForward>,
                                &prepare_backward,   &launch_prepared<PreparedBackward>};

}  // namespace

int64_t kernel_table() { return reinterpret_cast<int64_t>(&kTable); }

}  // namespace fused_layernorm
