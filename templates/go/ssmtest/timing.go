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

// Timed draws the problem that a kernel is timed at: the Nano geometry, 64 heads x 64 and 8 groups, or the kernel's own
// head_dim; Mamba-1 at 8192 channels. Decode resumes from its slots, a prompt of many tokens is fresh. Kernels of the same
// types, d_state and head_dim have the same problem. The error is ErrUnsupported where the kernel does not take sequences
// of so many tokens.
func Timed(row *ssmscan.Row, sequences, tokens int) (*Problem, error) {
	shape := Shape{Lengths: repeat(tokens, sequences), Heads: 64, HeadDim: 64, DState: int(row.Spec.DState), Groups: 8}
	if shape.DState == 0 {
		shape.DState = 128
	}
	options := []Option{Types(row.Spec.IO, row.Spec.State)}
	if limits, ok := row.Limits["head_dim"]; ok {
		shape.HeadDim = int(limits[0])
	}
	if shape.HeadDim == 1 {
		shape.Heads, shape.Groups = 8192, 1
		options = append(options, Columns)
	}
	if tokens > ssmscan.DecodeTokens {
		options = append(options, Fresh(true))
	}
	// Sizes alone decide; nothing is drawn for a kernel that does not take them.
	sizes := ssmscan.Geometry{
		Tokens: int32(sequences * tokens), Sequences: int32(sequences), Heads: int32(shape.Heads), HeadDim: int32(shape.HeadDim),
		Groups: int32(shape.Groups), DState: int32(shape.DState), Longest: int32(tokens), PerColumnA: shape.HeadDim == 1,
	}
	if reason := row.Refusal(ssmscan.Problem{Geometry: sizes, IO: row.Spec.IO, State: row.Spec.State}); reason != "" {
		return nil, fmt.Errorf("%w: %s", ErrUnsupported, reason)
	}
	return Draw("timing", 7, shape, options...), nil
}

// Place uploads a problem, in as many copies as no cache holds. The error is ErrUnsupported where the kernel does not take
// it.
func Place(device *ssmscan.Device, kernel *ssmscan.Kernel, p *Problem) (*Session, error) {
	if reason := kernel.Row.Refusal(ssmscan.Problem{Geometry: p.Geometry(), IO: p.IO, State: p.StateType}); reason != "" {
		return nil, fmt.Errorf("%w: %s", ErrUnsupported, reason)
	}
	s := &Session{kernel: kernel, memory: memory{device: device}}
	var err error
	if s.plan, err = kernel.Row.Plan(kernel.Target, p.Geometry()); err != nil {
		return nil, err
	}
	slots := int64(p.Sequences) * int64(p.slotValues()) * p.StateType.Bytes()
	s.Bytes = int64(2*len(p.X)+len(p.B)+len(p.C))*p.IO.Bytes() + slots
	for _, resumes := range p.Resume {
		if resumes {
			s.Bytes += slots / int64(p.Sequences)
		}
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
