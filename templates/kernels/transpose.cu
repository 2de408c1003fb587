// Turns arrays whose tokens lie side by side, [batch, rows, tokens], into [batch, tokens, rows], which scans read: x, B
// and C behind a convolution over tokens. What moves are words of 16 or 32 bits, whatever they mean.
//
// One launch does up to kMostArrays arrays of one batch and one number of tokens: blocks (tile of tokens, tile of rows,
// sequence), the tiles of rows of one array behind those of the other; kThreads threads; a tile of dynamic shared
// memory. pyharness/transpose.py has the same numbers and packs TransposeArgs.

#include <cstdint>

namespace {

constexpr int kMostArrays = 5;
constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kTokensOfTile = 64;

}  // namespace

// Strides in elements. The source may start at any element; the result at a word of 32 bits, `rows` elements a token,
// which are whole words.
struct TransposedArray {
  const void* source;
  void* result;
  long long batch_stride, row_stride;
  long long rows;
};

struct TransposeArgs {
  TransposedArray arrays[kMostArrays];
  int count;
  int tokens;
};
static_assert(sizeof(TransposeArgs) == 208);

extern __shared__ __align__(16) unsigned char shared_memory[];

namespace {

// A lane writes one word of a token, of kPacked rows, so that a warp's store is 128 contiguous bytes; it reads tokens
// one by one, for which no alignment is needed.
template <typename Element>
__device__ __forceinline__ void transpose(const TransposeArgs& args) {
  constexpr int kPacked = 4 / sizeof(Element);
  constexpr int kRowsOfTile = kWarp * kPacked;
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kLoads = kTokensOfTile / kWarp;
  // An odd number of words: lanes that read one token of rows after each other find 32 different banks.
  constexpr int kPitch = kTokensOfTile + kPacked;
  Element* const tile = reinterpret_cast<Element*>(shared_memory);

  int which = 0;
  long long first_row = static_cast<long long>(blockIdx.y) * kRowsOfTile;
  while (which + 1 < args.count && first_row >= args.arrays[which].rows) {
    first_row -= (args.arrays[which].rows + kRowsOfTile - 1) / kRowsOfTile * kRowsOfTile;
    ++which;
  }
  const TransposedArray& array = args.arrays[which];
  const long long first_token = static_cast<long long>(blockIdx.x) * kTokensOfTile;
  const long long rows = array.rows, row_stride = array.row_stride;
  const int rows_here = static_cast<int>(min(rows - first_row, static_cast<long long>(kRowsOfTile)));
  const int tokens_here = static_cast<int>(min(args.tokens - first_token, static_cast<long long>(kTokensOfTile)));
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  const Element* source = static_cast<const Element*>(array.source) + blockIdx.z * array.batch_stride +
                          (first_row + warp) * row_stride + first_token + lane;
  Element loaded[kRowsOfTile / kWarps][kLoads];
#pragma unroll
  for (int i = 0; i < kRowsOfTile / kWarps; ++i) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const bool inside = warp + i * kWarps < rows_here && lane + k * kWarp < tokens_here;
      loaded[i][k] = inside ? source[k * kWarp] : Element(0);
    }
    source += kWarps * row_stride;
  }
  // Rows of one word are kWarp rows apart in the tile: else lanes would step over two rows and meet in a bank.
#pragma unroll
  for (int i = 0; i < kRowsOfTile / kWarps; ++i) {
    const int row = warp + i * kWarps;
    Element* const place = tile + (row % kPacked * kWarp + row / kPacked) * kPitch + lane;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) place[k * kWarp] = loaded[i][k];
  }
  __syncthreads();

  const Element* const column = tile + lane * kPitch + warp;
  const long long first = blockIdx.z * static_cast<long long>(args.tokens) + first_token + warp;
  Element* result = static_cast<Element*>(array.result) + first * rows + first_row + lane * kPacked;
#pragma unroll
  for (int i = 0; i < kTokensOfTile / kWarps; ++i) {
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < kPacked; ++k) {
      word |= static_cast<uint32_t>(column[k * kWarp * kPitch + i * kWarps]) << (k * 8 * sizeof(Element) % 32);
    }
    const bool inside = lane * kPacked < rows_here && warp + i * kWarps < tokens_here;
    if (inside) *reinterpret_cast<uint32_t*>(result) = word;
    result += kWarps * rows;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) ssm_transpose_16(const __grid_constant__ TransposeArgs args) {
  transpose<uint16_t>(args);
}

extern "C" __global__ void __launch_bounds__(kThreads) ssm_transpose_32(const __grid_constant__ TransposeArgs args) {
  transpose<uint32_t>(args);
}
