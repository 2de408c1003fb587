//go:build cuda && cgo

package ssmscan

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"example.com/ssmscan/internal/golden"
	"example.com/ssmscan/internal/storage"
)

// openDevice opens the first GPU, or skips where there is none or where it cannot run images of the staged target.
func openDevice(t *testing.T, target string) *Device {
	t.Helper()
	device, err := Open(0)
	if errors.Is(err, ErrNoCUDA) {
		t.Skipf("ErrNoCUDA: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.Close(); err != nil {
			t.Error(err)
		}
	})
	if device.fit(target, false) == 0 {
		t.Skipf("%s is %s, which cannot run the staged images of %s: uv run invoke go --arch %s",
			device.Name, device.Target(), target, device.Target())
	}
	return device
}

func TestOpenSaysErrNoCUDAOrFindsADevice(t *testing.T) {
	device, err := Open(0)
	if errors.Is(err, ErrNoCUDA) {
		t.Skipf("ErrNoCUDA: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	t.Logf("%s, %s, %d bytes of shared memory a block, driver for CUDA %d.%d",
		device.Name, device.Target(), device.SharedLimit, device.DriverVersion/1000, device.DriverVersion%1000/10)
	var driver *DriverError
	if _, err := Open(1 << 20); !errors.As(err, &driver) || driver.Op != "cuDeviceGet" {
		t.Errorf("device 2^20: want a DriverError of cuDeviceGet, have %v", err)
	}
}

func TestKernelsPassTheGoldenVectors(t *testing.T) {
	target, kernels := readKernels(t)
	vectors := readVectors(t)
	device := openDevice(t, target)
	used := map[string]bool{}
	for _, made := range kernels {
		kernel, err := device.Load(made.row, target, made.image)
		if err != nil {
			t.Fatal(err)
		}
		for _, vector := range matching(t, made.row, vectors) {
			used[vector.Name] = true
			t.Run(made.row.ID+"/"+vector.Name, func(t *testing.T) { runVector(t, device, kernel, vector) })
		}
		if err := kernel.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, vector := range vectors {
		if !used[vector.Name] {
			t.Errorf("golden vector %s: want a kernel of its d_state and types, have none", vector.Name)
		}
	}
}

// matching gives the vectors of a kernel's d_state and types, of which there must be one.
func matching(t *testing.T, row *Row, vectors []*golden.Vector) []*golden.Vector {
	t.Helper()
	var found []*golden.Vector
	for _, vector := range vectors {
		if (Spec{DState: vector.DState, IO: DType(vector.IO), State: DType(vector.State)}) == row.Spec {
			found = append(found, vector)
		}
	}
	if found == nil {
		t.Fatalf("%s: want a golden vector of its d_state and types, have none", row.ID)
	}
	return found
}

// guard is the size of the zones around every buffer, and their fill. y starts as this fill too: 0xFF is a NaN in
// every type, so a value that nothing wrote is seen.
const (
	guard = 256
	fill  = 0xFF
)

// buffer is device memory between guard zones, with what it held before the launch.
type buffer struct {
	address uint64 // of the first byte after the guard
	before  []byte // guards included
}

// place uploads content between guard zones and frees it after the test.
func place(t *testing.T, device *Device, content []byte) *buffer {
	t.Helper()
	before := bytes.Repeat([]byte{fill}, len(content)+2*guard)
	copy(before[guard:], content)
	address, err := device.Alloc(len(before))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.Free(address); err != nil {
			t.Error(err)
		}
	})
	return &buffer{address + guard, before}
}

func (b *buffer) upload(t *testing.T, device *Device) {
	t.Helper()
	if err := device.Upload(b.address-guard, b.before); err != nil {
		t.Fatal(err)
	}
}

func (b *buffer) download(t *testing.T, device *Device) []byte {
	t.Helper()
	after := make([]byte, len(b.before))
	if err := device.Download(after, b.address-guard); err != nil {
		t.Fatal(err)
	}
	return after
}

// rows cuts the wanted rows out of a downloaded buffer and leaves what was there before in their place, so that
// nothing else may differ afterwards.
func (b *buffer) rows(after []byte, offset int, stride, size int64, rows []int) []byte {
	var cut []byte
	for _, row := range rows {
		start := guard + offset + row*int(stride)
		cut = append(cut, after[start:start+int(size)]...)
		copy(after[start:start+int(size)], b.before[start:start+int(size)])
	}
	return cut
}

// placeVector takes device memory for the buffers of a vector and for y.
func placeVector(t *testing.T, device *Device, vector *golden.Vector) map[string]*buffer {
	t.Helper()
	bytesOfY := int64(vector.Tokens) * vector.YStride * DType(vector.IO).Bytes()
	buffers := map[string]*buffer{"y": place(t, device, bytes.Repeat([]byte{fill}, int(bytesOfY)))}
	for name, content := range vector.Buffers {
		buffers[name] = place(t, device, content)
	}
	return buffers
}

// setField sets a pointer or stride of ScanArgs by its name in the manifest.
func setField(args *ScanArgs, name string, set func(reflect.Value)) bool {
	value := reflect.ValueOf(args).Elem()
	for i := range value.NumField() {
		if value.Type().Field(i).Tag.Get("scan") == name {
			set(value.Field(i))
			return true
		}
	}
	return false
}

// arguments makes ScanArgs of a vector whose buffers are on the device.
func arguments(t *testing.T, vector *golden.Vector, buffers map[string]*buffer) *ScanArgs {
	t.Helper()
	args := &ScanArgs{
		YStride: vector.YStride, Slots: vector.Slots,
		Tokens: vector.Tokens, Sequences: vector.Sequences, Heads: vector.Heads, HeadDim: vector.HeadDim,
		Groups: vector.Groups, DState: vector.DState, PadSlot: vector.PadSlot, DTMin: vector.DTMin, DTMax: vector.DTMax,
	}
	args.Y = buffers["y"].address
	for name, array := range vector.Arrays {
		address := buffers[array.Buffer].address + uint64(array.Offset)
		if !setField(args, name, func(field reflect.Value) { field.SetUint(address) }) {
			t.Fatalf("array %s: want a pointer of ScanArgs by that name, have none", name)
		}
		setField(args, name+"_stride", func(field reflect.Value) { field.SetInt(array.Stride) })
	}
	for _, name := range vector.Flags {
		flag, ok := map[string]Flags{
			"softplus": Softplus, "per_column_A": PerColumnA, "dt_f32": DTFloat32, "dt_limit": DTLimit,
		}[name]
		if !ok {
			t.Fatalf("flag %s: want one that this package knows", name)
		}
		args.Flags |= flag
	}
	args.SetVectorFlags(DType(vector.IO), DType(vector.State))
	return args
}

// planFor makes the plan of a kernel for a vector.
func planFor(t *testing.T, kernel *Kernel, vector *golden.Vector) *KernelPlan {
	t.Helper()
	plan, err := kernel.Row.Plan(kernel.Target, Geometry{
		Tokens: vector.Tokens, Sequences: vector.Sequences, Heads: vector.Heads, HeadDim: vector.HeadDim,
		Groups: vector.Groups, DState: vector.DState, Longest: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	if plan.WorkspaceBytes > 0 {
		t.Fatalf("%s: want a kernel without workspace, have %d bytes", kernel.Row.ID, plan.WorkspaceBytes)
	}
	return &plan
}

func runVector(t *testing.T, device *Device, kernel *Kernel, vector *golden.Vector) {
	io, state := DType(vector.IO).Bytes(), DType(vector.State).Bytes()
	buffers := placeVector(t, device, vector)
	args := arguments(t, vector, buffers)
	plan := planFor(t, kernel, vector)
	args.Lanes, args.Rows, args.Chunk = plan.Lanes, plan.Rows, plan.Chunk

	// run launches once over fresh contents and gives the stored y and state; the rest must be as it was.
	run := func() map[string][]byte {
		for _, buffer := range buffers {
			buffer.upload(t, device)
		}
		if err := kernel.Launch(0, plan, args); err != nil {
			t.Fatal(err)
		}
		if err := device.Synchronize(0); err != nil {
			t.Fatal(err)
		}
		out := map[string][]byte{}
		for name, buffer := range buffers {
			after := buffer.download(t, device)
			if name == "y" {
				tokens := make([]int, vector.Tokens)
				for i := range tokens {
					tokens[i] = i
				}
				row := int64(vector.Heads) * int64(vector.HeadDim) * io
				out["y"] = buffer.rows(after, 0, vector.YStride*io, row, tokens)
			} else if view := vector.Arrays["state"]; view.Buffer == name {
				row := int64(vector.Heads) * int64(vector.HeadDim) * int64(vector.DState) * state
				out["state"] = buffer.rows(after, view.Offset, view.Stride*state, row, vector.Expect["state"].Rows)
			}
			if !bytes.Equal(after, buffer.before) {
				t.Errorf("buffer %s: want every byte outside the results as it was, have some changed", name)
			}
		}
		return out
	}

	first := run()
	var line []string
	for _, output := range []struct{ name, dtype string }{{"y", vector.IO}, {"state", vector.State}} {
		expect := vector.Expect[output.name]
		values, err := storage.Decode(output.dtype, first[output.name])
		if err != nil {
			t.Fatal(err)
		}
		have := expect.Compare(output.dtype, values)
		line = append(line, fmt.Sprintf("%s: norm %.2e of %.2e, worst %.3f of 1", output.name, have.Norm, expect.Norm, have.Worst))
		if !have.Within(&expect) {
			t.Errorf("%s: want a norm of at most %.3g and a worst element of at most 1, have %.3g and %.3g",
				output.name, expect.Norm, have.Norm, have.Worst)
		}
	}
	t.Logf("%s (%s)", strings.Join(line, "; "), vector.About)
	if again := run(); !bytes.Equal(again["y"], first["y"]) || !bytes.Equal(again["state"], first["state"]) {
		t.Error("a second run: want the same bits, have others")
	}
}

func TestLaunchAllocatesNothingAndItsErrorsNameTheKernel(t *testing.T) {
	target, kernels := readKernels(t)
	device := openDevice(t, target)
	kernel, err := device.Load(kernels[0].row, target, kernels[0].image)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := kernel.Close(); err != nil {
			t.Error(err)
		}
	})
	vector := matching(t, kernels[0].row, readVectors(t))[0]
	buffers := placeVector(t, device, vector)
	for _, buffer := range buffers {
		buffer.upload(t, device)
	}
	args := arguments(t, vector, buffers)
	plan := planFor(t, kernel, vector)
	args.Lanes, args.Rows, args.Chunk = plan.Lanes, plan.Rows, plan.Chunk
	allocations := testing.AllocsPerRun(100, func() {
		if err := kernel.Launch(0, plan, args); err != nil {
			t.Fatal(err)
		}
	})
	if allocations != 0 {
		t.Errorf("a launch: want no allocation, have %v", allocations)
	}
	if err := device.Synchronize(0); err != nil {
		t.Fatal(err)
	}
	var driver *DriverError
	plan.Launches[0].Grid[0] = 0
	err = kernel.Launch(0, plan, args)
	if !errors.As(err, &driver) || driver.Op != "cuLaunchKernel" || driver.Kernel != kernels[0].row.ID {
		t.Errorf("an empty grid: want a DriverError of cuLaunchKernel for %s, have %v", kernels[0].row.ID, err)
	}
}
