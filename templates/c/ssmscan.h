// SPDX-License-Identifier: Apache-2.0
//
// A header-only loader of the scan kernels of this package: C99 and libdl. The CUDA driver is opened at run time; no
// CUDA header and no link against CUDA is needed. ssmscan_tables.h holds the manifest and the selection table as data.
//
//   ssm_device device;
//   ssm_library library;
//   ssm_choice choice;
//   ssm_plan plan;
//   if (ssm_open(0, &device) || ssm_load(&device, "path/of/the/package", NULL, 0, &library)) die(ssm_error());
//   ssm_problem problem = {{tokens, sequences, heads, head_dim, groups, d_state, -1, 0, 0}, "f32", "f32"};
//   if (ssm_select(&library, &problem, 0, &choice) || ssm_plan_for(&library, choice.kernel, &problem, &plan)) ...
//   ScanArgs args = {...};
//   if (ssm_launch(&library, choice.kernel, &plan, &args, stream)) ...
//
// Functions return 0, or -1 with the reason in ssm_error(), which is a thread's own. A launch allocates nothing, waits
// for nothing and restores the context that was current. Loading checks every image against its sha256.

#ifndef SSMSCAN_H
#define SSMSCAN_H

#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ssm_plan.h"

// The one argument of every kernel. Pointers are device addresses, 0 where an optional array is absent; strides are in
// elements.
typedef struct {
  uint64_t x, z, y, dt, A, B, C, D, dt_bias, state, state_scale, cu_seqlens, read_slots, write_slots, resume,
      checkpoint_slots, sequence_order, rounding_key, workspace;
  int64_t x_stride, z_stride, y_stride, dt_stride, B_stride, C_stride, state_stride, state_scale_stride, slots,
      workspace_bytes;
  int32_t tokens, sequences, heads, head_dim, groups, d_state, pad_slot;
  float dt_min, dt_max;
  uint32_t flags;
  int32_t lanes, rows, chunk;
} ScanArgs;

enum {
  SSM_SOFTPLUS = 1 << 0,
  SSM_PER_COLUMN_A = 1 << 1,
  SSM_DT_F32 = 1 << 2,
  SSM_DT_LIMIT = 1 << 3,
  // ssm_launch finds these: base, outer stride and inner row length are multiples of 16 bytes.
  SSM_VECTOR_X = 1 << 4,
  SSM_VECTOR_Z = 1 << 5,
  SSM_VECTOR_Y = 1 << 6,
  SSM_VECTOR_B = 1 << 7,
  SSM_VECTOR_C = 1 << 8,
  SSM_VECTOR_STATE = 1 << 9,
};

typedef struct {
  ssm_geometry sizes;
  const char *io, *state;  // "f32", "bf16", "f16"; the state also "i8"
} ssm_problem;

// An image of a kernel; grade is "device", "emulator" or "unproven".
typedef struct {
  const char *lane, *target, *kind, *sha256, *grade;
  int64_t bytes;
  int32_t dynamic_shared;
} ssm_image;

enum { SSM_MAX_LIMITS = 8, SSM_MAX_ENTRIES = 8, SSM_MAX_IMAGES = 24 };

// A manifest row.
typedef struct {
  const char *id, *family, *io, *state;
  const char* precision;  // of f32 operands of matrix products: "split", "tf32", or empty
  double operand_error;   // relative norm of what rounding of the operands of matrix products may cause, else 0
  int32_t d_state;        // 0: found at run time
  int32_t is_default;     // what selection falls back on
  int32_t block;
  const char* entries[SSM_MAX_ENTRIES];
  struct {
    const char* name;
    int64_t least, most;
  } limits[SSM_MAX_LIMITS];
  ssm_grid grid;
  ssm_image images[SSM_MAX_IMAGES];
} ssm_kernel;

typedef struct {
  const char *device, *target, *io, *state, *kernel, *source;
  double microseconds;
  int64_t batch_heads, tokens;
  int32_t heads, head_dim, d_state, groups;
} ssm_entry;

typedef struct {
  const char *io, *state, *kernel;
  int32_t d_state;
} ssm_default;

typedef struct {
  const char* name;
  int32_t cuda;  // that a driver must serve: 1000 * major + 10 * minor
  int32_t ptx;   // the same for PTX, which no older driver of the same major version reads
  const char* min_driver;
} ssm_lane;

// What ssmscan_tables.h defines; lists end in an element of zeros, lanes have the newest first.
typedef struct {
  const ssm_lane* lanes;
  const ssm_kernel* kernels;
  const ssm_entry* entries;
  const ssm_default* defaults;
} ssm_tables;

enum { SSM_REQUIRE_PROVEN = 1, SSM_ALLOW_JIT = 2 };

typedef struct {
  char name[96];
  int32_t major, minor, shared_limit, driver_version;
  void* context;
  int32_t device, owned;
} ssm_device;

enum { SSM_MAX_KERNELS = 512 };

// What is loaded: by the number of a kernel in the tables, its image (-1: none) and functions.
typedef struct {
  const ssm_tables* tables;
  ssm_device* device;
  int32_t image[SSM_MAX_KERNELS];
  void* module[SSM_MAX_KERNELS];
  void* functions[SSM_MAX_KERNELS][SSM_MAX_ENTRIES];
} ssm_library;

typedef struct {
  int32_t kernel;  // its number in the tables
  int32_t steps;   // steps down on the way to it
  const char* grade;
} ssm_choice;

static __thread char ssm_error_text[512];

static inline const char* ssm_error(void) { return ssm_error_text; }

static inline int ssm_fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(ssm_error_text, sizeof ssm_error_text, format, values);
  va_end(values);
  return -1;
}

// SHA-256 (FIPS 180-4), as 64 hexadecimal digits and a NUL.

static inline void ssm_sha256_block(uint32_t h[8], const unsigned char* p) {
  static const uint32_t K[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
#define SSM_ROTATE(x, n) ((x) >> (n) | (x) << (32 - (n)))
  uint32_t w[64], a[8];
  for (int i = 0; i < 16; i++)
    w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
  for (int i = 16; i < 64; i++) {
    const uint32_t s0 = SSM_ROTATE(w[i - 15], 7) ^ SSM_ROTATE(w[i - 15], 18) ^ w[i - 15] >> 3;
    const uint32_t s1 = SSM_ROTATE(w[i - 2], 17) ^ SSM_ROTATE(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  memcpy(a, h, sizeof a);
  for (int i = 0; i < 64; i++) {
    const uint32_t s1 = SSM_ROTATE(a[4], 6) ^ SSM_ROTATE(a[4], 11) ^ SSM_ROTATE(a[4], 25);
    const uint32_t t1 = a[7] + s1 + ((a[4] & a[5]) ^ (~a[4] & a[6])) + K[i] + w[i];
    const uint32_t s0 = SSM_ROTATE(a[0], 2) ^ SSM_ROTATE(a[0], 13) ^ SSM_ROTATE(a[0], 22);
    const uint32_t t2 = s0 + ((a[0] & a[1]) ^ (a[0] & a[2]) ^ (a[1] & a[2]));
    memmove(a + 1, a, 7 * sizeof a[0]);
    a[4] += t1;
    a[0] = t1 + t2;
  }
  for (int i = 0; i < 8; i++) h[i] += a[i];
#undef SSM_ROTATE
}

static inline void ssm_sha256(const unsigned char* data, size_t bytes, char hex[65]) {
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  unsigned char tail[128] = {0};
  const size_t whole = bytes / 64 * 64, left = bytes - whole, size = left < 56 ? 64 : 128;
  for (size_t i = 0; i < whole; i += 64) ssm_sha256_block(h, data + i);
  memcpy(tail, data + whole, left);
  tail[left] = 0x80;
  for (int i = 0; i < 8; i++) tail[size - 1 - i] = (unsigned char)((uint64_t)bytes * 8 >> 8 * i);
  for (size_t i = 0; i < size; i += 64) ssm_sha256_block(h, tail + i);
  for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", h[i]);
}

// Selection: the rule is in the package's documentation; Python and Go state it too.

static inline int64_t ssm_longest(const ssm_geometry* g) {
  return g->longest >= 0 ? g->longest : ssm_ceil_div(g->tokens, g->sequences > 1 ? g->sequences : 1);
}

// A size that a kernel may limit, -1 where it is not known.
static inline int64_t ssm_size(const ssm_geometry* g, const char* name) {
  if (strcmp(name, "d_state") == 0) return g->d_state;
  if (strcmp(name, "head_dim") == 0) return g->head_dim;
  if (strcmp(name, "heads") == 0) return g->heads;
  if (strcmp(name, "groups") == 0) return g->groups;
  if (strcmp(name, "longest") == 0) return ssm_longest(g);
  if (strcmp(name, "per_column_a") == 0) return g->per_column_a;
  if (strcmp(name, "checkpoint_step") == 0) return g->checkpoint_step;
  return -1;
}

static inline int ssm_takes(const ssm_kernel* kernel, const ssm_problem* p) {
  if (strcmp(kernel->io, p->io) != 0 || strcmp(kernel->state, p->state) != 0) return 0;
  for (int i = 0; i < SSM_MAX_LIMITS && kernel->limits[i].name != NULL; i++) {
    char name[32];
    snprintf(name, sizeof name, "%s", kernel->limits[i].name);
    char* multiple = strstr(name, "_multiple");
    if (multiple != NULL) *multiple = 0;
    const int64_t size = ssm_size(&p->sizes, name);
    if (multiple != NULL) {
      if (size < 0 || size % kernel->limits[i].least != 0) return 0;
      continue;
    }
    if (size < kernel->limits[i].least || size > kernel->limits[i].most) return 0;
  }
  return 1;
}

// Whether every sequence is one of decode: by the longest, or by the average length where that is not known.
static inline int ssm_decode(const ssm_problem* p) { return ssm_longest(&p->sizes) <= 8; }

// What an invariant choice is made for: 16 sequences of 1 token for decode, 1 of 4096 for prefill.
static inline ssm_problem ssm_invariant(const ssm_problem* p) {
  ssm_problem asked = *p;
  const int decode = ssm_decode(p);
  asked.sizes.sequences = decode ? 16 : 1;
  asked.sizes.tokens = decode ? 16 : 4096;
  asked.sizes.longest = decode ? 8 : 4096;
  return asked;
}

static inline int ssm_bits(int64_t value) {
  int bits = 0;
  for (; value > 0; value >>= 1) bits++;
  return bits;
}

static inline int ssm_distance(const ssm_entry* e, const ssm_problem* p) {
  const int64_t batch_heads = (int64_t)p->sizes.sequences * p->sizes.heads;
  return abs(ssm_bits(batch_heads) - ssm_bits(e->batch_heads)) + abs(ssm_bits(p->sizes.tokens) - ssm_bits(e->tokens));
}

// Whether an entry's problem is nearer than another's: one of the same head_dim is, then octaves count.
static inline int ssm_nearer(const ssm_entry* e, const ssm_entry* other, const ssm_problem* p) {
  const int own = e->head_dim == p->sizes.head_dim, others = other->head_dim == p->sizes.head_dim;
  if (own != others) return own;
  const int distance = ssm_distance(e, p) - ssm_distance(other, p);
  return distance != 0 ? distance < 0 : strcmp(e->kernel, other->kernel) < 0;
}

static inline int ssm_same(const ssm_entry* e, const ssm_problem* p) {
  const ssm_geometry* g = &p->sizes;
  return e->heads == g->heads && e->head_dim == g->head_dim && e->groups == g->groups && e->tokens == g->tokens &&
         e->batch_heads == (int64_t)g->sequences * g->heads;
}

static inline int ssm_rounds(const ssm_kernel* kernel, const char* precision) {
  return strcmp(kernel->precision, precision) == 0;
}

// The number of a kernel by its id, -1 where it does not fit. One that rounds to tf32 is never selected.
static inline int ssm_fitting(const ssm_tables* tables, const unsigned char* fits, const char* id) {
  for (int k = 0; tables->kernels[k].id != NULL; k++)
    if (strcmp(tables->kernels[k].id, id) == 0) return fits[k] && !ssm_rounds(&tables->kernels[k], "tf32") ? k : -1;
  return -1;
}

// Entries for one problem, the fastest first.
static inline int ssm_faster(const ssm_entry* a, const ssm_entry* b) {
  if (a->microseconds != b->microseconds) return a->microseconds < b->microseconds;
  return strcmp(a->kernel, b->kernel) < 0;
}

// What entries are looked at: those of this device, or of others of its target.
typedef struct {
  const ssm_tables* tables;
  const ssm_problem* problem;
  const char *device, *target;
  const unsigned char* fits;
  int kin;
} ssm_place;

static inline int ssm_in_place(const ssm_place* place, const ssm_entry* e) {
  const ssm_problem* p = place->problem;
  const int own = strcmp(e->device, place->device) == 0;
  if (place->kin ? own || strcmp(e->target, place->target) != 0 : !own) return 0;
  return e->d_state == p->sizes.d_state && strcmp(e->io, p->io) == 0 && strcmp(e->state, p->state) == 0;
}

// The kernel of an entry, -1 where it does not fit. Whether split operands are worth it depends on the device.
static inline int ssm_kept(const ssm_place* place, const ssm_entry* e) {
  const int kernel = ssm_fitting(place->tables, place->fits, e->kernel);
  return kernel >= 0 && place->kin && ssm_rounds(&place->tables->kernels[kernel], "split") ? -1 : kernel;
}

// The fastest entry of this very problem, and whether a faster one was passed over because its kernel does not fit.
static inline const ssm_entry* ssm_exact(const ssm_place* place, int* passed) {
  const ssm_entry *best = NULL, *first = NULL;
  for (const ssm_entry* e = place->tables->entries; e->kernel != NULL; e++) {
    if (!ssm_in_place(place, e) || !ssm_same(e, place->problem)) continue;
    const int kernel = ssm_fitting(place->tables, place->fits, e->kernel);
    if (kernel < 0 && (first == NULL || ssm_faster(e, first))) first = e;
    if (ssm_kept(place, e) >= 0 && (best == NULL || ssm_faster(e, best))) best = e;
  }
  *passed = best != NULL && first != NULL && ssm_faster(first, best);
  return best;
}

// Whether an entry counts for problems beside its own. What was reported says nothing of kernels that came later.
static inline int ssm_counts(const ssm_place* place, const ssm_entry* e) {
  return ssm_in_place(place, e) && strcmp(e->source, "reported") != 0 && ssm_kept(place, e) >= 0;
}

// Whether another entry for an entry's problem has a faster kernel.
static inline int ssm_beaten(const ssm_place* place, const ssm_entry* e) {
  for (const ssm_entry* f = place->tables->entries; f->kernel != NULL; f++) {
    if (f->batch_heads == e->batch_heads && f->tokens == e->tokens && f->heads == e->heads &&
        f->head_dim == e->head_dim && f->groups == e->groups && ssm_faster(f, e) && ssm_counts(place, f))
      return 1;
  }
  return 0;
}

// Whether an entry is for decode, by the average length.
static inline int ssm_decode_entry(const ssm_entry* e) {
  return ssm_ceil_div(e->tokens * e->heads, e->batch_heads > 1 ? e->batch_heads : 1) <= 8;
}

// The entry of the nearest problem, of decode or of prefill as the problem is.
static inline const ssm_entry* ssm_nearest(const ssm_place* place) {
  const ssm_entry* best = NULL;
  for (const ssm_entry* e = place->tables->entries; e->kernel != NULL; e++) {
    if (!ssm_counts(place, e) || ssm_decode_entry(e) != ssm_decode(place->problem)) continue;
    if (best != NULL && !ssm_nearer(e, best, place->problem)) continue;
    if (!ssm_beaten(place, e)) best = e;
  }
  return best;
}

// The smallest id among kernels that fit: those with a d_state of their own, of a family, with default fields, if
// asked.
static inline int ssm_smallest(const ssm_tables* tables, const unsigned char* fits, int special, const char* family,
                               int is_default) {
  int best = -1;
  for (int k = 0; tables->kernels[k].id != NULL; k++) {
    const ssm_kernel* kernel = &tables->kernels[k];
    if (!fits[k] || kernel->precision[0] != 0) continue;
    if ((special && kernel->d_state == 0) || (is_default && !kernel->is_default)) continue;
    if (family != NULL && strcmp(kernel->family, family) != 0) continue;
    if (best < 0 || strcmp(kernel->id, tables->kernels[best].id) < 0) best = k;
  }
  return best;
}

// Picks among kernels that fit; device and target are empty where no device matters. -1: none fits.
static inline int ssm_choose(const ssm_tables* tables, const ssm_problem* p, const char* device, const char* target,
                             const unsigned char* fits, int32_t* steps) {
  *steps = 0;
  for (int kin = device[0] == 0; target[0] != 0 && kin < 2; kin++) {
    const ssm_place place = {tables, p, device, target, fits, kin};
    int passed;
    const ssm_entry* found = ssm_exact(&place, &passed);
    *steps += found == NULL || passed;
    if (found == NULL) {
      found = ssm_nearest(&place);
      *steps += found == NULL;
    }
    if (found != NULL) return ssm_kept(&place, found);
  }
  int named = -1;
  for (const ssm_default* d = tables->defaults; d->kernel != NULL; d++) {
    if (d->d_state != p->sizes.d_state || strcmp(d->io, p->io) != 0 || strcmp(d->state, p->state) != 0) continue;
    const int kernel = ssm_fitting(tables, fits, d->kernel);
    if (kernel < 0 || ssm_rounds(&tables->kernels[kernel], "split")) continue;
    if (named < 0 || strcmp(d->kernel, tables->kernels[named].id) < 0) named = kernel;
  }
  if (named < 0 && ssm_decode(p) && p->sizes.head_dim > 1) named = ssm_smallest(tables, fits, 1, "update", 1);
  if (named < 0) named = ssm_smallest(tables, fits, 1, "recurrent", 1);
  if (named < 0) named = ssm_smallest(tables, fits, 1, "recurrent", 0);
  if (named >= 0) return named;
  ++*steps;
  named = ssm_smallest(tables, fits, 1, NULL, 0);
  if (named >= 0) return named;
  ++*steps;
  return ssm_smallest(tables, fits, 0, NULL, 0);
}

// The driver.

#define SSM_DRIVER(X)                                                                                     \
  X(cuInit, (unsigned))                                                                                   \
  X(cuDriverGetVersion, (int*))                                                                           \
  X(cuDeviceGet, (int*, int))                                                                             \
  X(cuDeviceGetName, (char*, int, int))                                                                   \
  X(cuDeviceGetAttribute, (int*, int, int))                                                               \
  X(cuDevicePrimaryCtxRetain, (void**, int))                                                              \
  X(cuDevicePrimaryCtxRelease_v2, (int))                                                                  \
  X(cuCtxPushCurrent_v2, (void*))                                                                         \
  X(cuCtxPopCurrent_v2, (void**))                                                                         \
  X(cuCtxGetDevice, (int*))                                                                               \
  X(cuModuleLoadData, (void**, const void*))                                                              \
  X(cuModuleUnload, (void*))                                                                              \
  X(cuModuleGetFunction, (void**, void*, const char*))                                                    \
  X(cuFuncSetAttribute, (void*, int, int))                                                                \
  X(cuLaunchKernel,                                                                                       \
    (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**)) \
  X(cuMemAlloc_v2, (uint64_t*, size_t))                                                                   \
  X(cuMemFree_v2, (uint64_t))                                                                             \
  X(cuMemcpyHtoD_v2, (uint64_t, const void*, size_t))                                                     \
  X(cuMemcpyDtoH_v2, (void*, uint64_t, size_t))                                                           \
  X(cuStreamSynchronize, (void*))                                                                         \
  X(cuGetErrorName, (int, const char**))

// What cuLaunchKernelEx takes: a launch's sizes and a list of attributes, as the driver's ABI has them.
typedef struct {
  int id;
  char pad[4];
  int value[16];
} ssm_attribute;

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  ssm_attribute* attributes;
  unsigned count;
} ssm_config;

static struct {
#define X(name, parameters) int(*name) parameters;
  SSM_DRIVER(X)
#undef X
  int (*cuFuncLoad)(void*);                                           // NULL before CUDA 12.4
  int (*cuLaunchKernelEx)(const ssm_config*, void*, void**, void**);  // NULL before CUDA 11.8
} ssm_driver;

static inline int ssm_check(int code, const char* op, const char* kernel) {
  const char* name = NULL;
  if (code == 0) return 0;
  if (ssm_driver.cuGetErrorName != NULL) ssm_driver.cuGetErrorName(code, &name);
  // These codes are of faults on the device: this call only reports them.
  const int earlier =
      code == 214 || code == 220 || code == 700 || code == 702 || code == 710 || (code >= 714 && code <= 719);
  return ssm_fail("%s failed%s%s: %s%s (%d)", op, kernel[0] ? " for kernel " : "", kernel,
                  earlier ? "an asynchronous fault of earlier work, reported by this call: " : "",
                  name != NULL ? name : "unknown error", code);
}

#define SSM_TRY(name, ...)                                             \
  do {                                                                 \
    if (ssm_check(ssm_driver.name(__VA_ARGS__), #name, "")) return -1; \
  } while (0)

// Opens libcuda; call it once before threads use the rest.
static inline int ssm_open_driver(void) {
  static int opened;
  if (opened) return 0;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return ssm_fail("no CUDA driver: cannot open libcuda.so.1");
#define X(name, parameters)                          \
  *(void**)&ssm_driver.name = dlsym(library, #name); \
  if (ssm_driver.name == NULL) return ssm_fail("libcuda.so.1 has no %s: a newer driver is needed", #name);
  SSM_DRIVER(X)
#undef X
  *(void**)&ssm_driver.cuFuncLoad = dlsym(library, "cuFuncLoad");
  *(void**)&ssm_driver.cuLaunchKernelEx = dlsym(library, "cuLaunchKernelEx");
  SSM_TRY(cuInit, 0);
  opened = 1;
  return 0;
}

static inline int ssm_describe(ssm_device* device) {
  SSM_TRY(cuDriverGetVersion, &device->driver_version);
  SSM_TRY(cuDeviceGetName, device->name, sizeof device->name, device->device);
  SSM_TRY(cuDeviceGetAttribute, &device->major, 75, device->device);
  SSM_TRY(cuDeviceGetAttribute, &device->minor, 76, device->device);
  SSM_TRY(cuDeviceGetAttribute, &device->shared_limit, 97, device->device);
  return 0;
}

// Retains the primary context of a GPU, the one that the runtime API uses.
static inline int ssm_open(int ordinal, ssm_device* device) {
  memset(device, 0, sizeof *device);
  if (ssm_open_driver()) return -1;
  SSM_TRY(cuDeviceGet, &device->device, ordinal);
  if (ssm_describe(device)) return -1;
  SSM_TRY(cuDevicePrimaryCtxRetain, &device->context, device->device);
  device->owned = 1;
  return 0;
}

// Takes a CUcontext of the caller's.
static inline int ssm_open_context(void* context, ssm_device* device) {
  void* popped;
  memset(device, 0, sizeof *device);
  if (ssm_open_driver()) return -1;
  device->context = context;
  SSM_TRY(cuCtxPushCurrent_v2, context);
  const int found = ssm_check(ssm_driver.cuCtxGetDevice(&device->device), "cuCtxGetDevice", "");
  SSM_TRY(cuCtxPopCurrent_v2, &popped);
  return found ? -1 : ssm_describe(device);
}

static inline int ssm_close(ssm_device* device) {
  if (device->owned) SSM_TRY(cuDevicePrimaryCtxRelease_v2, device->device);
  return 0;
}

// The target by which the selection table knows a GPU.
static inline void ssm_base_target(const ssm_device* device, char target[16]) {
  static const int portable[] = {75, 80, 86, 89, 90, 100, 120};
  int best = 0;
  for (size_t i = 0; i < sizeof portable / sizeof *portable; i++)
    if (portable[i] / 10 == device->major && portable[i] % 10 <= device->minor) best = portable[i];
  if (best > 0)
    snprintf(target, 16, "sm_%d", best);
  else
    snprintf(target, 16, "compute_80");
}

// How well a target fits a GPU: its own exact target, its own, lower minor versions, PTX; 0 does not fit.
static inline int ssm_fit(const ssm_device* device, const char* target, int jit) {
  char own[16];
  int number = 0;
  if (sscanf(target, "compute_%d", &number) == 1) return jit && number <= 10 * device->major + device->minor ? 1 : 0;
  snprintf(own, sizeof own, "sm_%d%da", device->major, device->minor);
  if (strcmp(target, own) == 0) return 1000;
  if (sscanf(target, "sm_%d", &number) != 1 || target[strlen(target) - 1] == 'a') return 0;
  return number / 10 == device->major && number % 10 <= device->minor ? 100 + number % 10 : 0;
}

// Reads an image below the package's folder and checks it; the caller frees it. It ends in a NUL, as PTX has to.
static inline unsigned char* ssm_read_image(const char* root, const ssm_kernel* kernel, const ssm_image* image) {
  char path[1024], hex[65];
  snprintf(path, sizeof path, "%s/images/%s/%s/%s/%s.%s", root, image->lane, image->target, kernel->family, kernel->id,
           image->kind);
  FILE* file = fopen(path, "rb");
  if (file == NULL) {
    ssm_fail("kernel %s: no image at %s", kernel->id, path);
    return NULL;
  }
  unsigned char* data = (unsigned char*)malloc((size_t)image->bytes + 1);
  const size_t have = data != NULL ? fread(data, 1, (size_t)image->bytes + 1, file) : 0;
  fclose(file);
  if (data == NULL || have != (size_t)image->bytes) {
    free(data);
    ssm_fail("%s: want %lld bytes, have %zu", path, (long long)image->bytes, have);
    return NULL;
  }
  ssm_sha256(data, have, hex);
  if (strcmp(hex, image->sha256) != 0) {
    free(data);
    ssm_fail("%s: want sha256 %s, have %s", path, image->sha256, hex);
    return NULL;
  }
  data[have] = 0;
  return data;
}

static inline int ssm_unload(ssm_library* library);

// Loads one kernel's image and finds its entries; the context is current.
static inline int ssm_load_kernel(ssm_library* library, const char* root, int k, int number) {
  const ssm_kernel* kernel = &library->tables->kernels[k];
  const ssm_image* image = &kernel->images[number];
  // The first of two launches may want more than the other.
  const int gather_shared = (int)ssm_integer(&kernel->grid, "gather_shared");
  const int most_shared = gather_shared > image->dynamic_shared ? gather_shared : image->dynamic_shared;
  unsigned char* data = ssm_read_image(root, kernel, image);
  if (data == NULL) return -1;
  const int loaded = ssm_driver.cuModuleLoadData(&library->module[k], data);
  free(data);
  if (ssm_check(loaded, "cuModuleLoadData", kernel->id)) return -1;
  for (int e = 0; e < SSM_MAX_ENTRIES && kernel->entries[e] != NULL; e++) {
    void** function = &library->functions[k][e];
    int code = ssm_driver.cuModuleGetFunction(function, library->module[k], kernel->entries[e]);
    if (ssm_check(code, "cuModuleGetFunction", kernel->id)) return -1;
    enum { DYNAMIC_SHARED = 8 };
    if (most_shared > 0) code = ssm_driver.cuFuncSetAttribute(*function, DYNAMIC_SHARED, most_shared);
    if (ssm_check(code, "cuFuncSetAttribute", kernel->id)) return -1;
    // A driver that can loads functions at their first launch else, which may be within a capture.
    if (ssm_driver.cuFuncLoad != NULL) code = ssm_driver.cuFuncLoad(*function);
    if (ssm_check(code, "cuFuncLoad", kernel->id)) return -1;
  }
  library->image[k] = number;
  return 0;
}

// Loads, for each kernel of the tables (of one family, where family is not NULL), the best image for the device;
// options are SSM_REQUIRE_PROVEN and SSM_ALLOW_JIT. root is the folder of the package.
static inline int ssm_load_tables(ssm_device* device, const ssm_tables* tables, const char* root, const char* family,
                                  int options, ssm_library* library) {
  memset(library, 0, sizeof *library);
  library->tables = tables;
  library->device = device;
  memset(library->image, -1, sizeof library->image);
  const ssm_lane *lane = tables->lanes, *oldest = lane;
  while (lane->name != NULL && device->driver_version < lane->cuda) oldest = lane++;
  if (lane->name == NULL)
    return ssm_fail("the driver is too old: want CUDA %d.%d, driver branch R%s, have CUDA %d.%d", oldest->cuda / 1000,
                    oldest->cuda % 1000 / 10, oldest->min_driver, device->driver_version / 1000,
                    device->driver_version % 1000 / 10);
  SSM_TRY(cuCtxPushCurrent_v2, device->context);
  int failed = 0, count = 0;
  for (int k = 0; !failed && tables->kernels[k].id != NULL; k++) {
    const ssm_kernel* kernel = &tables->kernels[k];
    int best = -1, best_fit = 0;
    if (family != NULL && strcmp(kernel->family, family) != 0) continue;
    for (int i = 0; i < SSM_MAX_IMAGES && kernel->images[i].target != NULL; i++) {
      const ssm_image* image = &kernel->images[i];
      const int jit = (options & SSM_ALLOW_JIT) && device->driver_version >= lane->ptx;
      const int fit = ssm_fit(device, image->target, jit);
      if (strcmp(image->lane, lane->name) != 0 || fit <= best_fit || image->dynamic_shared > device->shared_limit)
        continue;
      if ((options & SSM_REQUIRE_PROVEN) && strcmp(image->grade, "device") != 0) continue;
      best = i;
      best_fit = fit;
    }
    if (best < 0) continue;
    failed = k >= SSM_MAX_KERNELS ? ssm_fail("more than %d kernels", SSM_MAX_KERNELS)
                                  : ssm_load_kernel(library, root, k, best);
    count++;
  }
  void* popped;
  SSM_TRY(cuCtxPopCurrent_v2, &popped);
  if (!failed && count == 0)
    failed = ssm_fail("no kernel of this package has an image for %s (sm_%d%d)%s", device->name, device->major,
                      device->minor, options & SSM_REQUIRE_PROVEN ? " that is proven on a device" : "");
  if (failed) {
    char kept[sizeof ssm_error_text];  // the first error is the one to tell
    memcpy(kept, ssm_error_text, sizeof kept);
    ssm_unload(library);
    memcpy(ssm_error_text, kept, sizeof kept);
  }
  return failed;
}

// Unloads every module; no launch may be running.
static inline int ssm_unload(ssm_library* library) {
  void* popped;
  int failed = 0;
  SSM_TRY(cuCtxPushCurrent_v2, library->device->context);
  for (int k = 0; k < SSM_MAX_KERNELS; k++) {
    if (library->module[k] != NULL)
      failed |= ssm_check(ssm_driver.cuModuleUnload(library->module[k]), "cuModuleUnload", "");
    library->module[k] = NULL;
  }
  SSM_TRY(cuCtxPopCurrent_v2, &popped);
  return failed;
}

// Whether a kernel is loaded and takes a problem, to be launched by its number whatever selection says.
static inline int ssm_can_run(const ssm_library* library, int kernel, const ssm_problem* problem) {
  return library->image[kernel] >= 0 && ssm_takes(&library->tables->kernels[kernel], problem);
}

// Picks the kernel for a problem among those that are loaded. invariant looks at the geometry and at the length of the
// longest sequence alone, so that bits do not change with the batch.
static inline int ssm_select(const ssm_library* library, const ssm_problem* problem, int invariant,
                             ssm_choice* choice) {
  const ssm_tables* tables = library->tables;
  const ssm_problem asked = invariant ? ssm_invariant(problem) : *problem;
  unsigned char fits[SSM_MAX_KERNELS] = {0};
  char target[16];
  for (int k = 0; tables->kernels[k].id != NULL; k++) fits[k] = (unsigned char)ssm_can_run(library, k, &asked);
  ssm_base_target(library->device, target);
  choice->kernel = ssm_choose(tables, &asked, library->device->name, target, fits, &choice->steps);
  if (choice->kernel < 0)
    return ssm_fail("no kernel on %s: want d_state %d, head_dim %d, io %s, state %s, %d tokens in %d sequences",
                    library->device->name, asked.sizes.d_state, asked.sizes.head_dim, asked.io, asked.state,
                    asked.sizes.tokens, asked.sizes.sequences);
  choice->grade = tables->kernels[choice->kernel].images[library->image[choice->kernel]].grade;
  return 0;
}

// The plan of a loaded kernel for upper bounds.
static inline int ssm_plan_for(const ssm_library* library, int kernel, const ssm_problem* problem, ssm_plan* plan) {
  const ssm_kernel* row = &library->tables->kernels[kernel];
  const ssm_image* image = &row->images[library->image[kernel]];
  if (ssm_make_plan(&row->grid, row->block, image->dynamic_shared, &problem->sizes, plan))
    return ssm_fail("kernel %s: the grid rule %s is not known or its integers are wrong", row->id, row->grid.rule);
  return 0;
}

// Queues one launch of a plan. One that overlaps may start before the launch before it has ended, whose end it waits
// for itself; a driver that cannot do that runs one after the other.
static inline int ssm_launch_shape(void* function, const ssm_shape* s, void* stream, void** extra, const char* id) {
  const unsigned *grid = s->grid, *block = s->block;
  if (s->overlaps && ssm_driver.cuLaunchKernelEx != NULL) {
    enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
    ssm_attribute allowed = {PROGRAMMATIC_STREAM_SERIALIZATION, {0}, {1}};
    const ssm_config config = {
        {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, s->shared_bytes, stream, &allowed, 1};
    return ssm_check(ssm_driver.cuLaunchKernelEx(&config, function, NULL, extra), "cuLaunchKernelEx", id);
  }
  return ssm_check(ssm_driver.cuLaunchKernel(function, grid[0], grid[1], grid[2], block[0], block[1], block[2],
                                             s->shared_bytes, stream, NULL, extra),
                   "cuLaunchKernel", id);
}

// Runs a plan on a stream (a CUstream or cudaStream_t; 0 is the default stream) and returns before it is done. Flags of
// vector accesses, lanes, rows and chunk are filled in.
static inline int ssm_launch(const ssm_library* library, int kernel, const ssm_plan* plan, const ScanArgs* args,
                             void* stream) {
  const ssm_kernel* row = &library->tables->kernels[kernel];
  const int io = ssm_bytes(row->io), state = ssm_bytes(row->state);
  ScanArgs own = *args;
  size_t bytes = sizeof own;
  void *popped, *extra[] = {(void*)1, &own, (void*)2, &bytes, NULL};
  own.flags &= SSM_SOFTPLUS | SSM_PER_COLUMN_A | SSM_DT_F32 | SSM_DT_LIMIT;
  own.flags |= ssm_vector_flag(SSM_VECTOR_X, own.x, own.x_stride, own.head_dim, io);
  own.flags |= ssm_vector_flag(SSM_VECTOR_Z, own.z, own.z_stride, own.head_dim, io);
  own.flags |= ssm_vector_flag(SSM_VECTOR_Y, own.y, own.y_stride, own.head_dim, io);
  own.flags |= ssm_vector_flag(SSM_VECTOR_B, own.B, own.B_stride, own.d_state, io);
  own.flags |= ssm_vector_flag(SSM_VECTOR_C, own.C, own.C_stride, own.d_state, io);
  own.flags |= ssm_vector_flag(SSM_VECTOR_STATE, own.state, own.state_stride, own.d_state, state);
  own.lanes = plan->lanes;
  own.rows = plan->rows;
  own.chunk = plan->chunk;
  if (plan->workspace_bytes > own.workspace_bytes)
    return ssm_fail("workspace: want %lld bytes, have %lld", (long long)plan->workspace_bytes,
                    (long long)own.workspace_bytes);
  SSM_TRY(cuCtxPushCurrent_v2, library->device->context);
  int failed = 0;
  for (int i = 0; !failed && i < plan->count; i++) {
    const ssm_shape* s = &plan->launches[i];
    failed = ssm_launch_shape(library->functions[kernel][s->entry], s, stream, extra, row->id);
  }
  SSM_TRY(cuCtxPopCurrent_v2, &popped);
  return failed;
}

#ifndef SSM_NO_TABLES
#include "ssmscan_tables.h"

// Loads the kernels of this package.
static inline int ssm_load(ssm_device* device, const char* root, const char* family, int options,
                           ssm_library* library) {
  return ssm_load_tables(device, &ssm_package, root, family, options, library);
}
#endif

#endif  // SSMSCAN_H
