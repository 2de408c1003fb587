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
	"strconv"
	"sync"
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

// Device is one GPU with its primary context, the one that the CUDA runtime API uses, retained. Its methods may be
// called from any goroutine.
type Device struct {
	Name          string
	Target        string // of its compute capability, such as sm_90
	SharedLimit   int    // dynamic shared memory that a block may opt in to, in bytes
	DriverVersion int    // 1000 * major + 10 * minor of the CUDA version that the driver serves

	context unsafe.Pointer
	device  C.int32_t
}

// Open retains the primary context of a GPU. The error wraps ErrNoCUDA where there is no driver or no device.
func Open(ordinal int) (*Device, error) {
	if err := load(); err != nil {
		return nil, err
	}
	var have C.ssm_device
	if err := failure(C.ssm_open(C.int32_t(ordinal), &have), ""); err != nil {
		return nil, err
	}
	return &Device{
		Name:          C.GoString(&have.name[0]),
		Target:        fmt.Sprintf("sm_%d%d", have.major, have.minor),
		SharedLimit:   int(have.shared_limit),
		DriverVersion: int(have.driver_version),
		context:       have.context,
		device:        have.device,
	}, nil
}

// Close releases the context. Kernels and memory of the device must no longer be used.
func (d *Device) Close() error {
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

// Download copies from a device address into host bytes and waits.
func (d *Device) Download(host []byte, address uint64) error {
	bytes := C.size_t(len(host))
	return failure(C.ssm_download(d.context, unsafe.Pointer(unsafe.SliceData(host)), C.uint64_t(address), bytes), "")
}

// Synchronize waits for a stream (0 is the default stream); it reports faults of everything launched there before.
func (d *Device) Synchronize(stream uintptr) error {
	return failure(C.ssm_synchronize(d.context, C.uintptr_t(stream)), "")
}

// Kernel is one loaded entry of an image.
type Kernel struct {
	Row *Row

	device   *Device
	module   unsafe.Pointer
	function unsafe.Pointer
	geometry C.ssm_geometry
}

// Load checks an image against its manifest row (argument layout, bytes, sha256; then registers, local and static
// shared memory as the driver reports them) and makes its entry ready to launch, shared memory opted in to.
func (d *Device) Load(row *Row, target string, image []byte) (*Kernel, error) {
	want, err := row.check(target, image)
	if err != nil {
		return nil, err
	}
	kernel := &Kernel{Row: row, device: d}
	status := C.ssm_module_load(d.context, unsafe.Pointer(unsafe.SliceData(image)), C.size_t(len(image)), &kernel.module)
	if err := failure(status, row.ID); err != nil {
		return nil, err
	}
	if err := kernel.resolve(want); err != nil {
		kernel.Close()
		return nil, err
	}
	return kernel, nil
}

// resolve finds the entry in the module and compares what the driver says of it with the manifest.
func (k *Kernel) resolve(want *Image) error {
	entry := k.Row.Entries[0]
	symbol := C.CString(entry)
	defer C.free(unsafe.Pointer(symbol))
	var have C.ssm_function
	status := C.ssm_get_function(k.device.context, k.module, symbol, C.int32_t(want.DynamicShared), &have)
	if err := failure(status, k.Row.ID); err != nil {
		return err
	}
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
	if k.Row.Block > int(have.max_threads) {
		return &ImageError{k.Row.ID, "threads of a block", strconv.Itoa(k.Row.Block), strconv.Itoa(int(have.max_threads))}
	}
	k.function = have.handle
	k.geometry.block = [3]C.uint32_t{C.uint32_t(k.Row.Block), 1, 1}
	k.geometry.shared_bytes = C.uint32_t(want.DynamicShared)
	return nil
}

// Launch runs the kernel on a stream (0 is the default stream) and returns before it is done. One C call makes the
// context current, copies the arguments to the driver and restores the context; it allocates nothing.
func (k *Kernel) Launch(stream uintptr, args *ScanArgs) error {
	blocks, err := k.Row.Blocks(args.Sequences, args.Heads, args.HeadDim)
	if err != nil {
		return err
	}
	geometry := k.geometry
	geometry.grid = [3]C.uint32_t{C.uint32_t(blocks), 1, 1}
	copied := *(*C.ssm_args)(unsafe.Pointer(args))
	return failure(C.ssm_launch(k.device.context, k.function, C.uintptr_t(stream), geometry, copied), k.Row.ID)
}

// Close unloads the image; no launch of it may be running.
func (k *Kernel) Close() error {
	return failure(C.ssm_module_unload(k.device.context, k.module), k.Row.ID)
}
