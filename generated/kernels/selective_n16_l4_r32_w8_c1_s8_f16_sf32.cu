// SPDX-License-Identifier: Apache-2.0
//
// ssm_selective_n16_l4_r32_w8_c1_s8_f16_sf32
//
// The selective scan of Mamba-1: head_dim is 1, a head is a channel, and A has a value for each channel and column (or
// one a channel). For token t of a sequence, channel h, group g = h / (channels / groups), column n:
//
//   d    = dt[t,h] + dt_bias[h];  d = log1p(exp(d)) where d <= 20 (softplus);  d = clamp(d, dt_min, dt_max)
//   S[n] = exp(d * A[h,n]) * S[n] + d * B[t,g,n] * x[t,h]
//   y[t,h] = (sum_n S[n] * C[t,g,n] + D[h] * x[t,h]) * silu(z[t,h])
//
// For decode. A block has a run of channels and 8 sequence(s), shared out to its warps: A, which is as large as a
// state, then comes from the first-level cache for all but one of them. A lane owns 4 channel(s) by 4 columns, the
// columns as 16-byte pieces l, l + 4, ... of 4: all of a sequence's state is asked for as soon as its slot is known,
// neighbouring lanes at neighbouring addresses. Nothing is staged in shared memory and no warp waits for another.
// Softplus and gate are computed once a (channel, token) and shuffled to the lanes that share the channel. Longer
// sequences are right too, and slow.
//
// The decay is 2^(d * (A log2 e)): two roundings of the exponent and one of the power, a relative error of at most
// (|d A| + 2) 2^-23. y is summed by column bits from high to low, in the order of the other families: every number of
// lanes, rows, warps and chunk tokens, in prefill and in decode, gives the same bits.
//
// Launch: runs of channels, none of which spans two groups, by shares of the sequences, runs fastest:
//   runs = groups * ceil(channels / groups / 32); grid.x = runs * ceil(max(sequences, 1) / 8), at most 2^31 - 1: fewer
//   shares are legal, in whole runs, and blocks go from sequence to sequence;
//   block.x = 256; dynamic shared memory = 0 bytes.
// One argument, ScanArgs by value; the struct below is its table. Compile with -fmad=false: products and sums are
// fused where fmaf says so and nowhere else, so that the order of rounding is what this file says.
#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Io = __half;    // x, z, y, B, C
using State = float;  // the stored state; arithmetic is f32

constexpr int kDState = 16;    // columns of a channel
constexpr int kLanes = 4;      // lanes that share a channel
constexpr int kChannels = 32;  // channels of a block
constexpr int kTile = 4;       // channels a lane owns
constexpr int kSequences = 8;  // sequences of a block
constexpr int kPieces = 1;     // 16-byte pieces of a channel's state that a lane owns
constexpr int kThreads = 256;

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

// Of sequence s, which is there. `zero` is 0.
__device__ __forceinline__ Entry load_entry_of(const ScanArgs& a, uint32_t s, uint32_t zero) {
  s += zero;
  Entry e;
  e.read = static_cast<int>(s), e.end = a.tokens, e.last = a.tokens, e.resume = a.state != nullptr;
  if (a.read_slots) e.read = a.read_slots[s];
  if (a.cu_seqlens) e.begin = a.cu_seqlens[s], e.end = a.cu_seqlens[s + 1];
  if (a.write_slots) e.write = a.write_slots[s];
  if (a.state && a.resume) e.resume = a.resume[s];
  if (a.cu_seqlens) e.last = a.cu_seqlens[a.sequences + zero];
  return e;
}

// NOTE: the compiler is not to know that every lane has the same numbers: in registers that a warp shares it would move
// each as soon as it is asked for, and wait there before it asks for the next. The number of a thread's block among
// those of a block, which is 0, it does not look through.
__device__ __forceinline__ uint32_t unknown_zero() { return threadIdx.x / kThreads; }

__device__ __forceinline__ Entry load_entry(const ScanArgs& a, int64_t entry) {
  const int s = sequence_of(a, static_cast<int>(entry));
  if (s >= 0 && s < a.sequences) return load_entry_of(a, s, 0);
  return Entry();
}

// Tokens from here on belong to no sequence.
__device__ __forceinline__ int first_unused_token(const ScanArgs& a) {
  return a.cu_seqlens ? min(max(a.cu_seqlens[a.sequences], 0), a.tokens) : a.tokens;
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

// a / b for numbers below kShort, by one reciprocal. NOTE: exact. With a half added no quotient is nearer to a whole
// number than 1 / 2b, and an error of 2^-22 of it, which is what the instruction may have, is less than that.
constexpr int64_t kShort = 1 << 21;
__device__ __forceinline__ uint32_t divide_short(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// Items of work: a run of channels of some of the sequences, runs fastest. No run spans two groups.
struct Runs {
  uint32_t of_group, all, channels;  // runs of a group, of all groups, and channels of a group
};

// `kUsual`: there is one group, and heads and the item are below kShort: no number is divided as an integer.
template <bool kUsual>
__device__ __forceinline__ Runs find_runs(const ScanArgs& a, int channels) {
  const uint32_t of_group = kUsual ? a.heads : static_cast<uint32_t>(a.heads) / static_cast<uint32_t>(a.groups);
  const uint32_t runs = (of_group + channels - 1) / channels;
  return {runs, kUsual ? runs : runs * a.groups, of_group};
}

__device__ __forceinline__ int64_t channel_items(const ScanArgs& a, const Runs& runs, int sequences) {
  return (entries_of(a) + sequences - 1) / sequences * runs.all;
}

template <bool kUsual>
__device__ __forceinline__ ChannelRun find_channels(const ScanArgs& a, const Runs& runs, int64_t item, int channels) {
  uint32_t entry;
  if (!kUsual) {
    entry = static_cast<uint32_t>(item / runs.all);
  } else if ((runs.all & (runs.all - 1)) == 0) {
    entry = static_cast<uint32_t>(item) >> (31 - __clz(runs.all));  // the usual number
  } else {
    entry = divide_short(static_cast<uint32_t>(item), runs.all);
  }
  const uint32_t run = static_cast<uint32_t>(item - static_cast<int64_t>(entry) * runs.all);
  const uint32_t group = kUsual ? 0 : run / runs.of_group;
  const uint32_t in_group = (run - group * runs.of_group) * channels;
  ChannelRun w;
  w.entry = entry;
  w.step = 0;
  w.group = static_cast<int>(group);
  w.first = static_cast<int>(group * runs.channels + in_group);
  w.valid = min(channels, static_cast<int>(runs.channels - in_group));
  return w;
}

// One token's step of four columns: S = decay * S + dx * B, and the sum of S * C over them.
__device__ __forceinline__ float advance(float* s, float4 decay, float dx, float4 b, float4 c) {
  s[0] = fmaf(decay.x, s[0], dx * b.x);
  s[1] = fmaf(decay.y, s[1], dx * b.y);
  s[2] = fmaf(decay.z, s[2], dx * b.z);
  s[3] = fmaf(decay.w, s[3], dx * b.w);
  return fmaf(s[3], c.w, fmaf(s[2], c.z, fmaf(s[1], c.y, s[0] * c.x)));
}

// Pieces of rows: the 16 bytes of state that a lane moves in one access, and the columns of B and C that go with them.
constexpr int kPiece = 16 / sizeof(State);  // columns of a piece
constexpr int kPieceQuads = kPiece / 4;

// kPiece columns as they are stored, four bytes a word, columns from low bits to high.
template <typename T>
struct Piece {
  static constexpr int kWords = kPiece * sizeof(T) / 4;
  uint32_t w[kWords];
};

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

template <typename T>
__device__ __forceinline__ void clear(Piece<T>& piece) {
#pragma unroll
  for (int i = 0; i < Piece<T>::kWords; ++i) piece.w[i] = 0u;
}

__device__ __forceinline__ uint4 load_words(const uint4* p, bool streaming) {
  return streaming ? load_streaming(p) : *p;
}

// Columns [n, n + kPiece) of a row in accesses of up to 16 bytes, which the caller knows to be aligned and to lie
// wholly inside or outside the row; columns from d_state on become 0.
template <bool kStreaming, typename T>
__device__ __forceinline__ void load_piece(Piece<T>& piece, const T* row, int n, int d_state) {
  if constexpr (Piece<T>::kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Piece<T>::kWords; i += 4) {
      const int at = n + i * static_cast<int>(4 / sizeof(T));
      uint4 v = make_uint4(0u, 0u, 0u, 0u);
      if (at < d_state) v = load_words(reinterpret_cast<const uint4*>(row + at), kStreaming);
      piece.w[i] = v.x, piece.w[i + 1] = v.y, piece.w[i + 2] = v.z, piece.w[i + 3] = v.w;
    }
  } else {
    static_assert(Piece<T>::kWords == 2, "four columns of two bytes");
    uint2 v = make_uint2(0u, 0u);
    if (n < d_state) v = *reinterpret_cast<const uint2*>(row + n);
    piece.w[0] = v.x, piece.w[1] = v.y;
  }
}

// The same element by element, for rows at any place.
template <typename T>
__device__ __forceinline__ void load_elements(Piece<T>& piece, const T* row, int n, int d_state) {
  using Bits = typename BitsOf<sizeof(T)>::type;
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < Piece<T>::kWords; ++i) {
    uint32_t word = 0u;
#pragma unroll
    for (int k = 0; k < kPerWord; ++k) {
      const int at = n + i * kPerWord + k;
      if (at < d_state) word |= static_cast<uint32_t>(reinterpret_cast<const Bits*>(row)[at]) << (k * 8 * sizeof(T));
    }
    piece.w[i] = word;
  }
}

// x of kCount rows from row `first` on: elements in as few accesses as their alignment allows, which is that of the
// first element of a run of rows, and rows from valid_rows on become 0. Whole accesses are valid or not.
template <int kCount>
__device__ __forceinline__ void load_run(Io (&to)[kCount], const Io* rows, int first, int valid_rows) {
  constexpr int kBytes = kCount * sizeof(Io);
  constexpr int kAccess = kBytes < 16 ? kBytes : 16;
  constexpr int kElements = kAccess / sizeof(Io);
#pragma unroll
  for (int r = 0; r < kCount; r += kElements) {
    const bool valid = first + r < valid_rows;
    const Io* from = rows + first + r;
    uint4 v = make_uint4(0u, 0u, 0u, 0u);
    if constexpr (kAccess == 16) {
      if (valid) v = *reinterpret_cast<const uint4*>(from);
    } else if constexpr (kAccess == 8) {
      const uint2 half = valid ? *reinterpret_cast<const uint2*>(from) : make_uint2(0u, 0u);
      v.x = half.x, v.y = half.y;
    } else if constexpr (kAccess == 4) {
      if (valid) v.x = *reinterpret_cast<const uint32_t*>(from);
    } else {
      if (valid) v.x = *reinterpret_cast<const uint16_t*>(from);
    }
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      to[r + k] = element_of(words[k * sizeof(Io) / 4] >> (k * 8 * sizeof(Io) % 32), Io());
    }
  }
}

__device__ __forceinline__ void store_piece(State* row, int n, const Piece<State>& piece, int d_state) {
  if (n >= d_state) return;
  store_streaming(reinterpret_cast<uint4*>(row + n), make_uint4(piece.w[0], piece.w[1], piece.w[2], piece.w[3]));
}

__device__ __forceinline__ void store_elements(State* row, int n, const Piece<State>& piece, int d_state) {
  using Bits = typename BitsOf<sizeof(State)>::type;
  constexpr int kPerWord = 4 / sizeof(State);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    if (n + i < d_state) {
      reinterpret_cast<Bits*>(row)[n + i] =
          static_cast<Bits>(piece.w[i / kPerWord] >> (i % kPerWord * 8 * static_cast<int>(sizeof(State))));
    }
  }
}

// Quad q of a piece as floats; integers are not scaled.
__device__ __forceinline__ float4 quad_of(const Piece<float>& p, int q) {
  return make_float4(__uint_as_float(p.w[4 * q]), __uint_as_float(p.w[4 * q + 1]), __uint_as_float(p.w[4 * q + 2]),
                     __uint_as_float(p.w[4 * q + 3]));
}
__device__ __forceinline__ float4 quad_of(const Piece<__nv_bfloat16>& p, int q) {
  return widen4(make_uint2(p.w[2 * q], p.w[2 * q + 1]), __nv_bfloat16());
}
__device__ __forceinline__ float4 quad_of(const Piece<__half>& p, int q) {
  return widen4(make_uint2(p.w[2 * q], p.w[2 * q + 1]), __half());
}
__device__ __forceinline__ float widen_byte(uint32_t biased, int k) {
  // 2^23 + b as a float has b in its low byte: exact, and two instructions where a conversion runs at quarter rate.
  return __uint_as_float(0x4b000000u | ((biased >> (8 * k)) & 0xffu)) - 8388736.f;
}
__device__ __forceinline__ float4 quad_of(const Piece<int8_t>& p, int q) {
  const uint32_t biased = p.w[q] ^ 0x80808080u;
  return make_float4(widen_byte(biased, 0), widen_byte(biased, 1), widen_byte(biased, 2), widen_byte(biased, 3));
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

// What an 8-bit row is stored with.
struct RowScale {
  float stored = 0.f;   // what a stored integer is multiplied with
  float inverse = 0.f;  // what takes a value to integers, after `lift`
  float lift = 1.f;     // brings rows of tiny values to where their inverse is finite
};

// Rounds four values to quad q of a piece. `random` is used where `stochastic`, `scale` by 8-bit rows.
__device__ __forceinline__ void round_quad(Piece<float>& p, int q, const float* s, uint4, bool, const RowScale&) {
#pragma unroll
  for (int i = 0; i < 4; ++i) p.w[4 * q + i] = __float_as_uint(s[i]);
}
template <typename T>
__device__ __forceinline__ void round_quad_16(Piece<T>& p, int q, const float* s, uint4 random, bool stochastic) {
  if (stochastic) {
    p.w[2 * q] = pack2(round_to(s[0], random.x, true, T()), round_to(s[1], random.y, true, T()));
    p.w[2 * q + 1] = pack2(round_to(s[2], random.z, true, T()), round_to(s[3], random.w, true, T()));
  } else {
    p.w[2 * q] = pack2(s[0], s[1], T());
    p.w[2 * q + 1] = pack2(s[2], s[3], T());
  }
}
__device__ __forceinline__ void round_quad(Piece<__nv_bfloat16>& p, int q, const float* s, uint4 random,
                                           bool stochastic, const RowScale&) {
  round_quad_16(p, q, s, random, stochastic);
}
__device__ __forceinline__ void round_quad(Piece<__half>& p, int q, const float* s, uint4 random, bool stochastic,
                                           const RowScale&) {
  round_quad_16(p, q, s, random, stochastic);
}

// A value in steps of its row's scale, to the nearest integer or, where stochastic, to one of its two neighbours: -127
// to 127 in the low byte.
__device__ __forceinline__ uint32_t to_steps(float v, uint32_t random, bool stochastic, const RowScale& scale) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: the sum's low bits are the integer
  v *= scale.lift;
  if (!stochastic) return __float_as_uint(fmaf(v, scale.inverse, kRound)) & 0xffu;
  const float below = floorf(fmaf(v, scale.inverse, static_cast<float>(random >> 8) * 0x1p-24f));
  return __float_as_uint(fminf(below, 127.f) + kRound) & 0xffu;
}
__device__ __forceinline__ void round_quad(Piece<int8_t>& p, int q, const float* s, uint4 random, bool stochastic,
                                           const RowScale& scale) {
  p.w[q] = to_steps(s[0], random.x, stochastic, scale) | to_steps(s[1], random.y, stochastic, scale) << 8 |
           to_steps(s[2], random.z, stochastic, scale) << 16 | to_steps(s[3], random.w, stochastic, scale) << 24;
}

// The scale that takes a row's largest magnitude to 127, from the bits of that magnitude: as integers they order NaN
// above infinity, so that neither is lost.
__device__ __forceinline__ RowScale row_scale(uint32_t largest_bits) {
  const float largest = __uint_as_float(largest_bits);
  RowScale scale;
  scale.stored = largest / 127.f;
  if (scale.stored == 0.f) return scale;
  if (largest < 0x1p-100f) scale.lift = 0x1p64f;
  scale.inverse = 127.f / (largest * scale.lift);
  return scale;
}

constexpr int kSlice = kPieces * kPiece;  // columns a lane owns of a channel
constexpr int kShares = 32 / kLanes;  // groups of lanes of a warp: a lane's channels are so far apart
constexpr int kTogether = kSequences * 32 > kThreads ? kSequences * 32 / kThreads : 1;  // sequences of a warp
constexpr int kOfOne = kThreads * kTogether / kSequences;  // threads that serve the same sequences, whole warps
constexpr bool kRounds = sizeof(State) < 4;  // stores lose bits
constexpr int kOwners = kLanes / kTile;  // lanes that compute the step and y of the same channel

__device__ __forceinline__ int column_of(int lane, int piece) { return kPiece * (lane + kLanes * piece); }

// Where a lane works: its columns, and the one channel of its tile whose step and y it computes.
struct Place {
  int lane;     // among those that share its channels
  int channel;  // its first among those of the run; the others follow kShares apart
  int own;      // the channel whose step and y it computes
};

__device__ __forceinline__ Place place_of(uint32_t thread) {
  Place at;
  at.lane = thread % kLanes;
  at.channel = thread % kOfOne / 32 * (kShares * kTile) + thread % 32 / kLanes;
  at.own = at.channel + folded_index<kLanes, kTile>(at.lane) * kShares;
  return at;
}

// What a lane reads of one token, as it is stored, so that nothing is waited for where it is asked for: its columns of
// B and C, which serve all its channels, and dt, x and z of its own.
struct Token {
  Piece<Io> B[kPieces], C[kPieces];
  uint32_t dt, x, z;  // dt: the bits of an f32 or of an io
};

__device__ __forceinline__ uint32_t load_dt_bits(const ScanArgs& a, int64_t index) {
  if (sizeof(Io) == 4 || a.flags & kFlagDtF32) return static_cast<const uint32_t*>(a.dt)[index];
  return static_cast<const typename BitsOf<sizeof(Io)>::type*>(a.dt)[index];
}

__device__ __forceinline__ float dt_of(const ScanArgs& a, const Token& token) {
  return a.flags & kFlagDtF32 ? __uint_as_float(token.dt) : to_f32(element_of(token.dt, Io()));
}

// B and C of a lane's columns and dt, x and z of channel `own`. kFast: B and C take accesses of 16 bytes (or all that a
// lane needs of them).
template <bool kFast>
__device__ __forceinline__ void load_token(Token& to, const ScanArgs& a, const ChannelRun& w, int lane, int own,
                                           int64_t t) {
  using Bits = typename BitsOf<sizeof(Io)>::type;
  const uint32_t row = w.first + own;
  const uint32_t column = w.group * kDState;
  to.dt = load_dt_bits(a, t * a.dt_stride + row);
  to.x = static_cast<const Bits*>(a.x)[t * a.x_stride + row];
  to.z = 0u;
  if (a.z) to.z = static_cast<const Bits*>(a.z)[t * a.z_stride + row];
  const Io* B = static_cast<const Io*>(a.B) + (t * a.B_stride + column);
  const Io* C = static_cast<const Io*>(a.C) + (t * a.C_stride + column);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int n = column_of(lane, i);
    if constexpr (kFast) {
      load_piece<false>(to.B[i], B, n, kDState);
      load_piece<false>(to.C[i], C, n, kDState);
    } else {
      load_elements(to.B[i], B, n, kDState);
      load_elements(to.C[i], C, n, kDState);
    }
  }
}

// A of a lane's columns of a channel.
template <bool kFast>
__device__ __forceinline__ void load_A(float (&A)[kSlice], const ScanArgs& a, const float* values, int64_t row,
                                       int lane) {
#pragma unroll
  for (int i = 0; i < kSlice; i += 4) {
    const int n = column_of(lane, i / kPiece) + i % kPiece;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if constexpr (kFast) {
      if (n < kDState) v = *reinterpret_cast<const float4*>(values + n);
    } else {
      const bool per_column = a.flags & kFlagPerColumnA;
      if (n + 0 < kDState) v.x = per_column ? values[n + 0] : a.A[row];
      if (n + 1 < kDState) v.y = per_column ? values[n + 1] : a.A[row];
      if (n + 2 < kDState) v.z = per_column ? values[n + 2] : a.A[row];
      if (n + 3 < kDState) v.w = per_column ? values[n + 3] : a.A[row];
    }
    A[i] = v.x, A[i + 1] = v.y, A[i + 2] = v.z, A[i + 3] = v.w;
  }
}

// What a lane's columns of a channel decay by in a step of d.
__device__ __forceinline__ void decay_by(float (&decays)[kSlice], const float (&A)[kSlice], float d) {
#pragma unroll
  for (int i = 0; i < kSlice; ++i) decays[i] = exp2_approx(d * (A[i] * kLog2e));
}

// One token's step of one of a lane's channels. Leaves the sums of S * C of each quad of a piece: sums over columns go
// by column bits from high to low: pieces of a lane, lanes, quads of a piece.
__device__ __forceinline__ void advance_channel(float (&s)[kSlice], const float (&decays)[kSlice], const Token& token,
                                                float dx, float (&sums)[kPieceQuads]) {
  float pieces[kPieceQuads][kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
#pragma unroll
    for (int q = 0; q < kPieceQuads; ++q) {
      const int at = i * kPiece + 4 * q;
      const float4 decay = make_float4(decays[at], decays[at + 1], decays[at + 2], decays[at + 3]);
      pieces[q][i] = advance(s + at, decay, dx, quad_of(token.B[i], q), quad_of(token.C[i], q));
    }
  }
#pragma unroll
  for (int q = 0; q < kPieceQuads; ++q) sums[q] = sum_quads(pieces[q]);
}

// NOTE: no streaming hint, for loads either: up to 2 % slower here, where A and tokens are read beside states.
__device__ __forceinline__ void store_words(State* to, const Piece<State>& piece) {
  *reinterpret_cast<uint4*>(to) = make_uint4(piece.w[0], piece.w[1], piece.w[2], piece.w[3]);
}

__device__ __forceinline__ void widen(float (&s)[kSlice], const Piece<State> (&stored)[kPieces]) {
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
#pragma unroll
    for (int q = 0; q < kPieceQuads; ++q) {
      const float4 v = quad_of(stored[i], q);
      float* to = s + i * kPiece + 4 * q;
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
  }
}

// Of sequence s, which is there. `zero` is 0, see load_entry_of.
__device__ __forceinline__ int load_read_slot(const ScanArgs& a, uint32_t s, uint32_t zero) {
  s += zero;
  int slot = static_cast<int>(s);
  if (a.read_slots) slot = a.read_slots[s];
  return slot;
}

// Words that the compiler is to ask for here, not where they are used.
template <typename T>
__device__ __forceinline__ void keep_here(T& values) {
#if !defined(SSM_EMULATOR)
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) {
    asm volatile("" : "+r"(reinterpret_cast<uint32_t*>(&values)[i]));
  }
#endif
}

// opaque(p) of an address that is known to be in global memory.
template <typename T>
__device__ __forceinline__ T* opaque_global(T* p) {
  p = opaque(p);
#if !defined(SSM_EMULATOR)
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

// What a step of a lane's channels is once its token is there, but for the state.
struct Step {
  bool usual;         // it is taken
  State* to;          // where the state goes
  Io* y;              // where y of the lane's own channel goes;
  float x, dx, open;  // of that channel x, d x and the gate
  float decays[kTile][kSlice];
};

constexpr uint32_t kDone = 1u << 31;  // of what take_usual_steps returns: nothing is left to do for the block

// The usual steps of a warp's sequences: one that has one token goes on from one slot to another, with softplus, D and
// z, rounding to nearest, and everything takes whole vectors. Token s is then that of sequence s, so that it is asked
// for before the offsets are there, and the state as soon as its slot is known. What else the numbers say is judged
// when all that is on its way: a sequence that they send the long way stores nothing here. `last`: no item of the block
// follows. Returns a bit for each that took its step, and kDone.
__device__ __forceinline__ uint32_t take_usual_steps(const ScanArgs& a, const ChannelRun& w, const Place& at,
                                                     uint32_t entry, bool last) {
  Entry e[kTogether];
  uint32_t t[kTogether];
  bool there[kTogether];
  int read[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    t[k] = entry + k;
    there[k] = k == 0 || t[k] < a.sequences;
    if (a.sequence_order && there[k]) t[k] = a.sequence_order[t[k]];
    there[k] = there[k] && t[k] < static_cast<uint32_t>(a.tokens);
    if (!there[k]) t[k] = 0;
    read[k] = load_read_slot(a, t[k], unknown_zero());
  }
  __syncwarp();  // the state waits for its slot alone
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    e[k] = load_entry_of(a, t[k], unknown_zero());
    e[k].read = read[k];
  }
  constexpr int kNext = kShares * kDState;  // elements from a lane's channel to its next
  const uint64_t first = static_cast<uint32_t>(w.first + at.channel) * uint64_t{kDState};
  const int64_t in_slot = static_cast<int64_t>(first) + column_of(at.lane, 0);
  Token tokens[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) load_token<true>(tokens[k], a, w, at.lane, at.own, t[k]);
  float bias = 0.f;
  if (a.dt_bias) bias = a.dt_bias[w.first + at.own];
  float D = a.D[w.first + at.own];
  float A[kTile][kSlice];
#pragma unroll
  for (int r = 0; r < kTile; ++r) load_A<true>(A[r], a, a.A + first + r * kNext, 0, at.lane);
  if constexpr (kSequences > 1) {
    // NOTE: the compiler would put some of these loads behind the wait for the slot, and states behind the wait for
    // those. It does not put them behind a return, which is never taken. A sequence alone is faster without.
    keep_here(tokens);
    keep_here(A);
    keep_here(D);
    if (a.head_dim < 0) return 0;
  }
  __syncwarp();

  Piece<State> stored[kTogether][kTile][kPieces];
  bool in_range[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const uint32_t read = e[k].read;
    in_range[k] = e[k].read >= 0 && read < static_cast<uint64_t>(a.slots);
    const State* const from = opaque_global(static_cast<const State*>(a.state) + (in_slot + read * a.state_stride));
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        clear(stored[k][r][i]);
        if (in_range[k] && column_of(at.lane, i) < kDState) {
          load_piece<false>(stored[k][r][i], from + r * kNext + i * kPiece * kLanes, 0, kDState);
        }
      }
    }
  }

  // All that needs no state, while it is on its way.
  uint32_t taken = 0;
  Step steps[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int final = listed_write(a, e[k]);
    Step& step = steps[k];
    step.usual = there[k] & (e[k].begin == static_cast<int>(t[k])) & (e[k].end == static_cast<int>(t[k]) + 1) &
                 (e[k].resume != 0) & (e[k].read != a.pad_slot) & in_range[k] & in_pool(a, final);
    step.to = opaque_global(static_cast<State*>(a.state) + (in_slot + final * a.state_stride));
    step.y = static_cast<Io*>(a.y) + (t[k] * a.y_stride + static_cast<uint32_t>(w.first + at.own));
    if (uniform(step.usual)) taken |= 1u << k;
    const float d = softplus(dt_of(a, tokens[k]) + bias);
    const float x = to_f32(element_of(tokens[k].x, Io()));
    step.x = x, step.dx = d * x;
    step.open = gate(to_f32(element_of(tokens[k].z, Io())));
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      decay_by(step.decays[r], A[r], __shfl_sync(kWholeWarp, d, r * kOwners, kLanes));
    }
  }
  if (taken == (1u << kTogether) - 1 && e[0].last >= a.tokens && last) taken |= kDone;
  taken = opaque(taken);

  // NOTE: runs once. The assembler would put much of the above behind the wait for the states, but not into a loop.
  // They are moved on in place, so that nothing of what they decide can be taken out of it.
#pragma unroll 1
  do {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const Step& step = steps[k];
      float sums[kTile][kPieceQuads];
      // A channel is widened, moved on, narrowed and stored at once.
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        float s[kSlice];
        widen(s, stored[k][r]);
        advance_channel(s, step.decays[r], tokens[k], __shfl_sync(kWholeWarp, step.dx, r * kOwners, kLanes), sums[r]);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          Piece<State>& piece = stored[k][r][i];
#pragma unroll
          for (int q = 0; q < kPieceQuads; ++q) {
            round_quad(piece, q, s + i * kPiece + 4 * q, make_uint4(0u, 0u, 0u, 0u), false, RowScale());
          }
          const bool there = step.usual && column_of(at.lane, i) < kDState;
          if (there) store_words(step.to + r * kNext + i * kPiece * kLanes, piece);
        }
      }
      float quads[kPieceQuads];
#pragma unroll
      for (int q = 0; q < kPieceQuads; ++q) {
        float channels[kTile];
#pragma unroll
        for (int r = 0; r < kTile; ++r) channels[r] = sums[r][q];
        fold_lanes<kLanes, kTile>(channels, at.lane);
        quads[q] = sum_lanes(channels[0], kOwners);
      }
      const float out = fmaf(D, step.x, sum_quads(quads)) * step.open;
      if (step.usual && at.lane % kOwners == 0) *step.y = from_f32<Io>(out);
    }
  } while (a.d_state < 0);
  return taken;
}

// Stores a lane's columns of a channel to a slot.
template <bool kFast>
__device__ __forceinline__ void store_channel(const ScanArgs& a, int64_t row, const float (&s)[kSlice], int64_t slot,
                                              int token, int lane) {
  Rounding rounding;
  if constexpr (kRounds) rounding = find_rounding(a.rounding_key);
  State* to = static_cast<State*>(a.state) + slot * a.state_stride + row * kDState;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int n = column_of(lane, i);
    Piece<State> piece;
#pragma unroll
    for (int q = 0; q < kPieceQuads; ++q) {
      uint4 random = make_uint4(0u, 0u, 0u, 0u);
      if (kRounds && rounding.stochastic) {
        random = draw4(rounding, static_cast<uint32_t>(row), (kDState + 3) / 4, n / 4 + q, slot, token);
      }
      round_quad(piece, q, s + i * kPiece + 4 * q, random, kRounds && rounding.stochastic, RowScale());
    }
    if constexpr (kFast) {
      if (n < kDState) store_words(to + n, piece);
    } else {
      store_elements(to, n, piece, kDState);
    }
  }
}

// Any sequence, all its tokens, one of a lane's channels after the other. kFast: state, A, B and C take accesses of 16
// bytes, and A is one a column.
template <bool kFast>
__device__ __forceinline__ void run_any(const ScanArgs& a, const ChannelRun& w, const Entry& e, const Place& at) {
  const int begin = max(e.begin, 0), end = min(e.end, a.tokens);
  if (uniform(is_padding(a, e))) {
    clear_channels(a, w, threadIdx.x % kOfOne, kOfOne, begin, end, 1);
    return;
  }
  const int initial = initial_slot(a, e), final = final_slot(a, e, initial);
#pragma unroll 1
  for (int r = 0; r < kTile; ++r) {
    const int channel = at.channel + r * kShares;
    const bool there = channel < w.valid;
    const int own = there ? channel : 0;  // lanes of no channel take part in what lanes do together
    const int64_t row = w.first + static_cast<int64_t>(own);
    const float bias = a.dt_bias ? a.dt_bias[row] : 0.f, D = a.D ? a.D[row] : 0.f;
    float A[kSlice], s[kSlice];
    load_A<kFast>(A, a, a.A + row * kDState, row, at.lane);
    {
      const State* from = static_cast<const State*>(a.state) + (initial * a.state_stride + row * kDState);
      Piece<State> stored[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        clear(stored[i]);
        if (there && initial >= 0) {
          if constexpr (kFast) {
            load_piece<false>(stored[i], from, column_of(at.lane, i), kDState);
          } else {
            load_elements(stored[i], from, column_of(at.lane, i), kDState);
          }
        }
      }
      widen(s, stored);
    }
#pragma unroll 1
    for (int t = begin; t < end; ++t) {
      Token token;
      load_token<kFast>(token, a, w, at.lane, own, t);
      const float d = step_size(dt_of(a, token), bias, a.flags, a.dt_min, a.dt_max);
      const float x = to_f32(element_of(token.x, Io()));
      float decays[kSlice], quads[kPieceQuads];
      decay_by(decays, A, d);
      advance_channel(s, decays, token, d * x, quads);
#pragma unroll
      for (int q = 0; q < kPieceQuads; ++q) quads[q] = sum_lanes(quads[q], kLanes);
      float out = sum_quads(quads);
      if (a.D) out = fmaf(D, x, out);
      if (a.z) out *= gate(to_f32(element_of(token.z, Io())));
      if (there && at.lane == 0) static_cast<Io*>(a.y)[t * a.y_stride + row] = from_f32<Io>(out);
      const int64_t slot = a.checkpoint_slots ? a.checkpoint_slots[t] : -1;
      if (there && slot >= 0 && slot < a.slots) store_channel<kFast>(a, row, s, slot, t - begin, at.lane);
    }
    if (there && final >= 0) store_channel<kFast>(a, row, s, final, end - begin - 1, at.lane);
  }
}

// Whether sequences may take the usual step as far as the arguments tell. NOTE: no branches, so that all arguments are
// asked for at once: those that were not read before are slow to come.
__device__ __forceinline__ bool is_usual(const ScanArgs& a) {
  constexpr uint32_t kWanted = kFlagVectorState | kFlagVectorB | kFlagVectorC | kFlagPerColumnA | kFlagSoftplus;
  const bool short_numbers = (blockIdx.x | static_cast<uint32_t>(a.heads)) < kShort;
  bool usual = short_numbers & (a.groups == 1) & ((a.flags & (kWanted | kFlagDtLimit)) == kWanted);
  usual &= (reinterpret_cast<uintptr_t>(a.A) % 16 == 0) & (a.z != nullptr) & (a.D != nullptr);
  usual &= (a.checkpoint_slots == nullptr) & (0 < a.tokens) & (a.tokens <= a.sequences);
  return kDState % 4 == 0 && usual && !(kRounds && a.rounding_key);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = 4;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
ssm_selective_n16_l4_r32_w8_c1_s8_f16_sf32(const __grid_constant__ ScanArgs a) {
  const Place at = place_of(threadIdx.x);
  const uint32_t warp_first = threadIdx.x / kOfOne * kTogether;  // the warp's first among the sequences of a block
  uint32_t taken = 0;
  if (is_usual(a)) {
    const Runs runs = find_runs<true>(a, kChannels);
    const ChannelRun w = find_channels<true>(a, runs, blockIdx.x, kChannels);
    const uint32_t entry = w.entry * kSequences + warp_first;
    if (entry >= static_cast<uint32_t>(a.sequences)) return;
    if (w.valid == kChannels) {
      const bool last = blockIdx.x + int64_t{gridDim.x} >= channel_items(a, runs, kSequences);
      taken = take_usual_steps(a, w, at, entry, last);
      if (taken & kDone) return;
    }
  }
  const Runs runs = find_runs<false>(a, kChannels);
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < channel_items(a, runs, kSequences); item += gridDim.x, taken = 0) {
    const ChannelRun w = find_channels<false>(a, runs, item, kChannels);
    constexpr uint32_t kVectors = kFlagVectorState | kFlagVectorB | kFlagVectorC | kFlagPerColumnA;
    const bool vectors =
        (a.flags & kVectors) == kVectors && kDState % 4 == 0 && reinterpret_cast<uintptr_t>(a.A) % 16 == 0;
#pragma unroll 1
    for (int k = 0; k < kTogether; ++k) {
      const int64_t entry = static_cast<int64_t>(w.entry) * kSequences + warp_first + k;
      if (entry >= entries_of(a)) return;
      const bool left = (taken >> k & 1) == 0;
      const Entry e = load_entry(a, entry);
      if (left && vectors) run_any<true>(a, w, e, at);
      if (left && !vectors) run_any<false>(a, w, e, at);
      clear_channels(a, w, threadIdx.x % kOfOne, kOfOne, first_unused_token(a) + entry, a.tokens, entries_of(a));
    }
  }
}
