// The ceilings that timings are read against: the fewest bytes and the fewest FMAs or products that a scan can do,
// moved and issued by kernels that do nothing else. Timed in the same run as the scan kernels and by the same protocol.
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

// What a launch costs that does nothing: its parameter block is as large as that of a scan kernel.
struct ScanSized {
  unsigned char bytes[288];
};
extern "C" __global__ void ceiling_empty(ScanSized) {}

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

// The rate of matrix products: `rounds` x 16 times a warp adds the product of 16 x k and k x 128 operands to 16 x 128
// sums that stay in registers, k = 16 in bf16 and 8 in tf32. Compiled for sm_90a by warp group products, of which four
// warps share one and whose right operand is in shared memory; elsewhere by mma.sync. Blocks of 256 threads, two a
// multiprocessor. The operands are numbers of either sign between 1 and 2: a chip's clock depends on what it
// multiplies.
namespace {

constexpr int kProductSteps = 16;

__device__ __forceinline__ unsigned operand_word(unsigned seed) {
  return 0x3f803f80u ^ ((seed * 2654435761u) & 0x807f807fu);
}

}  // namespace

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PRODUCT_SUMS(v, i)                                                                                    \
  "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3]), "+f"(v[i + 4]), "+f"(v[i + 5]), "+f"(v[i + 6]), \
      "+f"(v[i + 7]), "+f"(v[i + 8]), "+f"(v[i + 9]), "+f"(v[i + 10]), "+f"(v[i + 11]), "+f"(v[i + 12]),      \
      "+f"(v[i + 13]), "+f"(v[i + 14]), "+f"(v[i + 15])
#define PRODUCT_NAMES                                                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
// NOTE: rows of the right operand are 128 bytes, swizzled, 8 rows after 1024 bytes; a step of k is 32 bytes further on.
#define PRODUCTS(name, shape, tail)                                                                        \
  extern "C" __global__ void __launch_bounds__(256, 2) name(float* out, int rounds) {                      \
    __shared__ __align__(1024) unsigned panel[128 * 32];                                                   \
    for (int i = threadIdx.x; i < 128 * 32; i += blockDim.x) panel[i] = operand_word(i);                   \
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(panel));                       \
    const unsigned long long right = (address & 0x3ffffu) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;    \
    unsigned left[4];                                                                                      \
    for (int i = 0; i < 4; ++i) left[i] = operand_word(4 * threadIdx.x + i);                               \
    float v[64] = {};                                                                                      \
    asm volatile("fence.proxy.async;" ::: "memory");                                                       \
    __syncthreads();                                                                                       \
    for (int round = 0; round < rounds; ++round) {                                                         \
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");                                              \
      _Pragma("unroll") for (int step = 0; step < kProductSteps; ++step) {                                 \
        asm volatile("wgmma.mma_async.sync.aligned." shape " " PRODUCT_NAMES                               \
                     ", {%64, %65, %66, %67}, %68, 1, 1, 1" tail ";\n"                                     \
                     : PRODUCT_SUMS(v, 0), PRODUCT_SUMS(v, 16), PRODUCT_SUMS(v, 32), PRODUCT_SUMS(v, 48)   \
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right + 2 * (step % 4)) \
                     : "memory");                                                                          \
      }                                                                                                    \
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");                                       \
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");                                       \
    }                                                                                                      \
    float sum = 0.0f;                                                                                      \
    for (int i = 0; i < 64; ++i) sum += v[i];                                                              \
    out[static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x] = sum;                              \
  }
PRODUCTS(ceiling_products_bf16, "m64n128k16.f32.bf16.bf16", ", 0")
PRODUCTS(ceiling_products_tf32, "m64n128k8.f32.tf32.tf32", "")
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define PRODUCTS(name, shape)                                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 2) name(float* out, int rounds) {                               \
    unsigned left[4], right[2];                                                                                     \
    for (int i = 0; i < 4; ++i) left[i] = operand_word(4 * threadIdx.x + i);                                        \
    for (int i = 0; i < 2; ++i) right[i] = operand_word(2 * threadIdx.x + i + 1024);                                \
    float v[16][4] = {};                                                                                            \
    for (int round = 0; round < rounds; ++round) {                                                                  \
      _Pragma("unroll") for (int step = 0; step < kProductSteps; ++step) {                                          \
        _Pragma("unroll") for (int n = 0; n < 16; ++n) {                                                            \
          asm volatile("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                       : "+f"(v[n][0]), "+f"(v[n][1]), "+f"(v[n][2]), "+f"(v[n][3])                                 \
                       : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));     \
        }                                                                                                           \
      }                                                                                                             \
    }                                                                                                               \
    float sum = 0.0f;                                                                                               \
    for (int n = 0; n < 16; ++n) sum += v[n][0] + v[n][1] + v[n][2] + v[n][3];                                      \
    out[static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x] = sum;                                       \
  }
PRODUCTS(ceiling_products_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
PRODUCTS(ceiling_products_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#endif
