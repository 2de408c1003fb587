// Pieces of rows: the 16 bytes of state that a lane moves in one access, and the columns of B and C that go with them.
constexpr int kPiece = 16 / sizeof(State);  // columns of a piece
constexpr int kPieceQuads = kPiece / 4;

// kPiece columns as they are stored, four bytes a word, columns from low bits to high.
template <typename T>
struct Piece {
  static constexpr int kWords = kPiece * sizeof(T) / 4;
  uint32_t w[kWords];
};

#include "bits.cuh"

template <typename T>
__device__ __forceinline__ void clear(Piece<T>& piece) {
#pragma unroll
  for (int i = 0; i < Piece<T>::kWords; ++i) piece.w[i] = 0u;
}

__device__ __forceinline__ uint4 load_words(const uint4* p, bool streaming) {
  return streaming ? load_streaming(p) : *p;
}

// Columns [n, n + kPiece) of a row in accesses of up to 16 bytes, which the caller knows to be aligned and to lie
// wholly inside or outside the row; columns from d_state on become 0.
template <bool kStreaming, typename T>
__device__ __forceinline__ void load_piece(Piece<T>& piece, const T* row, int n, int d_state) {
  if constexpr (Piece<T>::kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Piece<T>::kWords; i += 4) {
      const int at = n + i * static_cast<int>(4 / sizeof(T));
      uint4 v = make_uint4(0u, 0u, 0u, 0u);
      if (at < d_state) v = load_words(reinterpret_cast<const uint4*>(row + at), kStreaming);
      piece.w[i] = v.x, piece.w[i + 1] = v.y, piece.w[i + 2] = v.z, piece.w[i + 3] = v.w;
    }
  } else {
    static_assert(Piece<T>::kWords == 2, "four columns of two bytes");
    uint2 v = make_uint2(0u, 0u);
    if (n < d_state) v = *reinterpret_cast<const uint2*>(row + n);
    piece.w[0] = v.x, piece.w[1] = v.y;
  }
}

// The same element by element, for rows at any place.
template <typename T>
__device__ __forceinline__ void load_elements(Piece<T>& piece, const T* row, int n, int d_state) {
  using Bits = typename BitsOf<sizeof(T)>::type;
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < Piece<T>::kWords; ++i) {
    uint32_t word = 0u;
#pragma unroll
    for (int k = 0; k < kPerWord; ++k) {
      const int at = n + i * kPerWord + k;
      if (at < d_state) word |= static_cast<uint32_t>(reinterpret_cast<const Bits*>(row)[at]) << (k * 8 * sizeof(T));
    }
    piece.w[i] = word;
  }
}

// x of kCount rows from row `first` on: elements in as few accesses as their alignment allows, which is that of the
// first element of a run of rows, and rows from valid_rows on become 0. Whole accesses are valid or not.
template <int kCount>
__device__ __forceinline__ void load_run(Io (&to)[kCount], const Io* rows, int first, int valid_rows) {
  constexpr int kBytes = kCount * sizeof(Io);
  constexpr int kAccess = kBytes < 16 ? kBytes : 16;
  constexpr int kElements = kAccess / sizeof(Io);
#pragma unroll
  for (int r = 0; r < kCount; r += kElements) {
    const bool valid = first + r < valid_rows;
    const Io* from = rows + first + r;
    uint4 v = make_uint4(0u, 0u, 0u, 0u);
    if constexpr (kAccess == 16) {
      if (valid) v = *reinterpret_cast<const uint4*>(from);
    } else if constexpr (kAccess == 8) {
      const uint2 half = valid ? *reinterpret_cast<const uint2*>(from) : make_uint2(0u, 0u);
      v.x = half.x, v.y = half.y;
    } else if constexpr (kAccess == 4) {
      if (valid) v.x = *reinterpret_cast<const uint32_t*>(from);
    } else {
      if (valid) v.x = *reinterpret_cast<const uint16_t*>(from);
    }
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      to[r + k] = element_of(words[k * sizeof(Io) / 4] >> (k * 8 * sizeof(Io) % 32), Io());
    }
  }
}

__device__ __forceinline__ void store_piece(State* row, int n, const Piece<State>& piece, int d_state) {
  if (n >= d_state) return;
  store_streaming(reinterpret_cast<uint4*>(row + n), make_uint4(piece.w[0], piece.w[1], piece.w[2], piece.w[3]));
}

__device__ __forceinline__ void store_elements(State* row, int n, const Piece<State>& piece, int d_state) {
  using Bits = typename BitsOf<sizeof(State)>::type;
  constexpr int kPerWord = 4 / sizeof(State);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    if (n + i < d_state) {
      reinterpret_cast<Bits*>(row)[n + i] =
          static_cast<Bits>(piece.w[i / kPerWord] >> (i % kPerWord * 8 * static_cast<int>(sizeof(State))));
    }
  }
}

// Quad q of a piece as floats; integers are not scaled.
__device__ __forceinline__ float4 quad_of(const Piece<float>& p, int q) {
  return make_float4(__uint_as_float(p.w[4 * q]), __uint_as_float(p.w[4 * q + 1]), __uint_as_float(p.w[4 * q + 2]),
                     __uint_as_float(p.w[4 * q + 3]));
}
__device__ __forceinline__ float4 quad_of(const Piece<__nv_bfloat16>& p, int q) {
  return widen4(make_uint2(p.w[2 * q], p.w[2 * q + 1]), __nv_bfloat16());
}
__device__ __forceinline__ float4 quad_of(const Piece<__half>& p, int q) {
  return widen4(make_uint2(p.w[2 * q], p.w[2 * q + 1]), __half());
}
__device__ __forceinline__ float widen_byte(uint32_t biased, int k) {
  // 2^23 + b as a float has b in its low byte: exact, and two instructions where a conversion runs at quarter rate.
  return __uint_as_float(0x4b000000u | ((biased >> (8 * k)) & 0xffu)) - 8388736.f;
}
__device__ __forceinline__ float4 quad_of(const Piece<int8_t>& p, int q) {
  const uint32_t biased = p.w[q] ^ 0x80808080u;
  return make_float4(widen_byte(biased, 0), widen_byte(biased, 1), widen_byte(biased, 2), widen_byte(biased, 3));
}
