// The tensor cores leave a lane two neighbouring columns of two rows: rows lane / 4 and lane / 4 + 8, columns
// 2 (lane % 4) + {0, 1} of an 8-column tile. Neighbouring lanes swap halves to have four columns of one row each.
constexpr uint32_t kWholeWarp = 0xffffffffu;

__device__ __forceinline__ int quad_row(int lane) { return lane / 4 + 8 * (lane & 1); }
__device__ __forceinline__ int quad_column(int lane) { return 2 * (lane & 2); }

__device__ __forceinline__ float4 to_quad(const float (&v)[4], int lane) {
  const bool odd = lane & 1;
  const float first = __shfl_xor_sync(kWholeWarp, odd ? v[0] : v[2], 1);
  const float second = __shfl_xor_sync(kWholeWarp, odd ? v[1] : v[3], 1);
  return odd ? make_float4(first, second, v[2], v[3]) : make_float4(v[0], v[1], first, second);
}

// Four neighbouring elements in global memory, as one access where `vector`.
__device__ __forceinline__ float4 load_four(const Io* p, bool vector) {
  if (vector) return load4(p);
  return make_float4(to_f32(p[0]), to_f32(p[1]), to_f32(p[2]), to_f32(p[3]));
}

__device__ __forceinline__ void store_four(Io* p, float4 v, bool vector) {
  alignas(16) Io out[4] = {from_f32<Io>(v.x), from_f32<Io>(v.y), from_f32<Io>(v.z), from_f32<Io>(v.w)};
  if (vector) {
    store_streaming(reinterpret_cast<Quad<Io>::type*>(p), *reinterpret_cast<Quad<Io>::type*>(out));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) p[i] = out[i];
}
