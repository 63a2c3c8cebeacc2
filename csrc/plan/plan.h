// Which kernel runs a problem, and how it is laid out: plain host code that needs no GPU.
//
// The numbers that fix the order of a row's sums (strategy, width, vecs, threads, blocks_per_row)
// follow from the row's length, the types and the device, never from the number of rows: a row's
// result is the same in any batch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fused_layernorm {

enum class DataType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

// Threads of a block of the forward warp kernel (4194304 x 64 float32: 522 us, with 256 533; 128 x
// 1024 bfloat16: 2.6 and 2.8).
constexpr int kWarpForwardThreads = 128;
// Vectors that a lane may own in forward; beside a residual four of half precision are better in a
// block, be it of one warp (bfloat16: 32768 x 1024 67.4 us, 66.4; 4096 x 1024 9.8, 10.0).
constexpr int most_warp_forward_vecs(int size, bool residual) {
  return residual && size == 2 ? 3 : 4;
}
// Threads of backward's persistent blocks, which leave each 128 registers (96, with 640 threads,
// were slower even where rows of 5120 columns leave 192 of 512 threads idle: 152 us against 147).
constexpr int kBackwardThreads = 512;
// The warp kernel of float32 with an activation has more, of 80 registers (4194304 x 64 with GELU:
// 833 us, with 512 threads 959; without, 640 threads and 512 are alike).
constexpr int warp_backward_threads(int size, bool activates) {
  return size == 4 && activates ? 768 : kBackwardThreads;
}
// Blocks of few rows on a multiprocessor: they have no running sums, but activations take
// registers.
constexpr int few_rows_blocks(bool fused) { return fused ? 1 : 2; }
// Rows that a block of backward works on at once, and rows (slices) that a ring holds.
constexpr int kMaxGroups = 15;
constexpr int kMaxStages = 8;
// Registers: a thread of backward keeps the running dweight and dbias of its columns; in the warp
// kernel, which also has the next row in registers, of so many vectors.
constexpr int most_warp_backward_vecs(int width) { return width == 1 ? 8 : 2; }
constexpr int kBackwardColsPerThread = 32;
constexpr int kKeptColsPerThread = 16;  // where it keeps xhat and g of a row beside them
// Blocks that compute dweight and dbias alone have lines of 64 bytes, single elements sectors
// of 32.
constexpr int column_lanes(int width, int size) { return width == 1 ? 32 / size : 4; }
// Forward keeps a row in registers. Up to four vectors a thread take 64 of them, five 72, eight 96;
// but of plain rows (nothing fused, nothing shifted, parameters of x's type, no float64) eight take
// 80 in narrow blocks, three a multiprocessor, and 64 in wide ones, two a multiprocessor; and under
// an epilogue alone, with parameters no wider than x, four take 56 (with GELU: 8192 x 12288 112.5
// us, with 64 123.7).
constexpr int kNarrowForwardThreads = 256;
constexpr bool is_lean(bool epilogue, bool residual, int size, int weight_size) {
  return epilogue && !residual && weight_size <= size;
}
constexpr int most_forward_threads(int vecs, bool plain, bool lean) {
  if (vecs == 4 && lean) return 576;
  return vecs <= 4 ? 1024 : vecs == 5 ? 448 : plain ? 512 : 640;
}
// One warp of a block of a split row collects the row's sums.
constexpr int kSplitForwardThreads = 1024 - 32;
constexpr int kSplitForwardVecs = 4;
// Forward's kSplit without bulk copies keeps a slice in registers, 32 of a thread's 64.
constexpr int kResidentThreads = 1024;
constexpr int kResidentVecs = 8;
// Threads of backward's kStream blocks; each of their warps leaves its share of a row's sums.
constexpr int kStreamSumsThreads = 256;
// A device with more multiprocessors than this leaves some out of its longest rows.
constexpr int kMaxBlocksPerRow = 160;

constexpr int size_of(DataType type) {
  return type == DataType::kFloat64 ? 8 : type == DataType::kFloat32 ? 4 : 2;
}

enum class Strategy : int32_t {
  kWarp,    // a warp, or a part of one, holds a row in registers
  kBlock,   // a block, or a part of one, works on a row
  kSplit,   // one persistent block or several hold a row, several meet in global memory
  kStream,  // rows of any length: sums, combined, then a second read
};

struct Device {
  int capability = 90;         // 10 * major + minor
  int sms = 132;               // streaming multiprocessors
  int shared_memory = 232448;  // bytes that one block may have
};

struct Problem {
  int64_t rows = 0;
  int64_t cols = 0;
  DataType x = DataType::kFloat32;
  DataType weight = DataType::kFloat32;
  DataType y = DataType::kFloat32;
  bool aligned = true;  // every row of every tensor begins at a multiple of 16 bytes (of x)
  bool backward = false;
  bool residual = false;      // forward: a second input; backward: a gradient beside dx
  bool needs_dparams = true;  // backward: dweight or dbias is asked for
  bool has_epilogue = false;  // an activation, or a scale that is not 1
};

struct Plan {
  Strategy strategy = Strategy::kStream;
  int width = 1;              // elements a thread moves at once (shifted: owns side by side)
  int vecs = 1;               // such vectors a thread owns of a row
  int threads = 32;           // that work on one row in a block; kWarp: lanes on one row
  int groups = 1;             // rows that a block works on at once
  int blocks_per_row = 1;     // kSplit: slices of a row; kStream: chunks of a row
  int slice_cols = 0;         // columns of one slice or chunk
  int stage_cols = 0;         // bulk: columns that a slice has room for in shared memory; forward's
                              // kSplit without bulk copies: those that a slice of bias has room for
  int64_t blocks = 1;         // on rows; persistent in backward and kSplit
  bool few_rows = false;      // backward: all in one launch, without partial sums
  int64_t column_blocks = 0;  // few rows: blocks on dweight and dbias beside those on rows
  bool shifted = false;       // forward: rows begin anywhere, and are moved by vectors all the same
  bool bulk = false;          // rows come to shared memory by Hopper's bulk copies
  int stages = 0;             // bulk: rows (row slices) that a group keeps in flight
  int lag = 0;                // kSplit: rows between publishing a row's sums and collecting them
  int shared_bytes = 0;       // dynamic shared memory of a block
  int partials = 1;           // backward: float sums of dweight and dbias to be added up
  int64_t workspace_bytes = 0;

  // Offsets into the workspace.
  int64_t dparams_offset = 0;  // backward: [dweight, dbias][partials][cols]
  int64_t totals_offset = 0;   // kStream: the two sums of every row
};

// Throws std::invalid_argument, in one sentence, if a forced strategy cannot run the problem.
Plan make_plan(const Problem& problem, const Device& device);

// Overrides parts of every later plan: "strategy=split vecs=4 threads=256 groups=1 bulk=0 stages=3
// blocks_per_row=8", any subset of them; nothing resets. For tests and tuning; process-wide.
void force_plan(std::optional<std::string> options);

// The plan as a JSON object, for tests and `python -m fused_layernorm`.
std::string describe(const Plan& plan);

}  // namespace fused_layernorm
