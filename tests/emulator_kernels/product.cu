// One warp. x is A and B, both [16][16] in bf16; y is round_bf16(A B) B in f32: fragments from shared memory, the second
// A from the registers of the first D.
extern __shared__ __align__(16) unsigned char shared_memory[];

extern "C" __global__ void __launch_bounds__(32) ssm_product(const __grid_constant__ ScanArgs args) {
  using Row = __nv_bfloat16[16];
  const int lane = threadIdx.x;
  const uint4* from = reinterpret_cast<const uint4*>(args.x);
  uint4* to = reinterpret_cast<uint4*>(shared_memory);
  copy_async_16(to + lane, from + lane);
  copy_async_16(to + 32 + lane, from + 32 + lane);
  copy_async_wait_all();
  __syncwarp();  // landed
  const Row* A = reinterpret_cast<const Row*>(shared_memory);
  const Row* B = A + 16;
  uint32_t a[4], b[4];
  load_matrices(a, A[lane % 16] + lane / 16 * 8);
  load_matrices_transposed(b, B[lane % 16] + lane / 16 * 8);
  float first[2][4] = {}, second[2][4] = {};
  for (int half = 0; half < 2; ++half) mma(first[half], a, b[2 * half], b[2 * half + 1], __nv_bfloat16());
  uint32_t next[4];
  for (int i = 0; i < 4; ++i) next[i] = pack2(first[i / 2][i % 2 * 2], first[i / 2][i % 2 * 2 + 1], __nv_bfloat16());
  for (int half = 0; half < 2; ++half) mma(second[half], next, b[2 * half], b[2 * half + 1], __nv_bfloat16());
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 4; ++i) {
      args.y[16 * (lane / 4 + 8 * (i / 2)) + 8 * half + 2 * (lane % 4) + i % 2] = second[half][i];
    }
  }
}
