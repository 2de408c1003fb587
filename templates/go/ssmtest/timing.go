//go:build cuda && cgo

package ssmtest

import (
	"fmt"
	"time"

	"example.com/ssmscan"
)

// coldBytes is what the pools of a session hold at least, so that each call reads from memory: three times the largest L2.
const coldBytes = 3 * 128 << 20

// Session is a kernel with its arrays in device memory, for timing: several copies of all of them, which calls
// visit in turn.
type Session struct {
	kernel *ssmscan.Kernel
	plan   ssmscan.KernelPlan
	memory memory
	args   []ssmscan.ScanArgs
	next   int

	// Bytes is the fewest that one call moves: inputs and resumed states read once, y and states written once.
	Bytes int64
}

// Place uploads a problem of the Nano geometry (64 heads x 64, 8 groups) in the kernel's types: decode resumes from its
// slots, a prompt of many tokens is fresh. The error is ErrUnsupported where the kernel does not take it.
func Place(device *ssmscan.Device, kernel *ssmscan.Kernel, sequences, tokens int) (*Session, error) {
	lengths := make([]int, sequences)
	for s := range lengths {
		lengths[s] = tokens
	}
	shape := Shape{Lengths: lengths, Heads: 64, HeadDim: 64, DState: int(kernel.Row.Spec.DState), Groups: 8}
	if shape.DState == 0 {
		shape.DState = 128
	}
	options := []Option{Types(kernel.Row.Spec.IO, kernel.Row.Spec.State)}
	if tokens > ssmscan.DecodeTokens {
		options = append(options, Fresh(true))
	}
	// Sizes alone decide; nothing is drawn for a kernel that does not take them.
	sizes := ssmscan.Geometry{
		Tokens: int32(sequences * tokens), Sequences: int32(sequences), Heads: 64, HeadDim: 64, Groups: 8,
		DState: int32(shape.DState), Longest: int32(tokens),
	}
	if reason := kernel.Row.Refusal(ssmscan.Problem{Geometry: sizes, IO: kernel.Row.Spec.IO, State: kernel.Row.Spec.State}); reason != "" {
		return nil, fmt.Errorf("%w: %s", ErrUnsupported, reason)
	}
	p := Draw("timing", 7, shape, options...)
	s := &Session{kernel: kernel, memory: memory{device: device}}
	var err error
	if s.plan, err = kernel.Row.Plan(kernel.Target, p.Geometry()); err != nil {
		return nil, err
	}
	slots := int64(sequences) * int64(p.slotValues()) * max(p.StateType.Bytes(), 1)
	s.Bytes = int64(2*len(p.X)+len(p.B)+len(p.C))*p.IO.Bytes() + slots
	if tokens <= ssmscan.DecodeTokens {
		s.Bytes += slots
	}
	copies := 1 + int(coldBytes/s.Bytes)
	for range min(copies, 64) {
		args, err := s.memory.place(p)
		if err != nil {
			return nil, s.fail(err)
		}
		args.Lanes, args.Rows, args.Chunk = s.plan.Lanes, s.plan.Rows, s.plan.Chunk
		if s.plan.WorkspaceBytes > 0 {
			if args.Workspace, err = s.memory.add("workspace", make([]byte, s.plan.WorkspaceBytes), true); err != nil {
				return nil, s.fail(err)
			}
			args.WorkspaceBytes = s.plan.WorkspaceBytes
		}
		s.args = append(s.args, *args)
	}
	return s, nil
}

func (s *Session) fail(err error) error {
	_ = s.memory.free() // the first error is the one to tell
	return err
}

// Launch runs the kernel over the next copy.
func (s *Session) Launch(stream uintptr) error {
	args := &s.args[s.next%len(s.args)]
	s.next++
	return s.kernel.Launch(stream, &s.plan, args)
}

// LaunchCost is the CPU's time of cuLaunchKernel alone, over so many launches.
func (s *Session) LaunchCost(stream uintptr, count int) (time.Duration, error) {
	return s.kernel.LaunchCost(stream, &s.plan, &s.args[0], count)
}

// Close frees the memory.
func (s *Session) Close() error { return s.memory.free() }
