// SPDX-License-Identifier: Apache-2.0
// The functions of the kernel table (bindings/kernel_table.h). A call that needs a conversion or a
// copy, or that is not valid, is declined: the operator takes it.
#include "bindings/kernel_table.h"

#include <cmath>
#include <exception>
#include <limits>
#include <new>
#include <string>
#include <type_traits>

#include "bindings/cuda/launches.h"
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

// Whether kernels take these numbers, and parameters of these types without a conversion.
bool takes(const DirectNorm& n, const KernelTypes& types, const void* weight, const void* bias) {
  constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();
  const bool has_parameters = weight != nullptr || bias != nullptr;
  return n.rows > 0 && n.cols > 0 && n.rows <= kMaxExtent && n.cols <= kMaxExtent &&
         std::isfinite(n.scale) && std::isfinite(n.weight_offset) &&
         (weight != nullptr || n.weight_offset == 0.0) && types.y == type_of(n.y_type) &&
         (!has_parameters || types.weight == type_of(n.weight_type)) && is_aligned(weight) &&
         is_aligned(bias) && driver_problem().empty();
}

std::optional<ScalarType> type_of_parameters(const DirectNorm& n, const void* weight,
                                             const void* bias) {
  if (weight == nullptr && bias == nullptr) return std::nullopt;
  return type_of(n.weight_type);
}

Computation computation_of(const DirectNorm& n) {
  Computation computation;
  computation.activation =
      n.activation == nullptr ? Activation::kNone : activation_of(std::string(n.activation));
  computation.scale = n.scale;
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
    computation.xhat_rounding = xhat_rounding_of(n.round_before_weight, f.weight != nullptr, input);
    const ForwardTypes types =
        settle_types(input, has_residual ? std::optional(x) : std::nullopt,
                     type_of_parameters(n, f.weight, f.bias), type_of(n.y_type),
                     computation.xhat_rounding != XhatRounding::kNone);
    if (!takes(n, types.kernel, f.weight, f.bias) || std::isnan(n.eps) || types.adds_first ||
        types.summand != input) {
      return -1;
    }
    ForwardParams params;
    params.input = f.input;
    params.input_rows = RowMap(n.cols);
    params.residual = f.residual;
    params.residual_rows = RowMap(n.cols);
    params.residual_out = f.residual_out;
    params.weight = f.weight;
    params.bias = f.bias;
    params.y = f.y;
    params.mean = f.mean;
    params.rstd = f.rstd;
    params.rows = n.rows;
    params.cols = static_cast<int32_t>(n.cols);
    const DataTypes data_types = types.kernel.data_types();
    const bool aligned =
        is_aligned(f.input) && is_aligned(f.residual) && types.kernel.aligned(n.cols);
    const Problem problem = complete(params, data_types, computation, aligned);
    const auto planned = plan_forward(problem, n.device);
    params.stays_in_l2 = stays_in_l2(planned.plan);
    const auto* const prepared =
        new (into->bytes) PreparedForward{params, data_types, planned, n.device};
    return prepared->planned.workspace_bytes();
  });
}

int64_t prepare_backward(const DirectBackward* call, DirectLaunch* into) {
  const DirectBackward& b = *call;
  const DirectNorm& n = b.norm;
  return unless_refused([&]() -> int64_t {
    const KernelTypes types(type_of(n.x_type), type_of_parameters(n, b.weight, b.bias),
                            type_of(n.y_type));
    if (!takes(n, types, b.weight, b.bias)) return -1;
    BackwardParams params;
    params.dy = b.dy;
    params.x = b.x;
    params.dresidual = b.dresidual;
    params.dy_rows = params.x_rows = params.dresidual_rows = RowMap(n.cols);
    params.mean = b.mean;
    params.rstd = b.rstd;
    params.weight = b.weight;
    params.bias = b.bias;
    params.dx = b.dx;
    params.dweight = b.dweight;
    params.dbias = b.dbias;
    params.rows = params.group_rows = n.rows;
    params.cols = static_cast<int32_t>(n.cols);
    const DataTypes data_types = types.data_types();
    const bool aligned =
        is_aligned(b.x) && is_aligned(b.dy) && is_aligned(b.dresidual) && types.aligned(n.cols);
    const Problem problem = complete(params, data_types, computation_of(n), aligned,
                                     b.dweight != nullptr || b.dbias != nullptr, false);
    const auto* const prepared = new (into->bytes)
        PreparedBackward{params, data_types, plan_backward(problem, n.device), n.device};
    return prepared->planned.workspace_bytes();
  });
}

template <typename Prepared>
const char* run(const DirectLaunch* prepared, void* workspace) {
  thread_local std::string wrong;
  const auto& [given, types, planned, device] = Prepared::in(*prepared);
  try {
    auto params = given;
    params.workspace = workspace;
    launch(params, types, planned, current_stream(device));
    return nullptr;
  } catch (const std::exception& error) {
    wrong = error.what();
    return wrong.c_str();
  }
}

constexpr KernelTable kTable = {kKernelTableVersion,   sizeof(KernelTable), &prepare_forward,
                                &run<PreparedForward>, &prepare_backward,   &run<PreparedBackward>};

}  // namespace

int64_t kernel_table() { return reinterpret_cast<int64_t>(&kTable); }

}  // namespace fused_layernorm
