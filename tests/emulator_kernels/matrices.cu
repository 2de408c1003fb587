// Two warps. The first stores x, [32][8] of 16 bits, to rows of shared memory that are 48 bytes apart; then the first
// loads the four matrices and the second loads them transposed; y gets each lane's words.
extern __shared__ __align__(16) unsigned char shared_memory[];
constexpr int kPitch = 24;

extern "C" __global__ void __launch_bounds__(64) ssm_matrices(const __grid_constant__ ScanArgs a) {
  const int t = threadIdx.x, lane = t % 32;
  uint16_t* rows = reinterpret_cast<uint16_t*>(shared_memory);
  const uint16_t* x = reinterpret_cast<const uint16_t*>(a.x);
  if (t < 32) {
    for (int k = 0; k < 8; ++k) rows[kPitch * lane + k] = x[8 * lane + k];
  }
  __syncthreads();  // stored
  uint32_t r[4];
  if (t < 32) {
    load_matrices(r, rows + kPitch * lane);
  } else {
    load_matrices_transposed(r, rows + kPitch * lane);
  }
  __syncthreads();  // loaded
  if (t < 32) rows[kPitch * lane] = 0;
  for (int i = 0; i < 4; ++i) reinterpret_cast<uint32_t*>(a.y)[4 * t + i] = r[i];
}
