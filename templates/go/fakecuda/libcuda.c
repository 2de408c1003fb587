// A stand-in for libcuda.so.1, for tests on a machine without a GPU: device memory is host memory, and a launch runs the
// recurrence in double. There are two devices. It is strict about what the Go package owes the driver: a current context,
// modules and functions of that context, functions that are loaded before their first launch, the size of the argument
// buffer, the number of blocks, Vector flags that follow the addresses, and nothing but launches during a capture.
//
//   gcc -shared -fPIC -O2 -pthread -o libcuda.so.1 libcuda.c -lm && LD_LIBRARY_PATH=. ./ssmscan.test -test.v
//
// The image it takes is the text "fake", of a kernel with 32 rows a block, 40 registers and 16 bytes of static shared
// memory. Where FAKECUDA_FACTS names a file it takes any cubin or PTX instead, and the file has a line for each symbol:
// symbol, registers, static shared and local bytes, most threads of a block, and its rows: 0 is ScanArgs.rows, -1 a grid that is not looked
// at, -2 the first of two launches, which stamps the workspace, -3 the second, which wants the stamp of its own batch, -4
// such a second one that has to be launched as one that may start before the first has ended.
// Compiled with -DWITHOUT_ATTRIBUTES it has no cuLaunchKernelEx, as a driver before CUDA 11.8, and -4 is -3.
// FAKECUDA_CUDA is the CUDA version that it serves, by default 13000, FAKECUDA_NAME the name of its devices. Storage types are read from the symbol.

#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { DEVICES = 2, KERNELS = 8192 };
enum type { F32, BF16, F16, I8 };
enum { FIRST_LAUNCH = -2, SECOND_LAUNCH = -3, OVERLAPPING_LAUNCH = -4 };
enum { SOFTPLUS = 1, PER_COLUMN_A = 2, DT_F32 = 4, DT_LIMIT = 8, VECTOR_X = 16 };

struct args {
  const void *x, *z;
  void *y;
  const void *dt;
  const float *A;
  const void *B, *C;
  const float *D, *dt_bias;
  void *state;
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

// What the first of two launches leaves in the workspace.
struct stamp {
  char text[8];
  const void *y;
  int32_t tokens, sequences;
};

static const char contexts[DEVICES];
static __thread const char *current[4];  // the stack of contexts
static __thread int depth;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct function {
  char symbol[160];
  const char *context;
  int shared, registers, static_shared, local, threads, rows, loaded;
} functions[KERNELS];
static int known;

// Launches that were captured, in order; a stream that captures has one.
struct graph {
  int count;
  struct {
    struct function *function;
    struct args args;
  } launches[16];
};
struct stream {
  struct graph *graph;
  int invalid;
};
static __thread struct stream *capturing;  // by this thread

#define NEED_CONTEXT \
  if (depth == 0) return INVALID_CONTEXT

// What no thread may call while it captures.
#define NO_CAPTURE \
  NEED_CONTEXT;    \
  if (capturing != NULL) return capturing->invalid = 1, CAPTURE_UNSUPPORTED

// A module is its context: nothing else of it is looked at again.
static const char *module_of(const char *context) { return context + 0x1000; }

int cuInit(unsigned flags) { return flags; }
int cuDriverGetVersion(int *version) {
  const char *text = getenv("FAKECUDA_CUDA");
  return *version = text != NULL ? atoi(text) : 13000, SUCCESS;
}
int cuDeviceGetCount(int *count) { return *count = DEVICES, SUCCESS; }
int cuDeviceGet(int *device, int ordinal) {
  return *device = ordinal, ordinal >= 0 && ordinal < DEVICES ? SUCCESS : INVALID_DEVICE;
}
int cuDeviceGetName(char *name, int bytes, int device) {
  (void)device;
  const char *own = getenv("FAKECUDA_NAME");
  return snprintf(name, bytes, "%s", own != NULL ? own : "fake device"), SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 97 ? 227 * 1024 : -1;
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(const char **out, int device) { return *out = &contexts[device], SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device >= 0 && device < DEVICES ? SUCCESS : INVALID_DEVICE; }
int cuCtxPushCurrent_v2(const char *pushed) {
  // Each call of the Go package restores what it found, so no context is left from an earlier one.
  if (pushed < contexts || pushed >= contexts + DEVICES || depth != 0) return INVALID_CONTEXT;
  return current[depth++] = pushed, SUCCESS;
}
int cuCtxPopCurrent_v2(const char **popped) {
  NEED_CONTEXT;
  return *popped = current[--depth], SUCCESS;
}
int cuCtxGetDevice(int *device) {
  NEED_CONTEXT;
  return *device = (int)(current[depth - 1] - contexts), SUCCESS;
}
int cuStreamSynchronize(void *stream) {
  (void)stream;
  NO_CAPTURE;
  return SUCCESS;
}
int cuStreamCreate(struct stream **stream, unsigned flags) {
  NO_CAPTURE;
  return *stream = calloc(1, sizeof **stream), flags == 1 ? SUCCESS : INVALID_VALUE;
}
int cuStreamDestroy_v2(struct stream *stream) {
  NO_CAPTURE;
  return free(stream), SUCCESS;
}
int cuStreamBeginCapture_v2(struct stream *stream, int mode) {
  NO_CAPTURE;
  if (stream == NULL || stream->graph != NULL || mode != 1) return INVALID_VALUE;
  stream->graph = calloc(1, sizeof *stream->graph), stream->invalid = 0;
  return capturing = stream, SUCCESS;
}
int cuStreamEndCapture(struct stream *stream, struct graph **graph) {
  NEED_CONTEXT;
  if (capturing != stream) return INVALID_VALUE;
  *graph = stream->graph, stream->graph = NULL, capturing = NULL;
  if (stream->invalid) return free(*graph), *graph = NULL, CAPTURE_INVALIDATED;
  return SUCCESS;
}
int cuGraphInstantiateWithFlags(struct graph **executable, const struct graph *graph, unsigned long long flags) {
  NO_CAPTURE;
  if (graph == NULL || flags != 0) return INVALID_VALUE;
  return *executable = malloc(sizeof *graph), **executable = *graph, SUCCESS;
}
int cuGraphDestroy(struct graph *graph) {
  NO_CAPTURE;
  return free(graph), SUCCESS;
}
int cuGraphExecDestroy(struct graph *executable) {
  NO_CAPTURE;
  return free(executable), SUCCESS;
}
int cuEventCreate(struct timespec **event, unsigned flags) {
  NEED_CONTEXT;
  return *event = calloc(1, sizeof **event), flags == 0 ? SUCCESS : INVALID_VALUE;
}
int cuEventDestroy_v2(struct timespec *event) {
  NEED_CONTEXT;
  return free(event), SUCCESS;
}
int cuEventRecord(struct timespec *event, void *stream) {
  (void)stream;
  NEED_CONTEXT;
  return clock_gettime(CLOCK_MONOTONIC, event);
}
int cuEventSynchronize(struct timespec *event) { return event != NULL ? SUCCESS : INVALID_VALUE; }
int cuEventElapsedTime(float *ms, const struct timespec *first, const struct timespec *second) {
  *ms = (float)(1e3 * (second->tv_sec - first->tv_sec) + 1e-6 * (second->tv_nsec - first->tv_nsec));
  return SUCCESS;
}
int cuModuleLoadData(const char **out, const char *image) {
  NO_CAPTURE;
  *out = module_of(current[depth - 1]);
  if (getenv("FAKECUDA_FACTS") == NULL) return strcmp(image, "fake") == 0 ? SUCCESS : INVALID_IMAGE;
  return memcmp(image, "\177ELF", 4) == 0 || memcmp(image, "//", 2) == 0 ? SUCCESS : INVALID_IMAGE;
}
int cuModuleUnload(const char *unloaded) {
  NO_CAPTURE;
  return unloaded == module_of(current[depth - 1]) ? SUCCESS : INVALID_VALUE;
}

// What is known of a symbol; the caller holds the lock.
static int find_facts(struct function *f) {
  const char *path = getenv("FAKECUDA_FACTS");
  f->registers = 40, f->static_shared = 16, f->local = 0, f->threads = 1024, f->rows = 32;
  if (path == NULL) return strncmp(f->symbol, "ssm_", 4) == 0 ? SUCCESS : NOT_FOUND;
  FILE *file = fopen(path, "r");
  if (file == NULL) return NOT_FOUND;
  char symbol[160];
  int found = NOT_FOUND;
  while (fscanf(file, "%159s %d %d %d %d %d", symbol, &f->registers, &f->static_shared, &f->local, &f->threads,
                &f->rows) == 6) {
    if (strcmp(symbol, f->symbol) != 0) continue;
    found = SUCCESS;
    break;
  }
  return fclose(file), found;
}

int cuModuleGetFunction(struct function **out, const char *from, const char *symbol) {
  NO_CAPTURE;
  if (from != module_of(current[depth - 1])) return NOT_FOUND;
  pthread_mutex_lock(&lock);
  int code = NOT_FOUND;
  if (known < KERNELS) {
    *out = &functions[known];
    (*out)->context = current[depth - 1];
    snprintf((*out)->symbol, sizeof(*out)->symbol, "%s", symbol);
    code = find_facts(*out);
    known += code == SUCCESS;
  }
  pthread_mutex_unlock(&lock);
  return code;
}
int cuFuncSetAttribute(struct function *function, int attribute, int value) {
  NO_CAPTURE;
  return attribute == 8 ? (function->shared = value, SUCCESS) : INVALID_VALUE;
}
int cuFuncLoad(struct function *function) {
  NO_CAPTURE;
  return function->loaded = 1, SUCCESS;
}
int cuFuncGetAttribute(int *value, int attribute, struct function *f) {
  NEED_CONTEXT;
  *value = attribute == 0   ? f->threads
           : attribute == 1 ? f->static_shared
           : attribute == 3 ? f->local
           : attribute == 4 ? f->registers
                            : -1;
  return SUCCESS;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  NO_CAPTURE;
  void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *address = (uint64_t)(uintptr_t)memory, bytes > 0 && memory != NULL ? SUCCESS : INVALID_VALUE;
}
int cuMemFree_v2(uint64_t address) {
  NO_CAPTURE;
  return free((void *)(uintptr_t)address), SUCCESS;
}
int cuMemcpyHtoD_v2(uint64_t address, const void *host, size_t bytes) {
  NO_CAPTURE;
  return memcpy((void *)(uintptr_t)address, host, bytes), SUCCESS;
}
int cuMemcpyHtoDAsync_v2(uint64_t address, const void *host, size_t bytes, void *stream) {
  (void)stream;
  return cuMemcpyHtoD_v2(address, host, bytes);
}
int cuMemcpyDtoH_v2(void *host, uint64_t address, size_t bytes) {
  NO_CAPTURE;
  return memcpy(host, (void *)(uintptr_t)address, bytes), SUCCESS;
}
int cuGetErrorName(int code, const char **name) { return *name = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : "FAKE_ERROR", 0; }
int cuGetErrorString(int code, const char **text) { return *text = "from the fake driver", (void)code, 0; }

static int size_of(enum type type) { return type == F32 ? 4 : type == I8 ? 1 : 2; }

static double load(const void *array, int64_t index, enum type type) {
  float value;
  uint32_t bits;
  switch (type) {
    case F32:
      return ((const float *)array)[index];
    case F16:
      return (double)((const _Float16 *)array)[index];
    case I8:
      return ((const int8_t *)array)[index];
    case BF16:
      bits = (uint32_t)((const uint16_t *)array)[index] << 16;
      return memcpy(&value, &bits, 4), value;
  }
  return NAN;
}

static void store(void *array, int64_t index, double value, enum type type) {
  const float narrow = (float)value;
  uint32_t bits;
  switch (type) {
    case F32:
      ((float *)array)[index] = narrow;
      break;
    case F16:
      ((_Float16 *)array)[index] = (_Float16)value;
      break;
    case I8:
      ((int8_t *)array)[index] = (int8_t)lrint(value);
      break;
    case BF16:
      memcpy(&bits, &narrow, 4);
      ((uint16_t *)array)[index] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
      break;
  }
}

// A row of the state, of d_state columns: loaded into S or stored from it.
static void load_row(const struct args *a, enum type type, int64_t slot, int64_t row, double *S) {
  const double scale = type == I8 ? a->state_scale[slot * a->state_scale_stride + row] : 1;
  for (int n = 0; n < a->d_state; n++)
    S[n] = scale * load(a->state, slot * a->state_stride + row * a->d_state + n, type);
}

static void store_row(const struct args *a, enum type type, int64_t slot, int64_t row, const double *S) {
  double scale = 1;
  if (type == I8) {
    double most = 0;
    for (int n = 0; n < a->d_state; n++) most = fmax(most, fabs(S[n]));
    a->state_scale[slot * a->state_scale_stride + row] = (float)(most / 127);
    scale = most > 0 ? 127 / most : 0;
  }
  for (int n = 0; n < a->d_state; n++)
    store(a->state, slot * a->state_stride + row * a->d_state + n, scale * S[n], type);
}

static uint32_t vector_flags(const struct args *a, enum type io, enum type state) {
  const void *base[] = {a->x, a->z, a->y, a->B, a->C, a->state};
  const int64_t stride[] = {a->x_stride, a->z_stride, a->y_stride, a->B_stride, a->C_stride, a->state_stride};
  const int row[] = {a->head_dim, a->head_dim, a->head_dim, a->d_state, a->d_state, a->d_state};
  uint32_t flags = 0;
  for (int i = 0; i < 6; i++) {
    const int size = size_of(i == 5 ? state : io);
    const uint64_t bits = (uint64_t)(uintptr_t)base[i] | (uint64_t)(stride[i] * size) | (uint64_t)(row[i] * size);
    if (base[i] != NULL && bits % 16 == 0) flags |= (uint32_t)VECTOR_X << i;
  }
  return flags;
}

// One row of one head of one sequence: tokens first to last of it, S its d_state columns.
static void scan_row(const struct args *a, enum type io, enum type state, int first, int last, int h, int p, double *S) {
  const int g = h / (a->heads / a->groups), N = a->d_state;
  const int64_t row = (int64_t)h * a->head_dim + p;
  for (int64_t t = first; t < last; t++) {
    double d = load(a->dt, t * a->dt_stride + h, a->flags & DT_F32 ? F32 : io);
    if (a->dt_bias != NULL) d += a->dt_bias[h];
    if (a->flags & SOFTPLUS && d <= 20) d = log1p(exp(d));
    if (a->flags & DT_LIMIT) d = fmin(fmax(d, a->dt_min), a->dt_max);
    const double x = load(a->x, t * a->x_stride + row, io);
    double y = a->D != NULL ? a->D[h] * x : 0;
    double decay = exp(d * a->A[a->flags & PER_COLUMN_A ? h * N : h]);
    for (int n = 0; n < N; n++) {
      if (a->flags & PER_COLUMN_A) decay = exp(d * a->A[h * N + n]);
      S[n] = decay * S[n] + d * load(a->B, t * a->B_stride + g * N + n, io) * x;
      y += S[n] * load(a->C, t * a->C_stride + g * N + n, io);
    }
    if (a->z != NULL) {
      const double z = load(a->z, t * a->z_stride + row, io);
      y *= z / (1 + exp(-z));
    }
    store(a->y, t * a->y_stride + row, y, io);
    const int checkpoint = a->checkpoint_slots != NULL ? a->checkpoint_slots[t] : -1;
    if (checkpoint >= 0) store_row(a, state, checkpoint, row, S);
  }
}

static void scan(const struct args *a, enum type io, enum type state) {
  double S[1024];
  const int N = a->d_state, end = a->cu_seqlens != NULL ? a->cu_seqlens[a->sequences] : a->tokens;
  for (int i = 0; i < a->sequences; i++) {
    const int s = a->sequence_order != NULL ? a->sequence_order[i] : i;
    if (s < 0 || s >= a->sequences) continue;
    const int first = a->cu_seqlens != NULL ? a->cu_seqlens[s] : 0;
    const int last = a->cu_seqlens != NULL ? a->cu_seqlens[s + 1] : a->tokens;
    const int read = a->read_slots != NULL ? a->read_slots[s] : s;
    const int write = a->write_slots != NULL ? a->write_slots[s] : read;
    const int resumes = a->resume != NULL ? a->resume[s] : a->state != NULL;
    for (int h = 0; h < a->heads; h++)
      for (int p = 0; p < a->head_dim; p++) {
        const int64_t row = (int64_t)h * a->head_dim + p;
        if (read == a->pad_slot) {
          for (int64_t t = first; t < last; t++) store(a->y, t * a->y_stride + row, 0, io);
          continue;
        }
        memset(S, 0, N * sizeof *S);
        if (resumes) load_row(a, state, read, row, S);
        scan_row(a, io, state, first, last, h, p, S);
        if (write >= 0 && a->state != NULL) store_row(a, state, write, row, S);
      }
  }
  for (int64_t t = end; t < a->tokens; t++)
    for (int64_t row = 0; row < (int64_t)a->heads * a->head_dim; row++) store(a->y, t * a->y_stride + row, 0, io);
}

static enum type type_of(const char *symbol, const char *names[4]) {
  for (int type = 0; type < 4; type++)
    if (strstr(symbol, names[type]) != NULL) return (enum type)type;
  return F32;
}

static int run(const struct function *function, struct args a) {
  const enum type io = type_of(function->symbol, (const char *[4]){"_f32_s", "_bf16_s", "_f16_s", "_i8_s"});
  const enum type state = type_of(function->symbol, (const char *[4]){"_sf32", "_sbf16", "_sf16", "_si8"});
  const int rows = function->rows;
  if (rows <= FIRST_LAUNCH) {
    const struct stamp own = {"stamped", a.y, a.tokens, a.sequences};
    if (a.workspace == NULL || a.workspace_bytes < (int64_t)sizeof own) return INVALID_VALUE;
    if (rows == FIRST_LAUNCH) return memcpy(a.workspace, &own, sizeof own), SUCCESS;
    if (memcmp(a.workspace, &own, sizeof own) != 0) return INVALID_VALUE;
    memset(a.workspace, 0, sizeof own);
  }
  scan(&a, io, state);
  return SUCCESS;
}

int cuGraphLaunch(const struct graph *executable, struct stream *stream) {
  NO_CAPTURE;
  if (stream != NULL && stream->graph != NULL) return INVALID_VALUE;
  int code = SUCCESS;
  for (int i = 0; i < executable->count && code == SUCCESS; i++)
    code = run(executable->launches[i].function, executable->launches[i].args);
  return code;
}

static int launch(struct function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                  unsigned bz, unsigned shared, struct stream *stream, void **parameters, void **extra) {
  NEED_CONTEXT;
  struct args a;
  if (function->context != current[depth - 1] || !function->loaded) return INVALID_CONTEXT;
  if (gx == 0 || gy != 1 || gz != 1 || bx * by * bz == 0 || parameters != NULL) return INVALID_VALUE;
  if ((int)shared > function->shared || bx * by * bz > (unsigned)function->threads) return INVALID_VALUE;
  if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != NULL) return INVALID_VALUE;
  if (*(size_t *)extra[3] != sizeof a || sizeof a != 288) return INVALID_VALUE;
  memcpy(&a, extra[1], sizeof a);
  const enum type io = type_of(function->symbol, (const char *[4]){"_f32_s", "_bf16_s", "_f16_s", "_i8_s"});
  const enum type state = type_of(function->symbol, (const char *[4]){"_sf32", "_sbf16", "_sf16", "_si8"});
  const int rows = function->rows != 0 ? function->rows : a.rows;
  const uint32_t want = vector_flags(&a, io, state), have = a.flags & ~(uint32_t)(VECTOR_X - 1);
  const unsigned sequences = a.sequences > 1 ? a.sequences : 1;
  const unsigned blocks = rows > 0 ? sequences * a.heads * ((a.head_dim + rows - 1) / rows) : rows < 0;
  if (want != have || gx < blocks || blocks == 0) {
    fprintf(stderr, "fake driver: want Vector flags %x and %u blocks, have %x and %u\n", want, blocks, have, gx);
    return INVALID_VALUE;
  }
  struct graph *graph = stream != NULL ? stream->graph : NULL;
  if (graph == NULL) return run(function, a);
  if (capturing != stream || graph->count == sizeof graph->launches / sizeof *graph->launches) return INVALID_VALUE;
  graph->launches[graph->count].function = function;
  graph->launches[graph->count++].args = a;
  return SUCCESS;
}

int cuLaunchKernel(struct function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, struct stream *stream, void **parameters, void **extra) {
#ifndef WITHOUT_ATTRIBUTES
  if (function->rows == OVERLAPPING_LAUNCH) {
    fprintf(stderr, "fake driver: want %s launched as one that overlaps\n", function->symbol);
    return INVALID_VALUE;
  }
#endif
  return launch(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

#ifndef WITHOUT_ATTRIBUTES
struct attribute {
  int id, pad;
  union {
    char bytes[64];
    int allowed;
  } value;
};
struct config {
  unsigned gx, gy, gz, bx, by, bz, shared;
  struct stream *stream;
  const struct attribute *attributes;
  unsigned count;
};
int cuLaunchKernelEx(const struct config *c, struct function *function, void **parameters, void **extra) {
  enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
  const struct attribute *a = c->attributes;
  if (c->count != 1 || a->id != PROGRAMMATIC_STREAM_SERIALIZATION || a->value.allowed != 1) return INVALID_VALUE;
  if (function->rows != OVERLAPPING_LAUNCH) {
    fprintf(stderr, "fake driver: %s is launched as one that overlaps\n", function->symbol);
    return INVALID_VALUE;
  }
  return launch(function, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream, parameters, extra);
}
#endif
