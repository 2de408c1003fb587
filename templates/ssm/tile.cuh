// 16 x 16 tiles of operands as a warp holds them, 8 x 8 quarters a word: a lane has row lane / 4, columns 2 (lane % 4)
// + {0, 1} of each. The left operand of a product has the quarters in the order (0, 0), (8, 0), (0, 8), (8, 8); the
// right one, which is multiplied by its rows, in the order (0, 0), (0, 8), (8, 0), (8, 8), so that what one instruction
// takes is in neighbouring registers. Two tiles of 8 columns that a product left, packed, are either. Where a value is
// the sum of two operands, words 4 to 7 are the small ones.
struct alignas(16) Left {
  uint32_t r[4 * kParts];
};
struct alignas(16) Right {
  uint32_t r[4 * kParts];
};

// near += a * b^T for rows [0, 8) of b, far += the same for rows [8, 16). Of the products of two sums, that of the two
// small parts is left out.
__device__ __forceinline__ void multiply(float (&near)[4], float (&far)[4], const Left& a, const Right& b) {
  const uint32_t (&large)[4] = reinterpret_cast<const uint32_t (&)[4]>(a.r[0]);
  if constexpr (kParts == 2) {
    const uint32_t (&small)[4] = reinterpret_cast<const uint32_t (&)[4]>(a.r[4 * (kParts - 1)]);
    constexpr int kSmall = 4 * (kParts - 1);
    mma(near, small, b.r[0], b.r[1], Operand());
    mma(far, small, b.r[2], b.r[3], Operand());
    mma(near, large, b.r[kSmall], b.r[kSmall + 1], Operand());
    mma(far, large, b.r[kSmall + 2], b.r[kSmall + 3], Operand());
  }
  mma(near, large, b.r[0], b.r[1], Operand());
  mma(far, large, b.r[2], b.r[3], Operand());
}

// The tile at (row, column) of an array in shared memory, `plane` elements before its small parts.
__device__ __forceinline__ Left load_left(const Operand* from, int pitch, int row, int column, int lane, int plane) {
  Left t;
  const Operand* own = from + (row + lane % 16) * pitch + column + lane / 16 * 8;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    load_matrices(reinterpret_cast<uint32_t (&)[4]>(t.r[4 * part]), own + part * plane);
  }
  return t;
}
__device__ __forceinline__ Right load_right(const Operand* from, int pitch, int row, int column, int lane, int plane) {
  Right t;
  const Operand* own = from + (row + lane % 8 + lane / 16 * 8) * pitch + column + (lane & 8);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    load_matrices(reinterpret_cast<uint32_t (&)[4]>(t.r[4 * part]), own + part * plane);
  }
  return t;
}

// The transposed tile: its rows are the array's columns.
__device__ __forceinline__ Right load_right_transposed(const Operand* from, int pitch, int row, int column, int lane,
                                                       int plane) {
  Right t;
  const Operand* own = from + (row + lane % 16) * pitch + column + lane / 16 * 8;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    load_matrices_transposed(reinterpret_cast<uint32_t (&)[4]>(t.r[4 * part]), own + part * plane);
  }
  return t;
}

__device__ __forceinline__ float2 unpack(uint32_t two, __nv_bfloat16) {
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(uint32_t two, __half) {
  const __half2_raw raw{static_cast<unsigned short>(two), static_cast<unsigned short>(two >> 16)};
  return __half22float2(__half2(raw));
}

template <typename Side>
__device__ __forceinline__ void pack_word(Side& t, int word, float left, float right) {
  t.r[word] = pack2(left, right, Operand());
  if constexpr (kParts == 2) {
    const float2 large = unpack(t.r[word], Operand());
    t.r[word + 4 * (kParts - 1)] = pack2(left - large.x, right - large.y, Operand());
  }
}

// Two tiles of 8 columns that products left.
__device__ __forceinline__ Left pack_left(const float (&near)[4], const float (&far)[4]) {
  Left t;
  pack_word(t, 0, near[0], near[1]);
  pack_word(t, 1, near[2], near[3]);
  pack_word(t, 2, far[0], far[1]);
  pack_word(t, 3, far[2], far[3]);
  return t;
}
__device__ __forceinline__ Right pack_right(const float (&near)[4], const float (&far)[4]) {
  Right t;
  pack_word(t, 0, near[0], near[1]);
  pack_word(t, 1, far[0], far[1]);
  pack_word(t, 2, near[2], near[3]);
  pack_word(t, 3, far[2], far[3]);
  return t;
}

// The tile as a left operand, its columns multiplied by a lane's weights of columns 2 (lane % 4) + {0, 1, 8, 9}.
__device__ __forceinline__ Left weigh(const Right& t, float4 weight) {
  Left out;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int from = (word & 1) * 2 + word / 2;
    float2 v = unpack(t.r[from], Operand());
    if constexpr (kParts == 2) {
      const float2 small = unpack(t.r[from + 4 * (kParts - 1)], Operand());
      v = make_float2(v.x + small.x, v.y + small.y);
    }
    pack_word(out, word, v.x * (word < 2 ? weight.x : weight.z), v.y * (word < 2 ? weight.y : weight.w));
  }
  return out;
}

// One element to shared memory.
__device__ __forceinline__ void put_operand(Operand* to, Io v, int plane) {
  const float wide = to_f32(v);
  to[0] = from_f32<Operand>(wide);
  if constexpr (kParts == 2) to[plane] = from_f32<Operand>(wide - to_f32(to[0]));
}

// Sixteen bytes of elements to shared memory, or zeros.
__device__ __forceinline__ void copy_operands(Operand* to, const Io* from, bool there, int plane) {
  if constexpr (kParts == 2) {
    const float4 v = there ? load4(from) : make_float4(0.f, 0.f, 0.f, 0.f);
    Left t;
    pack_word(t, 0, v.x, v.y);
    pack_word(t, 1, v.z, v.w);
    *reinterpret_cast<uint2*>(to) = make_uint2(t.r[0], t.r[1]);
    *reinterpret_cast<uint2*>(to + plane) = make_uint2(t.r[4 * (kParts - 1)], t.r[4 * (kParts - 1) + 1]);
  } else {
    copy_async_16_or_zeros(to, from, there);
  }
}

// The values of a left tile: rows lane / 4 and lane / 4 + 8 of columns [0, 8), then of columns [8, 16).
__device__ __forceinline__ void values_of(float2 (&v)[4], const Left& t) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = unpack(t.r[i], Operand());
    if constexpr (kParts == 2) {
      const float2 small = unpack(t.r[i + 4 * (kParts - 1)], Operand());
      v[i] = make_float2(v[i].x + small.x, v[i].y + small.y);
    }
  }
}

__device__ __forceinline__ void read_tile(float2 (&v)[4], const Operand* from, int pitch, int row, int column, int lane,
                                          int plane) {
  values_of(v, load_left(from, pitch, row, column, lane, plane));
}
