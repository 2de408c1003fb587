// Products of a warp group, four warps whose first is a multiple of 4 (sm_90a): D [64][64] += A [64][16] B^T, B [64][16].
// A warp has rows 16 w of A and D, in registers as for mma; A may lie in shared memory too, B always does. An array in
// shared memory is a panel of 64 columns of 16 bits, 128 bytes a row, whose 16-byte pieces are swizzled: piece i of row r
// is at i ^ (r % 8). `step` counts 16 along what is summed: columns of a panel whose rows are those of A or B, and rows of
// a panel whose columns are B's rows (kTransposed).
//
// Products run beside the warps. What they read and write is theirs from products_begin to products_end, and stores to
// shared memory that they read are followed by fence_for_products and a barrier.
constexpr int kPanelColumns = 64, kPanelRowBytes = 128;

__device__ __forceinline__ int swizzled(int row, int column) {
  return row * kPanelColumns + ((column / 8 ^ row % 8) * 8 + column % 8);
}

__device__ __forceinline__ void fence_for_products() {
#if !defined(SSM_EMULATOR)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A barrier of one warp group; the emulator's is one of the block, so that all groups call it.
__device__ __forceinline__ void group_barrier() {
#if defined(SSM_EMULATOR)
  __syncthreads();
#else
  asm volatile("bar.sync %0, 128;" ::"r"(threadIdx.x / 128 + 1) : "memory");
#endif
}

// A place that the compiler moves no use of these registers across.
__device__ __forceinline__ void hold(float (&d)[8][4]) {
#if !defined(SSM_EMULATOR)
#pragma unroll
  for (int j = 0; j < 8; ++j) asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
#endif
}

__device__ __forceinline__ void products_begin() {
#if !defined(SSM_EMULATOR)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Waits for all products of this warp group.
__device__ __forceinline__ void products_end() {
#if !defined(SSM_EMULATOR)
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}

#if defined(SSM_EMULATOR)
template <bool kTransposed, typename T>
inline uint32_t two_of_panel(const T* panel, int step, int row, int column) {
  uint32_t two;
  if (!kTransposed) {
    const T* p = panel + swizzled(row, 16 * step + column);
    two = *reinterpret_cast<const uint32_t*>(p);
  } else {
    const auto low = *reinterpret_cast<const uint16_t*>(panel + swizzled(16 * step + column, row));
    const auto high = *reinterpret_cast<const uint16_t*>(panel + swizzled(16 * step + column + 1, row));
    two = low | static_cast<uint32_t>(high) << 16;
  }
  return two;
}
#else
template <bool kTransposed>
__device__ __forceinline__ uint64_t panel_at(const void* panel, int step) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(panel)) + step * (kTransposed ? 2048 : 32);
  // 8 rows of 128 bytes repeat after 1024; 128-byte swizzle.
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | uint64_t{1} << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}
#define SSM_D32(d)                                                                                                     \
  "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),             \
      "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),         \
      "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),         \
      "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),         \
      "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
#define SSM_D32_NAMES                                                                                                  \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "    \
  "%24, %25, %26, %27, %28, %29, %30, %31}"
#endif

// D += A B^T, both in shared memory and not transposed; with `fresh`, D = A B^T.
__device__ __forceinline__ void product(float (&d)[8][4], const Operand* a, const Operand* b, int step, bool fresh) {
#if defined(SSM_EMULATOR)
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = 2 * (lane % 4);
  uint32_t left[4];
  for (int i = 0; i < 4; ++i) left[i] = two_of_panel<false>(a, step, row + i % 2 * 8, column + i / 2 * 8);
  for (int j = 0; j < 8; ++j) {
    if (fresh) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.f;
    const int n = 8 * j + lane / 4;
    mma(d[j], left, two_of_panel<false>(b, step, n, column), two_of_panel<false>(b, step, n, column + 8), Operand());
  }
#else
  asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." SSM_OPERAND
               "." SSM_OPERAND " " SSM_D32_NAMES ", %32, %33, p, 1, 1, 0, 0;\n}\n"
               : SSM_D32(d)
               : "l"(panel_at<false>(a, step)), "l"(panel_at<false>(b, step)), "r"(static_cast<int>(fresh))
               : "memory");
#endif
}

// D += A B^T, A in registers, B transposed in shared memory.
__device__ __forceinline__ void product(float (&d)[8][4], const uint32_t* a, const Operand* b, int step) {
#if defined(SSM_EMULATOR)
  const int lane = threadIdx.x % 32, column = 2 * (lane % 4);
  const uint32_t left[4] = {a[0], a[1], a[2], a[3]};
  for (int j = 0; j < 8; ++j) {
    const int n = 8 * j + lane / 4;
    mma(d[j], left, two_of_panel<true>(b, step, n, column), two_of_panel<true>(b, step, n, column + 8), Operand());
  }
#else
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." SSM_OPERAND "." SSM_OPERAND " " SSM_D32_NAMES
               ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
               : SSM_D32(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(panel_at<true>(b, step))
               : "memory");
#endif
}
