// n products a warp, one after the other into the same D. A lane's x is 10 words: a, b and d as the PTX ISA lays the
// fragments out; its y is d.
template <typename T>
__device__ __forceinline__ void multiply(const ScanArgs& args) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t* x = reinterpret_cast<const uint32_t*>(args.x) + 10 * t;
  const uint32_t a[4] = {x[0], x[1], x[2], x[3]};
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(x[6 + i]);
  for (int i = 0; i < args.n; ++i) mma(d, a, x[4], x[5], T());
  for (int i = 0; i < 4; ++i) args.y[4 * t + i] = d[i];
}

extern "C" __global__ void ssm_mma_bf16(const __grid_constant__ ScanArgs args) { multiply<__nv_bfloat16>(args); }
extern "C" __global__ void ssm_mma_f16(const __grid_constant__ ScanArgs args) { multiply<__half>(args); }
extern "C" __global__ void ssm_mma_tf32(const __grid_constant__ ScanArgs args) { multiply<float>(args); }
