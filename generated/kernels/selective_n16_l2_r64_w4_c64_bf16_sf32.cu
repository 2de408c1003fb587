// SPDX-License-Identifier: Apache-2.0
//
// ssm_selective_n16_l2_r64_w4_c64_bf16_sf32
//
// The selective scan of Mamba-1: head_dim is 1, a head is a channel, and A has a value for each channel and column (or
// one a channel). For token t of a sequence, channel h, group g = h / (channels / groups), column n:
//
//   d    = dt[t,h] + dt_bias[h];  d = log1p(exp(d)) where d <= 20 (softplus);  d = clamp(d, dt_min, dt_max)
//   S[n] = exp(d * A[h,n]) * S[n] + d * B[t,g,n] * x[t,h]
//   y[t,h] = (sum_n S[n] * C[t,g,n] + D[h] * x[t,h]) * silu(z[t,h])
//
// For prefill. A lane owns 1 channel(s) by 8 columns in registers, the columns as quads l,
// l + 2, ...; B, C, dt, x and z of the next chunk are copied asynchronously while this one is computed.
// Every exponential is of its own (channel, column, token), and a multiprocessor issues 16 a clock: what surrounds them
// is kept small. Softplus and gate are computed once a (channel, token): the 2 lanes that share
// 1 channel(s) take 2 of them, for 2 token(s), and the sums of y cross the
// lanes together, so that each lane is left with the sum that it gates and stores.
//
// The decay is 2^(d * (A log2 e)): two roundings of the exponent and one of the power, a relative error of at most
// (|d A| + 2) 2^-23. y is summed by column bits from high to low, in the order of the other families: every number of
// lanes, rows, warps and chunk tokens, in prefill and in decode, gives the same bits.
//
// Launch: runs of channels, none of which spans two groups, by shares of the sequences, runs fastest:
//   runs = groups * ceil(channels / groups / 64); grid.x = runs * ceil(max(sequences, 1) / 1), at most 2^31 - 1: fewer
//   shares are legal, in whole runs, and blocks go from sequence to sequence;
//   block.x = 128; dynamic shared memory = 94208 bytes.
// One argument, ScanArgs by value; the struct below is its table. Compile with -fmad=false: products and sums are
// fused where fmaf says so and nowhere else, so that the order of rounding is what this file says.
#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Io = __nv_bfloat16;  // x, z, y, B, C
using State = float;       // the stored state; arithmetic is f32

constexpr int kDState = 16;    // columns of a channel
constexpr int kLanes = 2;      // lanes that share a channel
constexpr int kChannels = 64;  // channels of a block
constexpr int kTile = 1;       // channels a lane owns
constexpr int kQuads = 2;      // quads of columns a lane owns of a channel
constexpr int kChunk = 64;     // tokens staged at a time
constexpr int kBatches = 4;    // batches of tokens whose steps and gates are computed together
constexpr int kThreads = 128;

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

// What Mamba-1 computes for every channel and token: straight code, so that several can be in flight at once.
constexpr float kLog2e = 1.4426950408889634f;

// 2^x to 2 units in the last place, one instruction; results below 2^-126 become 0.
__device__ __forceinline__ float exp2_approx(float x) {
#if defined(SSM_EMULATOR)
  const float v = exp2f(x);
  return v < 0x1p-126f ? 0.f : v;
#else
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
#endif
}

// 1 / x to 1 unit in the last place, one instruction; results below 2^-126 become 0.
__device__ __forceinline__ float reciprocal_approx(float x) {
#if defined(SSM_EMULATOR)
  const float v = 1.f / x;
  return v < 0x1p-126f ? 0.f : v;
#else
  float v;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
#endif
}

// log1p(exp(d)) where d <= 20, else d: the bits of `step_size`, without its branches.
__device__ __forceinline__ float softplus(float d) {
  const bool curved = d <= 20.f;
  const float u = expf(curved ? d : 0.f);
#if !defined(SSM_EMULATOR)
  // 0 <= u <= exp(20): log1pf need not look for infinity and NaN.
  __builtin_assume(__float_as_uint(u) < 0x7f800000u);
#endif
  const float bent = log1pf(u);
  return curved ? bent : d;
}

// z * sigmoid(z). The reciprocal's rounding is relative, so nothing is lost where z is small.
__device__ __forceinline__ float gate(float z) { return z * reciprocal_approx(1.f + expf(-z)); }

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

// What one entry of a launch's sequence list has to do.
struct Sequence {
  int begin = 0;         // first token
  int end = 0;           // one past the last token
  int64_t read = -1;     // slot of the initial state, -1: start from zero
  int64_t write = -1;    // slot of the final state, -1: discard it
  bool padding = false;  // y rows become 0 and no state is touched
};

// NOTE: a slot out of range behaves as padding, so no data on the device can reach memory outside the pool. A fresh
// sequence's read slot is looked at only for padding.
__device__ __forceinline__ Sequence find_sequence(const ScanArgs& a, int64_t entry) {
  Sequence q;
  if (entry >= a.sequences) return q;
  const int64_t s = a.sequence_order ? a.sequence_order[entry] : entry;
  if (s < 0 || s >= a.sequences) return q;
  const int begin = a.cu_seqlens ? a.cu_seqlens[s] : 0;
  const int end = a.cu_seqlens ? a.cu_seqlens[s + 1] : a.tokens;
  const int64_t read = a.read_slots ? a.read_slots[s] : s;
  const int64_t write = a.write_slots ? a.write_slots[s] : read;
  const bool resume = a.state && (a.resume ? a.resume[s] != 0 : true);
  q.begin = max(begin, 0);
  q.end = min(end, a.tokens);
  q.padding =
      read == a.pad_slot || (resume && (read < 0 || read >= a.slots)) || (a.state && (write < -1 || write >= a.slots));
  if (q.padding) return q;
  if (resume) q.read = read;
  if (a.state) q.write = write;
  // An empty sequence that would write back what it read leaves the slot alone.
  if (q.end <= q.begin && q.read == q.write) q.read = q.write = -1;
  return q;
}

// Tokens from here on belong to no sequence: their rows of y become 0.
__device__ __forceinline__ int first_unused_token(const ScanArgs& a) {
  if (!a.cu_seqlens) return a.tokens;
  return min(max(a.cu_seqlens[a.sequences], 0), a.tokens);
}

// Entries of a launch's list: one a sequence; with none, one entry's blocks still clear the unused rows of y.
__device__ __forceinline__ int64_t entries_of(const ScanArgs& a) { return max(a.sequences, 1); }

// Sums over the columns of a row: first the quads of a lane, then the lanes that share the row, each as a tree from the
// highest bit of the index down. Where quads are dealt out to lanes in turn, the order of the columns is then the same
// whatever the number of lanes.
constexpr uint32_t kWholeWarp = 0xffffffffu;

// Sum of per-quad products in the fixed order: halves of the next power of two, from the highest bit down.
template <int kCount>
__device__ __forceinline__ float sum_quads(float (&v)[kCount]) {
  if constexpr (kCount == 1) {
    return v[0];
  } else {
    constexpr int kHalf = kCount > 8 ? 8 : kCount > 4 ? 4 : kCount > 2 ? 2 : 1;
    static_assert(kCount <= 2 * kHalf, "a lane owns at most 16 quads");
    float folded[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) folded[i] = i + kHalf < kCount ? v[i] + v[i + kHalf] : v[i];
    return sum_quads(folded);
  }
}

// `lanes` neighbouring lanes, a power of two, get the sum of theirs.
__device__ __forceinline__ float sum_lanes(float v, int lanes) {
#pragma unroll
  for (int bit = lanes / 2; bit >= 1; bit /= 2) v = v + __shfl_xor_sync(kWholeWarp, v, bit);
  return v;
}

// Begins kValues sums over kLanes lanes at once: at each step a lane keeps half of its values and sends its partner the
// other half, so that a sum costs about one shuffle. Each lane is left with v[0], its share of the sum of index
// folded_index<kLanes, kValues>(lane), which kLanes / kValues neighbouring lanes have yet to add up.
template <int kLanes, int kValues, int kSize>
__device__ __forceinline__ void fold_lanes(float (&v)[kSize], int lane) {
  if constexpr (kValues > 1) {
    constexpr int kHalf = kValues / 2, kBit = kLanes / 2;
    const bool upper = lane & kBit;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float send = upper ? v[i] : v[i + kHalf];
      const float keep = upper ? v[i + kHalf] : v[i];
      v[i] = keep + __shfl_xor_sync(kWholeWarp, send, kBit);
    }
    fold_lanes<kBit, kHalf>(v, lane);
  }
}

template <int kLanes, int kValues>
__device__ __forceinline__ int folded_index(int lane) {
  return lane % kLanes / (kLanes / kValues);
}

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

// Which run of channels a block works on, and which sequences. Mamba-1: head_dim is 1, a head is a channel. A run lies
// within one group, so that all its channels share B and C. A block keeps its run and goes from sequence to sequence:
// what belongs to channels is loaded once.
struct ChannelRun {
  int64_t entry;  // the block's first entry of the launch's list of sequences,
  int64_t step;   // and how far apart the others are
  int group;
  int first;  // first channel
  int valid;  // channels from `first` on that are there
};

// NOTE: the grid is a multiple of the number of runs, so blocks of one run are whole runs apart.
__device__ __forceinline__ ChannelRun find_channels(const ScanArgs& a, int channels) {
  const uint32_t of_group = static_cast<uint32_t>(a.heads) / static_cast<uint32_t>(a.groups);
  const uint32_t runs_of_group = (of_group + channels - 1) / channels;
  const uint32_t runs = runs_of_group * a.groups;
  const uint32_t entry = blockIdx.x / runs, run = blockIdx.x - entry * runs;
  ChannelRun w;
  w.entry = entry;
  w.step = gridDim.x / runs;
  w.group = a.groups == 1 ? 0 : static_cast<int>(run / runs_of_group);
  const int in_group = static_cast<int>(run - w.group * runs_of_group) * channels;
  w.first = w.group * static_cast<int>(of_group) + in_group;
  w.valid = min(channels, static_cast<int>(of_group) - in_group);
  return w;
}

// Zeros in the block's channels of y.
__device__ __forceinline__ void clear_channels(const ScanArgs& a, const ChannelRun& w, int64_t begin, int64_t end,
                                               int64_t step) {
  Io* y = static_cast<Io*>(a.y) + w.first;
  for (int64_t t = begin; t < end; t += step) {
    for (int c = threadIdx.x; c < w.valid; c += blockDim.x) y[t * a.y_stride + c] = from_f32<Io>(0.f);
  }
}

// The block's share of the tokens that belong to no sequence.
__device__ __forceinline__ void clear_unused(const ScanArgs& a, const ChannelRun& w) {
  clear_channels(a, w, first_unused_token(a) + w.entry, a.tokens, w.step);
}

// One token's step of four columns: S = decay * S + dx * B, and the sum of S * C over them.
__device__ __forceinline__ float advance(float* s, float4 decay, float dx, float4 b, float4 c) {
  s[0] = fmaf(decay.x, s[0], dx * b.x);
  s[1] = fmaf(decay.y, s[1], dx * b.y);
  s[2] = fmaf(decay.z, s[2], dx * b.z);
  s[3] = fmaf(decay.w, s[3], dx * b.w);
  return fmaf(s[3], c.w, fmaf(s[2], c.z, fmaf(s[1], c.y, s[0] * c.x)));
}

constexpr int kSlice = 4 * kQuads;           // columns a lane owns of a channel
constexpr int kColumns = kSlice * kLanes;    // columns in shared memory: kDState and zeros up to the last quad
constexpr int kBatch = kLanes / kTile;       // tokens whose sums of y cross the lanes together
constexpr int kShares = 32 / kLanes;         // groups of lanes of a warp: a lane's channels are so far apart
constexpr int kPerAccess = 16 / sizeof(Io);  // elements of a 16-byte access
constexpr bool kWiden = sizeof(Io) < 4;      // 16-bit B and C are widened once a chunk
// Rows of staged channels, padded so that the tokens of a batch lie in different banks.
constexpr int kStagedChannels = (kChannels + kPerAccess - 1) / kPerAccess * kPerAccess + 32 / sizeof(Io);
constexpr int kStagedSteps = (kChannels + 3) / 4 * 4 + 8;

// Shared memory, in order: two buffers of raw tokens, and widened B and C of one chunk.
struct Staged {
  Io B[kChunk][kColumns];
  Io C[kChunk][kColumns];
  Io x[kChunk][kStagedChannels];
  Io z[kChunk][kStagedChannels];
  float dt[kChunk][kStagedSteps];  // or io, with rows of as many bytes
};
struct Widened {
  float B[kChunk][kColumns];
  float C[kChunk][kColumns];
};
static_assert(2 * sizeof(Staged) + (kWiden ? sizeof(Widened) : 0) == 94208,
              "the launch asks for what the kernel uses");

extern __shared__ __align__(16) unsigned char shared_memory[];

// Starts the copies of n_tokens rows of kCount elements, of which those from `valid` on become 0, to rows of kStride
// elements. `vector` says that every row begins at a multiple of 16 bytes and that `valid` is a whole number of them;
// what is not goes through registers. Neighbouring threads copy neighbouring pieces of a row.
template <int kCount, int kStride, typename T>
__device__ __forceinline__ void stage(T* to, const T* from, int64_t stride, int n_tokens, int valid, bool vector) {
  constexpr int kPer = 16 / sizeof(T);
  constexpr int kPieces = (kCount + kPer - 1) / kPer;
  constexpr int kSpan = kPieces >= 16 ? 16 : kPieces >= 8 ? 8 : kPieces >= 4 ? 4 : kPieces >= 2 ? 2 : 1;
  constexpr int kStep = kThreads / kSpan;  // tokens apart
  int t = threadIdx.x / kSpan;
  from += t * stride;
  to += t * kStride;
  if (vector) {
    const int first = threadIdx.x % kSpan * kPer;
#pragma unroll
    for (int i = 0; i < kChunk; i += kStep, t += kStep, from += kStep * stride, to += kStep * kStride) {
      if (t < n_tokens) {
#pragma unroll
        for (int n = first; n < kPieces * kPer; n += kSpan * kPer) {
          if (n < valid) {
            copy_async_16(to + n, from + n);
          } else {
            *reinterpret_cast<uint4*>(to + n) = make_uint4(0u, 0u, 0u, 0u);
          }
        }
      }
    }
  } else {
#pragma unroll 1
    for (; t < n_tokens; t += kStep, from += kStep * stride, to += kStep * kStride) {
#pragma unroll 1
      for (int n = threadIdx.x % kSpan; n < kCount; n += kSpan) to[n] = n < valid ? from[n] : from_f32<T>(0.f);
    }
  }
}

template <typename T>
__device__ __forceinline__ bool takes_vectors(const T* from, int64_t stride, int valid) {
  constexpr int kPer = 16 / sizeof(T);
  return reinterpret_cast<uintptr_t>(from) % 16 == 0 && stride % kPer == 0 && valid % kPer == 0;
}

// The arrays of a block's channels at a sequence's first token.
struct Source {
  const Io *B, *C, *x, *z;
  const void* dt;
  bool vector_B, vector_C, vector_x, vector_z, vector_dt;
};

__device__ __forceinline__ Source find_source(const ScanArgs& a, const ChannelRun& w, int begin) {
  Source s;
  s.B = static_cast<const Io*>(a.B) + begin * a.B_stride + static_cast<int64_t>(w.group) * kDState;
  s.C = static_cast<const Io*>(a.C) + begin * a.C_stride + static_cast<int64_t>(w.group) * kDState;
  s.x = static_cast<const Io*>(a.x) + begin * a.x_stride + w.first;
  s.z = a.z ? static_cast<const Io*>(a.z) + begin * a.z_stride + w.first : nullptr;
  s.vector_B = takes_vectors(s.B, a.B_stride, kDState);
  s.vector_C = takes_vectors(s.C, a.C_stride, kDState);
  s.vector_x = takes_vectors(s.x, a.x_stride, w.valid);
  s.vector_z = takes_vectors(s.z, a.z_stride, w.valid);
  const int64_t at = begin * a.dt_stride + w.first;
  if (a.flags & kFlagDtF32) {
    s.dt = static_cast<const float*>(a.dt) + at;
    s.vector_dt = takes_vectors(static_cast<const float*>(s.dt), a.dt_stride, w.valid);
  } else {
    s.dt = static_cast<const Io*>(a.dt) + at;
    s.vector_dt = takes_vectors(static_cast<const Io*>(s.dt), a.dt_stride, w.valid);
  }
  return s;
}

// Starts the copies of n_tokens tokens from token t0 of the sequence on.
__device__ __forceinline__ void stage_chunk(const ScanArgs& a, const Source& s, Staged& to, int t0, int n_tokens,
                                            int valid) {
  const int64_t t = t0;
  stage<kColumns, kColumns>(&to.B[0][0], s.B + t * a.B_stride, a.B_stride, n_tokens, kDState, s.vector_B);
  stage<kColumns, kColumns>(&to.C[0][0], s.C + t * a.C_stride, a.C_stride, n_tokens, kDState, s.vector_C);
  stage<kChannels, kStagedChannels>(&to.x[0][0], s.x + t * a.x_stride, a.x_stride, n_tokens, valid, s.vector_x);
  if (s.z) {
    stage<kChannels, kStagedChannels>(&to.z[0][0], s.z + t * a.z_stride, a.z_stride, n_tokens, valid, s.vector_z);
  }
  if (a.flags & kFlagDtF32) {
    const float* dt = static_cast<const float*>(s.dt) + t * a.dt_stride;
    stage<kChannels, kStagedSteps>(&to.dt[0][0], dt, a.dt_stride, n_tokens, valid, s.vector_dt);
  } else {
    const Io* dt = static_cast<const Io*>(s.dt) + t * a.dt_stride;
    constexpr int kRow = kStagedSteps * sizeof(float) / sizeof(Io);
    stage<kChannels, kRow>(reinterpret_cast<Io*>(&to.dt[0][0]), dt, a.dt_stride, n_tokens, valid, s.vector_dt);
  }
}

// A lane's tile of the state, and log2 e times its A.
struct Tile {
  float s[kTile][kSlice];
  float A[kTile][kSlice];
};

// Where a lane works: its columns, and the one channel of its tile and token of a batch whose step and y it computes.
struct Place {
  int lane;          // among those that share its channels
  int channel;       // its first; the others follow kShares apart
  int own_channel;   // whose step and y it computes,
  int own_token;     // of which token of a batch
  bool own_valid;    // whether that channel is there
  float D, dt_bias;  // of that channel
};

// What one lane computes for kCount batches: of its own channel and of one token of each.
template <int kCount>
struct Steps {
  float d[kCount];     // step size
  float dx[kCount];    // times x
  float x[kCount];
  float gate[kCount];  // silu(z)
};

// How a call's steps are computed. kUsual is what real models ask for: softplus, no limits, D and z there, no
// checkpoints, and as many channels and tokens as the kernel has room for.
template <bool kIsUsual, bool kIsDtF32>
struct Usual {
  static constexpr bool kUsual = kIsUsual, kDtF32 = kIsDtF32;
};

// Of kCount batches of staged tokens from token t of the chunk on, of which those from n_tokens on are not there.
template <int kCount, typename How>
__device__ __forceinline__ Steps<kCount> find_steps(How, const ScanArgs& a, const Staged& from, const Place& at, int t,
                                                    int n_tokens) {
  Steps<kCount> steps;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int own = t + k * kBatch + at.own_token;
    steps.d[k] = steps.dx[k] = steps.x[k] = 0.f;
    steps.gate[k] = 1.f;
    if (!How::kUsual && own >= n_tokens) continue;
    const bool dt_f32 = How::kUsual ? How::kDtF32 : (a.flags & kFlagDtF32) != 0;
    const void* row = from.dt[own];
    const float dt =
        dt_f32 ? static_cast<const float*>(row)[at.own_channel] : to_f32(static_cast<const Io*>(row)[at.own_channel]);
    steps.x[k] = to_f32(from.x[own][at.own_channel]);
    if constexpr (How::kUsual) {
      steps.d[k] = softplus(dt + at.dt_bias);
    } else {
      steps.d[k] = step_size(dt, at.dt_bias, a.flags, a.dt_min, a.dt_max);
    }
    steps.dx[k] = steps.d[k] * steps.x[k];
    if (How::kUsual || a.z) steps.gate[k] = gate(to_f32(from.z[own][at.own_channel]));
  }
  return steps;
}

// One token's step of a lane's tile; sums[r] becomes the lane's share of y of its channel r.
__device__ __forceinline__ void advance_tile(Tile& tile, const float* B, const float* C, const float (&d)[kTile],
                                             const float (&dx)[kTile], float (&sums)[kTile]) {
  float quads[kTile][kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float4 b = *reinterpret_cast<const float4*>(B + 4 * kLanes * i);
    const float4 c = *reinterpret_cast<const float4*>(C + 4 * kLanes * i);
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      const float* A = tile.A[r] + 4 * i;
      const float4 decay = make_float4(exp2_approx(d[r] * A[0]), exp2_approx(d[r] * A[1]), exp2_approx(d[r] * A[2]),
                                       exp2_approx(d[r] * A[3]));
      quads[r][i] = advance(tile.s[r] + 4 * i, decay, dx[r], b, c);
    }
  }
#pragma unroll
  for (int r = 0; r < kTile; ++r) sums[r] = sum_quads(quads[r]);
}

__device__ __forceinline__ void load_tile(const ScanArgs& a, Tile& tile, const ChannelRun& w, const Place& at,
                                          int64_t slot) {
  const State* state = static_cast<const State*>(a.state) + slot * a.state_stride;
#pragma unroll
  for (int r = 0; r < kTile; ++r) {
    const int channel = at.channel + r * kShares;
    const bool there = channel < w.valid;
    const int64_t row = w.first + static_cast<int64_t>(channel);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int n = 4 * (at.lane + kLanes * i);
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
      if (there && slot >= 0) v = load_columns(state + row * kDState, n, kDState, a.flags & kFlagVectorState);
      float* s = tile.s[r] + 4 * i;
      s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int64_t index = a.flags & kFlagPerColumnA ? row * kDState + n + k : row;
        tile.A[r][4 * i + k] = there && n + k < kDState ? a.A[index] * kLog2e : 0.f;
      }
    }
  }
}

__device__ __forceinline__ void store_tile(const ScanArgs& a, const Tile& tile, const ChannelRun& w, const Place& at,
                                           int64_t slot, int token) {
  const Rounding rounding = find_rounding(a.rounding_key);
  State* state = static_cast<State*>(a.state) + slot * a.state_stride;
#pragma unroll
  for (int r = 0; r < kTile; ++r) {
    const int channel = at.channel + r * kShares;
    if (channel < w.valid) {
      const int64_t row = w.first + static_cast<int64_t>(channel);
      const Destination to{state + row * kDState, static_cast<uint32_t>(row), slot, token};
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float* s = tile.s[r] + 4 * i;
        store_columns(to, 4 * (at.lane + kLanes * i), make_float4(s[0], s[1], s[2], s[3]), kDState,
                      a.flags & kFlagVectorState, rounding);
      }
    }
  }
}

// What a lane reads of a staged chunk, and where its own y goes.
struct Chunk {
  const float *B, *C;  // its first quad of the first token
  Io* y;               // of its own channel and token, at the first batch
  int64_t y_stride;    // from batch to batch
  int first;           // first token, of the sequence
  int n_tokens;
};

// kCount batches from token t of the chunk on.
template <int kCount, typename How>
__device__ __forceinline__ void advance_batches(How, const ScanArgs& a, const Sequence& q, const ChannelRun& w,
                                                const Place& at, Tile& tile, Chunk& chunk, const Steps<kCount>& steps,
                                                int t) {
  float out[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    float sums[kTile * kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int token = t + k * kBatch + u;
      float d[kTile], dx[kTile], token_sums[kTile] = {};
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        d[r] = __shfl_sync(kWholeWarp, steps.d[k], r * kBatch + u, kLanes);
        dx[r] = __shfl_sync(kWholeWarp, steps.dx[k], r * kBatch + u, kLanes);
      }
      if (How::kUsual || token < chunk.n_tokens) {
        advance_tile(tile, chunk.B + token * kColumns, chunk.C + token * kColumns, d, dx, token_sums);
        if (!How::kUsual && a.checkpoint_slots) {
          const int of_sequence = chunk.first + token;
          const int64_t slot = a.checkpoint_slots[q.begin + of_sequence];
          if (slot >= 0 && slot < a.slots) store_tile(a, tile, w, at, slot, of_sequence);
        }
      }
#pragma unroll
      for (int r = 0; r < kTile; ++r) sums[r * kBatch + u] = token_sums[r];
    }
    fold_lanes<kLanes, kTile * kBatch>(sums, at.lane);
    out[k] = sums[0];
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const bool there = How::kUsual || (at.own_valid && t + at.own_token + k * kBatch < chunk.n_tokens);
    if (How::kUsual || a.D) out[k] = fmaf(at.D, steps.x[k], out[k]);
    if (there) *chunk.y = from_f32<Io>(out[k] * steps.gate[k]);
    chunk.y += chunk.y_stride;
  }
}

// The whole groups of kBatches batches of a chunk; returns the tokens that they took. The steps of a group are
// computed among the exponentials of the group before it.
template <typename How>
__device__ __forceinline__ int advance_groups(How how, const ScanArgs& a, const Sequence& q, const ChannelRun& w,
                                              const Place& at, Tile& tile, const Staged& staged, Chunk& chunk) {
  constexpr int kGroup = kBatches * kBatch;
  if (chunk.n_tokens < kGroup) return 0;
  Steps<kBatches> steps = find_steps<kBatches>(how, a, staged, at, 0, chunk.n_tokens);
  int t = 0;
#pragma unroll 1
  for (; t + kGroup <= chunk.n_tokens; t += kGroup) {
    // After the last group its own steps once more, which nothing uses: no branch comes between.
    const int ahead = t + 2 * kGroup <= chunk.n_tokens ? t + kGroup : t;
    const Steps<kBatches> next = find_steps<kBatches>(how, a, staged, at, ahead, chunk.n_tokens);
    advance_batches<kBatches>(how, a, q, w, at, tile, chunk, steps, t);
    steps = next;
  }
  return t;
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
ssm_selective_n16_l2_r64_w4_c64_bf16_sf32(const __grid_constant__ ScanArgs a) {
  Staged* staged = reinterpret_cast<Staged*>(shared_memory);
  Widened& widened = *reinterpret_cast<Widened*>(shared_memory + 2 * sizeof(Staged));

  const int thread = threadIdx.x;
  const ChannelRun w = find_channels(a, kChannels);
  Place at;
  at.lane = thread % kLanes;
  const int share = thread % 32 / kLanes;
  at.channel = thread / 32 * (kShares * kTile) + share;
  at.own_channel = at.channel + at.lane / kBatch * kShares;
  at.own_token = at.lane % kBatch;
  at.own_valid = at.own_channel < w.valid;
  at.D = at.own_valid && a.D ? a.D[w.first + at.own_channel] : 0.f;
  at.dt_bias = at.own_valid && a.dt_bias ? a.dt_bias[w.first + at.own_channel] : 0.f;
  const bool usual = (a.flags & (kFlagSoftplus | kFlagDtLimit)) == kFlagSoftplus && a.z && a.D && !a.checkpoint_slots &&
                     w.valid == kChannels;

  const int64_t entries = entries_of(a);
#pragma unroll 1
  for (int64_t entry = w.entry; entry < entries; entry += w.step) {
    const Sequence q = find_sequence(a, entry);
    if (q.padding) {
      clear_channels(a, w, q.begin, q.end, 1);
      continue;
    }
    const int length = max(q.end - q.begin, 0);
    const Source source = find_source(a, w, q.begin);
    Tile tile;
    load_tile(a, tile, w, at, q.read);
    Chunk chunk;
    chunk.y = static_cast<Io*>(a.y) + (q.begin + at.own_token) * a.y_stride + w.first + at.own_channel;
    chunk.y_stride = kBatch * a.y_stride;

    int buffer = 1;
    // Each turn asks for a chunk and computes the one before: the first has none to compute.
#pragma unroll 1
    for (int first = -kChunk; first < length; first += kChunk, buffer ^= 1) {
      copy_async_wait_all();
      __syncthreads();  // the chunk is staged; nobody reads the other buffer, what was widened or the last sequence
      if (first + kChunk < length) {
        stage_chunk(a, source, staged[buffer ^ 1], first + kChunk, min(kChunk, length - first - kChunk), w.valid);
      }
      if (first < 0) continue;
      const Staged& now = staged[buffer];
      chunk.first = first;
      chunk.n_tokens = min(kChunk, length - first);
      for (int i = thread; i < chunk.n_tokens * (kColumns / 4); i += kThreads) {
        const int t = i / (kColumns / 4), n = i % (kColumns / 4) * 4;
        *reinterpret_cast<float4*>(&widened.B[t][n]) = load4(&now.B[t][n]);
        *reinterpret_cast<float4*>(&widened.C[t][n]) = load4(&now.C[t][n]);
      }
      __syncthreads();  // B and C are widened
      chunk.B = &widened.B[0][4 * at.lane];
      chunk.C = &widened.C[0][4 * at.lane];

      int t = 0;
      if (usual && (a.flags & kFlagDtF32)) {
        t = advance_groups(Usual<true, true>(), a, q, w, at, tile, now, chunk);
      } else if (usual) {
        t = advance_groups(Usual<true, false>(), a, q, w, at, tile, now, chunk);
      }
#pragma unroll 1
      for (; t < chunk.n_tokens; t += kBatch) {
        const Usual<false, false> how;
        const Steps<1> steps = find_steps<1>(how, a, now, at, t, chunk.n_tokens);
        advance_batches<1>(how, a, q, w, at, tile, chunk, steps, t);
      }
    }
    if (q.write >= 0) store_tile(a, tile, w, at, q.write, length - 1);
  }
  clear_unused(a, w);
}
