// Products of small matrices on tensor cores (sm_80 and up). A matrix is spread over the 32 lanes of a warp, which call
// each of these together. With group = lane / 4 and member = lane % 4, the PTX ISA puts into word i of a lane's
//   a: row group + 8 (i % 2), columns 2 member + 8 (i / 2) and the next (16 bits), or column member + 4 (i / 2) (tf32);
//   b: rows 2 member + 8 i and the next (16 bits), or row member + 4 i (tf32), of column group;
//   d: row group + 8 (i / 2), column 2 member + i % 2.
// Of two 16-bit elements in a word the first has the low bits.

// D += A B with A [16][16], B [16][8] and D [16][8]. Products are exact; their sums are neither rounded to nearest nor
// taken in a known order, and lie within 2^-20 (|D| + sum of |A B|) of the exact ones. The assembly is not volatile: it
// is a function of its operands alone, which the compiler may schedule among other work.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
#if defined(SSM_EMULATOR)
  emu_mma(kEmuMmaBf16, d, a, b0, b1);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
#if defined(SSM_EMULATOR)
  emu_mma(kEmuMmaF16, d, a, b0, b1);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// The same with A [16][8] and B [8][8] in f32, of which the hardware drops the 13 low bits (tf32). Round to tf32
// before, where a truncation would bias the result.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float) {
#if defined(SSM_EMULATOR)
  emu_mma(kEmuMmaTf32, d, a, b0, b1);
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Four 8 x 8 matrices of 16-bit elements from shared memory, one a word: lane l gives the address of row l % 8 of
// matrix l / 8, a multiple of 16. A lane gets elements 2 member and the next of row `group`; transposed, of column
// `group`. So the four matrices of A in the order of its words (upper left, lower left, upper right, lower right) are
// the fragment of A, and B as it is stored, [k][n], comes as fragments when transposed. The assembly is volatile and
// clobbers memory, for the compiler does not see that it reads: no store may sink below it, and no barrier may change
// places with it.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
#if defined(SSM_EMULATOR)
  emu_load_matrices(kEmuLoadMatrices, r, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
#endif
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
#if defined(SSM_EMULATOR)
  emu_load_matrices(kEmuLoadMatricesTransposed, r, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
#endif
}
