// SPDX-License-Identifier: Apache-2.0
// Small programs without a race in which racecheck of CUDA 13.0 reports a hazard, each the pattern
// of a kernel here. They tell its reports that mean nothing from those that do.
//
//   nvcc -arch=sm_90 -lineinfo -o racecheck_limits ci/racecheck_limits.cu
//   compute-sanitizer --tool racecheck ./racecheck_limits equal      # no hazards
//   compute-sanitizer --tool racecheck ./racecheck_limits different  # 1 hazard
//   compute-sanitizer --tool racecheck ./racecheck_limits chained    # 1 hazard
#include <cstdint>
#include <cstdio>
#include <cstring>

constexpr int kTeams = 4, kTeamThreads = 64, kThreads = kTeams * kTeamThreads;

// Teams with barriers of their own, as in backward/group.cu, where one team may have one row of a
// group more than another. All threads reach a __syncthreads() between the stores to `sums` and the
// loads of other teams' sums. There are hazards if the teams have passed different numbers of their
// own barriers before, and none if the numbers are equal. (So the cases for racecheck have equally
// many rows for each team.)
__global__ void teams_kernel(float* out, bool different) {
  __shared__ float sums[kTeams][kTeamThreads];
  __shared__ float scratch[2][kTeams][2];
  const int team = threadIdx.x / kTeamThreads, thread = threadIdx.x % kTeamThreads;
  float v = thread;
  const int barriers = different ? 2 + team % 3 : 3;
  for (int i = 0; i < barriers; ++i) {
    if (thread % 32 == 0) scratch[i & 1][team][thread / 32] = v;
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(kTeamThreads) : "memory");
    v += scratch[i & 1][team][0] + scratch[i & 1][team][1];
  }
  __syncthreads();
  sums[team][thread] = v;
  __syncthreads();
  float total = 0;
  for (int t = 0; t < kTeams; ++t) total += sums[t][thread];
  out[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

__device__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ void init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Readers, one warp between, and a writer, each behind a barrier at which the one before arrives,
// as the workers, the measurers and the collector of forward/ring.cu: the writer writes anew what
// all readers have read.
__global__ void chained_kernel(float* out) {
  __shared__ alignas(8) uint64_t written[2], read, passed_on;
  __shared__ float number;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init(written, 1);
    init(written + 1, 1);
    init(&read, kThreads / 32 - 2);
    init(&passed_on, 1);
  }
  __syncthreads();
  if (warp == 0) {
    if (lane == 0) {
      number = 1;
      arrive(written);
    }
    wait(&passed_on, 0);
    if (lane == 0) {
      number = 2;
      arrive(written + 1);
    }
  } else if (warp == 1) {
    wait(&read, 0);
    if (lane == 0) arrive(&passed_on);
  } else {
    wait(written, 0);
    float sum = number;
    __syncwarp();
    if (lane == 0) arrive(&read);
    wait(written + 1, 0);
    sum += number;
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  }
}

int main(int argc, char** argv) {
  constexpr int kBlocks = 4;
  float* out;
  if (argc != 2 || cudaMalloc(&out, kBlocks * kThreads * sizeof(float)) != cudaSuccess) {
    return 1;
  }
  if (strcmp(argv[1], "chained") == 0) {
    chained_kernel<<<kBlocks, kThreads>>>(out);
  } else {
    teams_kernel<<<kBlocks, kThreads>>>(out, strcmp(argv[1], "different") == 0);
  }
  const cudaError_t error = cudaDeviceSynchronize();
  printf("%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
