//go:build cuda && cgo

package ssmtest

import (
	"fmt"
	"reflect"
	"time"

	"example.com/ssmscan"
)

// coldBytes is what the pools of a session hold at least, so that each call reads from memory: three times the largest L2.
const coldBytes = 3 * 128 << 20

// Session is a problem's arrays in device memory, for timing: several copies of all of them, which calls visit in turn.
type Session struct {
	problem   *Problem
	memory    memory
	args      []ssmscan.ScanArgs
	workspace uint64
	held      int64 // bytes of the workspace
	next      int

	kernel *ssmscan.Kernel
	plan   ssmscan.KernelPlan

	// Bytes is the fewest that one call moves: inputs and resumed states read once, y and states written once.
	Bytes int64
}

// timedShape is the Nano geometry, 64 heads x 64 and 8 groups, or the kernel's own head_dim; Mamba-1 at 8192 channels.
func timedShape(row *ssmscan.Row, sequences, tokens int) Shape {
	shape := Shape{Lengths: repeat(tokens, sequences), Heads: 64, HeadDim: 64, DState: int(row.Spec.DState), Groups: 8}
	if shape.DState == 0 {
		shape.DState = 128
	}
	if limits, ok := row.Limits["head_dim"]; ok {
		shape.HeadDim = int(limits[0])
	}
	if shape.HeadDim == 1 {
		shape.Heads, shape.Groups = 8192, 1
	}
	return shape
}

// TimedName names the problem that a kernel is timed at. Kernels of one name have one problem.
func TimedName(row *ssmscan.Row, sequences, tokens int) string {
	shape := timedShape(row, sequences, tokens)
	return fmt.Sprintf("timing %dx%d n%d p%d %s s%s", sequences, tokens, shape.DState, shape.HeadDim, row.Spec.IO, row.Spec.State)
}

// Timed draws the problem that a kernel is timed at: the Nano geometry, 64 heads x 64 and 8 groups, or the kernel's own
// head_dim; Mamba-1 at 8192 channels. Decode resumes from its slots, a prompt of many tokens is fresh. The error is
// ErrUnsupported where the kernel does not take sequences of so many tokens.
func Timed(row *ssmscan.Row, sequences, tokens int) (*Problem, error) {
	shape := timedShape(row, sequences, tokens)
	options := []Option{Types(row.Spec.IO, row.Spec.State)}
	if shape.HeadDim == 1 {
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
		return nil, fmt.Errorf("%w: %s: %s", ErrUnsupported, row.ID, reason)
	}
	return Draw(TimedName(row, sequences, tokens), 7, shape, options...), nil
}

// Place uploads a problem, in as many copies as no cache holds.
func Place(device *ssmscan.Device, p *Problem) (*Session, error) {
	s := &Session{problem: p, memory: memory{device: device}}
	slots := int64(p.Sequences) * int64(p.slotValues()) * p.StateType.Bytes()
	s.Bytes = int64(2*len(p.X)+len(p.B)+len(p.C))*p.IO.Bytes() + slots
	for _, resumes := range p.Resume {
		if resumes {
			s.Bytes += slots / int64(p.Sequences)
		}
	}
	first, err := s.memory.place(p)
	if err != nil {
		return nil, s.fail(err)
	}
	s.args = append(s.args, *first)
	placed := s.memory.arrays
	for range min(coldBytes/s.Bytes, 63) {
		args, err := s.memory.again(placed, *first)
		if err != nil {
			return nil, s.fail(err)
		}
		s.args = append(s.args, args)
	}
	return s, nil
}

// again uploads arrays once more and gives arguments that point at these.
func (m *memory) again(placed []*array, args ssmscan.ScanArgs) (ssmscan.ScanArgs, error) {
	moved := map[uint64]uint64{}
	for _, array := range placed {
		address, err := m.add(array.name, array.before[guard:len(array.before)-guard], array.writable)
		if err != nil {
			return args, err
		}
		moved[array.address+guard] = address
	}
	fields := reflect.ValueOf(&args).Elem()
	for i := range fields.NumField() {
		if field := fields.Field(i); field.Kind() == reflect.Uint64 && field.Uint() != 0 {
			field.SetUint(moved[field.Uint()])
		}
	}
	return args, nil
}

// Use makes a kernel the one that Launch runs. All copies share its workspace. The error is ErrUnsupported where it does not
// take the problem.
func (s *Session) Use(kernel *ssmscan.Kernel) error {
	plan, err := planned(kernel, s.problem)
	if err != nil {
		return err
	}
	if plan.WorkspaceBytes > s.held {
		if s.workspace, err = s.memory.add("workspace", make([]byte, plan.WorkspaceBytes), true); err != nil {
			return err
		}
		s.held = plan.WorkspaceBytes
	}
	s.kernel, s.plan = kernel, *plan
	for i := range s.args {
		fill(&s.args[i], plan, s.workspace, s.held)
	}
	return nil
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
