// Products of a warp group, four warps whose first is a multiple of 4 (sm_90a): D [64][n] += A [64][16] B^T, B
// [n][16]. A warp has rows 16 w of A and D, in registers as for mma; A may lie in shared memory too, B always does. An
// array in shared memory is a panel of 64 columns of 16 bits, 128 bytes a row, whose 16-byte pieces are swizzled: piece
// i of row r is at i ^ (r % 8). `step` counts 16 along what is summed: columns of a panel whose rows are those of A or
// B, and rows of a panel of 64 whose columns are B's rows (kTransposed), more than 64 of them in the panels behind it.
//
// Products run beside the warps. What they read and write is theirs from products_begin until products_wait, and stores
// to shared memory that they read are followed by fence_for_products and a barrier.
constexpr int kPanelColumns = 64, kPanelRowBytes = 128;

// Where an element of a panel is. Columns that are some multiple of 16 further right, within the panel, are at this
// place xor that multiple.
__device__ __forceinline__ int swizzled(int row, int column) {
  const uint32_t r = row, c = column;
  return static_cast<int>(r * kPanelColumns + ((c / 8 ^ r % 8) * 8 + c % 8));
}

__device__ __forceinline__ void fence_for_products() {
#if !defined(SSM_EMULATOR)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A place that the compiler moves no use of these registers across.
template <int kTiles8>
__device__ __forceinline__ void hold(float (&d)[kTiles8][4]) {
#if !defined(SSM_EMULATOR)
#pragma unroll
  for (int j = 0; j < kTiles8; ++j) {
    asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
  }
#endif
}

__device__ __forceinline__ void products_begin() {
#if !defined(SSM_EMULATOR)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Closes a batch of products.
__device__ __forceinline__ void products_end() {
#if !defined(SSM_EMULATOR)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most so many of this warp group's batches run.
template <int kBatches>
__device__ __forceinline__ void products_wait() {
#if !defined(SSM_EMULATOR)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kBatches) : "memory");
#endif
}

// The same for a number that is constant once loops are unrolled.
__device__ __forceinline__ void products_wait_but(int batches) {
  switch (batches) {
    case 0:
      products_wait<0>();
      break;
    case 1:
      products_wait<1>();
      break;
    case 2:
      products_wait<2>();
      break;
    default:
      products_wait<3>();
  }
}

// A panel as products name it. It may begin some multiple of 8 rows further on, and of 16 columns.
struct Panel {
#if defined(SSM_EMULATOR)
  const Operand* first;
  int column = 0;
  explicit Panel(const Operand* panel) : first(panel) {}
  Panel moved(int rows, int columns) const {
    Panel p(first + rows * kPanelColumns);
    p.column = column + columns;
    return p;
  }
#else
  uint64_t bits;
  __device__ __forceinline__ explicit Panel(const Operand* panel) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(panel));
    // 64 rows on is the panel behind; 8 rows of 128 bytes repeat after 1024; 128-byte swizzle.
    bits = uint64_t{(address & 0x3ffff) >> 4} | uint64_t{64 * kPanelRowBytes / 16} << 16 | uint64_t{64} << 32 |
           uint64_t{1} << 62;
  }
  __device__ __forceinline__ explicit Panel(uint64_t moved) : bits(moved) {}
  __device__ __forceinline__ Panel moved(int rows, int columns) const {
    return Panel(bits + rows * (kPanelRowBytes / 16) + columns / 8);
  }
  template <bool kTransposed>
  __device__ __forceinline__ uint64_t at(int step) const {
    return bits + step * (kTransposed ? 16 * kPanelRowBytes / 16 : 2);
  }
#endif
  __device__ __forceinline__ Panel operator+(int panels) const { return moved(64 * panels, 0); }
};

#if defined(SSM_EMULATOR)
template <bool kTransposed>
inline uint32_t two_of_panel(Panel panel, int step, int row, int column) {
  if (!kTransposed) return *reinterpret_cast<const uint32_t*>(panel.first + swizzled(row, 16 * step + column));
  row += panel.column;
  const Operand* first = panel.first + row / kPanelColumns * 64 * kPanelColumns;
  const auto low = *reinterpret_cast<const uint16_t*>(first + swizzled(16 * step + column, row % kPanelColumns));
  const auto high = *reinterpret_cast<const uint16_t*>(first + swizzled(16 * step + column + 1, row % kPanelColumns));
  return low | static_cast<uint32_t>(high) << 16;
}

template <bool kTransposed, int kTiles8>
inline void product_of(float (&d)[kTiles8][4], const uint32_t (&left)[4], Panel b, int step) {
  const int lane = threadIdx.x % 32, column = 2 * (lane % 4);
  for (int j = 0; j < kTiles8; ++j) {
    const int n = 8 * j + lane / 4;
    mma(d[j], left, two_of_panel<kTransposed>(b, step, n, column), two_of_panel<kTransposed>(b, step, n, column + 8),
        Operand());
  }
}

// D += A B^T, both in shared memory and not transposed; with `fresh`, D = A B^T.
template <int kTiles8>
inline void product(float (&d)[kTiles8][4], Panel a, Panel b, int step, bool fresh) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = 2 * (lane % 4);
  uint32_t left[4];
  for (int i = 0; i < 4; ++i) left[i] = two_of_panel<false>(a, step, row + i % 2 * 8, column + i / 2 * 8);
  for (int j = 0; fresh && j < kTiles8; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.f;
  product_of<false>(d, left, b, step);
}

// D += A B^T, A in registers, B transposed in shared memory.
template <int kTiles8>
inline void product(float (&d)[kTiles8][4], const uint32_t* a, Panel b, int step) {
  product_of<true>(d, {a[0], a[1], a[2], a[3]}, b, step);
}
#else
#define SSM_D32(d)                                                                                             \
  "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),     \
      "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), \
      "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), \
      "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), \
      "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
#define SSM_D32_NAMES                                                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}"

__device__ __forceinline__ void product(float (&d)[8][4], Panel a, Panel b, int step, bool fresh) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." SSM_OPERAND
               "." SSM_OPERAND " " SSM_D32_NAMES ", %32, %33, p, 1, 1, 0, 0;\n}\n"
               : SSM_D32(d)
               : "l"(a.at<false>(step)), "l"(b.at<false>(step)), "r"(static_cast<int>(fresh))
               : "memory");
}

__device__ __forceinline__ void product(float (&d)[8][4], const uint32_t* a, Panel b, int step) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." SSM_OPERAND "." SSM_OPERAND " " SSM_D32_NAMES
               ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
               : SSM_D32(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.at<true>(step))
               : "memory");
}
#endif

// Four 8 x 8 matrices of 16 bits to shared memory: lane l gives the address of row l % 8 of matrix l / 8, and has
// columns 2 (l % 4) + {0, 1} of row l / 4 of each.
__device__ __forceinline__ void store_matrices(Operand* row, const uint32_t (&r)[4]) {
#if defined(SSM_EMULATOR)
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const auto own = __shfl_sync(kWholeWarp, reinterpret_cast<unsigned long long>(row), 8 * i + lane / 4);
    *reinterpret_cast<uint32_t*>(reinterpret_cast<Operand*>(own) + 2 * (lane % 4)) = r[i];
  }
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(row))),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}
