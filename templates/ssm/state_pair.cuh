// Two elements as one word group: float2 for f32, a word for 16-bit types.
template <typename T>
struct Pair {
  using type = uint32_t;
};
template <>
struct Pair<float> {
  using type = float2;
};

__device__ __forceinline__ float2 widen2(float2 v, float) { return v; }
template <typename T>
__device__ __forceinline__ float2 widen2(uint32_t v, T) {
  const float4 wide = widen4(make_uint2(v, 0u), T());
  return make_float2(wide.x, wide.y);
}

// Two neighbouring columns of a row of a slot, the first of which is even. `vector` says that they may go as one
// access.
__device__ __forceinline__ float2 load_pair(const State* p, bool vector) {
  if (!vector) return make_float2(to_f32(p[0]), to_f32(p[1]));
  return widen2(load_streaming(reinterpret_cast<const Pair<State>::type*>(p)), State());
}

__device__ __forceinline__ void store_pair(const Destination& to, int n, float left, float right, int d_state,
                                           bool vector, const Rounding& r) {
  uint2 random = make_uint2(0u, 0u);
  if (r.stochastic) {
    const uint4 four = draw4(r, to.row_index, (d_state + 3) / 4, n / 4, to.slot, to.token);
    random = n & 2 ? make_uint2(four.z, four.w) : make_uint2(four.x, four.y);
  }
  alignas(8) State out[2] = {round_to(left, random.x, r.stochastic, State()),
                             round_to(right, random.y, r.stochastic, State())};
  if (vector) {
    store_streaming(reinterpret_cast<Pair<State>::type*>(to.row + n), *reinterpret_cast<Pair<State>::type*>(out));
    return;
  }
  to.row[n] = out[0];
  to.row[n + 1] = out[1];
}
