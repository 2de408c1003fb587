//go:build cuda && cgo

// A stack of scan layers at the Nano geometry: prefill, then decode steps, with random inputs to the scan.
//
//	CGO_ENABLED=1 go run -tags cuda . -layers 23 -prompt 4096 -steps 256
//
// Some rows of the first and the last layer are held against a float64 reference. What is printed: tokens per second, and
// the share of the time that each kernel takes.
package main

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"time"

	"example.com/ssmscan"
	"example.com/ssmscan/ssmtest"
)

const groups, headDim, dState = 8, 64, 128

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "example:", err)
		os.Exit(1)
	}
}

type sizes struct{ layers, prompt, steps, sequences, heads int }

func run() error {
	var s sizes
	ordinal := flag.Int("device", 0, "number of the GPU")
	proven := flag.Bool("proven", false, "take only images that were proven on a device")
	flag.IntVar(&s.layers, "layers", 23, "layers")
	flag.IntVar(&s.prompt, "prompt", 4096, "tokens of each prompt")
	flag.IntVar(&s.steps, "steps", 256, "decode steps")
	flag.IntVar(&s.sequences, "sequences", 16, "sequences")
	flag.IntVar(&s.heads, "heads", 64, "heads, a multiple of 8")
	flag.Parse()
	if s.layers < 1 || s.prompt < 1 || s.steps < 1 || s.sequences < 1 || s.heads < groups || s.heads%groups != 0 {
		return fmt.Errorf("want at least one layer, token, step and sequence, and a multiple of %d heads, have %+v", groups, s)
	}

	opened := time.Now()
	device, err := ssmscan.Open(*ordinal)
	if err != nil {
		return err
	}
	defer device.Close()
	loading := time.Now()
	scanner, err := device.Scanner(ssmscan.Options{RequireProven: *proven}, everyImage...)
	if err != nil {
		return err
	}
	defer scanner.Close()
	fmt.Printf("%s: %d kernels loaded in %v, after %v for the context\n", device.GPU, len(scanner.Kernels()),
		time.Since(loading).Round(time.Millisecond), loading.Sub(opened).Round(time.Millisecond))
	stack, err := newStack(device, scanner, s)
	if err != nil {
		return err
	}
	defer stack.close()
	return stack.run()
}

// input is one array of all tokens, on the host and on the device.
type input struct {
	host    []float32
	address uint64
	row     int // elements of a token
}

// layer is what differs from layer to layer: A, D, dt_bias and the pool.
type layer struct {
	a, d, bias              []float32
	aAt, dAt, biasAt, state uint64
}

type stack struct {
	sizes
	device          *ssmscan.Device
	scanner         *ssmscan.Scanner
	prefill, decode *ssmscan.Plan
	x, dt, b, c     input // the prompt's tokens, then those of the steps
	y               uint64
	layers          []layer
	prefillBatch    *ssmscan.Batch
	decodeBatch     *ssmscan.Batch
	blob, workspace uint64
	memory          []uint64
}

func newStack(device *ssmscan.Device, scanner *ssmscan.Scanner, s sizes) (*stack, error) {
	k := &stack{sizes: s, device: device, scanner: scanner}
	bounds := ssmscan.Bounds{
		Tokens: int32(s.prompt), Sequences: 1, Heads: int32(s.heads), HeadDim: headDim, Groups: groups, DState: dState,
		IO: ssmscan.F32, State: ssmscan.F32, PadSlot: -1,
	}
	var err error
	if k.prefill, err = scanner.Plan(bounds); err != nil {
		return nil, err
	}
	bounds.Tokens, bounds.Sequences, bounds.Longest = int32(s.sequences), int32(s.sequences), 1
	if k.decode, err = scanner.Plan(bounds); err != nil {
		return nil, err
	}
	k.prefillBatch, k.decodeBatch = k.prefill.NewBatch(int64(s.sequences)), k.decode.NewBatch(int64(s.sequences))
	random := rand.New(rand.NewPCG(1, 2))
	tokens := s.prompt + s.steps*s.sequences
	inner := s.heads * headDim
	for _, array := range []struct {
		to  *input
		row int
	}{{&k.x, inner}, {&k.dt, s.heads}, {&k.b, groups * dState}, {&k.c, groups * dState}} {
		host := make([]float32, tokens*array.row)
		for i := range host {
			host[i] = float32(random.NormFloat64())
		}
		*array.to = input{host, k.upload(&err, host), array.row}
	}
	uniform := func(low, high float64) []float32 {
		values := make([]float32, s.heads)
		for i := range values {
			values[i] = float32(low + (high-low)*random.Float64())
		}
		return values
	}
	for range s.layers {
		l := layer{a: uniform(-16, -1), d: uniform(-1, 1), bias: uniform(-6, -3)}
		l.aAt, l.dAt, l.biasAt = k.upload(&err, l.a), k.upload(&err, l.d), k.upload(&err, l.bias)
		l.state = k.alloc(&err, 4*s.sequences*inner*dState)
		k.layers = append(k.layers, l)
	}
	k.y = k.alloc(&err, 4*max(s.prompt, s.sequences)*inner)
	k.blob = k.alloc(&err, int(max(k.prefill.BatchBytes, k.decode.BatchBytes)))
	k.workspace = k.alloc(&err, int(max(k.prefill.WorkspaceBytes, k.decode.WorkspaceBytes, 256)))
	if err != nil {
		k.close()
		return nil, err
	}
	return k, nil
}

func (k *stack) alloc(err *error, bytes int) uint64 {
	if *err != nil {
		return 0
	}
	var address uint64
	if address, *err = k.device.Alloc(bytes); *err == nil {
		k.memory = append(k.memory, address)
	}
	return address
}

func (k *stack) upload(err *error, values []float32) uint64 {
	bytes := make([]byte, 0, 4*len(values))
	for _, value := range values {
		bytes = binary.LittleEndian.AppendUint32(bytes, math.Float32bits(value))
	}
	address := k.alloc(err, len(bytes))
	if *err == nil {
		*err = k.device.Upload(address, bytes)
	}
	return address
}

func (k *stack) close() {
	for _, address := range k.memory {
		_ = k.device.Free(address)
	}
}

// step runs one batch through all layers: one upload serves them all.
func (k *stack) step(plan *ssmscan.Plan, batch *ssmscan.Batch, token int) error {
	if err := k.device.UploadAsync(0, k.blob, batch.Bytes()); err != nil {
		return err
	}
	inner := int64(k.heads * headDim)
	for i := range k.layers {
		l := &k.layers[i]
		args := ssmscan.ScanArgs{
			X: k.x.at(token), DT: k.dt.at(token), B: k.b.at(token), C: k.c.at(token), Y: k.y,
			A: l.aAt, D: l.dAt, DTBias: l.biasAt, State: l.state,
			XStride: inner, YStride: inner, DTStride: int64(k.heads), BStride: groups * dState, CStride: groups * dState,
			StateStride: inner * dState, Slots: int64(k.sequences), Flags: ssmscan.Softplus | ssmscan.DTFloat32,
			Workspace: k.workspace, WorkspaceBytes: plan.WorkspaceBytes,
		}
		if err := k.scanner.Launch(0, plan, &args, k.blob); err != nil {
			return err
		}
	}
	return nil
}

func (in input) at(token int) uint64 { return in.address + uint64(4*token*in.row) }

func (k *stack) run() error {
	events := [3]*ssmscan.Event{}
	for i := range events {
		var err error
		if events[i], err = k.device.NewEvent(); err != nil {
			return err
		}
		defer events[i].Close()
	}
	found := map[int][]float32{} // y of the last layer, by the token of sequence 0
	if err := events[0].Record(0); err != nil {
		return err
	}
	for s := range k.sequences {
		if err := k.prefillBatch.Set([]int32{0, int32(k.prompt)}, []int32{int32(s)}, []bool{true}); err != nil {
			return err
		}
		if err := k.step(k.prefill, k.prefillBatch, 0); err != nil {
			return err
		}
	}
	if err := events[1].Record(0); err != nil {
		return err
	}
	var err error
	if found[k.prompt-1], err = k.read(k.prompt - 1); err != nil {
		return err
	}
	offsets, slots, fresh := make([]int32, k.sequences+1), make([]int32, k.sequences), make([]bool, k.sequences)
	for s := range k.sequences {
		offsets[s+1], slots[s] = int32(s+1), int32(s)
	}
	if err := k.decodeBatch.Set(offsets, slots, fresh); err != nil {
		return err
	}
	decoding, err := k.device.NewEvent()
	if err != nil {
		return err
	}
	defer decoding.Close()
	if err := decoding.Record(0); err != nil {
		return err
	}
	// The CPU's time is that of the first launches: after many of them the driver's queue is full, and each waits for the GPU.
	const queued = 256
	first := max(1, min(k.steps, queued/len(k.layers)))
	start := time.Now()
	var launching time.Duration
	for step := range k.steps {
		if err := k.step(k.decode, k.decodeBatch, k.prompt+step*k.sequences); err != nil {
			return err
		}
		if step == first-1 {
			launching = time.Since(start) / time.Duration(first*len(k.layers))
		}
	}
	if err := events[2].Record(0); err != nil {
		return err
	}
	if found[k.prompt+k.steps-1], err = k.read(0); err != nil {
		return err
	}
	prefill, err := events[1].Since(events[0])
	if err != nil {
		return err
	}
	decode, err := events[2].Since(decoding)
	if err != nil {
		return err
	}
	k.report(prefill, decode, launching)
	return k.check(found)
}

// read downloads a token's row of y.
func (k *stack) read(token int) ([]float32, error) {
	bytes := make([]byte, 4*k.heads*headDim)
	if err := k.device.Download(bytes, k.y+uint64(token*len(bytes))); err != nil {
		return nil, err
	}
	values := make([]float32, len(bytes)/4)
	for i := range values {
		values[i] = math.Float32frombits(binary.LittleEndian.Uint32(bytes[4*i:]))
	}
	return values, nil
}

func (k *stack) report(prefill, decode, launching time.Duration) {
	rate := func(tokens int, elapsed time.Duration) float64 { return float64(tokens) / elapsed.Seconds() }
	fmt.Printf("prefill: %d x %d tokens through %d layers in %v: %.0f tokens/s\n", k.sequences, k.prompt, len(k.layers),
		prefill.Round(time.Microsecond), rate(k.sequences*k.prompt, prefill))
	fmt.Printf("decode: %d steps of %d sequences in %v: %.0f tokens/s, %.2f us of CPU a launch\n", k.steps, k.sequences,
		decode.Round(time.Microsecond), rate(k.steps*k.sequences, decode),
		float64(launching)/float64(time.Microsecond))
	total := prefill + decode
	for _, phase := range []struct {
		name    string
		plan    *ssmscan.Plan
		elapsed time.Duration
	}{{"prefill", k.prefill, prefill}, {"decode", k.decode, decode}} {
		for _, part := range phase.plan.Parts {
			fmt.Printf("%5.1f %% %s %s (%s; %s)\n", 100*phase.elapsed.Seconds()/total.Seconds(), phase.name, part.Kernel.Row.ID,
				part.Choice.Why, part.Kernel.Proof)
		}
	}
}

// check holds rows of the last layer's y, at the last token of the prompt and at the last step of sequence 0, against the
// reference: the first and the last head, four rows of each.
func (k *stack) check(found map[int][]float32) error {
	const rows = 4
	worst, allowed, operands := 0.0, 0.0, 0.0
	for _, plan := range []*ssmscan.Plan{k.prefill, k.decode} {
		for _, part := range plan.Parts {
			operands = max(operands, part.Kernel.Row.OperandError())
		}
	}
	l := k.layers[len(k.layers)-1]
	for _, head := range []int{0, k.heads - 1} {
		group := head / (k.heads / groups)
		p := &ssmtest.Problem{
			Tokens: k.prompt + k.steps, Sequences: 1, Heads: 1, HeadDim: rows, Groups: 1, DState: dState, Slots: 1,
			IO: ssmscan.F32, StateType: ssmscan.F32, Softplus: true, PadSlot: -1,
			A: l.a[head : head+1], D: l.d[head : head+1], DTBias: l.bias[head : head+1],
			State: make([]float32, rows*dState), ReadSlots: []int32{0}, WriteSlots: []int32{0}, Resume: []bool{false},
			CuSeqlens: []int32{0, int32(k.prompt + k.steps)},
		}
		for t := range p.Tokens {
			token := t
			if t >= k.prompt {
				token = k.prompt + (t-k.prompt)*k.sequences // sequence 0 of the step
			}
			cut := func(in input, first, count int) []float32 { return in.host[token*in.row+first:][:count] }
			p.X = append(p.X, cut(k.x, head*headDim, rows)...)
			p.DT = append(p.DT, cut(k.dt, head, 1)...)
			p.B = append(p.B, cut(k.b, group*dState, dState)...)
			p.C = append(p.C, cut(k.c, group*dState, dState)...)
		}
		truth := ssmtest.Reference(p)
		allowed = max(allowed, p.Bounds()[0]+operands)
		for token, have := range found {
			var off, scale float64
			for row := range rows {
				want := truth.Y[token*rows+row]
				off += (float64(have[head*headDim+row]) - want) * (float64(have[head*headDim+row]) - want)
				scale += truth.YTerms[token*rows+row] * truth.YTerms[token*rows+row]
			}
			worst = max(worst, math.Sqrt(off/scale))
		}
	}
	fmt.Printf("rows of the last layer against float64: relative error %.1e of %.1e\n", worst, allowed)
	if !(worst <= allowed) {
		return fmt.Errorf("want a relative error of at most %.1e, have %.1e", allowed, worst)
	}
	return nil
}
