// SPDX-License-Identifier: Apache-2.0
// The operators `_plan`, `_plan_groups` and `_plan_gated`, which give the plan of any problem on
// any device as JSON, `_set_sm_margin`, what plans leave free of the device, `_force`, which forces
// parts of every later plan of rows, and `_limit`, which gives a number of csrc that Python needs,
// too. They are not for users, and need no GPU.

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>

#include "backward/plan.h"
#include "base/json.h"
#include "base/margin.h"
#include "bindings/data_types.h"
#include "bindings/force_plan.h"
#include "bindings/namespace.h"
#include "channels/tuning.h"
#include "forward/plan.h"
#include "gated/plan.h"
#include "groups/plan.h"
#include "heads/params.h"

namespace fused_layernorm {
namespace {

using torch::headeronly::ScalarType;
using torch::headeronly::toString;

template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

Device checked_device(int64_t capability, int64_t sms, int64_t shared_memory, int64_t l2_bytes) {
  check(sms >= 1 && sms < 1 << 16 && shared_memory >= kLeastSharedMemory && shared_memory < 1 << 30,
        "expected a device of 1 to 65535 multiprocessors with ", kLeastSharedMemory,
        " bytes of shared memory a block or more, got ", sms, " with ", shared_memory);
  check(l2_bytes >= 1 && l2_bytes < int64_t{1} << 40, "expected a device with L2, got ", l2_bytes,
        " bytes of it");
  return without_margin({static_cast<int>(capability), static_cast<int>(sms),
                         static_cast<int>(shared_memory), l2_bytes});
}

// weight and y are of x's type unless their types are given. `aligned` says whether all rows begin
// at multiples of 16 bytes. Without it, they do if the length of a row is such a multiple, in x and
// in y; and else at multiples of 8 bytes, if it is one of those.
std::string describe_plan(int64_t rows, int64_t cols, ScalarType dtype, bool backward,
                          std::optional<ScalarType> weight_dtype, std::optional<ScalarType> y_dtype,
                          std::optional<bool> aligned, bool residual, bool has_epilogue,
                          bool needs_dparams, int64_t group_rows, bool gated, int64_t capability,
                          int64_t sms, int64_t shared_memory, int64_t l2_bytes) {
  const ScalarType weight = weight_dtype.value_or(dtype), y = y_dtype.value_or(dtype);
  Problem problem;
  problem.x = data_type(dtype);
  problem.weight = data_type(weight);
  problem.y = data_type(y);
  check(has_kernels(problem.x, problem.weight, problem.y), "no kernel takes x of ", toString(dtype),
        ", weight of ", toString(weight), " and y of ", toString(y));
  check(rows >= 1 && cols >= 1 && rows <= kMostExtent && cols <= kMostExtent, "expected 1 to ",
        kMostExtent, " rows and columns, got ", rows, " rows of ", cols);
  const bool whole = cols % aligned_cols(size_of(problem.x), size_of(problem.y)) == 0;
  check(whole || !aligned.value_or(false), "rows of ", cols,
        " columns cannot all begin at multiples of 16 bytes");
  problem.rows = rows;
  problem.cols = cols;
  problem.aligned = aligned.value_or(whole);
  problem.halves =
      !aligned.has_value() && !whole && cols * size_of(problem.x) % (kVectorBytes / 2) == 0;
  problem.residual = residual;
  problem.has_epilogue = has_epilogue;
  problem.needs_dparams = needs_dparams;
  check(group_rows >= 0 && (group_rows == 0 || rows % group_rows == 0),
        "expected rows in whole groups, got ", rows, " rows in groups of ", group_rows);
  problem.modulated = group_rows > 0;
  problem.group_rows = group_rows;
  const Device device = checked_device(capability, sms, shared_memory, l2_bytes);
  if (!backward) return describe(make_forward_plan(problem, device));
  if (gated) {
    problem.gated = true;
    const auto plan = make_gated_plan(problem, device);
    return plan ? describe(*plan) : "null";
  }
  return describe(make_backward_plan(problem, device));
}

// y (dy in backward) is of x's type unless its type is given.
std::string describe_group_plan(int64_t samples, int64_t channels, int64_t positions,
                                int64_t groups, ScalarType dtype, bool backward,
                                std::optional<ScalarType> y_dtype, bool channels_last, bool aligned,
                                bool blocks_meet, int64_t capability, int64_t sms,
                                int64_t shared_memory, int64_t l2_bytes) {
  const ScalarType y = y_dtype.value_or(dtype);
  check(samples >= 1 && positions >= 1 && groups >= 1 && channels >= 1 && channels % groups == 0,
        "expected channels in whole groups, got ", channels, " channels in ", groups, " groups, ",
        samples, " samples and ", positions, " positions");
  GroupProblem problem;
  problem.samples = samples;
  problem.channels = channels;
  problem.positions = positions;
  problem.groups = groups;
  problem.layout = channels_last ? GroupLayout::kChannelsLast : GroupLayout::kPlanes;
  problem.x = data_type(dtype);
  problem.y = data_type(y);
  check(groups_have_kernels(problem.x, problem.y), "no kernel takes x of ", toString(dtype),
        " and y of ", toString(y));
  problem.aligned = aligned;
  problem.backward = backward;
  Device device = checked_device(capability, sms, shared_memory, l2_bytes);
  device.blocks_meet = blocks_meet;
  const auto plan = make_group_plan(problem, device);
  return plan ? describe(*plan) : "null";
}

std::string describe_gated_plan(int64_t rows, int64_t cols, int64_t groups, ScalarType dtype,
                                bool backward, bool aligned, bool needs_dweight, bool bias,
                                int64_t capability, int64_t sms, int64_t shared_memory,
                                int64_t l2_bytes) {
  check(rows >= 1 && cols >= 1 && groups >= 1 && rows <= kMostExtent && cols <= kMostExtent,
        "expected rows of groups of columns, got ", rows, " rows of ", groups, " groups of ", cols);
  GatedProblem problem;
  problem.rows = rows;
  problem.cols = cols;
  problem.groups = groups;
  problem.x = data_type(dtype);
  problem.aligned = aligned && cols % vector_width(size_of(problem.x)) == 0;
  problem.backward = backward;
  problem.needs_dweight = needs_dweight;
  problem.bias = bias;
  const auto plan =
      make_gated_norm_plan(problem, checked_device(capability, sms, shared_memory, l2_bytes));
  return plan ? describe(*plan) : "null";
}

void set_sm_margin(int64_t margin) {
  check(margin >= 0 && margin < 1 << 16, "expected a margin of 0 to 65535 multiprocessors, got ",
        margin);
  sm_margin = static_cast<int>(margin);
}

int64_t limit(std::string name) {
  if (name == "head_cols") return kMostHeadCols;
  check(name == "few_pixels", "no limit is called '", name, "'");
  return kFewPixels;
}

}  // namespace
}  // namespace fused_layernorm

STABLE_TORCH_LIBRARY_FRAGMENT(FUSED_LAYERNORM_NAMESPACE, m) {
  // `residual`: there is a residual, or in backward a gradient that is added to dx (dresidual).
  // `has_epilogue`: there is an activation, a scale that is not 1, or a weight that is not plain
  // (base/params.h). `needs_dparams`: a gradient of a parameter is asked for. `group_rows`: how
  // many rows share a modulation; 0 without one. `gated`, with `backward`: the plan of a gated
  // sum's backward in one launch, null if one launch cannot do it. The device is an H100 by
  // default; its capability is 10 * major + minor.
  m.def(
      "_plan(int rows, int cols, ScalarType dtype, *, bool backward=False, ScalarType? "
      "weight_dtype=None, ScalarType? y_dtype=None, bool? aligned=None, bool residual=False, bool "
      "has_epilogue=False, bool needs_dparams=True, int group_rows=0, bool gated=False, int "
      "capability=90, int sms=132, int shared_memory=232448, int l2_bytes=52428800) -> str");
  // The plan of a norm over groups of channels, null if kernels cannot count them. `aligned`: x and
  // y begin at multiples of 16 bytes. `blocks_meet`: else blocks do not wait for each other.
  m.def(
      "_plan_groups(int samples, int channels, int positions, int groups, ScalarType dtype, *, "
      "bool backward=False, ScalarType? y_dtype=None, bool channels_last=False, bool aligned=True, "
      "bool blocks_meet=True, int capability=90, int sms=132, int shared_memory=232448, int "
      "l2_bytes=52428800) -> str");
  // The plan of a gated norm over `groups` groups of `cols` columns of each row, null if kernels
  // cannot count them. `aligned`: all rows begin at multiples of 16 bytes.
  m.def(
      "_plan_gated(int rows, int cols, int groups, ScalarType dtype, *, bool backward=False, "
      "bool aligned=True, bool needs_dweight=True, bool bias=False, int capability=90, int "
      "sms=132, int shared_memory=232448, int l2_bytes=52428800) -> str");
  // Plans leave so many multiprocessors free from now on; those of the operators above, too.
  m.def("_set_sm_margin(int margin) -> ()");
  // None ends all forcing. force_plan.h lists the options.
  m.def("_force(str? options) -> ()");
  // "head_cols": the most columns of a head. "few_pixels": below so many, kernels of channels leave
  // some images to copies.
  m.def("_limit(str name) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(FUSED_LAYERNORM_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("_plan", TORCH_BOX(&fused_layernorm::describe_plan));
  m.impl("_plan_groups", TORCH_BOX(&fused_layernorm::describe_group_plan));
  m.impl("_plan_gated", TORCH_BOX(&fused_layernorm::describe_gated_plan));
  m.impl("_set_sm_margin", TORCH_BOX(&fused_layernorm::set_sm_margin));
  m.impl("_force", TORCH_BOX(&fused_layernorm::force_plan));
  m.impl("_limit", TORCH_BOX(&fused_layernorm::limit));
}
