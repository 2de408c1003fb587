// The ceilings that timings are read against: the fewest bytes and the fewest FMAs that a scan can do, moved and issued
// by kernels that do nothing else. Timed in the same run as the scan kernels and by the same protocol.
//
// Pointers are 16-byte aligned. Each entry takes the parameters listed; pyharness/ceilings.py packs them.

#include <cuda_runtime.h>

namespace {

constexpr int kWarp = 32;
constexpr int kRowsOfWarp = 4;       // rows of 128 floats, a float4 a lane
constexpr int kWarpsOfBlock = 2;     // blocks of ceiling_slots
constexpr int kVectorsOfThread = 4;  // of ceiling_contiguous and ceiling_copy
constexpr int kChains = 16;          // independent FMA chains of a thread

__device__ __forceinline__ float4 scaled(float4 v, float factor) {
  return make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
}

}  // namespace

// pool[slots[s]] *= factor, in the order of the sequences: what a decode step does to its state, and nothing else.
// A block covers 2 x 4 rows of 128 floats of one slot; tiles = floats of a slot / 1024; gridDim.x = sequences * tiles.
extern "C" __global__ void __launch_bounds__(kWarp* kWarpsOfBlock)
    ceiling_slots(float* pool, const int* slots, long long slot_stride, int tiles, float factor) {
  const int sequence = static_cast<int>(blockIdx.x / tiles);
  const int tile = static_cast<int>(blockIdx.x % tiles);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  float4* rows = reinterpret_cast<float4*>(pool + slots[sequence] * slot_stride) +
                 (static_cast<long long>(tile) * kWarpsOfBlock + warp) * kRowsOfWarp * kWarp + lane;
  float4 v[kRowsOfWarp];
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) v[r] = __ldcs(rows + r * kWarp);
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) __stcs(rows + r * kWarp, scaled(v[r], factor));
}

// data[i] *= factor over one range of whole blocks: gridDim.x = vectors / (4 * blockDim.x).
extern "C" __global__ void __launch_bounds__(256) ceiling_contiguous(float4* data, float factor) {
  float4* first = data + static_cast<long long>(blockIdx.x) * blockDim.x * kVectorsOfThread + threadIdx.x;
  float4 v[kVectorsOfThread];
#pragma unroll
  for (int i = 0; i < kVectorsOfThread; ++i) v[i] = __ldcs(first + i * blockDim.x);
#pragma unroll
  for (int i = 0; i < kVectorsOfThread; ++i) __stcs(first + i * blockDim.x, scaled(v[i], factor));
}

// target[i] = source[i] over one range of whole blocks: the rate at which any kernel can read and write.
extern "C" __global__ void __launch_bounds__(256) ceiling_copy(const float4* source, float4* target) {
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x * kVectorsOfThread + threadIdx.x;
  float4 v[kVectorsOfThread];
#pragma unroll
  for (int i = 0; i < kVectorsOfThread; ++i) v[i] = __ldcs(source + first + i * blockDim.x);
#pragma unroll
  for (int i = 0; i < kVectorsOfThread; ++i) __stcs(target + first + i * blockDim.x, v[i]);
}

// The FMA issue rate: 16 chains a thread of `rounds` x 16 fmaf, whose sum is stored so that they stay.
extern "C" __global__ void __launch_bounds__(256) ceiling_fma(float* out, int rounds, float factor, float addend) {
  float v[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) v[i] = static_cast<float>(threadIdx.x + i);
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int repeat = 0; repeat < kChains; ++repeat) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) v[i] = fmaf(v[i], factor, addend);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum += v[i];
  out[static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x] = sum;
}

// The rate of exponentials: 16 chains a thread of `rounds` x 16 of v = 2^(-v), which stay between 0 and 1.
extern "C" __global__ void __launch_bounds__(256) ceiling_exp(float* out, int rounds) {
  float v[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) v[i] = static_cast<float>(threadIdx.x + i) * 0x1p-9f;
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int repeat = 0; repeat < kChains; ++repeat) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v[i]) : "f"(-v[i]));
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum += v[i];
  out[static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x] = sum;
}
