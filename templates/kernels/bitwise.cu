// Helpers of `vet --bitwise`: memory filled with values that differ everywhere, and a count of words that differ.
// Each entry takes the parameters listed; pyharness/bitwise.py packs them.

#include <cstdint>

namespace {

// A mix of the position's bits (the finaliser of MurmurHash3, public domain).
__device__ __forceinline__ uint32_t mixed(uint64_t position, uint32_t seed) {
  uint64_t h = position * 0x9e3779b97f4a7c15ull + seed;
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdull;
  h ^= h >> 33;
  return static_cast<uint32_t>(h >> 16);
}

}  // namespace

// Words of storage whose elements are finite: kind 0 is f32 in +-[0.5, 2), 1 and 2 are pairs of bf16 and f16 in the
// same range, 3 is four signed bytes of -127 to 127, 4 is f32 in [0.0078125, 0.03125), for scales.
extern "C" __global__ void __launch_bounds__(256)
    bitwise_fill(uint32_t* words, unsigned long long count, int kind, uint32_t seed) {
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint32_t r = mixed(i, seed);
    uint32_t word = 0;
    if (kind == 0) {
      word = (r & 0x80ffffffu) + 0x3f000000u;  // sign and mantissa; exponents 126 and 127
    } else if (kind == 1) {
      word = (r & 0x80ff80ffu) + 0x3f003f00u;
    } else if (kind == 2) {
      word = (r & 0x87ff87ffu) + 0x38003800u;
    } else if (kind == 3) {
      for (int k = 0; k < 4; ++k) {
        const uint32_t byte = (r >> (8 * k)) & 0xffu;
        word |= (byte == 0x80u ? 0x7fu : byte) << (8 * k);
      }
    } else {
      word = (r & 0x00ffffffu) + 0x3c000000u;
    }
    words[i] = word;
  }
}

// Adds the number of words in which two ranges differ to *differing.
extern "C" __global__ void __launch_bounds__(256)
    bitwise_compare(const uint4* a, const uint4* b, unsigned long long vectors, unsigned long long* differing) {
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  unsigned long long found = 0;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += step) {
    const uint4 v = a[i], w = b[i];
    found += (v.x != w.x) + (v.y != w.y) + (v.z != w.z) + (v.w != w.w);
  }
  if (found) atomicAdd(differing, found);
}
