// The ladder from problem to plan. Each threshold carries the measurement that set it.
#include "plan/plan.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace fused_layernorm {
namespace {

constexpr int kWarpSize = 32;
// What backward's blocks keep on its way, where one of them has whole rows.
constexpr int kWantedRingBytes = 64 * 1024;
// Static shared memory, barriers included, and what the driver reserves in a block.
constexpr int kReservedSharedMemory = 3072;

struct Forced {
  std::optional<Strategy> strategy;
  std::map<std::string, int> numbers;

  int number(const char* key, int otherwise) const {
    if (numbers.empty()) return otherwise;
    const auto found = numbers.find(key);
    return found == numbers.end() ? otherwise : found->second;
  }
};

std::mutex forced_mutex;
Forced forced_plan;

const std::map<std::string, Strategy> kStrategies = {{"warp", Strategy::kWarp},
                                                     {"block", Strategy::kBlock},
                                                     {"split", Strategy::kSplit},
                                                     {"stream", Strategy::kStream}};

const char* name_of(Strategy strategy) {
  for (const auto& [name, value] : kStrategies) {
    if (value == strategy) return name.c_str();
  }
  return "unknown";
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

int power_of_two_from(int64_t n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Vectors a lane can own: more have no registers, or are better shared by a block.
int most_warp_vecs(const Problem& problem, int width) {
  if (problem.backward) return most_warp_backward_vecs(width);
  return most_warp_forward_vecs(size_of(problem.x), problem.residual);
}

// Few lanes with several vectors each make a shuffle serve more columns: what half precision needs,
// where arithmetic is the bound. In float32 it is loads of whole 128-byte lines.
int wanted_warp_vecs(const Problem& problem, int width, int64_t vectors) {
  if (width == 1 || problem.backward) return 4;
  // us with one, two and four; 4194304 x 64 with GELU 580, 528, 610; 131072 x 256 68, 68, 70.
  if (size_of(problem.x) == 4) return problem.has_epilogue ? 2 : 1;
  // 524288 x 64 bfloat16: 35.7, 37.4, 37.3; with SiLU 43.9, 37.0, 43.2.
  if (vectors == 8) return problem.has_epilogue ? 2 : 1;
  // Two are better if they leave no place empty (bfloat16: 65536 x 128 10.8 us, with four 11.4;
  // 32768 x 256 10.7, 11.1; 32768 x 512 18.9, 19.2; but 32768 x 320 15.5, 13.3), four with an
  // activation (32768 x 512 with GELU 22.8, 21.2).
  const bool fills = vectors == 16 || vectors == 32 || vectors == 64;
  return fills && !problem.has_epilogue ? 2 : 4;
}

// Backward of few rows: blocks on rows compute dx, blocks on columns dweight and dbias beside them.
void lay_out_few_rows(Plan& plan, const Problem& problem) {
  const int threads = plan.threads * plan.groups;
  const int cols = column_lanes(plan.width, size_of(problem.x)) * plan.width;
  plan.few_rows = true;
  plan.blocks = ceil_div(problem.rows, plan.groups);
  plan.column_blocks = problem.needs_dparams ? ceil_div(problem.cols, cols) : 0;
  const int sums = threads / kWarpSize * cols * 2 * std::max(4, size_of(problem.x));
  plan.shared_bytes = problem.needs_dparams ? sums : 0;
}

// The same where a group of warps has a row: as many groups as make a block whose threads suffice
// for the columns, or fewer, so that almost all blocks run at once (us with the most groups, two
// and one; bfloat16: 512 x 2060 9.9, 9.0, 11.6; 512 x 2415 9.8, 9.2, 12.0; 512 x 2047
// float32 10.6, 8.0, 9.1).
void lay_out_few_long_rows(Plan& plan, const Problem& problem, const Device& device,
                           const Forced& forced) {
  const int sm_threads =
      few_rows_blocks(problem.residual || problem.has_epilogue) * kBackwardThreads;
  const auto groups_of = [&](int threads) {
    return std::clamp(threads / plan.threads, 1, kMaxGroups);
  };
  // Blocks on columns need threads (bfloat16: 128 x 1024 2.9 us with 256 of them, 4.6 with 64; 512
  // x 1024 4.2 with 512, 4.6 with 256); vectors that do not fit at once are better in small blocks
  // (1024 x 4096 12.0, 12.8).
  constexpr int kLeastThreads = 256;
  const int most = groups_of(problem.rows < 256 ? kLeastThreads : 512);
  const int fallback = plan.width == 1 ? most : std::min(most, groups_of(kLeastThreads));
  const auto all_at_once = [&] {
    const int64_t places = int64_t{device.sms} * (sm_threads / (plan.threads * plan.groups));
    return 8 * (plan.blocks + plan.column_blocks) <= 9 * places;
  };
  for (plan.groups = most; plan.groups * plan.threads >= kLeastThreads; --plan.groups) {
    lay_out_few_rows(plan, problem);
    if (all_at_once()) break;
  }
  if (plan.groups * plan.threads < kLeastThreads) plan.groups = fallback;
  plan.groups = forced.number("groups", plan.groups);
  lay_out_few_rows(plan, problem);
}

// x and dy are then read twice, the second time from L2, but no second launch adds up partial sums
// (us with and without; bfloat16: 128 x 1024 2.8 and 9.3, 512 x 1023 5.4 and 9.0, 512 x 4096 7.3
// and 13.4, 2048 x 768 10.1 and 10.4, 2048 x 4096 21.4 and 23.1, 1024 x 8192 24.4 and 26.9).
bool has_few_rows(const Problem& problem, const Forced& forced) {
  const int64_t bytes = problem.rows * problem.cols * (size_of(problem.x) + size_of(problem.y));
  const bool few = problem.rows <= (problem.aligned ? 2048 : 1024) && bytes <= int64_t{32} << 20;
  return forced.number("few", few) != 0;
}

Plan warp_plan(const Problem& problem, const Device& device, int width, int64_t vectors,
               const Forced& forced) {
  Plan plan;
  plan.strategy = Strategy::kWarp;
  plan.width = width;
  const int vecs = std::min(forced.number("vecs", wanted_warp_vecs(problem, width, vectors)),
                            most_warp_vecs(problem, width));
  plan.threads = std::min(kWarpSize, power_of_two_from(ceil_div(vectors, vecs)));
  plan.vecs = static_cast<int>(ceil_div(vectors, plan.threads));
  // Backward has few kernels: of the vectors they provide for, some may be missing.
  if (problem.backward) plan.vecs = width > 1 ? 2 : plan.vecs <= 4 ? 4 : 8;
  plan.slice_cols = static_cast<int>(problem.cols);
  if (!problem.backward) {
    plan.groups = kWarpForwardThreads / plan.threads;
    plan.blocks = ceil_div(problem.rows, plan.groups);
  } else if (has_few_rows(problem, forced)) {
    plan.groups = kBackwardThreads / plan.threads;
    lay_out_few_rows(plan, problem);
  } else {
    const bool activates = width > 1 && problem.has_epilogue && !problem.residual;
    const int threads = warp_backward_threads(size_of(problem.x), activates);
    plan.groups = threads / plan.threads;
    plan.blocks = std::min<int64_t>(ceil_div(problem.rows, plan.groups), device.sms);
    plan.shared_bytes = static_cast<int>(2 * (threads / kWarpSize) * problem.cols *
                                         std::max(4, size_of(problem.x)));
  }
  return plan;
}

// Forward with nothing fused, nothing shifted and parameters of x's type: kernels of fewer
// registers.
bool is_plain(const Problem& problem) {
  return problem.aligned && !problem.residual && !problem.has_epilogue &&
         problem.x == problem.weight && problem.x != DataType::kFloat64;
}

// Vectors a thread owns of a row that a block keeps in registers, best first. us with four, five
// and eight; bfloat16: 16384 x 8192 130.3, 130.1, 132.8; 11264 x 11264 148.6, 124.1, 126.0; 8192 x
// 12288 112.7, 114.0, 100.0; 8192 x 16384 136.8, 135.1, 133.4; float32: 16384 x 4096 130.8, 129.5,
// 132.2; 10240 x 6144 132.7, 132.6, 123.2. With a residual: 16384 x 8192 265.0, 261.6, 274.9. With
// GELU: 32768 x 5120 175.4, 170.4, -; 16384 x 6144 107.8, 113.3, 109.0; 16384 x 8192 145.3, 153.8,
// 137.7; 8192 x 10240 100.3, 96.0, 93.0; 8192 x 12288 112.3, 132.8, 112.5 (SiLU 106.7, 137.2,
// 115.9); 8192 x 14336 150.8, 140.2, 147.0; 8192 x 16384 159.9, 169.8, 157.2 (SiLU 155.3, 162.6,
// 165.6). Ragged: 8192 x 8191 80.0, 85.8, 81.4; 8192 x 12287 137.8, 146.2, 123.1.
std::vector<int> forward_block_vecs(const Problem& problem, int64_t vectors) {
  const bool long_row = vectors > 1472;
  if (problem.residual) return {5, 4, 8};
  // Rows that never begin at multiples of 16 bytes; others are summed alike wherever they begin, up
  // to 4,096 vectors.
  const bool ragged = problem.cols * std::min(size_of(problem.x), size_of(problem.y)) % 16 != 0;
  if (ragged) return long_row ? std::vector<int>{8, 5, 4} : std::vector<int>{4, 5, 8};
  if (problem.has_epilogue) {
    if (vectors > 960 && vectors <= 1408) return {8, 4, 5};
    const bool better_five = vectors <= 704 || (vectors > 1664 && vectors <= 1792);
    return better_five ? std::vector<int>{5, 4, 8} : std::vector<int>{4, 5, 8};
  }
  return long_row ? std::vector<int>{8, 5, 4} : std::vector<int>{5, 4, 8};
}

// Forward: a row stays in the registers of one block. Short rows leave as few places empty as can
// be; with a residual three vectors of either are best (us with three and four, bfloat16: 32768 x
// 4096 270.4, 274.8; 65536 x 2048 262.7, 264.9; 32768 x 3072 201.8, 199.8).
std::optional<Plan> forward_block_plan(const Problem& problem, int width, int64_t vectors,
                                       const Forced& forced) {
  std::optional<Plan> best;
  int64_t best_places = 0;
  const bool short_row = vectors < 640;
  const bool fewest_places = short_row && !problem.residual;
  const auto ladder = fewest_places ? std::vector<int>{4, 5, 3}
                      : short_row   ? std::vector<int>{3, 4, 5}
                                    : forward_block_vecs(problem, vectors);
  for (int vecs : ladder) {
    Plan plan;
    plan.strategy = Strategy::kBlock;
    plan.width = width;
    plan.vecs = forced.number("vecs", vecs);
    plan.threads = static_cast<int>(round_up(ceil_div(vectors, plan.vecs), kWarpSize));
    const bool lean = is_lean(problem.has_epilogue, problem.residual, size_of(problem.x),
                              size_of(problem.weight));
    if (plan.threads > most_forward_threads(plan.vecs, is_plain(problem), lean)) continue;
    // Only a thread's last vector may be missing.
    if (int64_t{plan.vecs - 1} * plan.threads >= vectors) continue;
    const int64_t places = int64_t{plan.threads} * plan.vecs;
    if (best && (!fewest_places || places >= best_places)) continue;
    plan.blocks = problem.rows;
    plan.slice_cols = static_cast<int>(problem.cols);
    best = plan;
    best_places = places;
  }
  return best;
}

// Persistent blocks: `sms` of them in sets of `blocks_per_row`, as many sets as there is work for.
void lay_out_slices(Plan& plan, const Problem& problem, const Device& device) {
  const int64_t sets = device.sms / plan.blocks_per_row;
  const int64_t needed = ceil_div(problem.rows, plan.groups);
  plan.blocks = std::max<int64_t>(1, std::min(sets, needed)) * plan.blocks_per_row;
}

// Slices begin at multiples of 16 bytes of every tensor, as bulk copies must.
int slice_of(int64_t cols, int blocks_per_row, const Problem& problem, int width) {
  const int unit = width == 1 ? 1 : 16 / std::min(size_of(problem.x), size_of(problem.y));
  return static_cast<int>(round_up(ceil_div(cols, blocks_per_row), unit));
}

// Widening the slices' number to what the device's blocks allow keeps every multiprocessor busy.
int widen(int blocks_per_row, int sms) {
  return std::min(kMaxBlocksPerRow, sms / (sms / blocks_per_row));
}

// The meeting takes about 2 us: where slices are so short that a ring holds five, a row's sums are
// given two rows' time. A ring holds the rows that wait, the one in work and one on its way.
int lag_of(const Plan& plan, const Forced& forced) {
  if (plan.blocks_per_row == 1) return 0;
  return forced.number("lag", plan.stages >= 5 || !plan.bulk ? 2 : 1);
}

// So many blocks a row that a slice of it meets what `fits` asks for, which lays out the rest.
template <typename Fits>
std::optional<Plan> forward_sliced_plan(const Problem& problem, const Device& device, int vecs,
                                        const Forced& forced, const Fits& fits) {
  if (device.capability < 90 || !problem.aligned || problem.x == DataType::kFloat64 ||
      problem.residual) {
    return std::nullopt;
  }
  const int most = std::min(device.sms, kMaxBlocksPerRow);
  for (int least = forced.number("blocks_per_row", 1); least <= most; ++least) {
    Plan plan;
    plan.strategy = Strategy::kSplit;
    plan.width = 16 / size_of(problem.x);
    plan.vecs = vecs;
    plan.blocks_per_row = forced.numbers.count("blocks_per_row") ? least : widen(least, device.sms);
    plan.slice_cols = slice_of(problem.cols, plan.blocks_per_row, problem, plan.width);
    // The last slice must not be empty.
    if (int64_t{plan.slice_cols} * (plan.blocks_per_row - 1) >= problem.cols) continue;
    const int64_t vectors = ceil_div(plan.slice_cols, plan.width);
    plan.threads = static_cast<int>(round_up(ceil_div(vectors, vecs), kWarpSize));
    if (!fits(plan, device.shared_memory - kReservedSharedMemory)) continue;
    lay_out_slices(plan, problem, device);
    plan.workspace_bytes = plan.blocks_per_row > 1 ? problem.rows * plan.blocks_per_row * 8 : 0;
    return plan;
  }
  return std::nullopt;
}

// A ring of slices of x, and the slices of the parameters, in shared memory.
std::optional<Plan> forward_ring_plan(const Problem& problem, const Device& device,
                                      const Forced& forced) {
  const auto fits = [&](Plan& plan, int available) {
    const int64_t params = int64_t{2} * plan.slice_cols * size_of(problem.weight);
    const int64_t row = int64_t{plan.slice_cols} * size_of(problem.x);
    const int64_t stages = std::min<int64_t>(kMaxStages, (available - params) / row);
    plan.stages = forced.number("stages", static_cast<int>(stages));
    plan.bulk = true;
    plan.lag = lag_of(plan, forced);
    plan.shared_bytes = static_cast<int>(plan.stages * row + params);
    // Five: a row's sums then have two rows' time to meet. In half precision that means slices of
    // 16,384 columns (bfloat16: 4096 x 65536 304 us, with longer ones 334; 2048 x 262144 608, 664).
    return stages >= 5 && plan.threads <= kSplitForwardThreads;
  };
  return forward_sliced_plan(problem, device, kSplitForwardVecs, forced, fits);
}

// A slice of x in registers, that of weight and as much as there is room for of bias in shared
// memory. There are kernels for what is common in such rows: no epilogue, y of x's type.
std::optional<Plan> forward_resident_plan(const Problem& problem, const Device& device,
                                          const Forced& forced) {
  if (problem.has_epilogue || problem.y != problem.x) return std::nullopt;
  const auto fits = [&](Plan& plan, int available) {
    const int64_t size = size_of(problem.weight);
    const int64_t left = available - plan.slice_cols * size;
    const int64_t cols_of_threads = int64_t{plan.threads} * plan.width;  // a vector of each
    const int64_t bias_cols = left / (cols_of_threads * size) * cols_of_threads;
    plan.stage_cols = static_cast<int>(std::min<int64_t>(plan.slice_cols, bias_cols));
    plan.shared_bytes = static_cast<int>((int64_t{plan.slice_cols} + plan.stage_cols) * size);
    return left >= 0 && plan.threads <= kResidentThreads;
  };
  return forward_sliced_plan(problem, device, kResidentVecs, forced, fits);
}

// A row that one block can keep, with all of its parameters, is better not split over several rings
// (us kept and split; bfloat16: 8192 x 40000 356 and 425, 4096 x 57344 269 and 292, but 4096 x
// 65536 330 and 304; float32: 8192 x 20000 343 and 378, but 4096 x 25000 266 and 240).
bool better_resident(const Problem& problem, const Plan& resident) {
  const int64_t most_cols = size_of(problem.x) == 4 ? 20480 : 57344;
  return resident.blocks_per_row == 1 && resident.stage_cols == resident.slice_cols &&
         problem.cols <= most_cols;
}

std::optional<Plan> forward_split_plan(const Problem& problem, const Device& device,
                                       const Forced& forced) {
  const auto resident = forward_resident_plan(problem, device, forced);
  if (resident && forced.number("resident", better_resident(problem, *resident)) != 0) {
    return resident;
  }
  const auto ring = forward_ring_plan(problem, device, forced);
  return ring || forced.numbers.count("resident") ? ring : resident;
}

Plan forward_stream_plan(const Problem& problem, int width) {
  Plan plan;
  plan.strategy = Strategy::kStream;
  plan.width = width;
  plan.vecs = width == 1 ? 16 : 8;
  plan.threads = 512;
  plan.slice_cols = plan.threads * plan.vecs * width;
  plan.blocks_per_row = static_cast<int>(ceil_div(problem.cols, plan.slice_cols));
  plan.blocks = problem.rows * plan.blocks_per_row;
  const int64_t pair = 2 * std::max(4, size_of(problem.x));
  plan.totals_offset = round_up(plan.blocks * pair, 256);
  plan.workspace_bytes = plan.totals_offset + problem.rows * pair;
  return plan;
}

// Backward, one block or several a row: a thread owns the same columns of every row its block
// works on and keeps their dweight and dbias in registers.
std::optional<Plan> backward_block_plan(const Problem& problem, const Device& device, int width,
                                        const Forced& forced, bool generous) {
  // Single elements take more registers each.
  const int max_vecs = width == 1 ? 16 : kBackwardColsPerThread / width;
  const int64_t block_cols = int64_t{kBackwardThreads} * max_vecs * width;
  // Beside the threads that work on rows, a block of a split row has a warp that collects.
  const auto most_threads = [](int blocks_per_row) {
    return kBackwardThreads - (blocks_per_row > 1 ? kWarpSize : 0);
  };
  const bool may_bulk =
      device.capability >= 90 && problem.x != DataType::kFloat64 && forced.number("bulk", 1) != 0;
  const int available = device.shared_memory - kReservedSharedMemory;
  int minimum = static_cast<int>(ceil_div(problem.cols, block_cols));
  if (forced.strategy == Strategy::kSplit) minimum = std::max(minimum, 2);
  minimum = forced.number("blocks_per_row", minimum);
  const int most = std::min(device.sms, kMaxBlocksPerRow);
  for (int least = minimum; least <= most; ++least) {
    Plan plan;
    plan.width = width;
    plan.blocks_per_row =
        forced.numbers.count("blocks_per_row") || least == 1 ? least : widen(least, device.sms);
    plan.strategy = plan.blocks_per_row > 1 ? Strategy::kSplit : Strategy::kBlock;
    // There are no kernels for float64, nor for single elements without bulk copies.
    if (plan.strategy == Strategy::kSplit &&
        (problem.x == DataType::kFloat64 || (width == 1 && !may_bulk))) {
      return std::nullopt;
    }
    plan.slice_cols = slice_of(problem.cols, plan.blocks_per_row, problem, width);
    if (int64_t{plan.slice_cols} * (plan.blocks_per_row - 1) >= problem.cols) continue;
    const int64_t vectors = ceil_div(plan.slice_cols, width);
    // Sixteen columns a thread where one block has a row: more and shorter threads pay more for
    // the reductions (32768 x 4096 bfloat16: 229 us against 276 with eight), and beyond xhat and g
    // have no registers.
    int vecs = width == 1 ? max_vecs : std::max(1, max_vecs / 2);
    while (vecs < max_vecs && ceil_div(vectors, vecs) > most_threads(plan.blocks_per_row)) {
      vecs *= 2;
    }
    if (problem.x == DataType::kFloat64 && width > 1) vecs = max_vecs;
    plan.vecs = forced.number("vecs", vecs);
    plan.threads = static_cast<int>(round_up(ceil_div(vectors, plan.vecs), kWarpSize));
    const int block_threads = most_threads(plan.blocks_per_row);
    if (plan.threads > block_threads) continue;
    // Room for what threads without columns read, or for what lies around a row that does not
    // begin at a multiple of 16 bytes.
    const int64_t unit = 16 / std::min(size_of(problem.x), size_of(problem.y));
    plan.stage_cols = static_cast<int>(width > 1 ? int64_t{plan.threads} * plan.vecs * width
                                                 : round_up(plan.slice_cols + unit - 1, unit));
    const int64_t acc = std::max(4, size_of(problem.x));
    const int64_t group_sums = int64_t{2} * plan.vecs * width * plan.threads * acc;
    const int64_t params = round_up(
        int64_t{problem.has_epilogue ? 2 : 1} * plan.stage_cols * size_of(problem.weight), 16);
    const int64_t stage = int64_t{plan.stage_cols} * (size_of(problem.x) + size_of(problem.y));
    // A row in work, one that waits for its sums (kSplit), one on its way; more of them if the row
    // can have more blocks (2048 x 262144 bfloat16: 1110 us with four, 1144 with three; 64 x 150528
    // float32: 47 us with five, 53 with three).
    const int wanted_stages = size_of(problem.x) == 4 ? 5 : 4;
    const int least_stages = plan.blocks_per_row == 1 ? 2 : generous ? wanted_stages : 3;
    const auto fits = [&](int groups) {
      return (groups == 1 || groups * group_sums <= available) &&
             (!may_bulk || params + least_stages * stage * groups <= available);
    };
    const bool keeps = plan.vecs * width <= kKeptColsPerThread;
    const bool may_group = plan.blocks_per_row == 1 && (keeps || problem.x == DataType::kFloat64);
    int groups = may_group ? std::min(kMaxGroups, std::max(1, block_threads / plan.threads)) : 1;
    while (groups > 1 && !fits(groups)) --groups;
    if (!fits(groups)) continue;
    // Up to here nothing depends on the number of rows, and nothing after it changes a row's sums.
    // Few rows go to as many multiprocessors as there are.
    groups = static_cast<int>(
        std::min<int64_t>(groups, std::max<int64_t>(1, ceil_div(problem.rows, device.sms))));
    plan.groups = may_group ? forced.number("groups", groups) : 1;
    if (plan.strategy == Strategy::kBlock && keeps && has_few_rows(problem, forced)) {
      lay_out_few_long_rows(plan, problem, device, forced);
      return plan;
    }
    // Two groups whose threads are nearly full slow each other's memory down (us with one and two;
    // bfloat16: 32768 x 4096 211 and 222, x 4032 207 and 213, x 3840 206 and 200; float32: 8192 x
    // 4096 111.8 and 113.6), but a residual or an activation hides behind the other group
    // (bfloat16: 302 and 279, 317 and 247).
    const bool plain = !problem.residual && !problem.has_epilogue && problem.y == problem.x;
    if (may_bulk && plain && plan.groups == 2 && problem.cols >= 3968) {
      plan.groups = forced.number("groups", 1);
    }
    plan.shared_bytes = static_cast<int>(plan.groups > 1 ? plan.groups * group_sums : 0);
    // A ring pays from the third row on.
    plan.bulk = may_bulk && (plan.blocks_per_row > 1 || problem.rows > int64_t{2} * plan.groups);
    if (plan.bulk) {
      const int64_t ring_stage = stage * plan.groups;
      int64_t stages = std::min<int64_t>(kMaxStages, (available - params) / ring_stage);
      if (plan.blocks_per_row == 1) {
        // Rows further ahead do harm (bfloat16: 32768 x 1024 58 us with 64 KB of them, 63 with 224;
        // 32768 x 2048 108 and 116); but a row that is read twice is held for longer.
        const int64_t wanted = (kWantedRingBytes + ring_stage / 2) / ring_stage;
        stages = std::min(stages, std::max<int64_t>(wanted, keeps ? 2 : 3));
      }
      plan.stages = forced.number("stages", static_cast<int>(stages));
      plan.shared_bytes =
          static_cast<int>(std::max<int64_t>(plan.shared_bytes, params + plan.stages * ring_stage));
    }
    plan.lag = lag_of(plan, forced);
    lay_out_slices(plan, problem, device);
    return plan;
  }
  return std::nullopt;
}

Plan backward_stream_plan(const Problem& problem, const Device& device, int width) {
  Plan plan;
  plan.strategy = Strategy::kStream;
  plan.width = width;
  plan.vecs = 16 / width;
  plan.threads = kStreamSumsThreads;
  plan.slice_cols = plan.threads * plan.vecs * width;
  plan.blocks_per_row = static_cast<int>(ceil_div(problem.cols, plan.slice_cols));
  // Blocks over rows as well, where the columns alone leave multiprocessors idle.
  int64_t sets = ceil_div(int64_t{4} * device.sms, plan.blocks_per_row);
  sets = std::max<int64_t>(1, std::min<int64_t>({sets, problem.rows, device.sms}));
  plan.blocks = sets * plan.blocks_per_row;
  return plan;
}

void lay_out_backward_workspace(Plan& plan, const Problem& problem) {
  if (plan.few_rows) return;  // no partial sums
  const int64_t acc = std::max(4, size_of(problem.x));
  const int64_t sets = plan.blocks / std::max(1, plan.blocks_per_row);
  plan.partials = static_cast<int>(sets);
  int64_t offset = 0;
  if (plan.strategy == Strategy::kStream) {
    offset += problem.rows * plan.blocks_per_row * (plan.threads / kWarpSize) * 2 * acc;
  } else if (plan.blocks_per_row > 1) {
    offset += problem.rows * plan.blocks_per_row * 2 * acc;
  }
  plan.totals_offset = offset = round_up(offset, 256);
  if (plan.strategy == Strategy::kStream) {
    offset = round_up(offset + problem.rows * 2 * acc, 256);
  }
  plan.dparams_offset = offset;
  if (problem.needs_dparams && plan.partials > 1) {
    offset += int64_t{2} * plan.partials * problem.cols * acc;
  }
  plan.workspace_bytes = offset;
}

[[noreturn]] void refuse(Strategy strategy, const Problem& problem) {
  std::ostringstream message;
  message << "fused_layernorm: the strategy " << name_of(strategy) << " cannot run "
          << (problem.backward ? "backward" : "forward") << " rows of " << problem.cols
          << " columns on this device";
  throw std::invalid_argument(message.str());
}

}  // namespace

Plan make_plan(const Problem& problem, const Device& device) {
  Forced forced;
  {
    const std::lock_guard<std::mutex> lock(forced_mutex);
    forced = forced_plan;
  }
  // Forward moves rows that begin anywhere by vectors, unless they are too long for a block.
  const bool shifted = !problem.backward && !problem.aligned;
  const int width = problem.aligned || shifted ? 16 / size_of(problem.x) : 1;
  const int64_t vectors = ceil_div(problem.cols, width);
  const auto wanted = [&](Strategy strategy) {
    return !forced.strategy || *forced.strategy == strategy;
  };

  std::optional<Plan> plan;
  if (wanted(Strategy::kWarp) && vectors <= int64_t{kWarpSize} * most_warp_vecs(problem, width)) {
    plan = warp_plan(problem, device, width, vectors, forced);
  }
  if (!problem.backward) {
    if (!plan && wanted(Strategy::kBlock)) {
      plan = forward_block_plan(problem, width, vectors, forced);
    }
    if (!plan && wanted(Strategy::kSplit)) plan = forward_split_plan(problem, device, forced);
    if (!plan && wanted(Strategy::kStream)) {
      plan = forward_stream_plan(problem, shifted ? 1 : width);
    } else if (plan) {
      plan->shifted = shifted;
    }
  } else {
    if (!plan && (wanted(Strategy::kBlock) || wanted(Strategy::kSplit))) {
      plan = backward_block_plan(problem, device, width, forced, true);
      if (!plan) plan = backward_block_plan(problem, device, width, forced, false);
      if (plan && !wanted(plan->strategy)) plan.reset();
    }
    if (!plan && wanted(Strategy::kStream)) {
      plan = backward_stream_plan(problem, device, width);
    }
    if (plan) lay_out_backward_workspace(*plan, problem);
  }
  if (!plan) refuse(*forced.strategy, problem);
  return *plan;
}

void force_plan(std::optional<std::string> options) {
  Forced forced;
  std::istringstream words(options.value_or(""));
  for (std::string word; words >> word;) {
    const auto equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (key == "strategy") {
      const auto found = kStrategies.find(value);
      if (found == kStrategies.end()) {
        throw std::invalid_argument("fused_layernorm: no strategy is called '" + value +
                                    "': expected warp, block, split or stream");
      }
      forced.strategy = found->second;
    } else {
      forced.numbers[key] = std::stoi(value);
    }
  }
  const std::lock_guard<std::mutex> lock(forced_mutex);
  forced_plan = forced;
}

std::string describe(const Plan& plan) {
  std::ostringstream json;
  json << "{\"strategy\": \"" << name_of(plan.strategy) << "\", \"width\": " << plan.width
       << ", \"vecs\": " << plan.vecs << ", \"threads\": " << plan.threads
       << ", \"groups\": " << plan.groups << ", \"blocks_per_row\": " << plan.blocks_per_row
       << ", \"slice_cols\": " << plan.slice_cols << ", \"blocks\": " << plan.blocks
       << ", \"few_rows\": " << (plan.few_rows ? "true" : "false")
       << ", \"column_blocks\": " << plan.column_blocks
       << ", \"shifted\": " << (plan.shifted ? "true" : "false")
       << ", \"bulk\": " << (plan.bulk ? "true" : "false") << ", \"stages\": " << plan.stages
       << ", \"lag\": " << plan.lag << ", \"shared_bytes\": " << plan.shared_bytes
       << ", \"partials\": " << plan.partials << ", \"workspace_bytes\": " << plan.workspace_bytes
       << "}";
  return json.str();
}

}  // namespace fused_layernorm
