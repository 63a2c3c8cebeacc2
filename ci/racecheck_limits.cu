// SPDX-License-Identifier: Apache-2.0
// A small program that shows what racecheck can follow in a block whose teams have barriers of
// their own.
//
//   nvcc -arch=sm_90 -lineinfo -o racecheck_teams ci/racecheck_teams.cu
//   compute-sanitizer --tool racecheck ./racecheck_teams 0   # no hazards
//   compute-sanitizer --tool racecheck ./racecheck_teams 1   # 1 hazard
//
// The program has no race: all threads reach a __syncthreads() between the stores to `sums` and the
// loads of other teams' sums. Racecheck of CUDA 13.0 still reports hazards there if the teams have
// passed different numbers of their own barriers before, and none if the numbers are equal. The
// numbers can differ in backward/group.cu, where one team may have one row of a group more than
// another. The cases that ci/on_gpu gives racecheck therefore have equally many rows for each team.
#include <cstdio>
#include <cstdlib>

constexpr int kTeams = 4, kTeamThreads = 64;

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

int main(int argc, char** argv) {
  constexpr int kBlocks = 4;
  float* out;
  if (cudaMalloc(&out, kBlocks * kTeams * kTeamThreads * sizeof(float)) != cudaSuccess) return 1;
  teams_kernel<<<kBlocks, kTeams * kTeamThreads>>>(out, argc > 1 && atoi(argv[1]) != 0);
  const cudaError_t error = cudaDeviceSynchronize();
  printf("%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
