// 16 x 16 tiles of tf32 operands as a warp holds them. A product takes 8 columns at once; which column goes where among
// the 8 is free as long as both operands agree, and here a lane has columns 2 (lane % 4) + {0, 1}, as products leave
// them. Words 0 to 3 are columns [0, 8), 4 to 7 columns [8, 16): the left operand of a product has rows lane / 4 and
// lane / 4 + 8 of the first column, then of the second; the right one, which is multiplied by its rows, both columns of
// the one row, then of the other.
struct alignas(16) Left {
  uint32_t r[8];
};
struct alignas(16) Right {
  uint32_t r[8];
};

// near += a * b^T for rows [0, 8) of b, far += the same for rows [8, 16).
__device__ __forceinline__ void multiply(float (&near)[4], float (&far)[4], const Left& a, const Right& b) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t (&left)[4] = reinterpret_cast<const uint32_t (&)[4]>(a.r[4 * half]);
    mma(near, left, b.r[4 * half], b.r[4 * half + 1], Operand());
    mma(far, left, b.r[4 * half + 2], b.r[4 * half + 3], Operand());
  }
}

// To the nearest tf32, ties away from zero; the tensor cores would drop the 13 low bits.
__device__ __forceinline__ uint32_t to_tf32(float v) {
#if defined(SSM_EMULATOR)
  return v != v ? __float_as_uint(v) : (__float_as_uint(v) + 0x1000u) & ~0x1fffu;
#else
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return bits;
#endif
}

__device__ __forceinline__ Left load_left(const Operand* from, int pitch, int row, int column, int lane, int) {
  Left t;
  const Operand* own = from + (row + lane / 4) * pitch + column + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 upper = *reinterpret_cast<const float2*>(own + 8 * half);
    const float2 lower = *reinterpret_cast<const float2*>(own + 8 * half + 8 * pitch);
    t.r[4 * half] = to_tf32(upper.x);
    t.r[4 * half + 1] = to_tf32(lower.x);
    t.r[4 * half + 2] = to_tf32(upper.y);
    t.r[4 * half + 3] = to_tf32(lower.y);
  }
  return t;
}
__device__ __forceinline__ Right load_right(const Operand* from, int pitch, int row, int column, int lane, int plane) {
  const Left t = load_left(from, pitch, row, column, lane, plane);
  return Right{{t.r[0], t.r[2], t.r[1], t.r[3], t.r[4], t.r[6], t.r[5], t.r[7]}};
}

// The transposed tile: its rows are the array's columns.
__device__ __forceinline__ Right load_right_transposed(const Operand* from, int pitch, int row, int column, int lane,
                                                       int) {
  Right t;
  const Operand* own = from + (row + 2 * (lane % 4)) * pitch + column + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    t.r[4 * half] = to_tf32(own[8 * half * pitch]);
    t.r[4 * half + 1] = to_tf32(own[(8 * half + 1) * pitch]);
    t.r[4 * half + 2] = to_tf32(own[8 * half * pitch + 8]);
    t.r[4 * half + 3] = to_tf32(own[(8 * half + 1) * pitch + 8]);
  }
  return t;
}

// Two tiles of 8 columns that products left.
__device__ __forceinline__ Left pack_left(const float (&near)[4], const float (&far)[4]) {
  Left t;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int from = (i & 1) * 2 + i / 2;
    t.r[i] = to_tf32(near[from]);
    t.r[4 + i] = to_tf32(far[from]);
  }
  return t;
}
__device__ __forceinline__ Right pack_right(const float (&near)[4], const float (&far)[4]) {
  Right t;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    t.r[i] = to_tf32(near[i]);
    t.r[4 + i] = to_tf32(far[i]);
  }
  return t;
}

// The tile as a left operand, its columns multiplied by a lane's weights of columns 2 (lane % 4) + {0, 1, 8, 9}.
__device__ __forceinline__ Left weigh(const Right& t, float4 weight) {
  Left out;
#pragma unroll
  for (int word = 0; word < 8; ++word) {
    const int from = (word & 4) + (word & 1) * 2 + (word & 2) / 2;
    const float w = word < 4 ? (word & 2 ? weight.y : weight.x) : (word & 2 ? weight.w : weight.z);
    out.r[word] = to_tf32(__uint_as_float(t.r[from]) * w);
  }
  return out;
}

// One element to shared memory.
__device__ __forceinline__ void put_operand(Operand* to, Io v, int) { to[0] = v; }

// Sixteen bytes of elements to shared memory, or zeros.
__device__ __forceinline__ void copy_operands(Operand* to, const Io* from, bool there, int) {
  copy_async_16_or_zeros(to, from, there);
}

// A 16 x 16 tile as it is, not rounded: rows lane / 4 and lane / 4 + 8 of columns [0, 8), then of columns [8, 16).
__device__ __forceinline__ void read_tile(float2 (&v)[4], const Operand* from, int pitch, int row, int column, int lane,
                                          int) {
  const Operand* own = from + (row + lane / 4) * pitch + column + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const float2*>(own + i % 2 * 8 * pitch + i / 2 * 8);
}
