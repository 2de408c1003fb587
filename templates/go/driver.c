//go:build cuda && cgo

#include "driver.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// The driver's own types, as its ABI has them.
typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream;

enum {
  ATTRIBUTE_CAPABILITY_MAJOR = 75,
  ATTRIBUTE_CAPABILITY_MINOR = 76,
  ATTRIBUTE_SHARED_OPTIN = 97,
  FUNCTION_MAX_THREADS = 0,
  FUNCTION_STATIC_SHARED = 1,
  FUNCTION_LOCAL_BYTES = 3,
  FUNCTION_REGISTERS = 4,
  FUNCTION_DYNAMIC_SHARED = 8,
};

// Extra options of cuLaunchKernel.
#define LAUNCH_PARAM_END ((void *)0)
#define LAUNCH_PARAM_BUFFER_POINTER ((void *)1)
#define LAUNCH_PARAM_BUFFER_SIZE ((void *)2)

// What cuLaunchKernelEx takes: a launch's sizes and a list of attributes.
typedef struct {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int programmatic_stream_serialization_allowed;
  } value;
} CUlaunchAttribute;

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  CUstream stream;
  CUlaunchAttribute *attributes;
  unsigned count;
} CUlaunchConfig;

enum { LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

_Static_assert(sizeof(CUlaunchAttribute) == 72 && sizeof(CUlaunchConfig) == 56, "the driver's layout");

// Every function used, by its exported name: the _v2 names are the 64-bit interfaces that cuda.h maps to.
#define DRIVER_FUNCTIONS(X)                                                                                \
  X(cuInit, (unsigned))                                                                                    \
  X(cuDriverGetVersion, (int *))                                                                           \
  X(cuDeviceGetCount, (int *))                                                                             \
  X(cuDeviceGet, (CUdevice *, int))                                                                        \
  X(cuDeviceGetName, (char *, int, CUdevice))                                                              \
  X(cuDeviceGetAttribute, (int *, int, CUdevice))                                                          \
  X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                     \
  X(cuDevicePrimaryCtxRelease_v2, (CUdevice))                                                              \
  X(cuCtxPushCurrent_v2, (CUcontext))                                                                      \
  X(cuCtxPopCurrent_v2, (CUcontext *))                                                                     \
  X(cuCtxGetDevice, (CUdevice *))                                                                          \
  X(cuStreamSynchronize, (CUstream))                                                                       \
  X(cuStreamCreate, (CUstream *, unsigned))                                                                \
  X(cuStreamDestroy_v2, (CUstream))                                                                        \
  X(cuEventCreate, (void **, unsigned))                                                                    \
  X(cuEventDestroy_v2, (void *))                                                                           \
  X(cuEventRecord, (void *, CUstream))                                                                     \
  X(cuEventSynchronize, (void *))                                                                          \
  X(cuEventElapsedTime, (float *, void *, void *))                                                         \
  X(cuModuleLoadData, (CUmodule *, const void *))                                                          \
  X(cuModuleUnload, (CUmodule))                                                                            \
  X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *))                                           \
  X(cuFuncSetAttribute, (CUfunction, int, int))                                                            \
  X(cuFuncGetAttribute, (int *, int, CUfunction))                                                          \
  X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,     \
                     CUstream, void **, void **))                                                          \
  X(cuStreamBeginCapture_v2, (CUstream, int))                                                              \
  X(cuStreamEndCapture, (CUstream, void **))                                                               \
  X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))                                    \
  X(cuGraphLaunch, (void *, CUstream))                                                                     \
  X(cuGraphDestroy, (void *))                                                                              \
  X(cuGraphExecDestroy, (void *))                                                                          \
  X(cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                                \
  X(cuMemFree_v2, (CUdeviceptr))                                                                           \
  X(cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t))                                                  \
  X(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream))                                   \
  X(cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t))                                                        \
  X(cuGetErrorName, (CUresult, const char **))                                                             \
  X(cuGetErrorString, (CUresult, const char **))

static struct {
#define X(name, parameters) CUresult(*name) parameters;
  DRIVER_FUNCTIONS(X)
#undef X
  CUresult (*cuFuncLoad)(CUfunction);  // NULL before CUDA 12.4
  // NULL before CUDA 11.8
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig *, CUfunction, void **, void **);
} driver;

static ssm_status status(CUresult code, const char *op) { return (ssm_status){code, code ? op : NULL}; }

// Calls a driver function and, where it fails, leaves the enclosing function with its code and name.
#define TRY(name, ...)                                     \
  do {                                                     \
    const CUresult try_code = driver.name(__VA_ARGS__);    \
    if (try_code != 0) return status(try_code, #name);     \
  } while (0)

// The same, between ENTER and LEAVE: skips to `leave`, which restores the context.
#define ENTER(context)                \
  ssm_status result = {0, NULL};      \
  CUcontext popped;                   \
  TRY(cuCtxPushCurrent_v2, (context))
#define CHECK(name, ...)                                   \
  do {                                                     \
    result = status(driver.name(__VA_ARGS__), #name);      \
    if (result.code != 0) goto leave;                      \
  } while (0)
#define LEAVE                                                                  \
  leave:                                                                       \
  do {                                                                         \
    const CUresult pop_code = driver.cuCtxPopCurrent_v2(&popped);              \
    if (result.code == 0) result = status(pop_code, "cuCtxPopCurrent_v2");     \
    return result;                                                             \
  } while (0)

ssm_status ssm_load(void) {
  // The handle stays open for the life of the process, as the driver expects.
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return status(SSM_NO_LIBRARY, "libcuda.so.1");
#define X(name, parameters)                                          \
  *(void **)&driver.name = dlsym(library, #name);                    \
  if (driver.name == NULL) return status(SSM_NO_SYMBOL, #name);
  DRIVER_FUNCTIONS(X)
#undef X
  *(void **)&driver.cuFuncLoad = dlsym(library, "cuFuncLoad");
  *(void **)&driver.cuLaunchKernelEx = dlsym(library, "cuLaunchKernelEx");
  TRY(cuInit, 0);
  return status(0, NULL);
}

void ssm_describe(int32_t code, const char **name, const char **detail) {
  *name = *detail = NULL;
  if (driver.cuGetErrorName != NULL) driver.cuGetErrorName(code, name);
  if (driver.cuGetErrorString != NULL) driver.cuGetErrorString(code, detail);
  if (*name == NULL) *name = "unknown error";
  if (*detail == NULL) *detail = "the driver has no description";
}

ssm_status ssm_count(int32_t *devices) {
  TRY(cuDeviceGetCount, devices);
  return status(0, NULL);
}

static ssm_status describe_device(ssm_device *device) {
  TRY(cuDriverGetVersion, &device->driver_version);
  TRY(cuDeviceGetName, device->name, sizeof device->name, device->device);
  TRY(cuDeviceGetAttribute, &device->major, ATTRIBUTE_CAPABILITY_MAJOR, device->device);
  TRY(cuDeviceGetAttribute, &device->minor, ATTRIBUTE_CAPABILITY_MINOR, device->device);
  TRY(cuDeviceGetAttribute, &device->shared_limit, ATTRIBUTE_SHARED_OPTIN, device->device);
  return status(0, NULL);
}

ssm_status ssm_open(int32_t ordinal, ssm_device *device) {
  memset(device, 0, sizeof *device);
  device->ordinal = ordinal;
  TRY(cuDeviceGet, &device->device, ordinal);
  const ssm_status described = describe_device(device);
  if (described.code != 0) return described;
  TRY(cuDevicePrimaryCtxRetain, &device->context, device->device);
  return status(0, NULL);
}

ssm_status ssm_describe_context(uintptr_t context, ssm_device *device) {
  memset(device, 0, sizeof *device);
  device->ordinal = -1;
  device->context = (void *)context;
  ENTER((void *)context);
  CHECK(cuCtxGetDevice, &device->device);
  result = describe_device(device);
  LEAVE;
}

ssm_status ssm_close(int32_t device) {
  TRY(cuDevicePrimaryCtxRelease_v2, device);
  return status(0, NULL);
}

ssm_status ssm_module_load(void *context, const void *image, size_t bytes, void **module) {
  // A copy, because PTX must end in NUL and a Go slice promises neither that nor alignment.
  char *copy = malloc(bytes + 1);
  if (copy == NULL) return status(SSM_NO_MEMORY, "malloc");
  memcpy(copy, image, bytes);
  copy[bytes] = '\0';
  ssm_status result = status(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent_v2");
  if (result.code == 0) {
    CUcontext popped;
    result = status(driver.cuModuleLoadData(module, copy), "cuModuleLoadData");
    const CUresult pop_code = driver.cuCtxPopCurrent_v2(&popped);
    if (result.code == 0) result = status(pop_code, "cuCtxPopCurrent_v2");
  }
  free(copy);
  return result;
}

ssm_status ssm_module_unload(void *context, void *module) {
  ENTER(context);
  CHECK(cuModuleUnload, module);
  LEAVE;
}

ssm_status ssm_get_function(void *context, void *module, const char *symbol, int32_t shared_bytes, ssm_function *out) {
  ENTER(context);
  CHECK(cuModuleGetFunction, &out->handle, module, symbol);
  CHECK(cuFuncGetAttribute, &out->registers, FUNCTION_REGISTERS, out->handle);
  CHECK(cuFuncGetAttribute, &out->local_bytes, FUNCTION_LOCAL_BYTES, out->handle);
  CHECK(cuFuncGetAttribute, &out->static_shared, FUNCTION_STATIC_SHARED, out->handle);
  CHECK(cuFuncGetAttribute, &out->max_threads, FUNCTION_MAX_THREADS, out->handle);
  if (shared_bytes > 0) CHECK(cuFuncSetAttribute, out->handle, FUNCTION_DYNAMIC_SHARED, shared_bytes);
  if (driver.cuFuncLoad != NULL) CHECK(cuFuncLoad, out->handle);
  LEAVE;
}

ssm_status ssm_launch(void *context, void *function, uintptr_t stream, ssm_geometry geometry, ssm_args args) {
  // args lives on this stack; the driver copies it before the launch returns.
  size_t bytes = sizeof args;
  void *extra[] = {LAUNCH_PARAM_BUFFER_POINTER, &args, LAUNCH_PARAM_BUFFER_SIZE, &bytes, LAUNCH_PARAM_END};
  const uint32_t *grid = geometry.grid, *block = geometry.block;
  ENTER(context);
  if (geometry.overlaps && driver.cuLaunchKernelEx != NULL) {
    CUlaunchAttribute overlaps = {.id = LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION};
    overlaps.value.programmatic_stream_serialization_allowed = 1;
    const CUlaunchConfig config = {
        {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, geometry.shared_bytes, (CUstream)stream, &overlaps, 1};
    CHECK(cuLaunchKernelEx, &config, function, NULL, extra);
  } else {
    CHECK(cuLaunchKernel, function, grid[0], grid[1], grid[2], block[0], block[1], block[2], geometry.shared_bytes,
          (CUstream)stream, NULL, extra);
  }
  LEAVE;
}

ssm_status ssm_launch_cost(void *context, void *function, uintptr_t stream, ssm_geometry geometry, ssm_args args,
                           int32_t count, int64_t *nanoseconds) {
  size_t bytes = sizeof args;
  void *extra[] = {LAUNCH_PARAM_BUFFER_POINTER, &args, LAUNCH_PARAM_BUFFER_SIZE, &bytes, LAUNCH_PARAM_END};
  const uint32_t *grid = geometry.grid, *block = geometry.block;
  struct timespec first, last;
  ENTER(context);
  clock_gettime(CLOCK_MONOTONIC, &first);
  for (int32_t i = 0; i < count; i++)
    CHECK(cuLaunchKernel, function, grid[0], grid[1], grid[2], block[0], block[1], block[2], geometry.shared_bytes,
          (CUstream)stream, NULL, extra);
  clock_gettime(CLOCK_MONOTONIC, &last);
  *nanoseconds = (last.tv_sec - first.tv_sec) * INT64_C(1000000000) + (last.tv_nsec - first.tv_nsec);
  LEAVE;
}

ssm_status ssm_capture_begin(void *context, uintptr_t stream) {
  // What other threads do meanwhile is theirs; what this one may not do during a capture is refused.
  enum { CAPTURE_THREAD_LOCAL = 1 };
  ENTER(context);
  CHECK(cuStreamBeginCapture_v2, (CUstream)stream, CAPTURE_THREAD_LOCAL);
  LEAVE;
}

ssm_status ssm_capture_end(void *context, uintptr_t stream, void **graph) {
  void *recorded = NULL;
  ENTER(context);
  CHECK(cuStreamEndCapture, (CUstream)stream, &recorded);
  result = status(driver.cuGraphInstantiateWithFlags(graph, recorded, 0), "cuGraphInstantiateWithFlags");
  const CUresult destroyed = driver.cuGraphDestroy(recorded);
  if (result.code == 0) result = status(destroyed, "cuGraphDestroy");
  LEAVE;
}

ssm_status ssm_graph_launch(void *context, void *graph, uintptr_t stream) {
  ENTER(context);
  CHECK(cuGraphLaunch, graph, (CUstream)stream);
  LEAVE;
}

ssm_status ssm_graph_destroy(void *context, void *graph) {
  ENTER(context);
  CHECK(cuGraphExecDestroy, graph);
  LEAVE;
}

ssm_status ssm_synchronize(void *context, uintptr_t stream) {
  ENTER(context);
  CHECK(cuStreamSynchronize, (CUstream)stream);
  LEAVE;
}

ssm_status ssm_alloc(void *context, size_t bytes, uint64_t *address) {
  ENTER(context);
  CHECK(cuMemAlloc_v2, address, bytes);
  LEAVE;
}

ssm_status ssm_free(void *context, uint64_t address) {
  ENTER(context);
  CHECK(cuMemFree_v2, address);
  LEAVE;
}

ssm_status ssm_upload(void *context, uint64_t address, const void *host, size_t bytes) {
  ENTER(context);
  CHECK(cuMemcpyHtoD_v2, address, host, bytes);
  CHECK(cuStreamSynchronize, NULL);  // pageable memory is staged, and the copy then returns before it is done
  LEAVE;
}

ssm_status ssm_upload_async(void *context, uint64_t address, const void *host, size_t bytes, uintptr_t stream) {
  // Pageable memory is staged before the call returns, so the caller may change it at once.
  ENTER(context);
  CHECK(cuMemcpyHtoDAsync_v2, address, host, bytes, (CUstream)stream);
  LEAVE;
}

ssm_status ssm_download(void *context, void *host, uint64_t address, size_t bytes) {
  ENTER(context);
  CHECK(cuMemcpyDtoH_v2, host, address, bytes);
  LEAVE;
}

ssm_status ssm_stream_create(void *context, uintptr_t *stream) {
  enum { NON_BLOCKING = 1 };
  ENTER(context);
  CHECK(cuStreamCreate, (CUstream *)stream, NON_BLOCKING);
  LEAVE;
}

ssm_status ssm_stream_destroy(void *context, uintptr_t stream) {
  ENTER(context);
  CHECK(cuStreamDestroy_v2, (CUstream)stream);
  LEAVE;
}

ssm_status ssm_event_create(void *context, void **event) {
  ENTER(context);
  CHECK(cuEventCreate, event, 0);
  LEAVE;
}

ssm_status ssm_event_destroy(void *context, void *event) {
  ENTER(context);
  CHECK(cuEventDestroy_v2, event);
  LEAVE;
}

ssm_status ssm_event_record(void *context, void *event, uintptr_t stream) {
  ENTER(context);
  CHECK(cuEventRecord, event, (CUstream)stream);
  LEAVE;
}

ssm_status ssm_event_milliseconds(void *context, void *first, void *second, float *milliseconds) {
  ENTER(context);
  CHECK(cuEventSynchronize, second);
  CHECK(cuEventElapsedTime, milliseconds, first, second);
  LEAVE;
}
