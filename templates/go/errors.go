package ssmscan

import (
	"errors"
	"fmt"
	"strings"
)

// ErrNoCUDA says that there is nothing to launch on: no driver library, one too old to have a needed function, or no
// device. Errors that wrap it say which.
var ErrNoCUDA = errors.New("ssmscan: no CUDA driver or device")

// DriverError is a CUDA driver call that failed.
type DriverError struct {
	Op     string // the driver function, such as cuLaunchKernel
	Code   int    // the CUresult
	Name   string // its name, such as CUDA_ERROR_INVALID_VALUE
	Detail string // the driver's description of it
	Kernel string // id of the kernel that was loaded or launched, where there is one
}

// Earlier says whether the code is that of a fault on the device: the call only reports it, and what faulted is work that
// was launched before, by anyone in the context.
func (e *DriverError) Earlier() bool {
	switch {
	case e.Code == 214, e.Code == 220: // an uncorrectable ECC error, an NVLink error
		return true
	case e.Code == 700, e.Code == 702, e.Code == 710: // an illegal address, a timeout, an assertion
		return true
	case e.Code >= 714 && e.Code <= 719: // stack, instruction, alignment, address space, program counter, launch
		return true
	}
	return false
}

func (e *DriverError) Error() string {
	kernel, earlier := "", ""
	if e.Kernel != "" {
		kernel = " for kernel " + e.Kernel
	}
	if e.Earlier() {
		earlier = "an asynchronous fault of earlier work, reported by this call: "
	}
	return fmt.Sprintf("ssmscan: %s failed%s: %s%s (%d): %s", e.Op, kernel, earlier, e.Name, e.Code, e.Detail)
}

// ImageError is an image or a manifest row that is not what it claims to be.
type ImageError struct {
	Kernel string // id from the manifest row
	Field  string // what disagrees
	Want   string // as the manifest (or this package) has it
	Have   string // as the image (or the manifest) has it
}

func (e *ImageError) Error() string {
	return fmt.Sprintf("ssmscan: kernel %s: %s: want %s, have %s", e.Kernel, e.Field, e.Want, e.Have)
}

// NoKernelError says that nothing that was opened fits.
type NoKernelError struct {
	Want   string   // the problem, or the images of a device
	Device string   // name and target of the GPU
	Have   []string // what is on offer, each with the reason why it does not fit
}

func (e *NoKernelError) Error() string {
	const most = 8
	have := e.Have
	more := ""
	if len(have) > most {
		have, more = have[:most], fmt.Sprintf("; and %d more", len(have)-most)
	}
	offer := strings.Join(have, "; ")
	if offer == "" {
		offer = "nothing"
	}
	return fmt.Sprintf("ssmscan: no kernel on %s: want %s, have %s%s", e.Device, e.Want, offer, more)
}

// DriverTooOldError says that the driver loads no lane of images that was opened.
type DriverTooOldError struct {
	Have string // the CUDA version that the driver serves
	Want string // the one that the images need, with the driver branch that brings it
}

func (e *DriverTooOldError) Error() string {
	return fmt.Sprintf("ssmscan: the driver is too old: want %s, have %s", e.Want, e.Have)
}

// InvalidProblemError is an argument that is malformed.
type InvalidProblemError struct {
	Field string // the array or size, as ScanArgs and the Python harness name it
	Want  string
	Have  string
}

func (e *InvalidProblemError) Error() string {
	return fmt.Sprintf("ssmscan: %s: want %s, have %s", e.Field, e.Want, e.Have)
}
