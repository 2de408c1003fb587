package ssmscan

import (
	"errors"
	"fmt"
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

func (e *DriverError) Error() string {
	kernel := ""
	if e.Kernel != "" {
		kernel = " for kernel " + e.Kernel
	}
	return fmt.Sprintf("ssmscan: %s failed%s: %s (%d): %s", e.Op, kernel, e.Name, e.Code, e.Detail)
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
