// The CUDA driver interface, opened at run time: no cuda.h and no link against libcuda.

#ifndef SSMSCAN_DRIVER_H
#define SSMSCAN_DRIVER_H

#include <stddef.h>
#include <stdint.h>

// Failures that are not the driver's own; its CUresult values are positive.
enum { SSM_NO_LIBRARY = -1, SSM_NO_SYMBOL = -2, SSM_NO_MEMORY = -3 };

// What a call came to: code 0 is success; otherwise op names the driver function (or the library, or the missing
// function) that failed. The string is static.
typedef struct {
  int32_t code;
  const char *op;
} ssm_status;

typedef struct {
  void *context;  // the primary context, retained
  int32_t ordinal, device;
  int32_t major, minor;       // compute capability
  int32_t shared_limit;       // dynamic shared memory that a block may opt in to, bytes
  int32_t driver_version;     // 1000 * major + 10 * minor
  char name[96];
} ssm_device;

typedef struct {
  void *handle;
  int32_t registers, local_bytes, static_shared, max_threads;
} ssm_function;

// ScanArgs as bytes: Go states the fields and checks them against the manifest.
typedef struct {
  uint64_t words[36];
} ssm_args;

// overlaps: the kernel may start before the one launched before it has ended, whose end it waits for itself. A driver that
// cannot do that runs one after the other.
typedef struct {
  uint32_t grid[3], block[3], shared_bytes, overlaps;
} ssm_geometry;

// Opens libcuda and calls cuInit. Not safe to call from two threads at once; afterwards everything below is safe.
ssm_status ssm_load(void);
// Name and description of a CUresult; static strings, never NULL.
void ssm_describe(int32_t code, const char **name, const char **detail);

ssm_status ssm_count(int32_t *devices);
// Retains the primary context of a device, which is the one that the runtime API uses; ssm_close releases it.
ssm_status ssm_open(int32_t ordinal, ssm_device *device);
ssm_status ssm_close(int32_t device);
// Describes the device of a context that is the caller's and stays so.
ssm_status ssm_describe_context(uintptr_t context, ssm_device *device);

// Each call below makes the context current, works and restores the context that was current.
ssm_status ssm_module_load(void *context, const void *image, size_t bytes, void **module);
ssm_status ssm_module_unload(void *context, void *module);
// Finds an entry and loads it: a driver that can loads functions at their first launch else.
ssm_status ssm_get_function(void *context, void *module, const char *symbol, int32_t shared_bytes, ssm_function *out);
ssm_status ssm_launch(void *context, void *function, uintptr_t stream, ssm_geometry geometry, ssm_args args);
// Launches many times within one context switch and gives the nanoseconds of the CPU: what cuLaunchKernel alone costs.
ssm_status ssm_launch_cost(void *context, void *function, uintptr_t stream, ssm_geometry geometry, ssm_args args,
                           int32_t count, int64_t *nanoseconds);
// Between begin and end, launches of this thread on a stream are recorded and do not run. After a failure there is no
// graph.
ssm_status ssm_capture_begin(void *context, uintptr_t stream);
ssm_status ssm_capture_end(void *context, uintptr_t stream, void **graph);
ssm_status ssm_graph_launch(void *context, void *graph, uintptr_t stream);
ssm_status ssm_graph_destroy(void *context, void *graph);
ssm_status ssm_synchronize(void *context, uintptr_t stream);
ssm_status ssm_alloc(void *context, size_t bytes, uint64_t *address);
ssm_status ssm_free(void *context, uint64_t address);
ssm_status ssm_upload(void *context, uint64_t address, const void *host, size_t bytes);
ssm_status ssm_upload_async(void *context, uint64_t address, const void *host, size_t bytes, uintptr_t stream);
ssm_status ssm_download(void *context, void *host, uint64_t address, size_t bytes);

// Streams that do not wait for the default stream, and events that time what lies between them.
ssm_status ssm_stream_create(void *context, uintptr_t *stream);
ssm_status ssm_stream_destroy(void *context, uintptr_t stream);
ssm_status ssm_event_create(void *context, void **event);
ssm_status ssm_event_destroy(void *context, void *event);
ssm_status ssm_event_record(void *context, void *event, uintptr_t stream);
// Waits for the second event.
ssm_status ssm_event_milliseconds(void *context, void *first, void *second, float *milliseconds);

#endif
