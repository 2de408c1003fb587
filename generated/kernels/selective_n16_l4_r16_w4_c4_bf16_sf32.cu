// SPDX-License-Identifier: Apache-2.0
//
// ssm_selective_n16_l4_r16_w4_c4_bf16_sf32
//
// The selective scan of Mamba-1: head_dim is 1, a head is a channel, and A has a value for each channel and column (or
// one a channel). For token t of a sequence, channel h, group g = h / (channels / groups), column n:
//
//   d    = dt[t,h] + dt_bias[h];  d = log1p(exp(d)) where d <= 20 (softplus);  d = clamp(d, dt_min, dt_max)
//   S[n] = exp(d * A[h,n]) * S[n] + d * B[t,g,n] * x[t,h]
//   y[t,h] = (sum_n S[n] * C[t,g,n] + D[h] * x[t,h]) * silu(z[t,h])
//
// For prefill. A lane owns 2 channel(s) by 4 columns, the columns as quads l, l + 4, ...
// The warps of a block have the same channels and take turns of 4 tokens: exponentials, which bound the work (a
// multiprocessor issues 16 a clock), and all else that needs no state are computed by all warps at the same time, each
// for its own tokens; only the recurrence itself goes from warp to warp, the state of a quad being handed on as soon as
// it is there. So a few channels fill the device, and no sum is taken in another order than that of the tokens. Nothing
// else is shared: a warp fetches the tokens of its next turn while it computes this one.
//
// The decay is 2^(d * (A log2 e)): two roundings of the exponent and one of the power, a relative error of at most
// (|d A| + 2) 2^-23. y is summed by column bits from high to low, in the order of the other families: every number of
// lanes, rows, warps and chunk tokens, in prefill and in decode, gives the same bits.
//
// Launch: runs of channels, none of which spans two groups, by shares of the sequences, runs fastest:
//   runs = groups * ceil(channels / groups / 16); grid.x = runs * ceil(max(sequences, 1) / 1), at most 2^31 - 1: fewer
//   shares are legal, in whole runs, and blocks go from sequence to sequence;
//   block.x = 128; dynamic shared memory = 9216 bytes.
// One argument, ScanArgs by value; the struct below is its table. Compile with -fmad=false: products and sums are
// fused where fmaf says so and nowhere else, so that the order of rounding is what this file says.
#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Io = __nv_bfloat16;  // x, z, y, B, C
using State = float;       // the stored state; arithmetic is f32

constexpr int kDState = 16;    // columns of a channel
constexpr int kLanes = 4;      // lanes that share a channel
constexpr int kChannels = 16;  // channels of a block
constexpr int kTile = 2;       // channels a lane owns
constexpr int kQuads = 1;      // quads of columns a lane owns of a channel
constexpr int kTurn = 4;       // tokens of a warp's turn
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

// z * sigmoid(z), to a relative (|z| + 4) 2^-23: roundings of the exponent, of the power and of the reciprocal. The
// power is kept where its reciprocal is a normal number.
__device__ __forceinline__ float gate(float z) {
  return z * reciprocal_approx(1.f + exp2_approx(fminf(z * -kLog2e, 125.f)));
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

// Barriers between two warps of a block, by number from 0: one arrives and goes on, the other waits until it has come,
// with all that it had stored. `round` is how often a warp has waited at its barriers before.
// NOTE: the multiprocessor's own barriers wake a warp 40 clocks sooner, barriers in shared memory take less of it where
// it is busy: 6 % of a prompt whose channels fill the device. Before sm_90 a warp would have to ask for them again and
// again.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kSharedBarriers = kThreads <= 256;
#else
constexpr bool kSharedBarriers = false;
#endif
constexpr int kBarriers = 16;

#if defined(SSM_EMULATOR)
__device__ __forceinline__ void begin_turns() {}
__device__ __forceinline__ void arrive_at(int barrier) { emu_named_barrier(barrier, 64, 0); }
__device__ __forceinline__ void wait_at(int barrier, uint32_t, bool) { emu_named_barrier(barrier, 64, 1); }
#else
__shared__ uint64_t turn_barriers[kSharedBarriers ? kBarriers : 1];

__device__ __forceinline__ uint32_t address_of(int barrier) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(turn_barriers + barrier));
}

// Before all else, by the whole block.
__device__ __forceinline__ void begin_turns() {
  if constexpr (kSharedBarriers) {
    if (threadIdx.x < kBarriers) {
      asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(address_of(threadIdx.x)) : "memory");
    }
    __syncthreads();
  }
}
__device__ __forceinline__ void arrive_at(int barrier) {
  if constexpr (kSharedBarriers) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(address_of(barrier))
                 : "memory");
  } else {
    asm volatile("bar.arrive %0, 64;" ::"r"(barrier) : "memory");
  }
}
// NOTE: `again` is false. The loop keeps what is computed before the wait before it: the assembler moves instructions
// past a barrier, but not into a loop.
__device__ __forceinline__ void wait_at(int barrier, uint32_t round, bool again) {
  if constexpr (kSharedBarriers) {
    asm volatile(
        "{\n.reg .pred there;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 there, [%0], %1;\n@!there bra WAIT;\n}" ::"r"(
            address_of(barrier)),
        "r"(round & 1u)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred again;\nsetp.ne.u32 again, %1, 0;\nWAIT:\nbar.sync %0, 64;\n@again bra WAIT;\n}" ::"r"(barrier),
        "r"(static_cast<uint32_t>(again))
        : "memory");
  }
}
#endif

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

// Unsigned integers of the size of a storage type.
template <int kBytes>
struct BitsOf {
  using type = uint32_t;
};
template <>
struct BitsOf<2> {
  using type = uint16_t;
};
template <>
struct BitsOf<1> {
  using type = uint8_t;
};

// An element from its bits, the low ones of a word.
__device__ __forceinline__ float element_of(uint32_t bits, float) { return __uint_as_float(bits); }
__device__ __forceinline__ __nv_bfloat16 element_of(uint32_t bits, __nv_bfloat16) {
  __nv_bfloat16_raw raw;
  raw.x = static_cast<unsigned short>(bits);
  return __nv_bfloat16(raw);
}
__device__ __forceinline__ __half element_of(uint32_t bits, __half) {
  __half_raw raw;
  raw.x = static_cast<unsigned short>(bits);
  return __half(raw);
}

// Which run of channels a block works on, and which sequences. Mamba-1: head_dim is 1, a head is a channel. A run lies
// within one group, so that all its channels share B and C. A block keeps its run and goes from sequence to sequence:
// what belongs to channels is loaded once.
struct ChannelRun {
  uint32_t entry;  // the block's first entry of the launch's list of sequences,
  uint32_t step;   // and how far apart the others are
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

// Zeros in the run's channels of y, by so many threads.
__device__ __forceinline__ void clear_channels(const ScanArgs& a, const ChannelRun& w, int thread, int threads,
                                               int64_t begin, int64_t end, int64_t step) {
  Io* y = static_cast<Io*>(a.y) + w.first;
  for (int64_t t = begin; t < end; t += step) {
    for (int c = thread; c < w.valid; c += threads) y[t * a.y_stride + c] = from_f32<Io>(0.f);
  }
}

// One token's step of four columns: S = decay * S + dx * B, and the sum of S * C over them.
__device__ __forceinline__ float advance(float* s, float4 decay, float dx, float4 b, float4 c) {
  s[0] = fmaf(decay.x, s[0], dx * b.x);
  s[1] = fmaf(decay.y, s[1], dx * b.y);
  s[2] = fmaf(decay.z, s[2], dx * b.z);
  s[3] = fmaf(decay.w, s[3], dx * b.w);
  return fmaf(s[3], c.w, fmaf(s[2], c.z, fmaf(s[1], c.y, s[0] * c.x)));
}

constexpr int kSlice = 4 * kQuads;                            // columns a lane owns of a channel
constexpr int kColumns = kSlice * kLanes;                     // in shared memory: kDState and zeros up to the last quad
constexpr int kWarps = kThreads / 32;                         // warps that take turns
constexpr int kStep = kWarps * kTurn;                         // tokens from one turn of a warp to its next
constexpr int kOwn = kTurn > kLanes ? kTurn / kLanes : 1;     // tokens of a turn whose steps and y a lane computes,
constexpr int kOwners = kTurn > kLanes ? 1 : kLanes / kTurn;  // and lanes that compute those of the same token
constexpr int kRowQuads = kColumns / 4;
constexpr int kFetches = (2 * kTurn * kRowQuads + 31) / 32;   // quads of B and C that a lane fetches for a turn

// A state: each lane's quads of its channels.
struct Handed {
  float4 state[kQuads][kTile][32];
};

// Shared memory of each warp: B and C of its turn, widened, and the state that a sequence begins or ends with.
struct Turn {
  float B[kTurn][kColumns];
  float C[kTurn][kColumns];
  Handed kept;
  float D[kTile][32], dt_bias[kTile][32];  // of each lane's channels
};
// Within a sequence the state goes from turn to turn through one place: who takes it there puts it back there.
static_assert(kWarps * sizeof(Turn) + sizeof(Handed) == 9216, "the launch asks for what the kernel uses");

extern __shared__ __align__(16) unsigned char shared_memory[];

// kTile neighbouring channels of a token as they are stored, from low bits to high; of 16-bit types two a word.
struct Run {
  uint32_t w[kTile];
};

template <typename T>
__device__ __forceinline__ float channel_of(const Run& run, int r) {
  constexpr int kPerWord = 4 / sizeof(T);
  return to_f32(element_of(run.w[r / kPerWord] >> (r % kPerWord * 8 * sizeof(T) % 32), T()));
}

// Accesses as wide as the run, up to 16 bytes, which the caller knows to be aligned.
template <typename T>
__device__ __forceinline__ void load_run(Run& run, const T* p) {
  constexpr int kBytes = kTile * sizeof(T);
  if constexpr (kBytes == 2) {
    run.w[0] = *reinterpret_cast<const uint16_t*>(p);
  } else if constexpr (kBytes == 4) {
    run.w[0] = *reinterpret_cast<const uint32_t*>(p);
  } else if constexpr (kBytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    run.w[0] = v.x, run.w[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 4; i += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(p + i * (4 / sizeof(T)));
      run.w[i] = v.x, run.w[i + 1] = v.y, run.w[i + 2] = v.z, run.w[i + 3] = v.w;
    }
  }
}

// Element by element at any place; channels from `valid` on become 0.
template <typename T>
__device__ __forceinline__ void load_channels(Run& run, const T* p, int valid) {
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int r = 0; r < kTile; ++r) {
    const uint32_t bits = r < valid ? reinterpret_cast<const typename BitsOf<sizeof(T)>::type*>(p)[r] : 0u;
    run.w[r / kPerWord] = r % kPerWord ? run.w[r / kPerWord] | bits << (r % kPerWord * 8 * sizeof(T) % 32) : bits;
  }
}

// Stores the channels of a token, where `vector` as `load_run` loads them.
__device__ __forceinline__ void store_channels(Io* p, const float (&y)[kTile], int valid, bool vector) {
  if (vector) {
    alignas(kTile * sizeof(Io) < 16 ? kTile * sizeof(Io) : 16) Io v[kTile];
#pragma unroll
    for (int r = 0; r < kTile; ++r) v[r] = from_f32<Io>(y[r]);
    if constexpr (sizeof(v) == 2) {
      *p = v[0];
    } else if constexpr (sizeof(v) == 4) {
      *reinterpret_cast<uint32_t*>(p) = *reinterpret_cast<const uint32_t*>(v);
    } else if constexpr (sizeof(v) == 8) {
      *reinterpret_cast<uint2*>(p) = *reinterpret_cast<const uint2*>(v);
    } else {
#pragma unroll
      for (int i = 0; i < kTile; i += 16 / sizeof(Io)) {
        *reinterpret_cast<uint4*>(p + i) = *reinterpret_cast<const uint4*>(v + i);
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      if (r < valid) p[r] = from_f32<Io>(y[r]);
    }
  }
}

// Where a lane works.
struct Place {
  int lane;     // among those that share its channels: its quads are lane, lane + kLanes, ...
  int row;      // its first channel; the others follow
  int valid;    // channels from there on that are in the block's run
  int token;    // of a turn, the first of those that it computes steps and y of; the others are kLanes apart
};

// A of a lane's columns, times log2 e.
struct Rates {
  float A[kQuads][kTile][4];

  __device__ __forceinline__ Rates(const ScanArgs& a, const Place& at) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int n = 4 * (at.lane + kLanes * i) + c;
          const int64_t row = at.row + r;
          A[i][r][c] = r < at.valid && n < kDState ? a.A[a.flags & kFlagPerColumnA ? row * kDState + n : row] : 0.f;
          A[i][r][c] *= kLog2e;
        }
      }
    }
  }
};

// What a lane reads of a turn, as it is stored, so that nothing waits for it before it is used.
struct Fetched {
  typename Quad<Io>::type columns[kFetches];  // quads of B, then of C
  Run x[kOwn], dt[kOwn];
};

// What real models ask for, kUsual: softplus, no limits, D and z there, no checkpoints, and channels and columns that
// take vectors; its turns are whole. Everything else takes the same arithmetic with tests.
template <bool kIsUsual, bool kIsDtF32>
struct Usual {
  static constexpr bool kUsual = kIsUsual, kDtF32 = kIsDtF32;
};

// Where a lane reads the tokens of its warp's next turn.
struct Source {
  const Io* columns[kFetches];  // of B, or of C
  const Io* x;
  const void* dt;

  __device__ __forceinline__ Source(const ScanArgs& a, int group, const Place& at, int64_t first) {
#pragma unroll
    for (int i = 0; i < kFetches; ++i) {
      const int64_t t = first + fetched_token(i);
      const void* from = is_B(i) ? a.B : a.C;
      const Io* row = static_cast<const Io*>(from) + t * (is_B(i) ? a.B_stride : a.C_stride);
      columns[i] = row + static_cast<int64_t>(group) * kDState + fetched_column(i);
    }
    const int64_t t = first + at.token;
    x = static_cast<const Io*>(a.x) + t * a.x_stride + at.row;
    const int64_t at_dt = t * a.dt_stride + at.row;
    dt = a.flags & kFlagDtF32 ? static_cast<const void*>(static_cast<const float*>(a.dt) + at_dt)
                              : static_cast<const void*>(static_cast<const Io*>(a.dt) + at_dt);
  }

  // To the next turn of the warp.
  __device__ __forceinline__ void advance(const ScanArgs& a) {
#pragma unroll
    for (int i = 0; i < kFetches; ++i) columns[i] += kStep * (is_B(i) ? a.B_stride : a.C_stride);
    x += kStep * a.x_stride;
    dt = static_cast<const char*>(dt) + kStep * a.dt_stride * (a.flags & kFlagDtF32 ? sizeof(float) : sizeof(Io));
  }

  __device__ __forceinline__ static int quad(int i) { return i * 32 + static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static bool is_B(int i) { return quad(i) < kTurn * kRowQuads; }
  __device__ __forceinline__ static bool is_there(int i) { return quad(i) < 2 * kTurn * kRowQuads; }
  __device__ __forceinline__ static int fetched_token(int i) { return quad(i) / kRowQuads % kTurn; }
  __device__ __forceinline__ static int fetched_column(int i) { return quad(i) % kRowQuads * 4; }
};

// Elements before a token's row. Usual strides have 31 bits: one instruction.
template <typename How>
__device__ __forceinline__ int64_t row_offset(How, int token, int64_t stride) {
  if constexpr (How::kUsual) {
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(token)) * static_cast<uint32_t>(stride));
  } else {
    return token * stride;
  }
}

// Asks for n_tokens tokens of a turn.
template <typename How>
__device__ __forceinline__ void fetch(How, Fetched& to, const ScanArgs& a, const Source& from, const Place& at,
                                      int n_tokens) {
#pragma unroll
  for (int i = 0; i < kFetches; ++i) {
    alignas(16) Io v[4] = {from_f32<Io>(0.f), from_f32<Io>(0.f), from_f32<Io>(0.f), from_f32<Io>(0.f)};
    const int n = Source::fetched_column(i);
    if constexpr (How::kUsual) {
      to.columns[i] = *reinterpret_cast<const typename Quad<Io>::type*>(v);
      if (Source::is_there(i) && n < kDState) {
        to.columns[i] = *reinterpret_cast<const typename Quad<Io>::type*>(from.columns[i]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (Source::is_there(i) && Source::fetched_token(i) < n_tokens && n + k < kDState) v[k] = from.columns[i][k];
      }
      to.columns[i] = *reinterpret_cast<const typename Quad<Io>::type*>(v);
    }
  }
#pragma unroll
  for (int u = 0; u < kOwn; ++u) {
    const Io* x = from.x + u * kLanes * a.x_stride;
    const int64_t dt = u * kLanes * a.dt_stride;
    if constexpr (How::kUsual) {
      load_run(to.x[u], x);
      if constexpr (How::kDtF32) {
        load_run(to.dt[u], static_cast<const float*>(from.dt) + dt);
      } else {
        load_run(to.dt[u], static_cast<const Io*>(from.dt) + dt);
      }
    } else {
      const int valid = at.token + u * kLanes < n_tokens ? at.valid : 0;
      load_channels(to.x[u], x, valid);
      if (a.flags & kFlagDtF32) {
        load_channels(to.dt[u], static_cast<const float*>(from.dt) + dt, valid);
      } else {
        load_channels(to.dt[u], static_cast<const Io*>(from.dt) + dt, valid);
      }
    }
  }
}

// Widens what a lane fetched of B and C to where its warp reads it.
__device__ __forceinline__ void share_columns(const Fetched& from, Turn& to) {
  __syncwarp();  // the last turn's were read
#pragma unroll
  for (int i = 0; i < kFetches; ++i) {
    const int quad = i * 32 + static_cast<int>(threadIdx.x) % 32;
    if (quad < 2 * kTurn * kRowQuads) {  // C follows B
      *reinterpret_cast<float4*>(&to.B[0][0] + 4 * quad) = widen4(from.columns[i], Io());
    }
  }
  __syncwarp();  // this turn's are there
}

// Steps of a lane's own tokens, and what they multiply B with.
struct Steps {
  float d[kOwn][kTile], dx[kOwn][kTile];
};

template <typename How>
__device__ __forceinline__ Steps find_steps(How, const ScanArgs& a, const Fetched& from, const Turn& own) {
  Steps steps;
#pragma unroll
  for (int u = 0; u < kOwn; ++u) {
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      const bool dt_f32 = How::kUsual ? How::kDtF32 : (a.flags & kFlagDtF32) != 0;
      const float dt = dt_f32 ? channel_of<float>(from.dt[u], r) : channel_of<Io>(from.dt[u], r);
      const float bias = own.dt_bias[r][threadIdx.x % 32];
      const float d = How::kUsual ? softplus(dt + bias) : step_size(dt, bias, a.flags, a.dt_min, a.dt_max);
      steps.d[u][r] = d;
      steps.dx[u][r] = d * channel_of<Io>(from.x[u], r);
    }
  }
  return steps;
}

// What belongs to token t of the turn, from the lane that computed it.
__device__ __forceinline__ float of_token(const float (&v)[kOwn][kTile], int t, int r) {
  if constexpr (kLanes == 1) return v[t][r];
  return __shfl_sync(kWholeWarp, v[kTurn > kLanes ? t / kLanes : 0][r], t % kLanes * kOwners, kLanes);
}

// A state from its slot to shared memory, -1: zeros.
__device__ __forceinline__ void load_state(const ScanArgs& a, const Place& at, int64_t slot, Handed& to) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
      if (slot >= 0 && r < at.valid) {
        const int64_t row = at.row + r;
        const State* from = static_cast<const State*>(a.state) + slot * a.state_stride + row * kDState;
        v = load_columns(from, 4 * (at.lane + kLanes * i), kDState, a.flags & kFlagVectorState);
      }
      to.state[i][r][threadIdx.x % 32] = v;
    }
  }
}

// A quad of the columns of a lane's channels to a slot.
__device__ __forceinline__ void store_quad(const ScanArgs& a, const Place& at, const float4 (&s)[kTile], int64_t slot,
                                           int i, int token) {
  const Rounding rounding = find_rounding(a.rounding_key);
#pragma unroll
  for (int r = 0; r < kTile; ++r) {
    if (r < at.valid) {
      State* row = static_cast<State*>(a.state) + slot * a.state_stride + static_cast<int64_t>(at.row + r) * kDState;
      const Destination to{row, static_cast<uint32_t>(at.row + r), slot, token};
      store_columns(to, 4 * (at.lane + kLanes * i), s[r], kDState, a.flags & kFlagVectorState, rounding);
    }
  }
}

// An address in shared memory that is found here, not where it is used. Before sm_90 there are no registers for that.
template <typename T>
__device__ __forceinline__ T* found_here(T* p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t address = opaque(static_cast<uint32_t>(__cvta_generic_to_shared(p)));
  p = static_cast<T*>(__cvta_shared_to_generic(address));
#endif
  return p;
}

// Turns follow each other from warp to warp and from sequence to sequence: who takes one waits, quad by quad, for the
// one before, and then wakes the next. So nobody hands a state over before the last one was taken.
struct Ring {
  int warp;
  uint32_t round;  // turns that the warp has taken

  __device__ __forceinline__ void wait_for_turn(const ScanArgs& a, int i) const {
    if (kWarps > 1) wait_at(warp * kQuads + i, round, a.heads < 0);
  }
  __device__ __forceinline__ void wake_next(int i) const {
    if (kWarps > 1) arrive_at((warp + 1) % kWarps * kQuads + i);
  }
};

// Whether a turn begins with asking for z, and no warp waits for it: in f32 some targets have no registers left.
constexpr bool kGateFirst = sizeof(Io) < 4;

// z of a lane's own tokens of a turn.
template <typename How>
__device__ __forceinline__ void load_gates(How how, Run (&z)[kOwn], const ScanArgs& a, const Place& at, int first,
                                           int n_tokens) {
#pragma unroll
  for (int u = 0; u < kOwn; ++u) {
    const Io* from = static_cast<const Io*>(a.z) + row_offset(how, first + u * kLanes, a.z_stride) + at.row;
    if constexpr (How::kUsual) {
      load_run(z[u], from);
    } else {
      load_channels(z[u], from, a.z && at.token + u * kLanes < n_tokens ? at.valid : 0);
    }
  }
}

// One turn: n_tokens tokens from token t of the sequence on. Its state is taken from one place and put into another; if
// that is kept by this warp, the sequence ends here, and the next turn waits until it is stored.
template <typename How>
__device__ __forceinline__ void take_turn(How how, const ScanArgs& a, int begin, const Place& at,
                                          const Rates& rates, Ring& ring, const Turn& own, const Handed& taken,
                                          Handed& to, const Fetched& fetched, int t, int n_tokens) {
  const int first = begin + t + at.token;
  Run z[kOwn];  // on its way until y is there
  if (kGateFirst) load_gates(how, z, a, at, first, n_tokens);
  const Steps steps = find_steps(how, a, fetched, own);
  float sums[kTurn][kTile][kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int n = 4 * (at.lane + kLanes * i);
    // Decays, and what tokens add, need no state: all warps compute theirs at the same time.
    float s[kTurn][kTile][4], added[kTurn][kTile][4];
#pragma unroll
    for (int k = 0; k < kTurn; ++k) {
      const float4 B = *reinterpret_cast<const float4*>(&own.B[k][n]);
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        const float d = of_token(steps.d, k, r), dx = of_token(steps.dx, k, r);
#pragma unroll
        for (int c = 0; c < 4; ++c) s[k][r][c] = exp2_approx(d * rates.A[i][r][c]);
        added[k][r][0] = dx * B.x, added[k][r][1] = dx * B.y, added[k][r][2] = dx * B.z, added[k][r][3] = dx * B.w;
      }
    }

    const float4* const from = found_here(&taken.state[i][0][threadIdx.x % 32]);
    float4* const into = found_here(&to.state[i][0][threadIdx.x % 32]);
    ring.wait_for_turn(a, i);
    float4 state[kTile];
#pragma unroll
    for (int r = 0; r < kTile; ++r) state[r] = from[r * 32];
#pragma unroll
    for (int k = 0; k < kTurn; ++k) {
      if (!How::kUsual && k >= n_tokens) break;
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        state[r].x = s[k][r][0] = fmaf(s[k][r][0], state[r].x, added[k][r][0]);
        state[r].y = s[k][r][1] = fmaf(s[k][r][1], state[r].y, added[k][r][1]);
        state[r].z = s[k][r][2] = fmaf(s[k][r][2], state[r].z, added[k][r][2]);
        state[r].w = s[k][r][3] = fmaf(s[k][r][3], state[r].w, added[k][r][3]);
      }
    }
#pragma unroll
    for (int r = 0; r < kTile; ++r) into[r * 32] = state[r];
    if (&to != &own.kept) ring.wake_next(i);

    if (!kGateFirst && i == kQuads - 1) load_gates(how, z, a, at, first, n_tokens);
    if (!How::kUsual && a.checkpoint_slots) {
#pragma unroll
      for (int k = 0; k < kTurn; ++k) {
        const int64_t slot = k < n_tokens ? a.checkpoint_slots[begin + t + k] : -1;
        if (slot >= 0 && slot < a.slots) {
#pragma unroll
          for (int r = 0; r < kTile; ++r) state[r] = make_float4(s[k][r][0], s[k][r][1], s[k][r][2], s[k][r][3]);
          store_quad(a, at, state, slot, i, t + k);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kTurn; ++k) {
      const float4 C = *reinterpret_cast<const float4*>(&own.C[k][n]);
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        sums[k][r][i] = fmaf(s[k][r][3], C.w, fmaf(s[k][r][2], C.z, fmaf(s[k][r][1], C.y, s[k][r][0] * C.x)));
      }
    }
  }
  ++ring.round;

  // The sums of kTurn / kOwn tokens cross the lanes together, so that each is left with that of its own token.
#pragma unroll
  for (int u = 0; u < kOwn; ++u) {
    float y[kTile];
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      constexpr int kTogether = kTurn / kOwn;
      float v[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) v[k] = sum_quads(sums[u * kTogether + k][r]);
      fold_lanes<kLanes, kTogether>(v, at.lane);
      y[r] = sum_lanes(v[0], kOwners);
      if (How::kUsual || a.D) y[r] = fmaf(own.D[r][threadIdx.x % 32], channel_of<Io>(fetched.x[u], r), y[r]);
      if (How::kUsual || a.z) y[r] *= gate(channel_of<Io>(z[u], r));
    }
    const int token = at.token + u * kLanes;
    if ((How::kUsual || token < n_tokens) && at.lane % kOwners == 0) {
      store_channels(static_cast<Io*>(a.y) + row_offset(how, first + u * kLanes, a.y_stride) + at.row, y, at.valid,
                     How::kUsual);
    }
  }
}

// The whole turns of a warp in a sequence of which `left` tokens remain from the first of them on. Returns what remains
// after them.
template <typename How>
__device__ __forceinline__ int take_whole_turns(How how, const ScanArgs& a, int begin, int length, int group,
                                                const Place& at, Ring& ring, Turn& own, Handed& handed, int left) {
  if (left < kTurn) return left;
  const Rates rates(a, at);
  Source source(a, group, at, begin + static_cast<int64_t>(length - left));
  Fetched fetched;
  fetch(how, fetched, a, source, at, kTurn);
#pragma unroll 1
  for (; left >= kTurn; left -= kStep) {
    share_columns(fetched, own);
    const Fetched now = fetched;
    source.advance(a);
    if (left - kStep >= kTurn) fetch(how, fetched, a, source, at, kTurn);
    const Handed& from = left == length ? own.kept : handed;
    Handed& to = left == kTurn ? own.kept : handed;
    take_turn(how, a, begin, at, rates, ring, own, from, to, now, length - left, kTurn);
  }
  return left;
}

// Whether kTile channels of every token from a lane's first on may go in one access, and strides have 31 bits.
template <typename T>
__device__ __forceinline__ bool takes_runs(const void* p, int64_t stride, int64_t row) {
  constexpr int kBytes = kTile * sizeof(T) < 16 ? kTile * sizeof(T) : 16;
  const uintptr_t first = reinterpret_cast<uintptr_t>(static_cast<const T*>(p) + row);
  return (first | static_cast<uintptr_t>(stride * sizeof(T))) % kBytes == 0 && stride >= 0 && stride < (1ll << 31);
}

// The block's share of the tokens that belong to no sequence.
__device__ __forceinline__ void clear_unused(const ScanArgs& a, const ChannelRun& w) {
  clear_channels(a, w, threadIdx.x, kThreads, first_unused_token(a) + static_cast<int64_t>(w.entry), a.tokens, w.step);
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
ssm_selective_n16_l4_r16_w4_c4_bf16_sf32(const __grid_constant__ ScanArgs a) {
  Turn* turns = reinterpret_cast<Turn*>(shared_memory);
  begin_turns();
  const int warp = threadIdx.x / 32;
  Ring ring{warp, 0u};
  Turn& own = turns[warp];
  Handed& handed = *reinterpret_cast<Handed*>(turns + kWarps);
  const ChannelRun w = find_channels(a, kChannels);
  Place at;
  at.lane = threadIdx.x % kLanes;
  const int channel = threadIdx.x % 32 / kLanes * kTile;
  at.row = w.first + channel;
  at.valid = max(0, min(kTile, w.valid - channel));
  at.token = at.lane / kOwners;
#pragma unroll
  for (int r = 0; r < kTile; ++r) {
    const bool there = r < at.valid;
    own.D[r][threadIdx.x % 32] = there && a.D ? a.D[at.row + r] : 0.f;
    own.dt_bias[r][threadIdx.x % 32] = there && a.dt_bias ? a.dt_bias[at.row + r] : 0.f;
  }
  constexpr uint32_t kVectors = kFlagVectorB | kFlagVectorC;
  const bool dt_f32 = a.flags & kFlagDtF32;
  const bool dt_runs =
      dt_f32 ? takes_runs<float>(a.dt, a.dt_stride, w.first) : takes_runs<Io>(a.dt, a.dt_stride, w.first);
  const bool usual = (a.flags & (kFlagSoftplus | kFlagDtLimit)) == kFlagSoftplus && a.z && a.D && !a.checkpoint_slots &&
                     w.valid == kChannels && (a.flags & kVectors) == kVectors && kDState % 4 == 0 && dt_runs &&
                     takes_runs<Io>(a.x, a.x_stride, w.first) && takes_runs<Io>(a.z, a.z_stride, w.first) &&
                     takes_runs<Io>(a.y, a.y_stride, w.first);

  if (warp == kWarps - 1) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) ring.wake_next(i);  // the first turn waits for nothing
  }
  uint32_t taken = 0;  // turns of all sequences so far
  const uint32_t entries = static_cast<uint32_t>(entries_of(a));
#pragma unroll 1
  for (uint32_t entry = w.entry; entry < entries; entry += w.step) {
    const Sequence q = find_sequence(a, entry);
    if (q.padding) clear_channels(a, find_channels(a, opaque(kChannels)), threadIdx.x, kThreads, q.begin, q.end, 1);
    const int begin = q.begin, length = q.padding ? 0 : max(q.end - begin, 0);
    const int write = static_cast<int>(q.write);
    const uint32_t n_turns = max(1u, (static_cast<uint32_t>(length) + kTurn - 1) / kTurn);  // one at least
    const uint32_t turn = (warp + kWarps - taken % kWarps) % kWarps;                              // this warp's first
    if (turn == 0) load_state(a, at, q.read, own.kept);
    int left = length - static_cast<int>(turn) * kTurn;
    if (usual && dt_f32) {
      left = take_whole_turns(Usual<true, true>(), a, begin, length, w.group, at, ring, own, handed, left);
    } else if (usual) {
      left = take_whole_turns(Usual<true, false>(), a, begin, length, w.group, at, ring, own, handed, left);
    }
    bool empty = length == 0 && turn == 0;
#pragma unroll 1
    for (; left > 0 || empty; left -= kStep, empty = false) {
      const Source source(a, w.group, at, begin + static_cast<int64_t>(length - left));
      Fetched fetched;
      fetch(Usual<false, false>(), fetched, a, source, at, left);
      share_columns(fetched, own);
      const Handed& from = left == length ? own.kept : handed;
      Handed& to = left <= kTurn ? own.kept : handed;
      take_turn(Usual<false, false>(), a, begin, at, Rates(a, at), ring, own, from, to, fetched, length - left, left);
    }
    if ((turn + kWarps - (n_turns - 1) % kWarps) % kWarps == 0) {  // this warp took the last turn
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        float4 state[kTile];
#pragma unroll
        for (int r = 0; r < kTile; ++r) state[r] = own.kept.state[i][r][threadIdx.x % 32];
        if (write >= 0) store_quad(a, at, state, write, i, length - 1);
        ring.wake_next(i);
      }
    }
    taken += n_turns;
  }
  if (warp == static_cast<int>(taken % kWarps)) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) ring.wait_for_turn(a, i);  // a turn that nobody takes
  }
  clear_unused(a, find_channels(a, opaque(kChannels)));  // found anew: few registers are left in between
}
