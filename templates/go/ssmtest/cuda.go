//go:build cuda && cgo

package ssmtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"example.com/ssmscan"
	"example.com/ssmscan/internal/storage"
)

// guard is the size of the zones around every array in device memory, and poison what they hold. y starts as that too:
// 0xFF is a NaN in every float type, so an element that nothing wrote is seen.
const (
	guard  = 256
	poison = 0xFF
)

// Scanner is the kernel that selection picks for each problem.
func Scanner(scanner *ssmscan.Scanner) Implementation {
	return func(p *Problem) (*Result, error) {
		choice, err := scanner.Select(ssmscan.Problem{Geometry: p.Geometry(), IO: p.IO, State: p.StateType}, false)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnsupported, err)
		}
		return Kernel(scanner.Device(), scanner.Loaded(choice.ID))(p)
	}
}

// planned is the plan of a kernel for a problem. The error is ErrUnsupported where it does not take the problem.
func planned(kernel *ssmscan.Kernel, p *Problem) (*ssmscan.KernelPlan, error) {
	if reason := kernel.Row.Refusal(ssmscan.Problem{Geometry: p.Geometry(), IO: p.IO, State: p.StateType}); reason != "" {
		return nil, fmt.Errorf("%w: %s: %s", ErrUnsupported, kernel.Row.ID, reason)
	}
	plan, err := kernel.Row.Plan(kernel.Target, p.Geometry())
	return &plan, err
}

// fill sets what a plan decides of the arguments.
func fill(args *ssmscan.ScanArgs, plan *ssmscan.KernelPlan, workspace uint64, bytes int64) {
	args.Lanes, args.Rows, args.Chunk = plan.Lanes, plan.Rows, plan.Chunk
	args.Workspace, args.WorkspaceBytes = workspace, bytes
}

// Kernel is one loaded kernel. Every array lies between guard zones; a byte that changed outside the results is an error.
func Kernel(device *ssmscan.Device, kernel *ssmscan.Kernel) Implementation {
	return launched(device, kernel, func(launch func(uintptr) error) error {
		return errors.Join(launch(0), device.Synchronize(0))
	})
}

// Captured is Kernel through a graph: its launches are captured, and the graph is run.
func Captured(device *ssmscan.Device, kernel *ssmscan.Kernel) Implementation {
	return launched(device, kernel, func(launch func(uintptr) error) error {
		stream, err := device.NewStream()
		if err != nil {
			return err
		}
		graph, err := device.Capture(stream, func() error { return launch(stream) })
		if err == nil {
			err = errors.Join(graph.Launch(stream), device.Synchronize(stream), graph.Close())
		}
		return errors.Join(err, device.DestroyStream(stream))
	})
}

// launched is a kernel over arrays of its own; run launches it on a stream and waits.
func launched(
	device *ssmscan.Device, kernel *ssmscan.Kernel, run func(launch func(stream uintptr) error) error,
) Implementation {
	return func(p *Problem) (result *Result, err error) {
		plan, err := planned(kernel, p)
		if err != nil {
			return nil, err
		}
		memory := &memory{device: device}
		defer func() {
			if freed := memory.free(); err == nil && freed != nil {
				result, err = nil, freed
			}
		}()
		args, err := memory.place(p)
		if err != nil {
			return nil, err
		}
		workspace := uint64(0)
		if plan.WorkspaceBytes > 0 {
			if workspace, err = memory.add("workspace", bytes.Repeat([]byte{poison}, int(plan.WorkspaceBytes)), true); err != nil {
				return nil, err
			}
		}
		fill(args, plan, workspace, plan.WorkspaceBytes)
		if err := run(func(stream uintptr) error { return kernel.Launch(stream, plan, args) }); err != nil {
			return nil, err
		}
		if result, err = memory.result(p); err == nil {
			result.OperandError = kernel.Row.OperandError()
		}
		return result, err
	}
}

// array is device memory between guard zones, with what it held before.
type array struct {
	name     string
	address  uint64 // of the first byte, guards included
	before   []byte
	writable bool
}

type memory struct {
	device *ssmscan.Device
	arrays []*array
}

func (m *memory) add(name string, content []byte, writable bool) (uint64, error) {
	before := bytes.Repeat([]byte{poison}, len(content)+2*guard)
	copy(before[guard:], content)
	address, err := m.device.Alloc(len(before))
	if err != nil {
		return 0, err
	}
	m.arrays = append(m.arrays, &array{name, address, before, writable})
	return address + guard, m.device.Upload(address, before)
}

func (m *memory) free() error {
	var first error
	for _, array := range m.arrays {
		if err := m.device.Free(array.address); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// place uploads the arrays of a problem and gives the arguments that point at them.
func (m *memory) place(p *Problem) (*ssmscan.ScanArgs, error) {
	inner, columns := p.Heads*p.HeadDim, p.Groups*p.DState
	args := &ssmscan.ScanArgs{
		XStride: int64(inner), YStride: int64(inner), ZStride: int64(inner), DTStride: int64(p.Heads),
		BStride: int64(columns), CStride: int64(columns), StateStride: int64(p.slotValues()),
		StateScaleStride: int64(inner), Slots: int64(p.Slots), Tokens: int32(p.Tokens), Sequences: int32(p.Sequences),
		Heads: int32(p.Heads), HeadDim: int32(p.HeadDim), Groups: int32(p.Groups), DState: int32(p.DState), PadSlot: p.PadSlot,
	}
	dt := string(p.IO)
	if p.DTFloat32 || p.IO == ssmscan.F32 {
		dt, args.Flags = "f32", args.Flags|ssmscan.DTFloat32
	}
	if p.Softplus {
		args.Flags |= ssmscan.Softplus
	}
	if p.PerColumnA {
		args.Flags |= ssmscan.PerColumnA
	}
	if p.Limit != nil {
		args.Flags |= ssmscan.DTLimit
		args.DTMin, args.DTMax = p.Limit[0], p.Limit[1]
	}
	for _, input := range []struct {
		to     *uint64
		name   string
		dtype  string
		values []float32
	}{
		{&args.X, "x", string(p.IO), p.X}, {&args.Z, "z", string(p.IO), p.Z}, {&args.DT, "dt", dt, p.DT},
		{&args.A, "A", "f32", p.A}, {&args.B, "B", string(p.IO), p.B}, {&args.C, "C", string(p.IO), p.C},
		{&args.D, "D", "f32", p.D}, {&args.DTBias, "dt_bias", "f32", p.DTBias},
	} {
		if input.values == nil {
			continue
		}
		content, err := storage.Encode(input.dtype, input.values)
		if err != nil {
			return nil, err
		}
		if *input.to, err = m.add(input.name, content, false); err != nil {
			return nil, err
		}
	}
	if err := m.placeIndices(p, args); err != nil {
		return nil, err
	}
	var err error
	if args.Y, err = m.add("y", bytes.Repeat([]byte{poison}, len(p.X)*storage.Bytes(string(p.IO))), true); err != nil {
		return nil, err
	}
	if err := m.placeState(p, args); err != nil {
		return nil, err
	}
	args.SetVectorFlags(p.IO, p.StateType)
	return args, nil
}

func (m *memory) placeIndices(p *Problem, args *ssmscan.ScanArgs) error {
	for _, index := range []struct {
		to     *uint64
		name   string
		values []int32
	}{
		{&args.CuSeqlens, "cu_seqlens", p.CuSeqlens}, {&args.ReadSlots, "read_slots", p.ReadSlots},
		{&args.WriteSlots, "write_slots", p.WriteSlots}, {&args.CheckpointSlots, "checkpoint_slots", p.CheckpointSlots},
		{&args.SequenceOrder, "sequence_order", p.SequenceOrder},
	} {
		if index.values == nil {
			continue
		}
		var content []byte
		for _, value := range index.values {
			content = binary.LittleEndian.AppendUint32(content, uint32(value))
		}
		var err error
		if *index.to, err = m.add(index.name, content, false); err != nil {
			return err
		}
	}
	resume := make([]byte, p.Sequences)
	for s, resumes := range p.Resume {
		if resumes {
			resume[s] = 1
		}
	}
	var err error
	args.Resume, err = m.add("resume", resume, false)
	return err
}

func (m *memory) placeState(p *Problem, args *ssmscan.ScanArgs) error {
	var err error
	if p.StateType != ssmscan.I8 {
		content, err := storage.Encode(string(p.StateType), p.State)
		if err != nil {
			return err
		}
		args.State, err = m.add("state", content, true)
		return err
	}
	var content, scales []byte
	for row := 0; row < len(p.State); row += p.DState {
		most := float32(0)
		for _, value := range p.State[row : row+p.DState] {
			most = max(most, float32(math.Abs(float64(value))))
		}
		scale := most / 127
		scales = binary.LittleEndian.AppendUint32(scales, math.Float32bits(scale))
		for _, value := range p.State[row : row+p.DState] {
			step := 0.0
			if scale > 0 {
				step = math.RoundToEven(float64(value / scale))
			}
			content = append(content, byte(int8(step)))
		}
	}
	if args.State, err = m.add("state", content, true); err != nil {
		return err
	}
	args.StateScale, err = m.add("state_scale", scales, true)
	return err
}

// result downloads y and the state, and looks for bytes that changed where nothing may.
func (m *memory) result(p *Problem) (*Result, error) {
	after := map[string][]byte{}
	for _, array := range m.arrays {
		have := make([]byte, len(array.before))
		if err := m.device.Download(have, array.address); err != nil {
			return nil, err
		}
		if array.writable {
			after[array.name] = append([]byte(nil), have[guard:len(have)-guard]...)
			copy(have[guard:len(have)-guard], array.before[guard:])
		}
		for i, value := range have {
			if value != array.before[i] {
				return nil, fmt.Errorf("%s: want every byte outside the results as it was, have byte %d of it changed", array.name, i-guard)
			}
		}
	}
	result := &Result{}
	y, err := storage.Decode(string(p.IO), after["y"])
	if err != nil {
		return nil, err
	}
	result.Y = narrow(y)
	if p.StateType == ssmscan.I8 {
		for i, step := range after["state"] {
			scale := math.Float32frombits(binary.LittleEndian.Uint32(after["state_scale"][4*(i/p.DState):]))
			result.State = append(result.State, float32(int8(step))*scale)
		}
		return result, nil
	}
	state, err := storage.Decode(string(p.StateType), after["state"])
	if err != nil {
		return nil, err
	}
	result.State = narrow(state)
	return result, nil
}

func narrow(values []float64) []float32 {
	found := make([]float32, len(values))
	for i, value := range values {
		found[i] = float32(value)
	}
	return found
}
