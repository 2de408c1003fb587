// y = x through asynchronous copies of 16 bytes, two groups in flight; the last float4 of each tile is zero-filled.
extern __shared__ __align__(16) unsigned char shared_memory[];

extern "C" __global__ void __launch_bounds__(32) ssm_copy(const __grid_constant__ ScanArgs a) {
  float4* tiles = reinterpret_cast<float4*>(shared_memory);
  const int t = threadIdx.x;
  auto issue = [&](int tile) {
    if (t < 31) emu_cp_async(&tiles[tile % 2 * 32 + t], &a.x[tile * 128 + 4 * t], 16);
    else emu_cp_async_zfill(&tiles[tile % 2 * 32 + t], &a.x[tile * 128 + 4 * t], 16, 0);
    emu_cp_async_commit();
  };
  issue(0);
  for (int tile = 0; tile < a.n; ++tile) {
    if (tile + 1 < a.n) {
      issue(tile + 1);
      emu_cp_async_wait_group(1);  // all but the newest
    } else {
      emu_cp_async_wait_group(0);  // all
    }
    __syncthreads();  // landed
    reinterpret_cast<float4*>(a.y)[tile * 32 + t] = tiles[tile % 2 * 32 + (t ^ 1)];
    __syncthreads();  // read
  }
}
