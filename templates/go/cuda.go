//go:build cuda && cgo

package ssmscan

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "driver.h"
*/
import "C"

import (
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"time"
	"unsafe"
)

// The C bytes and the Go struct are the same size, or this does not compile.
var _ = [1]struct{}{}[unsafe.Sizeof(ScanArgs{})-unsafe.Sizeof(C.ssm_args{})]

// noDevice and stubLibrary are the CUresults by which cuInit says that there is nothing to run on.
const (
	stubLibrary = 34
	noDevice    = 100
)

// load opens the driver on the first use, not when the program starts.
var load = sync.OnceValue(func() error {
	status := C.ssm_load()
	switch status.code {
	case C.SSM_NO_LIBRARY:
		return fmt.Errorf("%w: cannot open %s", ErrNoCUDA, C.GoString(status.op))
	case C.SSM_NO_SYMBOL:
		return fmt.Errorf("%w: libcuda.so.1 has no %s: a newer driver is needed", ErrNoCUDA, C.GoString(status.op))
	case noDevice, stubLibrary:
		return fmt.Errorf("%w: %w", ErrNoCUDA, failure(status, ""))
	}
	return failure(status, "")
})

// failure turns a status into an error, nil on success.
func failure(status C.ssm_status, kernel string) error {
	switch status.code {
	case 0:
		return nil
	case C.SSM_NO_MEMORY:
		return fmt.Errorf("ssmscan: no host memory to copy an image of kernel %s", kernel)
	}
	var name, detail *C.char
	C.ssm_describe(status.code, &name, &detail)
	return &DriverError{
		Op: C.GoString(status.op), Code: int(status.code), Kernel: kernel,
		Name: C.GoString(name), Detail: C.GoString(detail),
	}
}

// Device is one GPU and a context of it. Its methods may be called from any goroutine.
type Device struct {
	GPU

	context unsafe.Pointer
	device  C.int32_t
	owned   bool // the primary context was retained
}

// Devices counts the GPUs. The error wraps ErrNoCUDA where there is no driver or no device.
func Devices() (int, error) {
	if err := load(); err != nil {
		return 0, err
	}
	var count C.int32_t
	err := failure(C.ssm_count(&count), "")
	return int(count), err
}

// Open retains the primary context of a GPU, the one that the CUDA runtime API uses. The error wraps ErrNoCUDA where
// there is no driver or no device.
func Open(ordinal int) (*Device, error) {
	if err := load(); err != nil {
		return nil, err
	}
	var have C.ssm_device
	if err := failure(C.ssm_open(C.int32_t(ordinal), &have), ""); err != nil {
		return nil, err
	}
	return newDevice(&have, true), nil
}

// OpenContext takes a context of the caller's, a CUcontext, which has to outlive the device.
func OpenContext(context uintptr) (*Device, error) {
	if err := load(); err != nil {
		return nil, err
	}
	var have C.ssm_device
	if err := failure(C.ssm_describe_context(C.uintptr_t(context), &have), ""); err != nil {
		return nil, err
	}
	return newDevice(&have, false), nil
}

func newDevice(have *C.ssm_device, owned bool) *Device {
	return &Device{
		GPU: GPU{
			Name:          C.GoString(&have.name[0]),
			Major:         int(have.major),
			Minor:         int(have.minor),
			SharedLimit:   int(have.shared_limit),
			DriverVersion: int(have.driver_version),
		},
		context: have.context,
		device:  have.device,
		owned:   owned,
	}
}

// Context is the CUcontext that the device works in.
func (d *Device) Context() uintptr { return uintptr(d.context) }

// Close releases the context where Open retained it. Kernels and memory of the device must no longer be used.
func (d *Device) Close() error {
	if !d.owned {
		return nil
	}
	return failure(C.ssm_close(d.device), "")
}

// Alloc takes device memory; its address is a multiple of 256.
func (d *Device) Alloc(bytes int) (uint64, error) {
	var address C.uint64_t
	err := failure(C.ssm_alloc(d.context, C.size_t(bytes), &address), "")
	return uint64(address), err
}

// Free gives device memory back.
func (d *Device) Free(address uint64) error {
	return failure(C.ssm_free(d.context, C.uint64_t(address)), "")
}

// Upload copies host bytes to a device address and waits.
func (d *Device) Upload(address uint64, host []byte) error {
	bytes := C.size_t(len(host))
	return failure(C.ssm_upload(d.context, C.uint64_t(address), unsafe.Pointer(unsafe.SliceData(host)), bytes), "")
}

// UploadAsync copies host bytes to a device address on a stream. The bytes may be changed when it returns.
func (d *Device) UploadAsync(stream uintptr, address uint64, host []byte) error {
	data, bytes := unsafe.Pointer(unsafe.SliceData(host)), C.size_t(len(host))
	return failure(C.ssm_upload_async(d.context, C.uint64_t(address), data, bytes, C.uintptr_t(stream)), "")
}

// Download copies from a device address into host bytes and waits.
func (d *Device) Download(host []byte, address uint64) error {
	bytes := C.size_t(len(host))
	return failure(C.ssm_download(d.context, unsafe.Pointer(unsafe.SliceData(host)), C.uint64_t(address), bytes), "")
}

// Synchronize waits for a stream (0 is the default stream); it reports faults of everything launched there before.
func (d *Device) Synchronize(stream uintptr) error {
	return failure(C.ssm_synchronize(d.context, C.uintptr_t(stream)), "")
}

// NewStream makes a stream that does not wait for the default stream.
func (d *Device) NewStream() (uintptr, error) {
	var stream C.uintptr_t
	err := failure(C.ssm_stream_create(d.context, &stream), "")
	return uintptr(stream), err
}

// DestroyStream gives a stream back.
func (d *Device) DestroyStream(stream uintptr) error {
	return failure(C.ssm_stream_destroy(d.context, C.uintptr_t(stream)), "")
}

// Graph is launches that were captured; it runs them all again, over what their arrays and batches then hold.
type Graph struct {
	device *Device
	graph  unsafe.Pointer
}

// Capture records the launches that a function makes on a stream, which must not be the default one, and runs none of
// them. The function may launch and nothing else; an error of it is returned.
func (d *Device) Capture(stream uintptr, launch func() error) (*Graph, error) {
	runtime.LockOSThread() // a capture is of its thread
	defer runtime.UnlockOSThread()
	if err := failure(C.ssm_capture_begin(d.context, C.uintptr_t(stream)), ""); err != nil {
		return nil, err
	}
	launched := launch()
	graph := &Graph{device: d}
	err := failure(C.ssm_capture_end(d.context, C.uintptr_t(stream), &graph.graph), "")
	if launched != nil {
		if err == nil {
			_ = graph.Close() // the first error is the one to tell
		}
		return nil, launched
	}
	if err != nil {
		return nil, err
	}
	return graph, nil
}

// Launch runs the captured launches on a stream and returns before they are done.
func (g *Graph) Launch(stream uintptr) error {
	return failure(C.ssm_graph_launch(g.device.context, g.graph, C.uintptr_t(stream)), "")
}

// Close frees the graph; it must not be running.
func (g *Graph) Close() error { return failure(C.ssm_graph_destroy(g.device.context, g.graph), "") }

// Event marks a point of a stream.
type Event struct {
	device *Device
	event  unsafe.Pointer
}

// NewEvent makes an event.
func (d *Device) NewEvent() (*Event, error) {
	event := &Event{device: d}
	err := failure(C.ssm_event_create(d.context, &event.event), "")
	return event, err
}

// Record marks what was launched on a stream so far.
func (e *Event) Record(stream uintptr) error {
	return failure(C.ssm_event_record(e.device.context, e.event, C.uintptr_t(stream)), "")
}

// Since waits for the event and gives the time from an earlier one.
func (e *Event) Since(first *Event) (time.Duration, error) {
	var milliseconds C.float
	err := failure(C.ssm_event_milliseconds(e.device.context, first.event, e.event, &milliseconds), "")
	return time.Duration(float64(milliseconds) * float64(time.Millisecond)), err
}

// Close gives the event back.
func (e *Event) Close() error { return failure(C.ssm_event_destroy(e.device.context, e.event), "") }

// Kernel is one loaded image, ready to launch.
type Kernel struct {
	Row    *Row
	Target string

	device    *Device
	module    unsafe.Pointer
	functions []unsafe.Pointer // by the number of the entry
}

// Load checks an image against its manifest row (argument layout, bytes, sha256; then registers, local and static
// shared memory as the driver reports them) and makes its entries ready to launch, shared memory opted in to.
func (d *Device) Load(row *Row, target string, image []byte) (*Kernel, error) {
	want, err := row.check(target, image)
	if err != nil {
		return nil, err
	}
	kernel := &Kernel{Row: row, Target: target, device: d}
	status := C.ssm_module_load(d.context, unsafe.Pointer(unsafe.SliceData(image)), C.size_t(len(image)), &kernel.module)
	if err := failure(status, row.ID); err != nil {
		return nil, err
	}
	for _, entry := range row.Entries {
		if err := kernel.resolve(entry, want); err != nil {
			_ = kernel.Close() // the first error is the one to tell
			return nil, err
		}
	}
	return kernel, nil
}

// resolve finds an entry in the module and compares what the driver says of it with the manifest. Registers and memory
// of PTX are the driver's own choice.
func (k *Kernel) resolve(entry string, want *Image) error {
	symbol := C.CString(entry)
	defer C.free(unsafe.Pointer(symbol))
	var have C.ssm_function
	status := C.ssm_get_function(k.device.context, k.module, symbol, C.int32_t(k.Row.mostShared(want)), &have)
	if err := failure(status, k.Row.ID); err != nil {
		return err
	}
	if want.Kind == "cubin" {
		usage := want.Usage[entry]
		for _, fact := range []struct {
			field      string
			want, have int
		}{
			{"registers", usage.Registers, int(have.registers)},
			{"local bytes", usage.LocalBytes, int(have.local_bytes)},
			{"static shared memory", usage.StaticShared, int(have.static_shared)},
		} {
			if fact.want != fact.have {
				return &ImageError{k.Row.ID, fact.field, strconv.Itoa(fact.want), strconv.Itoa(fact.have)}
			}
		}
	}
	if k.Row.Block > int(have.max_threads) {
		return &ImageError{k.Row.ID, "threads of a block of " + entry, strconv.Itoa(k.Row.Block), strconv.Itoa(int(have.max_threads))}
	}
	k.functions = append(k.functions, have.handle)
	return nil
}

func (l *Launch) geometry() C.ssm_geometry {
	overlaps := C.uint32_t(0)
	if l.Overlaps {
		overlaps = 1
	}
	return C.ssm_geometry{
		grid:         [3]C.uint32_t{C.uint32_t(l.Grid[0]), C.uint32_t(l.Grid[1]), C.uint32_t(l.Grid[2])},
		block:        [3]C.uint32_t{C.uint32_t(l.Block[0]), C.uint32_t(l.Block[1]), C.uint32_t(l.Block[2])},
		shared_bytes: C.uint32_t(l.SharedBytes),
		overlaps:     overlaps,
	}
}

// LaunchCost runs the first launch of a plan many times from one C call and gives the CPU's time of one: what
// cuLaunchKernel alone costs, for Launch to be held against.
func (k *Kernel) LaunchCost(stream uintptr, plan *KernelPlan, args *ScanArgs, count int) (time.Duration, error) {
	launch := &plan.Launches[0]
	function, copied := k.functions[launch.Entry], *(*C.ssm_args)(unsafe.Pointer(args))
	var nanoseconds C.int64_t
	status := C.ssm_launch_cost(
		k.device.context, function, C.uintptr_t(stream), launch.geometry(), copied, C.int32_t(count), &nanoseconds)
	return time.Duration(nanoseconds) / time.Duration(max(count, 1)), failure(status, k.Row.ID)
}

// Launch runs a plan of the kernel on a stream (0 is the default stream) and returns before it is done. For each launch
// of the plan one C call makes the context current, copies the arguments to the driver and restores the context; it
// allocates nothing and waits for nothing.
func (k *Kernel) Launch(stream uintptr, plan *KernelPlan, args *ScanArgs) error {
	copied := *(*C.ssm_args)(unsafe.Pointer(args))
	for i := range plan.Launches {
		launch := &plan.Launches[i]
		function := k.functions[launch.Entry]
		status := C.ssm_launch(k.device.context, function, C.uintptr_t(stream), launch.geometry(), copied)
		if status.code != 0 {
			return failure(status, k.Row.ID)
		}
	}
	return nil
}

// Close unloads the image; no launch of it may be running.
func (k *Kernel) Close() error {
	return failure(C.ssm_module_unload(k.device.context, k.module), k.Row.ID)
}

// Scanner is a library whose every module is loaded on a device. Its methods may be called from any goroutine.
type Scanner struct {
	*Library
	device  *Device
	kernels map[string]*Kernel
}

// Scanner opens images (see OpenImages) and loads the module of every kernel, so that no launch loads anything, during
// the capture of a graph or at any other time.
func (d *Device) Scanner(options Options, images ...Images) (*Scanner, error) {
	library, err := OpenImages(d.GPU, options, images...)
	if err != nil {
		return nil, err
	}
	scanner := &Scanner{Library: library, device: d, kernels: map[string]*Kernel{}}
	for _, image := range library.Kernels() {
		if library.unusable(image) != "" {
			continue // it is never selected
		}
		kernel, err := d.Load(image.Row, image.Target, image.Image)
		if err != nil {
			_ = scanner.Close() // the first error is the one to tell
			return nil, err
		}
		scanner.kernels[image.Row.ID] = kernel
	}
	return scanner, nil
}

// Device is the device that the modules are loaded on.
func (s *Scanner) Device() *Device { return s.device }

// Loaded gives a loaded kernel by its id, nil where there is none.
func (s *Scanner) Loaded(id string) *Kernel { return s.kernels[id] }

// Launch runs a plan on a stream, 0 for the default stream, and returns before it is done. A cudaStream_t will do.
//
// batch is the device address of a Batch's bytes, or 0 where the arguments themselves name cu_seqlens and slots and the
// plan has one part. What the plan and the batch decide is filled in: sizes, offsets, slots, flags of vector accesses. The
// caller gives arrays, strides and the flags that are his: Softplus, PerColumnA, DTFloat32, DTLimit. The workspace must
// not be in use by another launch.
//
// It allocates nothing, waits for nothing, and may be captured in a graph.
func (s *Scanner) Launch(stream uintptr, plan *Plan, args *ScanArgs, batch uint64) error {
	if err := plan.refuse(args, batch); err != nil {
		return err
	}
	for i := range plan.Parts {
		part := &plan.Parts[i]
		own := *args
		plan.Fill(&own, part, batch)
		kernel := s.kernels[part.Kernel.Row.ID]
		if kernel == nil {
			return &NoKernelError{Want: part.Kernel.Row.ID, Device: s.device.GPU.String(), Have: []string{"the plan of another library"}}
		}
		if err := kernel.Launch(stream, &part.KernelPlan, &own); err != nil {
			return err
		}
	}
	return nil
}

// Close unloads every module; no launch may be running.
func (s *Scanner) Close() error {
	var first error
	for _, kernel := range s.kernels {
		if err := kernel.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}
