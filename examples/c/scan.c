// SPDX-License-Identifier: Apache-2.0
//
// Runs the golden vectors of this package through the header-only loader: each is a problem with the results of a
// float64 oracle, in f32 or bf16. The kernel that is selected runs it, then every other one that takes it. What a call
// must not change is checked too.
//
//   cc -O2 -I../../include -o scan scan.c -ldl -lm
//   ./scan [-devices N] ../.. vectors/*.flat
//
// An engine that runs nvcc anyway launches a kernel by the function beside its source, compiled as the first lines of
// that file say into ID.launch.o; with this one and the CUDA runtime:
//
//   cc -O2 -I../../include -DSSM_LAUNCHER=ssm_launch_ID -o launched scan.c ID.launch.o -lcudart_static -lstdc++ -ldl
//   ...

#include <math.h>

#include "ssmscan.h"

#ifdef SSM_LAUNCHER
extern int SSM_LAUNCHER(const ScanArgs* args, void* stream);  // a cudaError_t

#define SSM_TEXT(name) #name
#define SSM_NAME(name) SSM_TEXT(name)

static int wanted(const ssm_kernel* row) {
  return strcmp(SSM_NAME(SSM_LAUNCHER) + strlen("ssm_launch_"), row->id) == 0;
}

static int launch(const ssm_library* library, int kernel, const ssm_plan* plan, const ScanArgs* args) {
  const int code = SSM_LAUNCHER(args, NULL);
  (void)library, (void)kernel, (void)plan;
  return code ? ssm_fail("%s gave cudaError_t %d", SSM_NAME(SSM_LAUNCHER), code) : 0;
}
#else
static int wanted(const ssm_kernel* row) { return row != NULL; }

static int launch(const ssm_library* library, int kernel, const ssm_plan* plan, const ScanArgs* args) {
  return ssm_launch(library, kernel, plan, args, NULL);
}
#endif

static void die(const char* what) {
  fprintf(stderr, "scan: %s: %s\n", what, ssm_error());
  exit(1);
}

// A vector as pyharness/flat_vectors.py writes it; the pointers of args are 1 + an offset in the data, 0 for none.
typedef struct {
  int64_t bf16, data_bytes, y_bytes, y_values, slot_count;  // bf16: whether x, B, C and y are, else they are f32
  double y_bounds[3], state_bounds[3];                      // norm, rtol, atol
  ScanArgs args;
  int64_t* slots;
  unsigned char* data;
  double *y, *states;
  unsigned char* file;
} vector;

static int read_vector(const char* path, vector* v) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) return ssm_fail("cannot open it");
  fseek(file, 0, SEEK_END);
  const long size = ftell(file);
  rewind(file);
  v->file = (unsigned char*)malloc((size_t)size);
  const size_t have = fread(v->file, 1, (size_t)size, file);
  fclose(file);
  const size_t head = 8 + 5 * 8 + 6 * 8 + sizeof(ScanArgs);
  if (have != (size_t)size || have < head || memcmp(v->file, "SSMFLAT2", 8) != 0) return ssm_fail("not a vector");
  const unsigned char* at = v->file + 8;
  memcpy(&v->bf16, at, 40);
  memcpy(v->y_bounds, at + 40, 24);
  memcpy(v->state_bounds, at + 64, 24);
  memcpy(&v->args, at + 88, sizeof(ScanArgs));
  const ScanArgs* a = &v->args;
  const int64_t slot = (int64_t)a->heads * a->head_dim * a->d_state;
  const size_t wanted = head + 8 * v->slot_count + v->data_bytes + 8 * v->y_values + 8 * v->slot_count * slot;
  if (have != wanted) return ssm_fail("want %zu bytes, have %zu", wanted, have);
  v->slots = (int64_t*)(v->file + head);
  v->data = v->file + head + 8 * v->slot_count;
  v->y = (double*)(v->data + v->data_bytes);
  v->states = v->y + v->y_values;
  return 0;
}

// Element i of an output in bf16 or f32.
static double value(const unsigned char* output, int64_t i, int64_t bf16) {
  uint32_t bits = 0;
  float number;
  if (bf16)
    memcpy((unsigned char*)&bits + 2, output + 2 * i, 2);
  else
    memcpy(&bits, output + 4 * i, 4);
  memcpy(&number, &bits, 4);
  return number;
}

// One unit in the last place of bf16, which has 8 digits; 0 for f32, whose rounding the bounds hold.
static double unit(double expected, int64_t bf16) {
  int exponent;
  frexp(expected, &exponent);
  return bf16 && expected != 0 ? ldexp(1, exponent - 8) : 0;
}

// Both distances of an output, a unit in the last place taken off each element: the relative norm over its bound, and
// the worst element over its own.
static double share(const double* want, const unsigned char* have, int64_t bf16, int64_t count, const double bounds[3],
                    double* squares, double* scale) {
  double worst = 0;
  for (int64_t i = 0; i < count; i++) {
    double expected;
    memcpy(&expected, want + i, 8);
    const double off = fdim(fabs(value(have, i, bf16) - expected), unit(expected, bf16));
    if (!(off <= (expected == 0 ? 0 : bounds[2] + bounds[1] * fabs(expected)))) worst = INFINITY;
    *squares += off * off;
    *scale += expected * expected;
  }
  return worst;
}

// operands is what rounding of the operands of matrix products may add to the norm; single elements then scatter.
static double check(const vector* v, double operands, const unsigned char* y, const unsigned char* after,
                    unsigned char* before) {
  const ScanArgs* a = &v->args;
  double y_bounds[3], state_bounds[3];
  memcpy(y_bounds, v->y_bounds, sizeof y_bounds);
  memcpy(state_bounds, v->state_bounds, sizeof state_bounds);
  if (operands > 0) {
    y_bounds[0] += operands;
    state_bounds[0] += operands;
    y_bounds[2] = state_bounds[2] = INFINITY;
  }
  const int64_t row = (int64_t)a->heads * a->head_dim, slot = row * a->d_state;
  double worst = 0, squares = 0, scale = 0;
  for (int64_t t = 0; t < a->tokens; t++)
    worst = fmax(worst, share(v->y + t * row, y + (v->bf16 ? 2 : 4) * t * a->y_stride, v->bf16, row, y_bounds, &squares,
                              &scale));
  if (squares > 0) worst = fmax(worst, sqrt(squares / scale) / y_bounds[0]);
  squares = scale = 0;
  for (int64_t i = 0; i < v->slot_count; i++) {
    int64_t number;
    memcpy(&number, v->slots + i, 8);
    const int64_t offset = (int64_t)a->state - 1 + 4 * number * a->state_stride;
    worst = fmax(worst, share(v->states + i * slot, after + offset, 0, slot, state_bounds, &squares, &scale));
    memcpy(before + offset, after + offset, 4 * slot);  // stored: it may differ
  }
  if (squares > 0) worst = fmax(worst, sqrt(squares / scale) / state_bounds[0]);
  return memcmp(before, after, v->data_bytes) == 0 ? worst : INFINITY;
}

static void try_(int code, const char* op) {
  if (ssm_check(code, op, "")) die("driver");
}

static int32_t longest(const vector* v) {
  const ScanArgs* a = &v->args;
  if (a->cu_seqlens == 0) return a->tokens;
  int32_t offsets[2], most = 0;
  for (int s = 0; s < a->sequences; s++) {
    memcpy(offsets, v->data + a->cu_seqlens - 1 + 4 * s, sizeof offsets);
    if (offsets[1] - offsets[0] > most) most = offsets[1] - offsets[0];
  }
  return most;
}

static ssm_problem problem_of(const vector* v) {
  const ScanArgs* a = &v->args;
  return (ssm_problem){.sizes = {.tokens = a->tokens,
                                 .sequences = a->sequences,
                                 .heads = a->heads,
                                 .head_dim = a->head_dim,
                                 .groups = a->groups,
                                 .d_state = a->d_state,
                                 .longest = longest(v),
                                 .per_column_a = (a->flags & SSM_PER_COLUMN_A) != 0,
                                 .checkpoint_step = a->checkpoint_slots != 0},
                       .io = v->bf16 ? "bf16" : "f32",
                       .state = "f32"};
}

// Runs one vector by one kernel; the largest error over what is allowed.
static double run(const ssm_library* library, const vector* v, int kernel) {
  const ScanArgs* a = &v->args;
  const ssm_problem problem = problem_of(v);
  ssm_plan plan;
  if (ssm_plan_for(library, kernel, &problem, &plan)) die("plan");
  uint64_t data, y, workspace = 0;
  void* popped;
  try_(ssm_driver.cuCtxPushCurrent_v2(library->device->context), "cuCtxPushCurrent");
  try_(ssm_driver.cuMemAlloc_v2(&data, (size_t)v->data_bytes), "cuMemAlloc");
  try_(ssm_driver.cuMemAlloc_v2(&y, (size_t)v->y_bytes), "cuMemAlloc");
  if (plan.workspace_bytes > 0) try_(ssm_driver.cuMemAlloc_v2(&workspace, (size_t)plan.workspace_bytes), "cuMemAlloc");
  unsigned char *before = (unsigned char*)malloc(v->data_bytes), *after = (unsigned char*)malloc(v->data_bytes);
  unsigned char* out = (unsigned char*)malloc(v->y_bytes);
  memcpy(before, v->data, v->data_bytes);
  memset(out, 0xFF, v->y_bytes);  // a NaN where nothing is stored
  try_(ssm_driver.cuMemcpyHtoD_v2(data, before, (size_t)v->data_bytes), "cuMemcpyHtoD");
  try_(ssm_driver.cuMemcpyHtoD_v2(y, out, (size_t)v->y_bytes), "cuMemcpyHtoD");
  try_(ssm_driver.cuCtxPopCurrent_v2(&popped), "cuCtxPopCurrent");

  ScanArgs args = *a;
  uint64_t* pointers = &args.x;
  for (int i = 0; i < 19; i++)
    if (pointers[i] != 0) pointers[i] += data - 1;
  args.y = y;
  args.workspace = workspace;
  args.workspace_bytes = plan.workspace_bytes;
  if (launch(library, kernel, &plan, &args)) die("launch");

  try_(ssm_driver.cuCtxPushCurrent_v2(library->device->context), "cuCtxPushCurrent");
  try_(ssm_driver.cuStreamSynchronize(NULL), "cuStreamSynchronize");
  try_(ssm_driver.cuMemcpyDtoH_v2(after, data, (size_t)v->data_bytes), "cuMemcpyDtoH");
  try_(ssm_driver.cuMemcpyDtoH_v2(out, y, (size_t)v->y_bytes), "cuMemcpyDtoH");
  try_(ssm_driver.cuMemFree_v2(data), "cuMemFree");
  try_(ssm_driver.cuMemFree_v2(y), "cuMemFree");
  if (workspace != 0) try_(ssm_driver.cuMemFree_v2(workspace), "cuMemFree");
  try_(ssm_driver.cuCtxPopCurrent_v2(&popped), "cuCtxPopCurrent");
  const double worst = check(v, library->tables->kernels[kernel].operand_error, out, after, before);
  free(before);
  free(after);
  free(out);
  return worst;
}

// Runs one vector by every kernel that takes it; how many were wrong.
static int run_all(const ssm_library* library, const char* path) {
  vector v;
  ssm_choice choice = {0};
  int failed = 0;
  if (read_vector(path, &v)) die(path);
  const ssm_problem problem = problem_of(&v);
  if (ssm_select(library, &problem, 0, &choice)) die("select");
  for (int k = -1; k < 0 || ssm_package.kernels[k].id != NULL; k++) {
    const int kernel = k < 0 ? choice.kernel : k;
    const ssm_kernel* row = &ssm_package.kernels[kernel];
    if (k == choice.kernel || !ssm_can_run(library, kernel, &problem) || !wanted(row)) continue;
    const double worst = run(library, &v, kernel);
    printf("%s %s: %.3f of what is allowed, on device %d by %s (%s)%s\n", worst <= 1 ? "ok" : "WRONG", path, worst,
           library->device->device, row->id, row->images[library->image[kernel]].grade,
           k < 0 ? ", which is selected" : "");
    failed += !(worst <= 1);
  }
  free(v.file);
  return failed;
}

int main(int count, char** arguments) {
  enum { MOST_DEVICES = 8 };
  static ssm_library libraries[MOST_DEVICES];
  ssm_device devices[MOST_DEVICES];
  int used = 1, failed = 0;
  if (count > 2 && strcmp(arguments[1], "-devices") == 0) {
    used = atoi(arguments[2]);
    count -= 2;
    arguments += 2;
  }
  if (count < 3 || used < 1 || used > MOST_DEVICES) {
    fprintf(stderr, "usage: scan [-devices N] PACKAGE VECTOR...   (N: 1 to %d, by default 1)\n", MOST_DEVICES);
    return 2;
  }
  for (int d = 0; d < used; d++) {
    if (ssm_open(d, &devices[d])) die("open");
    if (ssm_load(&devices[d], arguments[1], NULL, 0, &libraries[d])) die("load");
  }
  // All devices are open at once, and take each vector in turn.
  for (int i = 2; i < count; i++)
    for (int d = 0; d < used; d++) failed += run_all(&libraries[d], arguments[i]);
  for (int d = 0; d < used; d++)
    if (ssm_unload(&libraries[d]) || ssm_close(&devices[d])) die("close");
  return failed > 0;
}
