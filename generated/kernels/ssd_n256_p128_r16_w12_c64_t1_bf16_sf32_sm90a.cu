// SPDX-License-Identifier: Apache-2.0
//
// ssm_ssd_n256_p128_r16_w12_c64_t1_bf16_sf32_sm90a
//
// Prefill of Mamba-2 as chunked matrix products on tensor cores (state space duality, Dao and Gu 2024). For
// token t of a sequence, head h, group g = h / (heads / groups), row p, column n:
//
//   d      = dt[t,h] + dt_bias[h];  d = log1p(exp(d)) where d <= 20 (softplus);  d = clamp(d, dt_min, dt_max)
//   S[p,n] = exp(d * A[h]) * S[p,n] + d * B[t,g,n] * x[t,h,p]
//   y[t,h,p] = (sum_n S[p,n] * C[t,g,n] + D[h] * x[t,h,p]) * silu(z[t,h,p])
//
// A sequence is cut into chunks of 64 tokens from its own start. With L the running sum of d * A in a
// chunk, y of a chunk is (C . S) exp(L) from the state S before it, plus (C . B^T) exp(L - L^T) d x from its
// own tokens, and S becomes exp(L_end) S + (x exp(L_end - L) d)^T . B: products of matrices, of which the
// tensor cores take tiles of 16 x 16. A warp keeps 16 rows of a head's state in f32 registers from
// chunk to chunk, where they are, packed, an operand of C . S as they stand. C . B^T is worked out once for the
// 1 heads of a block. Sums of d * A are kept in two floats, and every decay is exp2 of a difference of
// such sums, at most 0 where A <= 0: nothing overflows, and what underflows is 0.
//
// Launch, in order:
//   ssm_ssd_n256_p128_r16_w12_c64_t1_bf16_sf32_sm90a_walk: grid.x = entries * 1 * groups * runs
//   with entries = max(sequences, 1), runs = ceil(2 * heads / groups / 1), at most
//   2^31 - 1 (blocks stride beyond that);
//   block.x = 384; dynamic shared memory = 225280 bytes.
//   No workspace.
// One argument, ScanArgs by value; the struct below is its table. heads is a multiple of groups,
// head_dim = 128.
#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

using Io = __nv_bfloat16;       // x, z, y, B, C
using State = float;            // the stored state; it is carried in f32
using Operand = __nv_bfloat16;  // what the tensor cores multiply

constexpr int kDState = 256;     // columns of a row
constexpr int kPartsOfHead = 2;  // each is walked like a head of its own, and called one below
constexpr int kHeadDim = 64;     // rows of a head
constexpr int kRows = 16;        // rows of a head whose state a warp holds
constexpr int kHeads = 1;        // heads of a block, all of one group
constexpr int kChunk = 64;       // tokens of a chunk
constexpr int kSegments = 1;     // most segments of a sequence, walked at the same time
constexpr int kGatherCuts = 1;   // cuts of a segment that the first of two launches walks at the same time
constexpr int kParts = 1;        // operands that one value is the sum of
constexpr int kStages = 2;       // chunks in shared memory: those ahead are copied during the work
constexpr int kWarps = 12;
constexpr int kThreads = 32 * kWarps;
constexpr int kStageThreads = 128;  // they copy tokens

// The one argument of every entry. The order is frozen: NumPy (pyharness/args.py), Go and C mirror it.
// Pointers are device addresses, null where an optional array is absent. Strides are in elements.
struct ScanArgs {
  const void* x;                    // [tokens, heads, head_dim], io
  const void* z;                    // like x, optional gate
  void* y;                          // like x, output
  const void* dt;                   // [tokens, heads], io or f32
  const float* A;                   // [heads], or [heads, d_state] with kFlagPerColumnA
  const void* B;                    // [tokens, groups, d_state], io
  const void* C;                    // like B
  const float* D;                   // [heads], optional
  const float* dt_bias;             // [heads], optional
  void* state;                      // [slots, heads, head_dim, d_state]
  float* state_scale;               // [slots, heads, head_dim], 8-bit state only
  const int32_t* cu_seqlens;        // [sequences + 1], null: one sequence
  const int32_t* read_slots;        // [sequences], null: 0, 1, 2, ...
  const int32_t* write_slots;       // [sequences], null: read_slots
  const uint8_t* resume;            // [sequences], null: 1 where there is a state
  const int32_t* checkpoint_slots;  // [tokens], optional
  const int32_t* sequence_order;    // [sequences], optional: what entry i visits; out of range: nothing
  const uint64_t* rounding_key;     // {seed, step}, optional
  void* workspace;
  int64_t x_stride;
  int64_t z_stride;
  int64_t y_stride;
  int64_t dt_stride;
  int64_t B_stride;
  int64_t C_stride;
  int64_t state_stride;
  int64_t state_scale_stride;
  int64_t slots;
  int64_t workspace_bytes;
  int32_t tokens;
  int32_t sequences;
  int32_t heads;
  int32_t head_dim;
  int32_t groups;
  int32_t d_state;
  int32_t pad_slot;
  float dt_min;
  float dt_max;
  uint32_t flags;
  int32_t lanes;
  int32_t rows;
  int32_t chunk;
};

enum Flag : uint32_t {
  kFlagSoftplus = 1u << 0,
  kFlagPerColumnA = 1u << 1,
  kFlagDtF32 = 1u << 2,
  kFlagDtLimit = 1u << 3,
  // NOTE: "vector" means that base, outer stride and inner row length are multiples of 16 bytes. The host decides.
  kFlagVectorX = 1u << 4,
  kFlagVectorZ = 1u << 5,
  kFlagVectorY = 1u << 6,
  kFlagVectorB = 1u << 7,
  kFlagVectorC = 1u << 8,
  kFlagVectorState = 1u << 9,
};

static_assert(sizeof(ScanArgs) == 288, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, x) == 0, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, z) == 8, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, y) == 16, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, dt) == 24, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, A) == 32, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, B) == 40, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, C) == 48, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, D) == 56, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, dt_bias) == 64, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, state) == 72, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, state_scale) == 80, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, cu_seqlens) == 88, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, read_slots) == 96, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, write_slots) == 104, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, resume) == 112, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, checkpoint_slots) == 120, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, sequence_order) == 128, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, rounding_key) == 136, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, workspace) == 144, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, x_stride) == 152, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, z_stride) == 160, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, y_stride) == 168, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, dt_stride) == 176, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, B_stride) == 184, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, C_stride) == 192, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, state_stride) == 200, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, state_scale_stride) == 208, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, slots) == 216, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, workspace_bytes) == 224, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, tokens) == 232, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, sequences) == 236, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, heads) == 240, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, head_dim) == 244, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, groups) == 248, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, d_state) == 252, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, pad_slot) == 256, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, dt_min) == 260, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, dt_max) == 264, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, flags) == 268, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, lanes) == 272, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, rows) == 276, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, chunk) == 280, "ScanArgs is frozen");

// Global accesses that will not be used again soon.
template <typename T>
__device__ __forceinline__ T load_streaming(const T* p) {
  return __ldcs(p);
}
template <typename T>
__device__ __forceinline__ void store_streaming(T* p, T v) {
  __stcs(p, v);
}

// Storage types in and out of f32. Loads and stores of four go as one access.
__device__ __forceinline__ float to_f32(float v) { return v; }
__device__ __forceinline__ float to_f32(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_f32(__half v) { return __half2float(v); }

template <typename T>
__device__ __forceinline__ T from_f32(float v);
template <>
__device__ __forceinline__ float from_f32<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_f32<__nv_bfloat16>(float v) {
  return __float2bfloat16(v);
}
template <>
__device__ __forceinline__ __half from_f32<__half>(float v) {
  return __float2half(v);
}

__device__ __forceinline__ float4 widen4(float4 v, float) { return v; }
__device__ __forceinline__ float4 widen4(uint2 v, __nv_bfloat16) {
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                     __uint_as_float(v.y & 0xffff0000u));
}
__device__ __forceinline__ float4 widen4(uint2 v, __half) {
  const __half2_raw low{static_cast<unsigned short>(v.x), static_cast<unsigned short>(v.x >> 16)};
  const __half2_raw high{static_cast<unsigned short>(v.y), static_cast<unsigned short>(v.y >> 16)};
  const float2 a = __half22float2(__half2(low)), b = __half22float2(__half2(high));
  return make_float4(a.x, a.y, b.x, b.y);
}

// Four elements as one word group: float4 for f32, uint2 for 16-bit types.
template <typename T>
struct Quad {
  using type = uint2;
};
template <>
struct Quad<float> {
  using type = float4;
};

template <typename T>
__device__ __forceinline__ float4 load4(const T* p) {
  return widen4(*reinterpret_cast<const typename Quad<T>::type*>(p), T());
}

// dt' of one token: bias, softplus and limits as the operation orders them. NaN passes through.
__device__ __forceinline__ float step_size(float dt, float bias, uint32_t flags, float dt_min, float dt_max) {
  float d = dt + bias;
  if ((flags & kFlagSoftplus) && d <= 20.f) d = log1pf(expf(d));
  if (flags & kFlagDtLimit) d = d < dt_min ? dt_min : (d > dt_max ? dt_max : d);
  return d;
}

__device__ __forceinline__ float load_dt(const ScanArgs& a, const void* dt_io, int64_t index) {
  return a.flags & kFlagDtF32 ? static_cast<const float*>(dt_io)[index] : to_f32(static_cast<const Io*>(dt_io)[index]);
}

__device__ __forceinline__ float silu(float z) { return z / (1.f + expf(-z)); }

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

// Rounding of stored states: to nearest, or stochastically with Philox 4x32-10 (Salmon et al., SC 2011) keyed by
// {seed, step} and counted by (element, slot, token), so that every launch configuration draws the same numbers.
struct Rounding {
  bool stochastic = false;
  uint32_t key0 = 0, key1 = 0, step = 0;
};

__device__ __forceinline__ Rounding find_rounding(const uint64_t* key) {
  Rounding r;
  if (key) {
    const uint64_t seed = key[0], step = key[1];
    r.stochastic = true;
    r.key0 = static_cast<uint32_t>(seed);
    r.key1 = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(step >> 32);
    r.step = static_cast<uint32_t>(step);
  }
  return r;
}

__device__ __forceinline__ uint4 philox(uint4 counter, uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xd2511f53u, counter.x), low0 = 0xd2511f53u * counter.x;
    const uint32_t high1 = __umulhi(0xcd9e8d57u, counter.z), low1 = 0xcd9e8d57u * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key0, low1, high0 ^ counter.w ^ key1, low0);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return counter;
}

// Four random words for the columns [4 * quad, 4 * quad + 4) of one row of a slot.
__device__ __forceinline__ uint4 draw4(const Rounding& r, uint32_t row, uint32_t quads, uint32_t quad, int64_t slot,
                                       int token) {
  const uint4 counter =
      make_uint4(row * quads + quad, static_cast<uint32_t>(slot), static_cast<uint32_t>(token), r.step);
  return philox(counter, r.key0, r.key1);
}

__device__ __forceinline__ float round_to(float v, uint32_t, bool, float) { return v; }

__device__ __forceinline__ __nv_bfloat16 round_to(float v, uint32_t random, bool stochastic, __nv_bfloat16) {
  const uint32_t bits = __float_as_uint(v);
  if (!stochastic || (bits & 0x7f800000u) == 0x7f800000u) return __float2bfloat16(v);
  __nv_bfloat16_raw out;
  out.x = static_cast<unsigned short>((bits + (random & 0xffffu)) >> 16);
  return __nv_bfloat16(out);
}

__device__ __forceinline__ __half round_to(float v, uint32_t random, bool stochastic, __half) {
  const uint32_t bits = __float_as_uint(v), magnitude = bits & 0x7fffffffu, sign = bits & 0x80000000u;
  const int exponent = static_cast<int>(magnitude >> 23);
  if (!stochastic || exponent == 255) return __float2half(v);
  if (exponent >= 113) {  // normal in f16: 13 mantissa bits go
    return __float2half(__uint_as_float(sign | ((magnitude + (random & 0x1fffu)) & ~0x1fffu)));
  }
  // Subnormal in f16: the quantum is 2^-24 whatever the exponent.
  uint32_t mantissa = exponent ? (magnitude & 0x7fffffu) | 0x800000u : magnitude << 1;
  int drop = 126 - exponent;
  if (drop > 31) {
    mantissa = drop - 31 < 32 ? mantissa >> (drop - 31) : 0u;
    drop = 31;
  }
  __half_raw out;
  out.x = static_cast<unsigned short>(((mantissa + (random & ((1u << drop) - 1u))) >> drop) | (sign >> 16));
  return __half(out);
}

// One row of a slot, in columns. `vector` says that four columns at a multiple of four may go as one access.
__device__ __forceinline__ float4 load_columns(const State* row, int n, int d_state, bool vector) {
  if (vector)
    return n < d_state ? widen4(load_streaming(reinterpret_cast<const Quad<State>::type*>(row + n)), State())
                       : make_float4(0.f, 0.f, 0.f, 0.f);
  float4 v;
  v.x = n + 0 < d_state ? to_f32(row[n + 0]) : 0.f;
  v.y = n + 1 < d_state ? to_f32(row[n + 1]) : 0.f;
  v.z = n + 2 < d_state ? to_f32(row[n + 2]) : 0.f;
  v.w = n + 3 < d_state ? to_f32(row[n + 3]) : 0.f;
  return v;
}

// Where a state goes: its slot, the row inside it ([heads * head_dim]) and the token that it follows.
struct Destination {
  State* row;
  uint32_t row_index;
  int64_t slot;
  int token;
};

__device__ __forceinline__ void store_columns(const Destination& to, int n, float4 v, int d_state, bool vector,
                                              const Rounding& r) {
  if (n >= d_state) return;
  uint4 random = make_uint4(0u, 0u, 0u, 0u);
  if (r.stochastic) random = draw4(r, to.row_index, (d_state + 3) / 4, n / 4, to.slot, to.token);
  alignas(16)
      State out[4] = {round_to(v.x, random.x, r.stochastic, State()), round_to(v.y, random.y, r.stochastic, State()),
                      round_to(v.z, random.z, r.stochastic, State()), round_to(v.w, random.w, r.stochastic, State())};
  if (vector) {
    store_streaming(reinterpret_cast<Quad<State>::type*>(to.row + n), *reinterpret_cast<Quad<State>::type*>(out));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i < d_state) to.row[n + i] = out[i];
  }
}

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

// A value that the compiler knows nothing of from here on: what it is worked out from comes before, and what is worked
// out from it stays behind, so that neither gets between a load and those that wait for it.
template <typename T>
__device__ __forceinline__ T opaque(T v) {
#if !defined(SSM_EMULATOR)
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(v));
  } else {
    asm volatile("" : "+r"(v));
  }
#endif
  return v;
}
// The numbers of one entry of a launch's sequence list, asked for together, so that they are waited for once. What they
// mean for the state and for the rest are questions of their own: the state's loads wait for no other answer.
struct Entry {
  int begin = 0;   // first token
  int end = 0;     // one past the last token
  int read = -1;   // slots as the lists say
  int write = -1;  // where there is no list, unused
  int resume = 0;  // not 0: the state goes on from the read slot
  int last = 0;    // one past the last token of all sequences
};

// The sequence that an entry of the list visits, out of range: nothing.
__device__ __forceinline__ int sequence_of(const ScanArgs& a, int entry) {
  if (!a.sequence_order) return entry;
  return entry < a.sequences ? a.sequence_order[entry] : -1;
}

// NOTE: the compiler is not to know that every lane has the same numbers: in registers that a warp shares it would move
// each as soon as it is asked for, and wait there before it asks for the next.
__device__ __forceinline__ Entry load_entry(const ScanArgs& a, int64_t entry) {
  Entry e;
  const int zero = opaque(0);
  const int s = sequence_of(a, static_cast<int>(entry) + zero);
  const bool there = s >= 0 && s < a.sequences;
  if (there) e.read = s, e.end = a.tokens;
  e.resume = there && a.state;
  if (there && a.read_slots) e.read = a.read_slots[s];
  if (there && a.state && a.resume) e.resume = a.resume[s];
  if (there && a.cu_seqlens) e.begin = a.cu_seqlens[s], e.end = a.cu_seqlens[s + 1];
  if (there && a.write_slots) e.write = a.write_slots[s];
  e.last = a.tokens;
  if (a.cu_seqlens) e.last = a.cu_seqlens[a.sequences + zero];
  return e;
}

__device__ __forceinline__ bool in_pool(const ScanArgs& a, int64_t slot) {
  return static_cast<uint64_t>(slot) < static_cast<uint64_t>(a.slots);
}

// Slot of the initial state, -1: start from zero.
__device__ __forceinline__ int initial_slot(const ScanArgs& a, const Entry& e) {
  return e.resume && e.read != a.pad_slot && in_pool(a, e.read) ? e.read : -1;
}

// Slot that the lists give the final state, -1: discard it.
__device__ __forceinline__ int listed_write(const ScanArgs& a, const Entry& e) {
  return !a.state ? -1 : a.write_slots ? e.write : e.read;
}

// NOTE: a slot out of range behaves as padding, so no data on the device can reach memory outside the pool. A fresh
// sequence's read slot is looked at only for padding. An entry out of range is padding without tokens.
__device__ __forceinline__ bool is_padding(const ScanArgs& a, const Entry& e) {
  const int write = listed_write(a, e);
  return e.read == a.pad_slot || (e.resume && !in_pool(a, e.read)) || (write != -1 && !in_pool(a, write));
}

// Slot of the final state: an empty sequence that would write back what it read leaves the slot alone.
__device__ __forceinline__ int final_slot(const ScanArgs& a, const Entry& e, int initial) {
  const int write = listed_write(a, e);
  return e.end <= e.begin && initial == write ? -1 : write;
}

// A condition of an entry's numbers, which is the same on every lane, as one that the compiler knows to be so.
__device__ __forceinline__ bool uniform(bool condition) { return __any_sync(kWholeWarp, condition); }

// Entries of a launch's list: one a sequence; with none, one entry's blocks still clear the unused rows of y.
__device__ __forceinline__ int64_t entries_of(const ScanArgs& a) { return max(a.sequences, 1); }

// Sixteen bytes from global to shared memory without passing through registers (sm_80 and up).
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#if defined(SSM_EMULATOR)
  emu_cp_async(shared, global, 16);
#elif __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

// Waits for this thread's own copies; a barrier must follow before other threads read them.
__device__ __forceinline__ void copy_async_wait_all() {
#if defined(SSM_EMULATOR)
  emu_cp_async_commit();
  emu_cp_async_wait_group(0);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The same, or sixteen bytes of zeros, for which nothing is read.
__device__ __forceinline__ void copy_async_16_or_zeros(void* shared, const void* global, bool there) {
#if defined(SSM_EMULATOR)
  if (there) {
    emu_cp_async(shared, global, 16);
  } else {
    *static_cast<uint4*>(shared) = make_uint4(0u, 0u, 0u, 0u);
  }
#else
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(there ? 16 : 0)
      : "memory");
#endif
}

// Closes a group of copies, and waits until at most so many of this thread's groups are in flight.
__device__ __forceinline__ void copy_async_commit() {
#if defined(SSM_EMULATOR)
  emu_cp_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kGroups>
__device__ __forceinline__ void copy_async_wait() {
#if defined(SSM_EMULATOR)
  emu_cp_async_wait_group(kGroups);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

__device__ __forceinline__ uint32_t pack2(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162_raw raw = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
}
__device__ __forceinline__ uint32_t pack2(float low, float high, __half) {
  const __half2_raw raw = __floats2half2_rn(low, high);
  return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
}
__device__ __forceinline__ uint32_t pack2(__nv_bfloat16 low, __nv_bfloat16 high) {
  return static_cast<uint32_t>(__nv_bfloat16_raw(low).x) | static_cast<uint32_t>(__nv_bfloat16_raw(high).x) << 16;
}
__device__ __forceinline__ uint32_t pack2(__half low, __half high) {
  return static_cast<uint32_t>(__half_raw(low).x) | static_cast<uint32_t>(__half_raw(high).x) << 16;
}

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

// 2^v by the special-function unit, to two units in the last place; subnormal inputs count as 0 and subnormal
// results become 0.
__device__ __forceinline__ float exp2_fast(float v) {
#if defined(SSM_EMULATOR)
  const float power = exp2f(v);
  return power < 0x1p-126f ? 0.f : power;
#else
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
#endif
}

// z * sigmoid(z), to a few units in the last place.
__device__ __forceinline__ float silu_fast(float z) {
  const float divisor = 1.f + fminf(exp2_fast(-1.44269504f * z), 0x1p125f);
#if defined(SSM_EMULATOR)
  return z / divisor;
#else
  return __fdividef(z, divisor);
#endif
}

// Sums in two floats (Dekker 1971, Knuth's two-sum): some 48 bits, so that the difference of two long sums has the
// digits of an f32 even where one token's term is millions of times another's.
struct alignas(8) Sum {
  float high, low;
};

__device__ __forceinline__ Sum add(Sum a, Sum b) {
  const float sum = a.high + b.high, of_b = sum - a.high;
  const float lost = (a.high - (sum - of_b)) + (b.high - of_b) + (a.low + b.low);
  const float high = sum + lost;
  return Sum{high, lost - (high - sum)};
}

__device__ __forceinline__ float difference(Sum a, Sum b) { return (a.high - b.high) + (a.low - b.low); }

constexpr float kLog2E = 1.44269502f, kLog2ELow = 1.92596303e-8f;  // log2(e) in two floats

// d * rate, rate being in two floats. Kept finite, so that differences of sums stay numbers.
__device__ __forceinline__ Sum exponent(float d, float rate, float rate_low) {
  const float high = d * rate, low = fmaf(d, rate, -high) + d * rate_low;
  return fabsf(high) <= 1e30f ? Sum{high, low} : Sum{copysignf(1e30f, high), 0.f};
}

// 16 x 16 tiles of operands as a warp holds them, 8 x 8 quarters a word: a lane has row lane / 4, columns 2 (lane % 4)
// + {0, 1} of each. The left operand of a product has the quarters in the order (0, 0), (8, 0), (0, 8), (8, 8); the
// right one, which is multiplied by its rows, in the order (0, 0), (0, 8), (8, 0), (8, 8), so that what one instruction
// takes is in neighbouring registers. Two tiles of 8 columns that a product left, packed, are either. Where a value is
// the sum of two operands, words 4 to 7 are the small ones.
struct alignas(16) Left {
  uint32_t r[4 * kParts];
};
struct alignas(16) Right {
  uint32_t r[4 * kParts];
};

// near += a * b^T for rows [0, 8) of b, far += the same for rows [8, 16). Of the products of two sums, that of the two
// small parts is left out.
__device__ __forceinline__ void multiply(float (&near)[4], float (&far)[4], const Left& a, const Right& b) {
  const uint32_t (&large)[4] = reinterpret_cast<const uint32_t (&)[4]>(a.r[0]);
  if constexpr (kParts == 2) {
    const uint32_t (&small)[4] = reinterpret_cast<const uint32_t (&)[4]>(a.r[4 * (kParts - 1)]);
    constexpr int kSmall = 4 * (kParts - 1);
    mma(near, small, b.r[0], b.r[1], Operand());
    mma(far, small, b.r[2], b.r[3], Operand());
    mma(near, large, b.r[kSmall], b.r[kSmall + 1], Operand());
    mma(far, large, b.r[kSmall + 2], b.r[kSmall + 3], Operand());
  }
  mma(near, large, b.r[0], b.r[1], Operand());
  mma(far, large, b.r[2], b.r[3], Operand());
}

// The tile at (row, column) of an array in shared memory, `plane` elements before its small parts.
__device__ __forceinline__ Left load_left(const Operand* from, int pitch, int row, int column, int lane, int plane) {
  Left t;
  const Operand* own = from + (row + lane % 16) * pitch + column + lane / 16 * 8;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    load_matrices(reinterpret_cast<uint32_t (&)[4]>(t.r[4 * part]), own + part * plane);
  }
  return t;
}
__device__ __forceinline__ Right load_right(const Operand* from, int pitch, int row, int column, int lane, int plane) {
  Right t;
  const Operand* own = from + (row + lane % 8 + lane / 16 * 8) * pitch + column + (lane & 8);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    load_matrices(reinterpret_cast<uint32_t (&)[4]>(t.r[4 * part]), own + part * plane);
  }
  return t;
}

// The transposed tile: its rows are the array's columns.
__device__ __forceinline__ Right load_right_transposed(const Operand* from, int pitch, int row, int column, int lane,
                                                       int plane) {
  Right t;
  const Operand* own = from + (row + lane % 16) * pitch + column + lane / 16 * 8;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    load_matrices_transposed(reinterpret_cast<uint32_t (&)[4]>(t.r[4 * part]), own + part * plane);
  }
  return t;
}

__device__ __forceinline__ float2 unpack(uint32_t two, __nv_bfloat16) {
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(uint32_t two, __half) {
  const __half2_raw raw{static_cast<unsigned short>(two), static_cast<unsigned short>(two >> 16)};
  return __half22float2(__half2(raw));
}

template <typename Side>
__device__ __forceinline__ void pack_word(Side& t, int word, float left, float right) {
  t.r[word] = pack2(left, right, Operand());
  if constexpr (kParts == 2) {
    const float2 large = unpack(t.r[word], Operand());
    t.r[word + 4 * (kParts - 1)] = pack2(left - large.x, right - large.y, Operand());
  }
}

// Two tiles of 8 columns that products left.
__device__ __forceinline__ Left pack_left(const float (&near)[4], const float (&far)[4]) {
  Left t;
  pack_word(t, 0, near[0], near[1]);
  pack_word(t, 1, near[2], near[3]);
  pack_word(t, 2, far[0], far[1]);
  pack_word(t, 3, far[2], far[3]);
  return t;
}
__device__ __forceinline__ Right pack_right(const float (&near)[4], const float (&far)[4]) {
  Right t;
  pack_word(t, 0, near[0], near[1]);
  pack_word(t, 1, far[0], far[1]);
  pack_word(t, 2, near[2], near[3]);
  pack_word(t, 3, far[2], far[3]);
  return t;
}

// The tile as a left operand, its columns multiplied by a lane's weights of columns 2 (lane % 4) + {0, 1, 8, 9}.
__device__ __forceinline__ Left weigh(const Right& t, float4 weight) {
  Left out;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int from = (word & 1) * 2 + word / 2;
    float2 v = unpack(t.r[from], Operand());
    if constexpr (kParts == 2) {
      const float2 small = unpack(t.r[from + 4 * (kParts - 1)], Operand());
      v = make_float2(v.x + small.x, v.y + small.y);
    }
    pack_word(out, word, v.x * (word < 2 ? weight.x : weight.z), v.y * (word < 2 ? weight.y : weight.w));
  }
  return out;
}

// One element to shared memory.
__device__ __forceinline__ void put_operand(Operand* to, Io v, int plane) {
  const float wide = to_f32(v);
  to[0] = from_f32<Operand>(wide);
  if constexpr (kParts == 2) to[plane] = from_f32<Operand>(wide - to_f32(to[0]));
}

// Sixteen bytes of elements to shared memory, or zeros.
__device__ __forceinline__ void copy_operands(Operand* to, const Io* from, bool there, int plane) {
  if constexpr (kParts == 2) {
    const float4 v = there ? load4(from) : make_float4(0.f, 0.f, 0.f, 0.f);
    Left t;
    pack_word(t, 0, v.x, v.y);
    pack_word(t, 1, v.z, v.w);
    *reinterpret_cast<uint2*>(to) = make_uint2(t.r[0], t.r[1]);
    *reinterpret_cast<uint2*>(to + plane) = make_uint2(t.r[4 * (kParts - 1)], t.r[4 * (kParts - 1) + 1]);
  } else {
    copy_async_16_or_zeros(to, from, there);
  }
}

// The values of a left tile: rows lane / 4 and lane / 4 + 8 of columns [0, 8), then of columns [8, 16).
__device__ __forceinline__ void values_of(float2 (&v)[4], const Left& t) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = unpack(t.r[i], Operand());
    if constexpr (kParts == 2) {
      const float2 small = unpack(t.r[i + 4 * (kParts - 1)], Operand());
      v[i] = make_float2(v[i].x + small.x, v[i].y + small.y);
    }
  }
}

__device__ __forceinline__ void read_tile(float2 (&v)[4], const Operand* from, int pitch, int row, int column, int lane,
                                          int plane) {
  values_of(v, load_left(from, pitch, row, column, lane, plane));
}

#define SSM_OPERAND "bf16"
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

using HeadRows = float[kHeadDim / 8][4];  // 16 tokens of a head's rows, as a warp has them
// Barriers by number, for some of a block's warps: a warp counts as 32 threads, and a phase of a barrier is over when
// `threads` have come to it. Number 0 is __syncthreads. One that arrives does not wait; what it did before is seen by
// those that wait. A barrier is come to again only when its phase before is known to be over.
__device__ __forceinline__ void barrier_wait(int number, int threads) {
#if defined(SSM_EMULATOR)
  emu_named_barrier(number, threads, true);
#else
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(int number, int threads) {
#if defined(SSM_EMULATOR)
  emu_named_barrier(number, threads, false);
#else
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}

// Moves registers between the warp groups of a block (sm_90a): those that give some up come first, and those that ask
// for more wait until there are as many. Each number is what a thread has from here on, a multiple of 8 from 24 to 256.
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
#if !defined(SSM_EMULATOR)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void ask_for_registers() {
#if !defined(SSM_EMULATOR)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

constexpr int kTiles = kChunk / 16;             // tiles of 16 tokens in a chunk
constexpr int kTileRows = kRows / 16;           // tiles of 16 rows of a warp
constexpr int kTileColumns = kDState / 16;      // tiles of 16 columns of a row
constexpr int kHeadWarps = kHeadDim / kRows;    // warps of a head

// What a block works on: some heads of one group, over one segment of a sequence or, in the first of two launches, over
// one of the kGatherCuts that a segment is cut in again; what follows calls that a segment too.
struct Block {
  int entry, segment;
  int begin, end;            // tokens of the sequence
  int read, write;           // slots, -1: none
  bool padding;
  int group, head, heads;    // first head, and how many there are
  int chunks, first, last;   // chunks of the sequence, and the segment's own
  int segments;              // that are not empty, the last not cut
  int unused;                // tokens from here on belong to no sequence
};

__device__ __forceinline__ int64_t blocks_of(const ScanArgs& a, int segments) {
  // NOTE: opaque, so that neither number is kept in a register from item to item.
  const int runs = (opaque(a.heads * kPartsOfHead) / a.groups + kHeads - 1) / kHeads;
  return static_cast<int64_t>(max(opaque(a.sequences), 1)) * segments * a.groups * runs;
}

// NOTE: 64-bit divisions are many times slower, and a launch of microseconds feels them.
__device__ __forceinline__ int64_t quotient(int64_t a, int b) {
  return a <= 0x7fffffff ? static_cast<int64_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b)) : a / b;
}

__device__ __forceinline__ Block find_block(const ScanArgs& a, int64_t item, int segments, int cuts) {
  const int of_group = opaque(a.heads * kPartsOfHead) / a.groups, runs = (of_group + kHeads - 1) / kHeads;
  const int of_segment = a.groups * runs;
  const int64_t row = quotient(item, of_segment);
  const int place = static_cast<int>(item - row * of_segment);
  Block b;
  b.entry = static_cast<int>(quotient(row, segments * cuts));
  b.segment = static_cast<int>(row - static_cast<int64_t>(b.entry) * segments * cuts);
  b.group = place / runs;
  const int before = (place - b.group * runs) * kHeads;
  b.head = b.group * of_group + before;
  b.heads = min(kHeads, of_group - before);
  const Entry e = load_entry(a, b.entry);
  const int initial = initial_slot(a, e);
  b.unused = __shfl_sync(kWholeWarp, min(max(e.last, 0), a.tokens), 0);
  // From one lane, so that the compiler knows that a warp has one value.
  b.begin = __shfl_sync(kWholeWarp, max(e.begin, 0), 0);
  b.end = __shfl_sync(kWholeWarp, min(e.end, a.tokens), 0);
  b.padding = uniform(b.entry >= a.sequences || is_padding(a, e));
  b.read = __shfl_sync(kWholeWarp, b.padding ? -1 : initial, 0);
  b.write = __shfl_sync(kWholeWarp, b.padding ? -1 : final_slot(a, e, initial), 0);
  const int tokens = max(b.end - b.begin, 0);
  b.chunks = (tokens + kChunk - 1) / kChunk;
  constexpr int kCuts = kSegments * kGatherCuts;
  const int whole = max((b.chunks + kCuts - 1) / kCuts, 1) * kGatherCuts, each = whole / cuts;
  b.first = min(b.segment * each, b.chunks);
  b.last = min(b.first + each, b.chunks);
  b.segments = (max((b.chunks + whole - 1) / whole, 1) - 1) * cuts + 1;
  return b;
}

// Zeros in y for this block's heads.
__device__ __forceinline__ void clear(const ScanArgs& a, const Block& b, int64_t begin, int64_t end, int64_t step) {
  Io* y = static_cast<Io*>(a.y) + static_cast<int64_t>(b.head) * kHeadDim;
  for (int64_t t = begin; t < end; t += step) {
    for (int i = threadIdx.x; i < b.heads * kHeadDim; i += kThreads) y[t * a.y_stride + i] = from_f32<Io>(0.f);
  }
}

// Decays of one chunk and head, tile by tile of 16 tokens, as exponents and powers of 2. Within a tile exponents are
// differences of sums in two floats; across tiles they are sums of whole tiles, which lose nothing.
struct Decays {
  Sum sum[kChunk];      // of d * A * log2(e) from the tile's first token to this one
  float d[kChunk];
  float since[kChunk];  // decay from before the tile to this token
  float until[kChunk];  // decay from this token to the end of its tile, times d
  float tile[kTiles];   // exponents of whole tiles

  // Exponent of the tiles [first, last).
  __device__ __forceinline__ float between(int first, int last) const {
    float sum = 0.f;
    for (int i = first; i < last; ++i) sum += tile[i];
    return sum;
  }
};

// What a warp needs once a chunk or less. It has its own in shared memory, which spares it registers.
struct Note {
  float bias, rate, rate_low;  // what turns dt of the head into decays
};

// One warp's share of the decays of its head: half a warp a tile. dt is asked for with `load` a chunk ahead of
// `turn`, which makes it the next one.
struct Clock {
  static constexpr int kPasses = (kTiles + 2 * kHeadWarps - 1) / (2 * kHeadWarps);
  uint32_t dt[kPasses], ahead[kPasses];  // as stored, of the next chunk and the one after: nothing waits for it here

  __device__ __forceinline__ void start(const ScanArgs& a, int head, int lane, Note& out) {
    if (lane == 0) {
      const float A = a.A[head], rate = A * kLog2E;
      out.bias = a.dt_bias ? a.dt_bias[head] : 0.f;
      out.rate = rate;
      out.rate_low = fmaf(A, kLog2E, -rate) + A * kLog2ELow;
    }
    __syncwarp();
  }

  static __device__ __forceinline__ uint32_t load_raw(const ScanArgs& a, int64_t index) {
    if (sizeof(Io) == 4 || a.flags & kFlagDtF32) return static_cast<const uint32_t*>(a.dt)[index];
    return static_cast<const uint16_t*>(a.dt)[index];
  }
  static __device__ __forceinline__ float from_raw(const ScanArgs& a, uint32_t raw) {
    if (sizeof(Io) == 4 || a.flags & kFlagDtF32) return __uint_as_float(raw);
    return to_f32(*reinterpret_cast<const Io*>(&raw));
  }

  __device__ __forceinline__ void load(const ScanArgs& a, const Block& b, int head, int chunk, int warp, int lane) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int tile = 2 * (warp + pass * kHeadWarps) + lane / 16;
      const int64_t t = b.begin + static_cast<int64_t>(chunk) * kChunk + 16 * tile + lane % 16;
      // Tokens behind the end change nothing.
      ahead[pass] = tile < kTiles && t < b.end ? load_raw(a, t * a.dt_stride + head) : 0u;
    }
  }

  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) dt[pass] = ahead[pass];
  }

  __device__ __forceinline__ void advance(const ScanArgs& a, const Block& b, int chunk, int warp, int lane,
                                          const Note& r, Decays& out) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int tile = 2 * (warp + pass * kHeadWarps) + lane / 16, k = 16 * tile + lane % 16;
      if (2 * (warp + pass * kHeadWarps) >= kTiles) break;
      const bool there = b.begin + static_cast<int64_t>(chunk) * kChunk + k < b.end;
      const float d = there ? step_size(from_raw(a, dt[pass]), r.bias, a.flags, a.dt_min, a.dt_max) : 0.f;
      Sum sum = exponent(d, r.rate, r.rate_low);
#pragma unroll
      for (int reach = 1; reach < 16; reach *= 2) {
        const Sum left{__shfl_up_sync(kWholeWarp, sum.high, reach, 16), __shfl_up_sync(kWholeWarp, sum.low, reach, 16)};
        if (lane % 16 >= reach) sum = add(left, sum);
      }
      const Sum whole{__shfl_sync(kWholeWarp, sum.high, 15, 16), __shfl_sync(kWholeWarp, sum.low, 15, 16)};
      out.sum[k] = sum;
      out.d[k] = d;
      out.since[k] = exp2_fast(sum.high + sum.low);
      out.until[k] = exp2_fast(difference(whole, sum)) * d;
      if (lane % 16 == 15) out.tile[tile] = whole.high + whole.low;
    }
  }
};

// C . B of the 16 tokens of a tile with each other, as products leave it, decayed and times d.
__device__ __forceinline__ Left decayed(const Decays& w, const float (&near)[4], const float (&far)[4], int tile,
                                        int lane) {
  const int q = 16 * tile + lane / 4, k = 16 * tile + 2 * (lane % 4);
  float part[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int query = q + (i & 2) * 4, key = k + (i & 1) + (i & 4) * 2;
    const float decay = exp2_fast(difference(w.sum[query], w.sum[key])) * w.d[key];
    part[i / 4][i % 4] = key <= query ? (i < 4 ? near[i % 4] : far[i % 4]) * decay : 0.f;
  }
  return pack_left(part[0], part[1]);
}

// The same for 16 tokens of tile `later` (rows) and 16 of an earlier one: exp(sum(q) - sum(k)) in three
// factors, all of them decays.
__device__ __forceinline__ Left decayed(const Decays& w, const float (&near)[4], const float (&far)[4], int later,
                                        int earlier, int lane) {
  const int q = 16 * later + lane / 4, k = 16 * earlier + 2 * (lane % 4);
  const float passed = exp2_fast(w.between(earlier + 1, later));
  const float upper = w.since[q] * passed, lower = w.since[q + 8] * passed;
  float part[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float(&v)[4] = half ? far : near;
    const float2 until = *reinterpret_cast<const float2*>(&w.until[k + 8 * half]);
    part[half][0] = v[0] * (upper * until.x);
    part[half][1] = v[1] * (upper * until.y);
    part[half][2] = v[2] * (lower * until.x);
    part[half][3] = v[3] * (lower * until.y);
  }
  return pack_left(part[0], part[1]);
}

// Decays what the state before a chunk gives to 16 tokens of it.
template <int kCount>
__device__ __forceinline__ void scale_rows(const Decays& w, float (&y)[kCount][4], int tile, int lane) {
  float before = 0.f;
#pragma unroll
  for (int i = 0; i < kTiles - 1; ++i) before += i < tile ? w.tile[i] : 0.f;
  const float passed = exp2_fast(before);
  const float upper = w.since[16 * tile + lane / 4] * passed, lower = w.since[16 * tile + lane / 4 + 8] * passed;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    y[i][0] *= upper;
    y[i][1] *= upper;
    y[i][2] *= lower;
    y[i][3] *= lower;
  }
}

// What a chunk's end has of tokens 2 (lane % 4) + {0, 1, 8, 9} of a tile: the decay up to there, times d.
__device__ __forceinline__ float4 weights(const Decays& w, int tile, int lane) {
  const float after = exp2_fast(w.between(tile + 1, kTiles));
  const float2 near = *reinterpret_cast<const float2*>(&w.until[16 * tile + 2 * (lane % 4)]);
  const float2 far = *reinterpret_cast<const float2*>(&w.until[16 * tile + 2 * (lane % 4) + 8]);
  return make_float4(near.x * after, near.y * after, far.x * after, far.y * after);
}

constexpr int kCarriers = 4;  // warps that carry the state
constexpr int kWriterGroups = (kWarps - kCarriers) / 4;  // warp groups that bring tokens and write y, in turn
constexpr int kBlockRows = kHeads * kHeadDim;      // rows of a block: the first carriers have 16 each, others none
constexpr bool kWholeGroups = kHeadDim % 64 == 0;  // all rows of a warp group are of one head
constexpr int kPanel = kChunk * kPanelColumns;
constexpr int kStatePanel = kBlockRows * kPanelColumns;
constexpr int kGatherStages = 3;  // kStages where no y is written
constexpr int kClocks = 3;        // chunks whose decays are kept: that of y, that of the state, and the one ahead

// Registers of a thread: as launched, and once the two kinds of warps have shared them out.
constexpr int kThreadRegisters = 168, kCarrierRegisters = 232;
constexpr int kWriterRegisters = 136;
// Arrays of 64 tokens as panels of 64 columns.
template <int kColumns>
__device__ __forceinline__ constexpr int plane_of() {
  return 0;
}
template <int kColumns>
__device__ __forceinline__ int offset_of(int token, int column) {
  const uint32_t c = column;
  return c / kPanelColumns * kPanel + swizzled(token, c % kPanelColumns);
}

// Shared memory of a block, in bytes from its start. Panels are at multiples of 1024 bytes. Where no y is written
// there is no C, and nothing behind the stages.
constexpr int kOffsetNotes = kClocks * kHeads * static_cast<int>(sizeof(Decays));
constexpr int kOffsetBlock = kOffsetNotes + kCarriers * static_cast<int>(sizeof(Note));
constexpr int kOffsetStages = (kOffsetBlock + static_cast<int>(sizeof(Block)) + 1023) / 1024 * 1024;
constexpr int kOffsetX = kDState * kChunk * 2;  // in a stage, behind B
constexpr int kOffsetC = kOffsetX + (kBlockRows + 63) / 64 * kPanel * 2;
constexpr int kStageBytes = kOffsetC + kDState * kChunk * 2;
constexpr int kOffsetStates = kOffsetStages + kStages * kStageBytes;
constexpr int kOffsetRows = kOffsetStates + 2 * kBlockRows * kDState * 2;
constexpr int kRowsColumns = 32;  // of y that a warp turns into whole rows at a time
constexpr int kSharedBytes = kOffsetRows + 4 * kWriterGroups * 16 * kRowsColumns * 2;
static_assert(kSharedBytes == 225280, "the spec and the kernel agree on shared memory");
static_assert(kOffsetStages + kGatherStages * kOffsetC == 126976, "and on that of the first launch");

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Where a chunk's tokens are in shared memory.
template <bool kOutput>
__device__ __forceinline__ int stage_of(int chunk) {
  return kOffsetStages + (kOutput ? chunk % kStages * kStageBytes : chunk % kGatherStages * kOffsetC);
}
__device__ __forceinline__ Operand* tokens_B(int stage) { return reinterpret_cast<Operand*>(shared_memory + stage); }
__device__ __forceinline__ Operand* tokens_C(int stage) {
  return reinterpret_cast<Operand*>(shared_memory + stage + kOffsetC);
}
__device__ __forceinline__ Operand* tokens_x(int stage) {
  return reinterpret_cast<Operand*>(shared_memory + stage + kOffsetX);
}
// The state of the block's rows before the chunk, rounded: panels of all rows and 64 columns.
__device__ __forceinline__ Operand* rounded_state(int chunk) {
  return reinterpret_cast<Operand*>(shared_memory + kOffsetStates) + (chunk & 1) * kBlockRows * kDState;
}
__device__ __forceinline__ Decays& decays(int chunk, int head) {
  return reinterpret_cast<Decays*>(shared_memory)[chunk % kClocks * kHeads + head];
}
__device__ __forceinline__ Note& note_of(int warp) {
  return reinterpret_cast<Note*>(shared_memory + kOffsetNotes)[warp];
}

// x of 16 tokens and of the 16 rows at `row + further` of the block's; `row` begins a head.
__device__ __forceinline__ void read_x(float2 (&v)[4], int stage, int token, int row, int further, int lane) {
  Left t;
  const int first = offset_of<kBlockRows>(token + lane % 16, row + lane / 16 * 8);
  load_matrices(t.r, tokens_x(stage) + further / kPanelColumns * kPanel + (first ^ further % kPanelColumns));
  values_of(v, t);
}

// Sixteen tokens of y, kRowsColumns of their rows, on the way from a warp's products to whole rows in memory: piece i
// of 8 columns of token t is at i ^ (t / 2 % 4), so that neither side meets itself in a bank.
__device__ __forceinline__ Io* y_piece(int writer, int token, int piece) {
  Io* own = reinterpret_cast<Io*>(shared_memory + kOffsetRows) + writer * 16 * kRowsColumns;
  return own + token * kRowsColumns + (piece ^ static_cast<uint32_t>(token) / 2 % 4) * 8;
}

// Barriers, two of each for the chunks in turn. Those that carry the state and those that bring tokens and write y wait
// for each other only where one hands over to the other.
constexpr int kHandOver = 32 * kCarriers + 128;
enum Meeting : int {
  kLoaded = 1,           // a chunk and its decays are there
  kReady = kLoaded + 2,  // so is the state before it, and the chunk before has been read
  kLooked = kReady + 2,  // those that write y need the state before the chunk and its decays no more
  kTaken = kLooked + 2,  // the state behind the chunk has been summed
  kWritten = kTaken + 2  // a warp group that writes y needs its chunk no more
};

// What the block works on, in shared memory: it spares registers, and one warp finds it for all.
__device__ __forceinline__ const Block& share_block(const ScanArgs& a, int64_t item, int segments,
                                                    int cuts) {
  Block& shared = *reinterpret_cast<Block*>(shared_memory + kOffsetBlock);
  if (threadIdx.x < 32) {
    const Block found = find_block(a, item, segments, cuts);
    if (threadIdx.x == 0) shared = found;
  }
  __syncthreads();
  return shared;
}

// offset_of a token some turns of `kTurn` later, which is a constant further on where the pattern of offsets repeats.
template <int kColumns, int kTurn>
__device__ __forceinline__ int later_offset(int token, int column, int later) {
  if constexpr (kTurn % 8 == 0) return offset_of<kColumns>(token, column) + offset_of<kColumns>(later, 0);
  // Token kTurn of the pattern is token 0 of it with one bit of its piece's place turned.
  if constexpr (kTurn == 4) {
    return (offset_of<kColumns>(token, column) ^ offset_of<kColumns>(later % 8, 0)) +
           offset_of<kColumns>(later - later % 8, 0);
  }
  return offset_of<kColumns>(token + later, column);
}

// How some threads share the tokens of one array: a thread has the same 16-byte piece of every kAtOnce-th token.
template <int kColumns, int kSharers>
struct Share {
  static constexpr int kPiece = 16 / sizeof(Io), kPieces = kColumns / kPiece;
  // Tokens, whole turns of the pattern where there are as many threads.
  static constexpr int kTurns = kPieces <= kSharers / 8 ? 8 : 1;
  static constexpr int kAtOnce = kSharers / kPieces / kTurns * kTurns;
  static_assert(kPieces <= kSharers, "a pass of the block covers whole tokens");
  static constexpr int kPlane = plane_of<kColumns>();

  // A whole chunk; `from` is the thread's piece of its first token and moves `ahead` tokens on.
  static __device__ __forceinline__ void copy(Operand* to, const Io*& from, int64_t stride, int columns, int ahead,
                                              int thread) {
    const int first = static_cast<uint32_t>(thread) / kPieces, c = static_cast<uint32_t>(thread) % kPieces * kPiece;
    const int64_t step = kAtOnce * stride;
    const Io* next = from;
    if (first < kAtOnce && c < columns) {
#pragma unroll
      for (int t = 0; t < kChunk; t += kAtOnce) {
        if (kChunk % kAtOnce && first + t >= kChunk) break;
        copy_operands(to + later_offset<kColumns, kAtOnce>(first, c, t), next, true, kPlane);
        next += step;
      }
    }
    from += ahead * stride;
  }

  // The same for a chunk that the sequence ends in, zeros behind its `count` tokens, or for arrays that take no
  // 16-byte accesses; `from` is token 0.
  static __device__ __forceinline__ void copy_part(Operand* to, const Io* from, int64_t stride, bool vector, int count,
                                                int columns, int thread) {
    if (vector) {
      const int first = static_cast<uint32_t>(thread) / kPieces, c = static_cast<uint32_t>(thread) % kPieces * kPiece;
      if (first >= kAtOnce || c >= columns) return;
#pragma unroll 1
      for (int t = first; t < kChunk; t += kAtOnce) {
        copy_operands(to + offset_of<kColumns>(t, c), from + t * stride + c, t < count, kPlane);
      }
      return;
    }
#pragma unroll 1
    for (int i = thread; i < kChunk * kColumns; i += kSharers) {
      const int t = i / kColumns, c = i - t * kColumns;
      if (c < columns) {
        put_operand(to + offset_of<kColumns>(t, c), t < count ? from[t * stride + c] : from_f32<Io>(0.f), kPlane);
      }
    }
  }

  static __device__ __forceinline__ const Io* own(const void* array, int64_t stride, int64_t token, int64_t column,
                                                  int thread) {
    const int first = static_cast<uint32_t>(thread) / kPieces, c = static_cast<uint32_t>(thread) % kPieces * kPiece;
    return static_cast<const Io*>(array) + (token + first) * stride + column + c;
  }
};

// Brings the tokens of a segment to shared memory, every kEvery-th chunk, by kSharers threads; without kOutput
// all but C.
template <bool kOutput, int kSharers = kStageThreads, int kEvery = 1>
struct Tokens {
  using Columns = Share<kDState, kSharers>;
  using Values = Share<kHeads * kHeadDim, kSharers>;
  const Io *B, *C, *x;  // this thread's pieces of the next chunk
  int next;

  __device__ __forceinline__ Tokens(const ScanArgs& a, const Block& b, int chunk, int thread) {
    const int64_t t0 = b.begin + static_cast<int64_t>(chunk) * kChunk;
    const int64_t column = static_cast<int64_t>(b.group) * kDState, row = static_cast<int64_t>(b.head) * kHeadDim;
    B = Columns::own(a.B, a.B_stride, t0, column, thread);
    C = Columns::own(a.C, a.C_stride, t0, column, thread);
    x = Values::own(a.x, a.x_stride, t0, row, thread);
    next = chunk;
  }

  // Asks for the next chunk as one group of copies, an empty one behind the segment's last; or for B and C alone, then
  // for x.
  template <bool kKeys = true, bool kValues = true>
  __device__ __forceinline__ void stage(const ScanArgs& a, const Block& b, int thread) {
    stage_at<kKeys, kValues>(a, b, stage_of<kOutput>(next), thread);
  }
  template <bool kKeys = true, bool kValues = true>
  __device__ __forceinline__ void stage_at(const ScanArgs& a, const Block& b, int at, int thread) {
    constexpr uint32_t kVectors = kFlagVectorB | kFlagVectorX | (kOutput ? kFlagVectorC : 0u);
    if (next >= b.last) {
    } else if ((a.flags & kVectors) == kVectors &&
               static_cast<uint32_t>(next) < static_cast<uint32_t>(b.end - b.begin) / kChunk) {
      if (kKeys) Columns::copy(tokens_B(at), B, a.B_stride, kDState, kEvery * kChunk, thread);
      if (kKeys && kOutput) Columns::copy(tokens_C(at), C, a.C_stride, kDState, kEvery * kChunk, thread);
      if (kValues) Values::copy(tokens_x(at), x, a.x_stride, b.heads * kHeadDim, kEvery * kChunk, thread);
    } else {
      const int64_t t0 = b.begin + static_cast<int64_t>(next) * kChunk;
      const int count = static_cast<int>(min(static_cast<int64_t>(kChunk), b.end - t0));
      const int64_t column = static_cast<int64_t>(b.group) * kDState, row = static_cast<int64_t>(b.head) * kHeadDim;
      if (kKeys) {
        Columns::copy_part(tokens_B(at), static_cast<const Io*>(a.B) + t0 * a.B_stride + column, a.B_stride,
                                  a.flags & kFlagVectorB, count, kDState, thread);
      }
      if (kKeys && kOutput) {
        Columns::copy_part(tokens_C(at), static_cast<const Io*>(a.C) + t0 * a.C_stride + column, a.C_stride,
                                  a.flags & kFlagVectorC, count, kDState, thread);
      }
      if (kValues) {
        Values::copy_part(tokens_x(at), static_cast<const Io*>(a.x) + t0 * a.x_stride + row,
                                            a.x_stride, a.flags & kFlagVectorX, count, b.heads * kHeadDim, thread);
      }
    }
    next += kEvery;
    copy_async_commit();
  }

  // The chunks before the first that is worked on.
  __device__ __forceinline__ void stage_first(const ScanArgs& a, const Block& b, int thread) {
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) stage(a, b, thread);
  }
};

// The state of a warp's rows, as the tensor cores leave it: tile [i][2 * j + half] has rows 16 i + {lane / 4, +
// 8} and columns 16 j + 8 half + 2 (lane % 4) + {0, 1}.
struct Rows {
  float s[kTileRows][2 * kTileColumns][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kTileColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = 0.f;
      }
    }
  }

  __device__ __forceinline__ void scale(float decay) {
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kTileColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] *= decay;
      }
    }
  }

  // NOTE: opaque, so that no address is worked out ahead of where it is wanted and kept in a register that long.
  __device__ __forceinline__ void load_slot(const ScanArgs& a, int64_t slot, int row, int lane) {
    const State* from = static_cast<const State*>(a.state) + slot * a.state_stride;
    const State* own = from + static_cast<int64_t>(opaque(row) + opaque(lane) / 4) * kDState + 2 * (lane % 4);
    if (a.flags & kFlagVectorState) {
      load_rows<true>(own);
    } else {
      load_rows<false>(own);
    }
  }

  __device__ __forceinline__ void store_slot(const ScanArgs& a, int64_t slot, int token, int row, int lane,
                                             const Rounding& rounding) const {
    State* into = static_cast<State*>(a.state) + slot * a.state_stride;
    const int own = opaque(row) + opaque(lane) / 4;
    const Destination to{into + static_cast<int64_t>(own) * kDState, static_cast<uint32_t>(own), slot, token};
    if (a.flags & kFlagVectorState) {
      store_rows<true>(to, 2 * (lane % 4), rounding);
    } else {
      store_rows<false>(to, 2 * (lane % 4), rounding);
    }
  }

 private:
  template <bool kVector>
  __device__ __forceinline__ void load_rows(const State* own) {
#pragma unroll
    for (int i = 0; i < 2 * kTileRows; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kTileColumns; ++j) {
        const float2 v = load_pair(own + 8 * i * kDState + 8 * j, kVector);
        s[i / 2][j][i % 2 * 2] = v.x;
        s[i / 2][j][i % 2 * 2 + 1] = v.y;
      }
    }
  }

  template <bool kVector>
  __device__ __forceinline__ void store_rows(const Destination& first, int column, const Rounding& rounding) const {
#pragma unroll
    for (int i = 0; i < 2 * kTileRows; ++i) {
      const Destination to{first.row + 8 * i * kDState, first.row_index + 8 * i, first.slot, first.token};
#pragma unroll
      for (int j = 0; j < 2 * kTileColumns; ++j) {
        store_pair(to, 8 * j + column, s[i / 2][j][i % 2 * 2], s[i / 2][j][i % 2 * 2 + 1], kDState, kVector, rounding);
      }
    }
  }
};

// Leaves 64 columns of a warp's rows of the state before a chunk where products find them.
__device__ __forceinline__ void publish(const Rows& rows, int panel, int chunk, int warp, int lane) {
  lane = opaque(lane);  // or the addresses below are kept in registers from chunk to chunk
  Operand* to = rounded_state(chunk) + panel * kStatePanel;
  const int first = swizzled(16 * warp + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Left t = pack_left(rows.s[0][8 * panel + 2 * j], rows.s[0][8 * panel + 2 * j + 1]);
    store_matrices(to + (first ^ j * 16), t.r);
  }
}

// 64 columns of the rows, as products sum them.
__device__ __forceinline__ float (&columns_of(Rows& rows, int panel))[8][4] {
  return reinterpret_cast<float(&)[8][4]>(rows.s[0][8 * panel]);
}

// The state behind a chunk from the one before it, 64 columns at a time; a warp that is not `present` keeps zeros.
// `beside` is called while products run, and `leave` with each 64 columns when they are there, which without kOutput is
// when all are.
template <bool kOutput, typename Beside, typename Leave>
__device__ __forceinline__ void advance_state(Rows& rows, int stage, int chunk, bool present, int local, int row,
                                              int lane, const Beside& beside, const Leave& leave) {
  constexpr int kPanels = kDState / 64;
  Left x[kTiles]{};
  float decay = 0.f;
  if (kWholeGroups || present) {
    const Decays& w = decays(chunk, local);
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      Right t;
      const int token = 16 * k + lane % 16, place = local * kHeadDim + row + lane / 16 * 8;
      load_matrices_transposed(t.r, tokens_x(stage) + offset_of<kBlockRows>(token, place));
      x[k] = weigh(t, weights(w, k, lane));
    }
    decay = exp2_fast(w.between(0, kTiles));
  }
  const Panel keys(tokens_B(stage));
  if (!kOutput) rows.scale(decay);
#pragma unroll
  for (int n = 0; n < kPanels; ++n) {
    float(&s)[8][4] = columns_of(rows, n);
#pragma unroll
    for (int i = 0; kOutput && i < 32; ++i) s[i / 4][i % 4] *= decay;
    hold(s);
    if (kOutput || n == 0) products_begin();
#pragma unroll
    for (int k = 0; k < kTiles; ++k) product(s, x[k].r, keys + n, k);
    if (kOutput || n == kPanels - 1) products_end();
  }
  beside();
#pragma unroll
  for (int n = 0; n < kPanels; ++n) {
    products_wait_but(kOutput ? kPanels - 1 - n : 0);
    hold(columns_of(rows, n));
    leave(n);
  }
}

// Scores of 16 tokens, tile kLater of a chunk: those of each tile before it and of itself, zeros behind.
template <int kLater>
__device__ __forceinline__ void decay_scores(const Decays& w, const float (&near)[8][4], Left (&scores)[kTiles],
                                             int lane) {
  lane = opaque(lane);  // or what is worked out from it is kept in registers from chunk to chunk
  const int q = 16 * kLater + lane / 4, k = 2 * (lane % 4);
  scores[kLater] = decayed(w, near[2 * kLater], near[2 * kLater + 1], kLater, lane);
  float upper = w.since[q], lower = w.since[q + 8];
#pragma unroll
  for (int tile = kLater - 1; tile >= 0; --tile) {
    float part[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&v)[4] = near[2 * tile + half];
      const float2 until = *reinterpret_cast<const float2*>(&w.until[16 * tile + k + 8 * half]);
      part[half][0] = v[0] * until.x * upper;
      part[half][1] = v[1] * until.y * upper;
      part[half][2] = v[2] * until.x * lower;
      part[half][3] = v[3] * until.y * lower;
    }
    scores[tile] = pack_left(part[0], part[1]);
    if (tile > 0) {
      const float passed = exp2_fast(w.tile[tile]);
      upper *= passed;
      lower *= passed;
    }
  }
#pragma unroll
  for (int tile = kLater + 1; tile < kTiles; ++tile) scores[tile] = Left{};
}

// The same with the tile as a number: a text of its own for each, without a choice inside.
__device__ __forceinline__ void decay_scores(const Decays& w, const float (&near)[8][4], int later,
                                             Left (&scores)[kTiles], int lane) {
  static_assert(kTiles == 4, "a warp group has a warp for each tile of tokens");
  if (later == 0) {
    decay_scores<0>(w, near, scores, lane);
  } else if (later == 1) {
    decay_scores<1>(w, near, scores, lane);
  } else if (later == 2) {
    decay_scores<2>(w, near, scores, lane);
  } else {
    decay_scores<3>(w, near, scores, lane);
  }
}

__device__ __forceinline__ float2 load_two(const Io* p, bool vector) {
  if (vector) return unpack(*reinterpret_cast<const uint32_t*>(p), Io());
  return make_float2(to_f32(p[0]), to_f32(p[1]));
}

using FinishedRows = Left[kHeadDim / 16];  // the same, rounded

// Sixteen tokens of y and a head's rows of it, as they are finished, to memory in whole pieces of rows.
template <bool kVector>
__device__ __forceinline__ void store_rows(Io* into, int64_t stride, int64_t tokens, const FinishedRows& y, int writer,
                                           int lane) {
#pragma unroll
  for (int first = 0; first < kHeadDim; first += kRowsColumns) {
    __syncwarp();  // the columns before have been read
#pragma unroll
    for (int j = 0; j < kRowsColumns / 16; ++j) {
      const int i = first / 8 + 2 * j;
      if (8 * i >= kHeadDim) break;
      store_matrices(y_piece(writer, lane % 16, 2 * j + lane / 16), y[i / 2].r);
    }
    __syncwarp();
    if (first + kRowsColumns > kHeadDim && first + 8 * (lane % 4) >= kHeadDim) break;
    uint4 v[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      v[half] = *reinterpret_cast<const uint4*>(y_piece(writer, lane / 4 + 8 * half, lane % 4));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = lane / 4 + 8 * half;
      Io* own = into + token * stride + first + 8 * (lane % 4);
      if (token >= tokens) continue;
      if (kVector) {
        store_streaming(reinterpret_cast<uint4*>(own), v[half]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] = reinterpret_cast<const Io*>(&v[half])[i];
      }
    }
  }
}

// The last of y for 16 tokens and the rows of a head, as products leave it: D x, the gate, and rounded.
__device__ __forceinline__ void finish(const ScanArgs& a, const Block& b, HeadRows& y, FinishedRows& finished,
                                       float skip, int stage, int chunk, int tile, int local, int lane) {
  lane = opaque(lane);  // or the addresses below are kept in registers from chunk to chunk
  const int64_t t0 = b.begin + static_cast<int64_t>(chunk) * kChunk + 16 * tile;
  if (a.D) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; i += 2) {
      float2 x[4];  // rows lane / 4 and lane / 4 + 8 of tile i, then of tile i + 1
      read_x(x, stage, 16 * tile, local * kHeadDim, 8 * i, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float(&v)[4] = y[i + e / 2];
        v[e % 2 * 2] = fmaf(skip, x[e].x, v[e % 2 * 2]);
        v[e % 2 * 2 + 1] = fmaf(skip, x[e].y, v[e % 2 * 2 + 1]);
      }
    }
  }
  const int64_t place = static_cast<int64_t>(b.head + local) * kHeadDim;
  if (a.z) {
    const bool vector = a.flags & kFlagVectorZ;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t t = t0 + lane / 4 + 8 * half;
      const Io* from = static_cast<const Io*>(a.z) + t * a.z_stride + place + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        const float2 z = t < b.end ? load_two(from + 8 * i, vector) : make_float2(0.f, 0.f);
        y[i][2 * half] *= silu_fast(z.x);
        y[i][2 * half + 1] *= silu_fast(z.y);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) finished[i] = pack_left(y[2 * i], y[2 * i + 1]);
}

// It to memory.
__device__ __forceinline__ void store(const ScanArgs& a, const Block& b, const FinishedRows& y, int chunk, int local,
                                      int writer, int lane) {
  lane = opaque(lane);  // or the addresses below are kept in registers from chunk to chunk
  const int64_t t0 = b.begin + static_cast<int64_t>(chunk) * kChunk + 16 * (writer % 4);
  const int64_t place = static_cast<int64_t>(b.head + local) * kHeadDim;
  Io* into = static_cast<Io*>(a.y) + t0 * a.y_stride + place;
  if (a.flags & kFlagVectorY) {
    store_rows<true>(into, a.y_stride, b.end - t0, y, writer, lane);
  } else {
    store_rows<false>(into, a.y_stride, b.end - t0, y, writer, lane);
  }
}

// That of a chunk's last head, which write_y leaves to the next turn, if the chunk is one of the segment's.
__device__ __forceinline__ void store_last(const ScanArgs& a, const Block& b, const FinishedRows& y, int chunk,
                                           int writer, int lane) {
  if (chunk >= b.first) store(a, b, y, chunk, b.heads - 1, writer, lane);
}

// y of a chunk for all rows of the block, of which a warp has 16 tokens: what the state before the chunk gives, and
// what the chunk's own tokens give. C . B is worked out once. `beside` is called while the first sums over the chunk's
// tokens are.
template <typename Beside>
__device__ __forceinline__ void write_y(const ScanArgs& a, const Block& b, int chunk, int writer, int lane,
                                        FinishedRows& finished, const Beside& beside) {
  const int stage = stage_of<true>(chunk), tile = writer % 4;
  const Panel keys(tokens_B(stage)), queries(tokens_C(stage));
  float near[8][4];
  products_begin();
#pragma unroll
  for (int k = 0; k < kTileColumns; ++k) product(near, queries + k / 4, keys + k / 4, k % 4, k == 0);  // C . B
  products_end();
  products_wait<0>();
  hold(near);
  Left scores[kTiles];
#pragma unroll 1
  for (int local = 0; local < b.heads; ++local) {
    const Decays& w = decays(chunk, local);
    const Panel state = Panel(rounded_state(chunk)).moved(local * kHeadDim, 0);
    const Panel values = Panel(tokens_x(stage)).moved(local * kHeadDim / 64 * 64, local * kHeadDim % 64);
    HeadRows y;
    products_begin();
#pragma unroll
    for (int k = 0; k < kTileColumns; ++k) {
      product(y, queries + k / 4, state.moved(k / 4 * kBlockRows, 0), k % 4, k == 0);  // C . S
    }
    products_end();
    // Beside these products, y of the head before: that of the turn before, where this is a chunk's first.
    const int before = local > 0 ? chunk : chunk - kWriterGroups;
    if (before >= b.first) store(a, b, finished, before, local > 0 ? local - 1 : b.heads - 1, writer, lane);
    decay_scores(w, near, tile, scores, lane);
    products_wait<0>();
    hold(y);
    scale_rows(w, y, tile, lane);
    if (local + 1 == b.heads && chunk + 2 < b.last) barrier_arrive(kLooked + chunk % 2, kHandOver);
    hold(y);
    products_begin();
#pragma unroll
    for (int k = 0; k < kTiles; ++k) product(y, scores[k].r, values, k);
    products_end();
    if (local == b.heads - 1) beside();
    const float skip = a.D ? a.D[(b.head + local) / kPartsOfHead] : 0.f;
    products_wait<0>();
    hold(y);
    finish(a, b, y, finished, skip, stage, chunk, tile, local, lane);
  }
}

// The state before a segment. Where there is a launch before this one, it has kept what leads up to it.
template <bool kOutput>
__device__ __forceinline__ void load_state(const ScanArgs& a, const Block& b, Rows& rows, int local, int warp,
                                           int state_row, int lane) {
  const int64_t read = b.read;
  if (b.segment != 0 || read < 0) return;
  rows.load_slot(a, read, state_row, lane);
}

// The state behind a segment: to its slot if it is the sequence's last one, else kept for the next launch.
template <bool kOutput>
__device__ __forceinline__ void leave_state(const ScanArgs& a, const Block& b, const Rows& rows, Sum total, int local,
                                            int own, int warp, int state_row, int lane) {
  const int slot = b.last == b.chunks ? b.write : -1;
  if (kOutput && slot >= 0) {
    rows.store_slot(a, slot, max(b.end - b.begin, 0) - 1, state_row, lane, find_rounding(a.rounding_key));
  }
}

// The state behind a chunk to the slot that its last token names.
__device__ __forceinline__ void store_checkpoint(const ScanArgs& a, const Block& b, const Rows& rows, int chunk,
                                                 int state_row, int lane) {
  const int64_t t = min(b.begin + static_cast<int64_t>(chunk + 1) * kChunk, static_cast<int64_t>(b.end)) - 1;
  const int64_t slot = a.checkpoint_slots[t];
  if (slot >= 0 && slot < a.slots) {
    rows.store_slot(a, slot, static_cast<int>(t - b.begin), state_row, lane, find_rounding(a.rounding_key));
  }
}

// Carries the state of a warp group's 64 rows through a segment. It works out each chunk's decays and, for those that
// write y, leaves the state before it.
template <bool kOutput>
__device__ __forceinline__ void carry_state(const ScanArgs& a, const Block& b, int warp, int lane) {
  int local = warp / kHeadWarps, own = warp - local * kHeadWarps;  // head of the block, warp of the head
  int row = own * kRows, head = b.head + local;
  // NOTE: all four warps of a group take part in its products, those without rows too, as long as one has some.
  const bool present = local < b.heads, group_present = warp / 4 * 4 / kHeadWarps < b.heads;
  Clock clock;
  if (present) {
    clock.load(a, b, head / kPartsOfHead, b.first, own, lane);
    clock.turn();
    clock.start(a, head / kPartsOfHead, lane, note_of(warp));
  }
  Rows rows;
  rows.clear();
  Sum total{0.f, 0.f};
  if (present) {
    load_state<kOutput>(a, b, rows, local, warp, head * kHeadDim + row, lane);
    clock.advance(a, b, b.first, own, lane, note_of(warp), decays(b.first, local));
    clock.load(a, b, head / kPartsOfHead, b.first + 1, own, lane);
    clock.turn();
#pragma unroll
    for (int panel = 0; kOutput && panel < kDState / 64; ++panel) publish(rows, panel, b.first, warp, lane);
  }
  bool first = true;
#pragma unroll 1
  for (int chunk = b.first; chunk < b.last; ++chunk) {
    if (kOutput) fence_for_products();
    barrier_wait(kLoaded + chunk % 2, kHandOver);
    barrier_arrive(kReady + chunk % 2, kHandOver);
    const bool more = chunk + 1 < b.last;
    const auto await_place = [&] {
      if (kOutput && more && !first) barrier_wait(kLooked + (chunk - 1) % 2, kHandOver);
    };
    const auto give_back = [&] {
      if (kOutput && chunk + kStages < b.last) barrier_arrive(kTaken + chunk % 2, kHandOver);
    };
    if (kWholeGroups ? present : group_present) {
      local = opaque(warp) / kHeadWarps;  // again, rather than kept in registers from chunk to chunk
      own = opaque(warp) - local * kHeadWarps;
      row = own * kRows;
      head = b.head + local;
      const auto find_decays = [&] {  // of the next chunk, where nobody looks at those of two chunks ago any more
        if (!kWholeGroups && !present) return;
        if (more) clock.advance(a, b, chunk + 1, own, lane, note_of(warp), decays(chunk + 1, local));
        clock.load(a, b, head / kPartsOfHead, chunk + 2, own, lane);
        clock.turn();
      };
      const auto leave = [&](int panel) {
        if (panel == kDState / 64 - 1) give_back();
        if (panel == 0) await_place();
        if (kOutput && more && (kWholeGroups || present)) publish(rows, panel, chunk + 1, warp, lane);
      };
      advance_state<kOutput>(rows, stage_of<kOutput>(chunk), chunk, present, local, row, lane, find_decays, leave);
      if (!kOutput && (kWholeGroups || present)) total = add(total, Sum{decays(chunk, local).between(0, kTiles), 0.f});
    } else {
      give_back();
      await_place();
    }
    first = false;
    if (kOutput && present && a.checkpoint_slots) {
      store_checkpoint(a, b, rows, chunk, opaque(head) * kHeadDim + row, lane);
    }
  }
  if (present) leave_state<kOutput>(a, b, rows, total, local, own, warp, opaque(head) * kHeadDim + row, lane);
}

// A warp group's work on the chunks that are its turn: it brings the tokens of one, and writes y of an earlier one, or
// is further ahead where there is no y to write.
template <bool kOutput>
__device__ __forceinline__ void bring_tokens(const ScanArgs& a, const Block& b, int writer, int lane) {
  constexpr int kPlaces = kOutput ? kStages : kGatherStages, kAhead = kOutput ? 1 : kPlaces - 1;
  // Chunks that begin before any place is taken again.
  constexpr int kFree = kPlaces - kAhead;
#pragma unroll 1
  for (int chunk = b.first - kAhead + (b.first - kAhead + kPlaces * kWriterGroups + writer / 4) % kWriterGroups;
       chunk < b.last; chunk += kWriterGroups) {
    const int next = chunk + kAhead;
    const bool started = chunk >= b.first, more = next < b.last;
    if (chunk >= b.first + kFree) barrier_wait(kReady + chunk % 2, kHandOver);
    if (more) {
      const int thread = opaque(threadIdx.x) % kStageThreads;
      Tokens<kOutput>(a, b, next, thread).stage(a, b, thread);
    }
    if (started && chunk < b.first + kFree) barrier_wait(kReady + chunk % 2, kHandOver);
    const auto hand_over = [&] {
      if (!more) return;
      copy_async_wait<0>();
      fence_for_products();
      barrier_arrive(kLoaded + next % 2, kHandOver);
    };
    static_assert(!kOutput, "y is written by bring_to_own_place");
    hand_over();
  }
}

// The same where y is written and each warp group has one place for the chunks of its turn: B and C of the next are
// asked for once those of this one have been used, and x when its y is written.
__device__ __forceinline__ void bring_to_own_place(const ScanArgs& a, const Block& b, int writer, int lane) {
  FinishedRows finished{};
  int chunk = b.first - kStages + (b.first + writer / 4) % kStages;
#pragma unroll 1
  for (; chunk < b.last; chunk += kStages) {
    const int next = chunk + kStages;
    const bool started = chunk >= b.first, more = next < b.last;
    const auto bring = [&](auto keys, auto values) {
      const int thread = opaque(threadIdx.x) % kStageThreads;
      Tokens<true>(a, b, next, thread).template stage<keys.value, values.value>(a, b, thread);
    };
    if (started) {
      barrier_wait(kReady + chunk % 2, kHandOver);
      write_y(a, b, chunk, writer, lane, finished, [&] {
        if (!more) return;
        barrier_wait(kTaken + chunk % 2, kHandOver);
        bring(std::true_type(), std::false_type());
      });
    }
    if (!more) {
      chunk += kStages;
      break;
    }
    if (started) {
      barrier_wait(kWritten + chunk % 2, kStageThreads);  // all of the group have read x
      bring(std::false_type(), std::true_type());
    } else {
      bring(std::true_type(), std::true_type());
    }
    copy_async_wait<0>();
    fence_for_products();
    barrier_arrive(kLoaded + next % 2, kHandOver);
  }
  store_last(a, b, finished, chunk - kStages, writer, lane);
}

// A segment of a sequence, chunk by chunk. With kOutput it writes y, checkpoints and the final state; without, it
// leaves what the segment adds to the state for those that walk the later segments.
template <bool kOutput>
__device__ __forceinline__ void walk(const ScanArgs& a, const Block& b) {
  // NOTE: from one lane, so that the compiler knows that a warp has one value.
  const int warp = __shfl_sync(kWholeWarp, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp < kCarriers) {
    ask_for_registers<kCarrierRegisters>();
    carry_state<kOutput>(a, b, warp, lane);
    give_up_registers<kThreadRegisters>();
  } else {
    give_up_registers<kWriterRegisters>();
    if constexpr (kOutput) {
      bring_to_own_place(a, b, warp - kCarriers, lane);
    } else {
      bring_tokens<false>(a, b, warp - kCarriers, lane);
    }
    ask_for_registers<kThreadRegisters>();
  }
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    ssm_ssd_n256_p128_r16_w12_c64_t1_bf16_sf32_sm90a_walk(const __grid_constant__ ScanArgs a) {
  for (int turn = 0;; ++turn) {
    const int64_t item = blockIdx.x + static_cast<int64_t>(turn) * gridDim.x;
    if (item >= blocks_of(a, opaque(kSegments))) break;
    const Block& b = share_block(a, item, kSegments, 1);
    if (b.padding) {
      if (b.segment == 0) clear(a, b, b.begin, b.end, 1);
    } else if (b.segment < b.segments) {
      walk<true>(a, b);
    }
    if (b.segment == 0) clear(a, b, b.unused + b.entry, a.tokens, entries_of(a));
    __syncthreads();  // shared memory is free for the next item
  }
}
