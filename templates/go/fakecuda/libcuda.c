// A stand-in for libcuda.so.1, for tests on a machine without a GPU: device memory is host memory, and a launch runs the
// recurrence in double. It is strict about what the Go package owes the driver: a current context, the size of the
// argument buffer, the number of blocks, and Vector flags that follow the addresses.
//
//   gcc -shared -fPIC -O2 -o libcuda.so.1 libcuda.c -lm && LD_LIBRARY_PATH=. ./ssmscan.test -test.v
//
// The image it takes is the text "fake", of a kernel with 32 rows a block, 40 registers and 16 bytes of static shared
// memory; the storage type of x, z, B, C and y is read from the symbol.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { ROWS = 32 };  // head_dim rows of one block
enum { SOFTPLUS = 1, PER_COLUMN_A = 2, DT_F32 = 4, DT_LIMIT = 8, VECTOR_X = 16 };

struct args {
  const void *x, *z;
  void *y;
  const void *dt;
  const float *A;
  const void *B, *C;
  const float *D, *dt_bias;
  float *state;
  float *state_scale;
  const int32_t *cu_seqlens, *read_slots, *write_slots;
  const uint8_t *resume;
  const int32_t *checkpoint_slots, *sequence_order;
  const uint64_t *rounding_key;
  void *workspace;
  int64_t x_stride, z_stride, y_stride, dt_stride, B_stride, C_stride, state_stride, state_scale_stride, slots,
      workspace_bytes;
  int32_t tokens, sequences, heads, head_dim, groups, d_state, pad_slot;
  float dt_min, dt_max;
  uint32_t flags;
  int32_t lanes, rows, chunk;
};

static const char context[] = "context", module[] = "module";
static __thread int current;  // whether the context is
static struct function {
  char symbol[128];
  int shared;
} functions[16];
static int known;

#define NEED_CONTEXT \
  if (current == 0) return INVALID_CONTEXT

int cuInit(unsigned flags) { return flags; }
int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal == 0 ? SUCCESS : INVALID_DEVICE; }
int cuDeviceGetName(char *name, int bytes, int device) {
  (void)device;
  return snprintf(name, bytes, "fake device"), SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 97 ? 227 * 1024 : -1;
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(const void **out, int device) { return *out = context, (void)device, SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device == 0 ? SUCCESS : INVALID_DEVICE; }
int cuCtxPushCurrent_v2(const void *pushed) {
  // Each call of the Go package restores what it found, so no context is left from an earlier one.
  return pushed == context && current == 0 ? (current++, SUCCESS) : INVALID_CONTEXT;
}
int cuCtxPopCurrent_v2(const void **popped) {
  NEED_CONTEXT;
  return *popped = context, current--, SUCCESS;
}
int cuStreamSynchronize(void *stream) {
  (void)stream;
  NEED_CONTEXT;
  return SUCCESS;
}
int cuModuleLoadData(const void **out, const char *image) {
  NEED_CONTEXT;
  return *out = module, strcmp(image, "fake") == 0 ? SUCCESS : INVALID_IMAGE;
}
int cuModuleUnload(const void *unloaded) {
  NEED_CONTEXT;
  return unloaded == module ? SUCCESS : INVALID_VALUE;
}
int cuModuleGetFunction(struct function **out, const void *from, const char *symbol) {
  NEED_CONTEXT;
  if (from != module || strncmp(symbol, "ssm_", 4) != 0 || known == 16) return NOT_FOUND;
  *out = &functions[known++];
  return snprintf((*out)->symbol, sizeof(*out)->symbol, "%s", symbol), SUCCESS;
}
int cuFuncSetAttribute(struct function *function, int attribute, int value) {
  NEED_CONTEXT;
  return attribute == 8 ? (function->shared = value, SUCCESS) : INVALID_VALUE;
}
int cuFuncGetAttribute(int *value, int attribute, struct function *function) {
  NEED_CONTEXT;
  *value = attribute == 0 ? 1024 : attribute == 1 ? 16 : attribute == 3 ? 0 : attribute == 4 ? 40 : -1;
  return function != NULL ? SUCCESS : INVALID_VALUE;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  NEED_CONTEXT;
  void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *address = (uint64_t)(uintptr_t)memory, bytes > 0 && memory != NULL ? SUCCESS : INVALID_VALUE;
}
int cuMemFree_v2(uint64_t address) {
  NEED_CONTEXT;
  return free((void *)(uintptr_t)address), SUCCESS;
}
int cuMemcpyHtoD_v2(uint64_t address, const void *host, size_t bytes) {
  NEED_CONTEXT;
  return memcpy((void *)(uintptr_t)address, host, bytes), SUCCESS;
}
int cuMemcpyDtoH_v2(void *host, uint64_t address, size_t bytes) {
  NEED_CONTEXT;
  return memcpy(host, (void *)(uintptr_t)address, bytes), SUCCESS;
}
int cuGetErrorName(int code, const char **name) { return *name = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : "FAKE_ERROR", 0; }
int cuGetErrorString(int code, const char **text) { return *text = "from the fake driver", (void)code, 0; }

static double load(const void *array, int64_t index, int bf16) {
  if (!bf16) return ((const float *)array)[index];
  const uint32_t bits = (uint32_t)((const uint16_t *)array)[index] << 16;
  float value;
  return memcpy(&value, &bits, 4), value;
}

static void store(void *array, int64_t index, double value, int bf16) {
  const float narrow = (float)value;
  if (!bf16) {
    ((float *)array)[index] = narrow;
    return;
  }
  uint32_t bits;
  memcpy(&bits, &narrow, 4);
  ((uint16_t *)array)[index] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static uint32_t vector_flags(const struct args *a, int io) {
  const void *base[] = {a->x, a->z, a->y, a->B, a->C, a->state};
  const int64_t stride[] = {a->x_stride, a->z_stride, a->y_stride, a->B_stride, a->C_stride, a->state_stride};
  const int row[] = {a->head_dim, a->head_dim, a->head_dim, a->d_state, a->d_state, a->d_state};
  uint32_t flags = 0;
  for (int i = 0; i < 6; i++) {
    const int size = i == 5 ? 4 : io;
    const uint64_t bits = (uint64_t)(uintptr_t)base[i] | (uint64_t)(stride[i] * size) | (uint64_t)(row[i] * size);
    if (base[i] != NULL && bits % 16 == 0) flags |= (uint32_t)VECTOR_X << i;
  }
  return flags;
}

// One row of one head of one sequence: tokens first to last of it, S its d_state columns.
static void scan_row(const struct args *a, int bf16, int first, int last, int h, int p, double *S) {
  const int g = h / (a->heads / a->groups), N = a->d_state;
  const int64_t row = (int64_t)h * a->head_dim + p;
  for (int64_t t = first; t < last; t++) {
    double d = load(a->dt, t * a->dt_stride + h, bf16 && !(a->flags & DT_F32));
    if (a->dt_bias != NULL) d += a->dt_bias[h];
    if (a->flags & SOFTPLUS && d <= 20) d = log1p(exp(d));
    if (a->flags & DT_LIMIT) d = fmin(fmax(d, a->dt_min), a->dt_max);
    const double x = load(a->x, t * a->x_stride + row, bf16);
    double y = a->D != NULL ? a->D[h] * x : 0;
    for (int n = 0; n < N; n++) {
      const double A = a->flags & PER_COLUMN_A ? a->A[h * N + n] : a->A[h];
      S[n] = exp(d * A) * S[n] + d * load(a->B, t * a->B_stride + g * N + n, bf16) * x;
      y += S[n] * load(a->C, t * a->C_stride + g * N + n, bf16);
    }
    if (a->z != NULL) {
      const double z = load(a->z, t * a->z_stride + row, bf16);
      y *= z / (1 + exp(-z));
    }
    store(a->y, t * a->y_stride + row, y, bf16);
    const int checkpoint = a->checkpoint_slots != NULL ? a->checkpoint_slots[t] : -1;
    if (checkpoint >= 0)
      for (int n = 0; n < N; n++) store(a->state, checkpoint * a->state_stride + row * N + n, S[n], 0);
  }
}

static void scan(const struct args *a, int bf16) {
  double S[1024];
  const int N = a->d_state, end = a->cu_seqlens != NULL ? a->cu_seqlens[a->sequences] : a->tokens;
  for (int i = 0; i < a->sequences; i++) {
    const int s = a->sequence_order != NULL ? a->sequence_order[i] : i;
    const int first = a->cu_seqlens != NULL ? a->cu_seqlens[s] : 0;
    const int last = a->cu_seqlens != NULL ? a->cu_seqlens[s + 1] : a->tokens;
    const int read = a->read_slots != NULL ? a->read_slots[s] : s;
    const int write = a->write_slots != NULL ? a->write_slots[s] : read;
    const int resumes = a->resume != NULL ? a->resume[s] : a->state != NULL;
    for (int h = 0; h < a->heads; h++)
      for (int p = 0; p < a->head_dim; p++) {
        const int64_t row = (int64_t)h * a->head_dim + p;
        if (read == a->pad_slot) {
          for (int64_t t = first; t < last; t++) store(a->y, t * a->y_stride + row, 0, bf16);
          continue;
        }
        for (int n = 0; n < N; n++) S[n] = resumes ? a->state[read * a->state_stride + row * N + n] : 0;
        scan_row(a, bf16, first, last, h, p, S);
        if (write >= 0)
          for (int n = 0; n < N; n++) store(a->state, write * a->state_stride + row * N + n, S[n], 0);
      }
  }
  for (int64_t t = end; t < a->tokens; t++)
    for (int64_t row = 0; row < (int64_t)a->heads * a->head_dim; row++) store(a->y, t * a->y_stride + row, 0, bf16);
}

int cuLaunchKernel(struct function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
  (void)stream;
  NEED_CONTEXT;
  struct args a;
  if (gx == 0 || gy != 1 || gz != 1 || bx * by * bz == 0 || parameters != NULL) return INVALID_VALUE;
  if ((int)shared > function->shared) return INVALID_VALUE;
  if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != NULL) return INVALID_VALUE;
  if (*(size_t *)extra[3] != sizeof a || sizeof a != 288) return INVALID_VALUE;
  memcpy(&a, extra[1], sizeof a);
  const int bf16 = strstr(function->symbol, "_bf16_") != NULL;
  const uint32_t want = vector_flags(&a, bf16 ? 2 : 4), have = a.flags & ~(uint32_t)(VECTOR_X - 1);
  const unsigned blocks = a.sequences * a.heads * ((a.head_dim + ROWS - 1) / ROWS);
  if (want != have || gx != blocks) {
    fprintf(stderr, "fake driver: want Vector flags %x and %u blocks, have %x and %u\n", want, blocks, have, gx);
    return INVALID_VALUE;
  }
  scan(&a, bf16);
  return SUCCESS;
}
