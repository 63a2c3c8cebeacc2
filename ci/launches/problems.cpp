// SPDX-License-Identifier: Apache-2.0
// Plans and launches problems of every kind on five chips. Prints what was launched for each, or
// with --quiet only the problems whose launch failed; exits with 1 if there are any.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <string_view>
#include <variant>

#include "backward/plan.h"
#include "base/params.h"
#include "channels/backward.h"
#include "channels/forward.h"
#include "forward/plan.h"
#include "gated/plan.h"
#include "groups/plan.h"
#include "launches.h"

using namespace fused_layernorm;

namespace {

// T4, A100, H100, B200, and an H100 of which the caller has a part.
constexpr Device kDevices[] = {{75, 40, 65536, 4 << 20},
                               {80, 108, 166912, 40 << 20},
                               {90, 132, 232448, 50 << 20},
                               {100, 148, 232448, 126 << 20},
                               {90, 132, 232448, 50 << 20, true, false}};
constexpr int64_t kRows[] = {1, 2, 9, 64, 100, 255, 300, 1024, 2048, 4096, 16384, 70000, 400000};
constexpr int64_t kCols[] = {
    1,      3,      7,      8,       16,      31,      32,      37,    64,    96,    100,   127,
    128,    129,    143,    255,     256,     257,     285,     320,   384,   511,   512,   513,
    640,    767,    768,    1000,    1023,    1024,    1025,    1027,  1151,  1152,  1280,  1536,
    1999,   2047,   2048,   2304,    2560,    3072,    3073,    4095,  4096,  4097,  5003,  5120,
    6144,   7168,   8191,   8192,    8193,    8200,    9216,    10240, 12288, 12289, 15875, 16384,
    16385,  20480,  20483,  24576,   32768,   32769,   40960,   40961, 65536, 65537, 99991, 131072,
    150528, 262144, 442368, 1048576, 1048577, 4194304, 16777216};
constexpr int64_t kMostElements = int64_t{1} << 33;

// What shift, scale and gate belong to.
enum class Modulated { kNot, kByRow, kByGroup, kByGroupWithGate, kByRowWithGate };

void* const kSomewhere = reinterpret_cast<void*>(0x10000000);

cudaError_t launch_forward(const Problem& problem, const DataTypes& types, const Device& device) {
  ForwardParams p;
  p.input = p.weight = p.bias = p.y = p.mean = p.rstd = p.workspace = kSomewhere;
  p.rows = problem.rows;
  p.cols = static_cast<int32_t>(problem.cols);
  if (problem.residual) p.residual = p.residual_out = kSomewhere;
  p.has_epilogue = p.activates = problem.has_epilogue;
  p.is_modulated = problem.modulated;
  if (problem.modulated) p.modulation.shift = p.modulation.scale = kSomewhere;
  if (problem.modulated && problem.residual) p.modulation.gate = kSomewhere;
  return std::visit(
      [&](const auto& plan) { return launch_layer_norm_forward(p, types, plan, nullptr); },
      make_forward_plan(problem, device));
}

// Nothing is launched for a gated sum that one launch cannot compute.
std::optional<cudaError_t> launch_backward(const Problem& problem, const DataTypes& types,
                                           const Device& device) {
  BackwardParams p;
  p.dy = p.x = p.mean = p.rstd = p.weight = p.bias = p.dx = p.workspace = kSomewhere;
  p.rows = problem.rows;
  p.cols = static_cast<int32_t>(problem.cols);
  p.has_epilogue = p.activates = problem.has_epilogue;
  p.is_modulated = problem.modulated;
  p.group_rows = problem.group_rows;
  if (problem.needs_column_grads) p.dweight = p.dbias = kSomewhere;
  if (problem.residual) p.dresidual = kSomewhere;
  if (problem.modulated) p.modulation.shift = p.modulation.scale = kSomewhere;
  if (problem.modulated && problem.needs_dparams) p.dshift = p.dscale = kSomewhere;
  const auto launch = [&](const auto& plan) {
    return launch_layer_norm_backward(p, types, plan, nullptr);
  };
  if (!problem.gated) return std::visit(launch, make_backward_plan(problem, device));
  p.modulation.gate = p.input = p.dinput = p.dgate = kSomewhere;
  const auto plan = make_gated_plan(problem, device);
  if (!plan) return std::nullopt;
  return std::visit(launch, *plan);
}

int64_t problems = 0, failed = 0;

void report(const Problem& problem, const Device& device, const char* direction, cudaError_t error,
            bool quiet) {
  ++problems;
  const bool fails = error != cudaSuccess || launches.empty();
  failed += fails;
  if (quiet && !fails) return;
  std::printf("sm_%d %s %lld x %lld types %d %d %d%s%s%s%s%s groups of %lld:", device.capability,
              direction, static_cast<long long>(problem.rows), static_cast<long long>(problem.cols),
              static_cast<int>(problem.x), static_cast<int>(problem.weight),
              static_cast<int>(problem.y), problem.aligned ? "" : " unaligned",
              problem.residual ? " residual" : "", problem.has_epilogue ? " epilogue" : "",
              problem.gated ? " gate" : "", problem.needs_dparams ? "" : " dx alone",
              static_cast<long long>(problem.group_rows));
  if (fails) std::printf(" error %d", static_cast<int>(error));
  for (const auto& launch : launches) std::printf(" %s;", launch.c_str());
  std::printf("\n");
}

void run(Problem problem, Modulated modulated, const Device& device, bool quiet) {
  const DataTypes types = {problem.x, problem.weight, problem.y};
  const bool by_row = modulated == Modulated::kByRow || modulated == Modulated::kByRowWithGate;
  problem.modulated = modulated != Modulated::kNot;
  if (problem.modulated) {
    problem.group_rows = by_row ? 1 : problem.rows % 3 == 0 ? problem.rows / 3 : problem.rows;
  }
  most_shared_memory = device.shared_memory;
  launches.clear();
  report(problem, device, "forward", launch_forward(problem, types, device), quiet);
  problem.gated =
      modulated == Modulated::kByGroupWithGate || modulated == Modulated::kByRowWithGate;
  for (const bool needs : {true, false}) {
    problem.needs_column_grads = needs;
    problem.needs_dparams = needs || problem.gated;
    launches.clear();
    if (const auto error = launch_backward(problem, types, device)) {
      report(problem, device, "backward", *error, quiet);
    }
  }
}

// Norms over the channels of images, for which a plan may decline; but not for some numbers of
// samples alone, since another strategy adds up a pixel's channels in another order.
void run_images(const Device& device, bool quiet) {
  constexpr std::array<int64_t, 6> kSamples = {1, 5, 9, 16, 64, 600};
  most_shared_memory = device.shared_memory;
  for (const auto& [x, weight, y] : kTypesWithKernels) {
    for (const int64_t channels : {1, 3, 24, 96, 384, 768, 1024, 2048, 4096}) {
      for (const int64_t pixels : {1, 49, 81, 100, 196, 225, 3136, 65536}) {
        for (int kind = 0; kind < 8; ++kind) {
          const bool channels_last = kind & 1, may_be_run = kind & 2;
          size_t forwards = 0, backwards = 0;
          for (const int64_t samples : kSamples) {
            const ChannelMap map = {samples, pixels, channels * pixels, pixels};
            const int64_t unit = std::min<int64_t>(pixels & -pixels, 8);
            const DataTypes types = {x, weight, y};
            Problem problem;
            problem.rows = map.samples * pixels;
            problem.cols = channels;
            problem.x = x;
            problem.weight = weight;
            problem.y = y;
            problem.has_epilogue = kind & 4;
            ForwardParams forward;
            BackwardParams backward;
            forward.has_epilogue = backward.has_epilogue = problem.has_epilogue;
            forward.cols = backward.cols = static_cast<int32_t>(channels);
            forward.rows = backward.rows = problem.rows;
            backward.dweight = backward.dbias = kSomewhere;
            launches.clear();
            if (const auto plan =
                    make_channels_plan(problem, map, unit, may_be_run, channels_last, device)) {
              ++forwards;
              report(problem, device, "forward of an image",
                     launch_layer_norm_forward(forward, types, *plan, nullptr), quiet);
            }
            launches.clear();
            const auto dy = channels_last ? std::nullopt : std::optional(map);
            if (const auto plan =
                    make_channels_plan(problem, map, dy, unit, may_be_run, channels_last, device)) {
              ++backwards;
              report(problem, device, "backward of an image",
                     launch_layer_norm_backward(backward, types, *plan, nullptr), quiet);
            }
          }
          const auto is_mixed = [&](size_t plans) {
            return plans != 0 && plans != kSamples.size();
          };
          if (is_mixed(forwards) || is_mixed(backwards)) {
            ++failed;
            std::printf(
                "sm_%d image of %lld channels and %lld pixels, types %d %d %d: planned for "
                "some numbers of samples alone\n",
                device.capability, static_cast<long long>(channels), static_cast<long long>(pixels),
                static_cast<int>(x), static_cast<int>(weight), static_cast<int>(y));
          }
        }
      }
    }
  }
}

// Norms over groups of channels, in both layouts and directions.
void run_groups(const Device& device, bool quiet) {
  most_shared_memory = device.shared_memory;
  for (const auto& [x, weight, y] : kTypesWithKernels) {
    if (!groups_have_kernels(x, y)) continue;
    for (const int64_t groups : {1, 4, 32}) {
      for (const int64_t of_group : {1, 3, 4, 10, 32, 40, 130}) {
        for (const int64_t positions :
             {1, 7, 64, 72, 1024, 3136, 9216, 10403, 16384, 65536, 262144, 1048576}) {
          for (int kind = 0; kind < 16; ++kind) {
            GroupProblem problem;
            problem.samples = kind & 8 ? 9 : 1;
            problem.channels = groups * of_group;
            problem.groups = groups;
            problem.positions = positions;
            problem.layout = kind & 1 ? GroupLayout::kChannelsLast : GroupLayout::kPlanes;
            problem.x = x;
            problem.y = y;
            problem.aligned = kind & 2;
            problem.backward = kind & 4;
            if (problem.samples * problem.channels * positions > kMostElements) continue;
            const auto plan = make_group_plan(problem, device);
            GroupParams params;
            params.x = params.mean = params.rstd = params.y = params.workspace = kSomewhere;
            params.samples = problem.samples;
            params.positions = positions;
            params.channels = static_cast<int32_t>(problem.channels);
            params.groups = static_cast<int32_t>(groups);
            params.channels_of_group = static_cast<int32_t>(problem.channels_of_group());
            if (problem.backward) params.dy = params.dweight.at = params.dbias.at = kSomewhere;
            launches.clear();
            const cudaError_t error =
                plan ? launch_group_norm(params, x, y, *plan, nullptr) : cudaErrorInvalidValue;
            ++problems;
            const bool fails = error != cudaSuccess || launches.empty();
            failed += fails;
            if (quiet && !fails) continue;
            std::printf(
                "sm_%d %s of groups %lld x %lld / %lld x %lld%s types %d %d%s:", device.capability,
                problem.backward ? "backward" : "forward", static_cast<long long>(problem.samples),
                static_cast<long long>(problem.channels), static_cast<long long>(groups),
                static_cast<long long>(positions), kind & 1 ? " channels_last" : "",
                static_cast<int>(x), static_cast<int>(y), problem.aligned ? "" : " unaligned");
            if (fails) std::printf(" error %d", static_cast<int>(error));
            for (const auto& each : launches) std::printf(" %s;", each.c_str());
            std::printf("\n");
          }
        }
      }
    }
  }
}

// Gated norms, in both orders and directions.
void run_gated(const Device& device, bool quiet) {
  most_shared_memory = device.shared_memory;
  for (const auto& [x, weight, y] : kTypesWithKernels) {
    for (const int64_t cols : {1, 8, 64, 100, 128, 520, 1024, 1536, 8192, 16384, 32768, 40000}) {
      for (int kind = 0; kind < 32; ++kind) {
        GatedProblem problem;
        problem.rows = kind & 1 ? 100000 : 1;
        problem.cols = cols;
        problem.groups = kind & 2 ? 8 : 1;
        problem.x = x;
        problem.aligned = cols % vector_width(size_of(x)) == 0;
        problem.backward = kind & 4;
        problem.needs_dweight = true;
        problem.bias = kind & 8;
        if (problem.backward && x != y) continue;
        const auto plan = make_gated_norm_plan(problem, device);
        GatedParams params;
        params.x = params.gate = params.y = params.rstd = params.workspace = kSomewhere;
        params.rows = static_cast<int32_t>(problem.rows);
        params.cols = static_cast<int32_t>(cols);
        params.groups = static_cast<int32_t>(problem.groups);
        params.gate_first = kind & 16;
        params.y_type = y;
        if (problem.backward) params.dy = params.dgate = params.dweight = kSomewhere;
        if (problem.bias) params.dbias = kSomewhere;
        launches.clear();
        const cudaError_t error = !plan ? cudaErrorInvalidValue
                                  : problem.backward
                                      ? launch_gated_backward(params, x, *plan, nullptr)
                                      : launch_gated_forward(params, x, *plan, nullptr);
        ++problems;
        const bool fails = error != cudaSuccess || launches.empty();
        failed += fails;
        if (quiet && !fails) continue;
        std::printf(
            "sm_%d gated %s of %lld x %lld x %lld types %d %d %d kind %d:", device.capability,
            problem.backward ? "backward" : "forward", static_cast<long long>(problem.rows),
            static_cast<long long>(problem.groups), static_cast<long long>(cols),
            static_cast<int>(x), static_cast<int>(weight), static_cast<int>(y), kind);
        if (fails) std::printf(" error %d", static_cast<int>(error));
        for (const auto& each : launches) std::printf(" %s;", each.c_str());
        std::printf("\n");
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool quiet = argc > 1 && std::string_view(argv[1]) == "--quiet";
  for (const Device& device : kDevices) {
    blocks_meet = device.blocks_meet;
    run_images(device, quiet);
    run_groups(device, quiet);
    run_gated(device, quiet);
    for (const auto& [x, weight, y] : kTypesWithKernels) {
      for (const int64_t cols : kCols) {
        for (const int64_t rows : kRows) {
          if (rows * cols > kMostElements) continue;
          const bool may_be_aligned = cols % aligned_cols(size_of(x), size_of(y)) == 0;
          for (int kind = 0; kind < 8; ++kind) {
            Problem problem;
            problem.rows = rows;
            problem.cols = cols;
            problem.x = x;
            problem.weight = weight;
            problem.y = y;
            problem.aligned = kind & 1;
            problem.residual = kind & 2;
            problem.has_epilogue = kind & 4;
            if (problem.aligned && !may_be_aligned) continue;
            run(problem, Modulated::kNot, device, quiet);
            problem.halves = !problem.aligned && cols * size_of(x) % (kVectorBytes / 2) == 0;
            if (problem.halves) run(problem, Modulated::kNot, device, quiet);
            problem.halves = false;
            if (problem.has_epilogue) continue;
            for (const auto modulated : {Modulated::kByRow, Modulated::kByRowWithGate,
                                         Modulated::kByGroup, Modulated::kByGroupWithGate}) {
              run(problem, modulated, device, quiet);
            }
          }
        }
      }
    }
  }
  std::fprintf(stderr, "%lld launches, %lld failed\n", static_cast<long long>(problems),
               static_cast<long long>(failed));
  return failed > 0;
}
