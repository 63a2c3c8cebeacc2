// SPDX-License-Identifier: Apache-2.0
// Whether a call is valid; prepare.h has the contract. These checks guard memory: no kernel is
// launched on arguments that do not fit together. Most messages that users read come from
// fused_layernorm/ops/arguments.py.
#include <cmath>
#include <sstream>

#include "call/layout.h"
#include "call/prepare.h"
#include "call/types.h"

namespace fused_layernorm {
namespace {

constexpr const char* kNotThere = "a gradient is asked for of a parameter that is not there";
constexpr const char* kNoStatistics = "mean and rstd must be those of the forward pass";

class Check {
 public:
  explicit Check(const NormCall& call) : call_(call), x_(call.backward ? call.x : call.input) {}

  Verdict run() {
    const NormOptions& options = call_.options;
    if (options.has_unknown_name) {
      require(false, "a name is unknown");
    } else if (options.num_groups != 0) {
      groups();
    } else if (options.gate_place != GatePlace::kInput) {
      gated();
    } else {
      rows();
    }
    return verdict_;
  }

 private:
  // Keeps the first thing that is wrong.
  template <typename... Parts>
  bool require(bool holds, const Parts&... parts) {
    if (holds) return true;
    std::ostringstream reason;
    (reason << ... << parts);
    verdict_ = {Verdict::kInvalid, reason.str()};
    return false;
  }

  bool beside(const RawTensor& tensor, const char* name) {
    return require(tensor.device == x_.device, name, " must be on the input's device");
  }
  // Whether a tensor has the sizes of x's dimensions from `first` on.
  bool shape(const RawTensor& tensor, const char* name, int64_t first) {
    if (!tensor) return true;
    const RawTensor wanted = {.sizes = x_.sizes + first, .dims = x_.dims - first};
    return require(have_one_shape(tensor, wanted), name,
                   first == 0 ? " must have the shape of the input"
                              : " must have the shape of the normalized dimensions") &&
           beside(tensor, name);
  }
  bool broadcast(const RawTensor& tensor, const char* name) {
    return !tensor ||
           (require(broadcasts_to(tensor, x_), name, " must broadcast to the shape of the input") &&
            beside(tensor, name));
  }
  bool numbers() {
    const NormOptions& o = call_.options;
    return require(std::isfinite(o.output_scale), "scale must be a finite number") &&
           require(!std::isnan(o.eps), "eps must be a number") &&
           require(std::isfinite(o.weight_offset), "weight_offset must be a finite number") &&
           require(call_.weight || o.weight_offset == 0.0,
                   "weight_offset is there without a weight");
  }
  // Parameters are of x's type, or float32 beside half precision. With a residual they may also be
  // of the input's type.
  bool type(const RawTensor& parameter, const char* name) {
    return !parameter || require(goes_with(parameter.type, call_.normalized().type) ||
                                     goes_with(parameter.type, x_.type),
                                 name,
                                 " must be of the input's dtype, or float32 beside half precision "
                                 "input");
  }
  bool one_type() {
    return require(!call_.weight || !call_.bias || call_.weight.type == call_.bias.type,
                   "weight and bias must be of one dtype");
  }
  bool types_of_columns() {
    return one_type() && type(call_.weight, "weight and bias") &&
           type(call_.bias, "weight and bias");
  }
  bool statistic(const RawTensor& tensor, int64_t count) {
    return tensor.device == x_.device && tensor.type == statistics_type(x_.type) &&
           numel_of(tensor) == count;
  }
  bool gradients(bool shift, bool scale, bool weight, bool bias) {
    const Needs& needs = call_.needs;
    return require(
        (call_.shift || !(shift && needs.dshift)) && (call_.scale || !(scale && needs.dscale)) &&
            (call_.weight || !(weight && needs.dweight)) && (call_.bias || !(bias && needs.dbias)),
        weight ? kNotThere : "a gradient is asked for of a shift or scale that is not there");
  }

  void rows() {
    const int64_t ndim = call_.options.normalized_ndim, leading = x_.dims - ndim;
    if (!require(ndim >= 1 && leading >= 0, "cannot normalize the last ", ndim, " of ", x_.dims,
                 " dimensions")) {
      return;
    }
    const int64_t rows = numel_of(x_, 0, leading), cols = numel_of(x_, leading, x_.dims);
    if (rows > kMostExtent || cols > kMostExtent) {
      verdict_.kind = Verdict::kNoKernel;
      return;
    }
    const auto modulation = [&](const RawTensor& tensor, const char* name) {
      return broadcast(tensor, name) && (call_.backward || type(tensor, name));
    };
    const auto modulations = [&] {
      return modulation(call_.shift, "shift") && modulation(call_.scale, "scale") &&
             modulation(call_.gate, "gate");
    };
    if (!shape(call_.weight, "weight", leading) || !shape(call_.bias, "bias", leading)) return;
    if (!call_.backward) {
      (void)(shape(call_.residual, "residual", 0) && numbers() && types_of_columns() &&
             modulations());
      return;
    }
    const bool is_rms = call_.options.is_rms;
    (void)(shape(call_.dy, "dy", 0) && shape(call_.dresidual, "dresidual", 0) &&
           shape(call_.input, "input", 0) && modulations() && numbers() &&
           gradients(true, true, false, false) &&
           require(!call_.dresidual || call_.dresidual.type == x_.type,
                   "dresidual must be of x's dtype") &&
           require(!is_rms || !call_.mean || numel_of(call_.mean) == 0, "RMSNorm has no mean") &&
           require((is_rms || statistic(call_.mean, rows)) && statistic(call_.rstd, rows),
                   kNoStatistics) &&
           one_type());
  }

  void groups() {
    const int64_t groups = call_.options.num_groups;
    if (!require(x_.dims >= 2, "the input must have at least two dimensions") ||
        !require(groups >= 1 && x_.sizes[1] % groups == 0,
                 "num_groups must be at least one and divide the channels")) {
      return;
    }
    const auto channels = [&](const RawTensor& tensor, const char* name) {
      return !tensor || (require(tensor.dims == 1 && tensor.sizes[0] == x_.sizes[1], name,
                                 " must have a number for each channel") &&
                         beside(tensor, name));
    };
    const auto samples = [&](const RawTensor& tensor, const char* name) {
      if (!tensor) return true;
      bool fits = tensor.dims >= 2;
      for (int64_t d = 0; fits && d < tensor.dims; ++d) {
        fits = tensor.sizes[d] == (d < 2 ? x_.sizes[d] : 1);
      }
      return require(fits, name, " must have a number for each channel of each sample") &&
             beside(tensor, name) && type(tensor, name);
    };
    const int64_t all = x_.sizes[0] * groups;
    (void)(numbers() && channels(call_.weight, "weight") && channels(call_.bias, "bias") &&
           types_of_columns() && samples(call_.shift, "shift") && samples(call_.scale, "scale") &&
           (!call_.backward ||
            (shape(call_.dy, "dy", 0) &&
             require(statistic(call_.mean, all) && statistic(call_.rstd, all), kNoStatistics) &&
             gradients(true, true, true, true))));
  }

  void gated() {
    if (!require(x_.dims >= 1, "the input must have a dimension")) return;
    const int64_t leading = x_.dims - 1, width = x_.sizes[leading];
    const int64_t size = call_.options.group_size;
    if (!require(size >= 0 && (size == 0 || width % size == 0),
                 "group_size must be at least one and divide the last dimension")) {
      return;
    }
    const int64_t groups = numel_of(x_, 0, leading) * (size == 0 ? 1 : width / size);
    const bool is_empty = numel_of(x_) == 0;
    (void)(shape(call_.gate, "gate", 0) && shape(call_.weight, "weight", leading) &&
           shape(call_.bias, "bias", leading) && numbers() && types_of_columns() &&
           (!call_.backward || (shape(call_.dy, "dy", 0) &&
                                require(is_empty || statistic(call_.rstd, groups),
                                        "rstd must be that of the forward pass") &&
                                gradients(false, false, true, true))));
  }

  const NormCall& call_;
  const RawTensor& x_;
  Verdict verdict_;
};

}  // namespace

Verdict check(const NormCall& call) { return Check(call).run(); }

}  // namespace fused_layernorm
