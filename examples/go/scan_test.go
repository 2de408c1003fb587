//go:build cuda && cgo

package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"testing"
	"time"

	"example.com/ssmscan"
	"example.com/ssmscan/ssmtest"
)

// open gives a GPU with every kernel loaded, or skips where there is none.
func open(tb testing.TB, ordinal int) *ssmscan.Scanner {
	tb.Helper()
	device, err := ssmscan.Open(ordinal)
	if errors.Is(err, ssmscan.ErrNoCUDA) {
		tb.Skipf("ErrNoCUDA: %v", err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	scanner, err := device.Scanner(ssmscan.Options{}, everyImage...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := errors.Join(scanner.Close(), device.Close()); err != nil {
			tb.Error(err)
		}
	})
	return scanner
}

func TestKernelsThatAreSelectedAreRight(t *testing.T) { ssmtest.Run(t, ssmtest.Scanner(open(t, 0))) }

// mixed is a batch of decode and prefill through a plan, its blob and one pool; it gives y by sequence and the pool.
type mixed struct {
	scanner *ssmscan.Scanner
	problem *ssmtest.Problem
	plan    *ssmscan.Plan
	truth   *ssmtest.Truth
}

func newMixed(t testing.TB, scanner *ssmscan.Scanner, lengths []int, invariant bool) *mixed {
	t.Helper()
	shape := ssmtest.Shape{Lengths: lengths, Heads: 8, HeadDim: 64, DState: 128, Groups: 2}
	p := ssmtest.Draw("mixed", 5, shape, ssmtest.Fresh(false))
	plan, err := scanner.Plan(ssmscan.Bounds{
		Tokens: 1024, Sequences: 8, Heads: 8, HeadDim: 64, Groups: 2, DState: 128, IO: "f32", State: "f32", PadSlot: -1,
		Invariant: invariant,
	})
	if err != nil {
		t.Fatal(err)
	}
	return &mixed{scanner: scanner, problem: p, plan: plan}
}

func floats(values []float32) []byte {
	var found []byte
	for _, value := range values {
		found = binary.LittleEndian.AppendUint32(found, math.Float32bits(value))
	}
	return found
}

// array is what one field of the arguments points at.
type array struct {
	at      *uint64
	content []byte
}

// arrays gives the contents of all arrays. They are as long as the bounds; what the batch does not use is NaN and must not
// matter.
func (m *mixed) arrays(args *ssmscan.ScanArgs) []array {
	p, plan := m.problem, m.plan
	long := func(values []float32, row int) []byte {
		nan := bytes.Repeat([]byte{0xFF}, 4*(int(plan.Tokens)*row-len(values)))
		return append(floats(values), nan...)
	}
	inner, columns := p.Heads*p.HeadDim, p.Groups*p.DState
	return []array{
		{&args.X, long(p.X, inner)}, {&args.DT, long(p.DT, p.Heads)}, {&args.B, long(p.B, columns)}, {&args.C, long(p.C, columns)},
		{&args.A, floats(p.A)}, {&args.D, floats(p.D)}, {&args.DTBias, floats(p.DTBias)}, {&args.Y, long(nil, inner)},
		{&args.State, floats(p.State)},
	}
}

// blob is the bytes of the batch.
func (m *mixed) blob(t testing.TB) []byte {
	t.Helper()
	p, batch := m.problem, m.plan.NewBatch(int64(m.problem.Slots))
	fresh := make([]bool, p.Sequences)
	for s := range fresh {
		fresh[s] = !p.Resume[s]
	}
	if err := batch.Set(p.CuSeqlens, p.ReadSlots, fresh); err != nil {
		t.Fatal(err)
	}
	return batch.Bytes()
}

// place uploads the arrays and the batch's blob, and gives arguments and the blob's address.
func (m *mixed) place(t testing.TB) (*ssmscan.ScanArgs, uint64) {
	t.Helper()
	device, p, plan := m.scanner.Device(), m.problem, m.plan
	alloc := func(bytes int) uint64 {
		address, err := device.Alloc(bytes)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = device.Free(address) })
		return address
	}
	inner := p.Heads * p.HeadDim
	args := &ssmscan.ScanArgs{
		XStride: int64(inner), YStride: int64(inner), DTStride: int64(p.Heads), BStride: int64(p.Groups * p.DState),
		CStride: int64(p.Groups * p.DState), StateStride: int64(inner * p.DState), Slots: int64(p.Slots),
		Flags: ssmscan.Softplus | ssmscan.DTFloat32,
	}
	for _, array := range m.arrays(args) {
		*array.at = alloc(len(array.content))
	}
	if plan.WorkspaceBytes > 0 {
		args.Workspace, args.WorkspaceBytes = alloc(int(plan.WorkspaceBytes)), plan.WorkspaceBytes
	}
	blob := alloc(len(m.blob(t)))
	m.upload(t, args, blob)
	return args, blob
}

// upload fills the arrays and the blob that arguments of a batch of this size point at.
func (m *mixed) upload(t testing.TB, args *ssmscan.ScanArgs, blob uint64) {
	t.Helper()
	for _, array := range append(m.arrays(args), array{&blob, m.blob(t)}) {
		if err := m.scanner.Device().Upload(*array.at, array.content); err != nil {
			t.Fatal(err)
		}
	}
}

func (m *mixed) run(t *testing.T, stream uintptr) *ssmtest.Result {
	return m.read(t, stream, m.launch(t, stream))
}

// launch uploads everything and does not wait for the launch.
func (m *mixed) launch(t *testing.T, stream uintptr) *ssmscan.ScanArgs {
	t.Helper()
	args, blob := m.place(t)
	if err := m.scanner.Launch(stream, m.plan, args, blob); err != nil {
		t.Fatal(err)
	}
	return args
}

// read waits for a launch and downloads what it gave.
func (m *mixed) read(t *testing.T, stream uintptr, args *ssmscan.ScanArgs) *ssmtest.Result {
	t.Helper()
	device, p, plan := m.scanner.Device(), m.problem, m.plan
	if err := device.Synchronize(stream); err != nil {
		t.Fatal(err)
	}
	read := func(address uint64, count int) []byte {
		content := make([]byte, 4*count)
		if err := device.Download(content, address); err != nil {
			t.Fatal(err)
		}
		return content
	}
	values := func(content []byte) []float32 {
		found := make([]float32, len(content)/4)
		for i := range found {
			found[i] = math.Float32frombits(binary.LittleEndian.Uint32(content[4*i:]))
		}
		return found
	}
	y := read(args.Y, int(plan.Tokens)*p.Heads*p.HeadDim)
	if past := y[4*len(p.X):]; !bytes.Equal(past, make([]byte, len(past))) {
		t.Error("y past the batch: want 0, have other values")
	}
	result := &ssmtest.Result{Y: values(y[:4*len(p.X)]), State: values(read(args.State, len(p.State)))}
	for _, part := range plan.Parts {
		t.Logf("%d tokens by %s in %d launches", p.Tokens, part.Kernel.Row.ID, len(part.Launches))
		result.OperandError = max(result.OperandError, part.Kernel.Row.OperandError())
	}
	return result
}

func (m *mixed) check(t *testing.T, have *ssmtest.Result) {
	t.Helper()
	if m.truth == nil {
		m.truth = ssmtest.Reference(m.problem)
	}
	if _, err := ssmtest.Check(m.problem, m.truth, have); err != nil {
		t.Error(err)
	}
}

func TestAMixedBatchIsRight(t *testing.T) {
	scanner := open(t, 0)
	m := newMixed(t, scanner, []int{1, 20, 3, 40, 1, 8, 9}, false)
	if len(m.plan.Parts) < 2 {
		t.Errorf("want a plan of several parts, have %+v", m.plan.Parts)
	}
	m.check(t, m.run(t, 0))
}

func TestInvariantBitsDoNotChangeWithTheBatch(t *testing.T) {
	scanner := open(t, 0)
	lengths := []int{1, 20, 3, 40, 1, 8, 9}
	whole := newMixed(t, scanner, lengths, true)
	result := whole.run(t, 0)
	whole.check(t, result)
	p := whole.problem
	inner := p.Heads * p.HeadDim
	for s, length := range lengths {
		lone := newMixed(t, scanner, []int{length}, true)
		q, first := lone.problem, int(p.CuSeqlens[s])
		q.X, q.DT = p.X[first*inner:][:length*inner], p.DT[first*p.Heads:][:length*p.Heads]
		q.B, q.C = p.B[first*p.Groups*p.DState:][:length*p.Groups*p.DState], p.C[first*p.Groups*p.DState:][:length*p.Groups*p.DState]
		q.A, q.D, q.DTBias, q.State, q.Slots = p.A, p.D, p.DTBias, p.State, p.Slots
		q.ReadSlots, q.WriteSlots, q.Resume = p.ReadSlots[s:s+1], p.WriteSlots[s:s+1], p.Resume[s:s+1]
		have := lone.run(t, 0)
		for i, value := range have.Y {
			if want := result.Y[first*inner+i]; math.Float32bits(value) != math.Float32bits(want) {
				t.Errorf("sequence %d of %d tokens, element %d: want the bits that it has in the batch, %v, have %v", s, length, i, want, value)
				break
			}
		}
	}
}

// newStream gives a stream that is there as long as the test.
func newStream(t *testing.T, device *ssmscan.Device) uintptr {
	t.Helper()
	stream, err := device.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.DestroyStream(stream); err != nil {
			t.Error(err)
		}
	})
	return stream
}

func TestManyGoroutinesWithStreamsOfTheirOwn(t *testing.T) {
	scanner := open(t, 0)
	for worker := range 8 {
		m := newMixed(t, scanner, []int{1, 12 + worker, 3}, worker%3 == 0)
		stream := newStream(t, scanner.Device())
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for range 3 {
				m.check(t, m.run(t, stream))
			}
		})
	}
}

// openTwo gives two GPUs with every kernel loaded, or skips where there are not so many.
func openTwo(t *testing.T) [2]*ssmscan.Scanner {
	t.Helper()
	count, err := ssmscan.Devices()
	if errors.Is(err, ssmscan.ErrNoCUDA) {
		t.Skipf("ErrNoCUDA: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if count < 2 {
		t.Skipf("want two devices, have %d", count)
	}
	return [2]*ssmscan.Scanner{open(t, 0), open(t, 1)}
}

// sameBits holds results of two devices of one model against each other.
func sameBits(t *testing.T, first, second *ssmtest.Result) {
	t.Helper()
	for _, both := range [][2][]float32{{first.Y, second.Y}, {first.State, second.State}} {
		if !bytes.Equal(floats(both[0]), floats(both[1])) {
			t.Error("want the same bits on both devices, have others")
		}
	}
}

// Each goroutine has a launch in flight on both devices, and begins with another one each time.
func TestGoroutinesOnTwoDevicesAtOnce(t *testing.T) {
	scanners := openTwo(t)
	alike := scanners[0].GPU == scanners[1].GPU
	for worker := range 8 {
		var batches [2]*mixed
		var streams [2]uintptr
		for device, scanner := range scanners {
			batches[device] = newMixed(t, scanner, []int{1, 12 + worker, 3}, worker%3 == 0)
			streams[device] = newStream(t, scanner.Device())
		}
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for turn := range 3 {
				var args [2]*ssmscan.ScanArgs
				var results [2]*ssmtest.Result
				for i := range batches {
					device := (worker + turn + i) % 2
					args[device] = batches[device].launch(t, streams[device])
				}
				for device, m := range batches {
					results[device] = m.read(t, streams[device], args[device])
					m.check(t, results[device])
					batches[1].truth = batches[0].truth // one problem
				}
				if alike {
					sameBits(t, results[0], results[1])
				}
			}
		})
	}
}

// Every kernel that is loaded runs cases of its own on both devices, several kernels at a time.
func TestEveryKernelOnTwoDevicesAtOnce(t *testing.T) {
	scanners := openTwo(t)
	alike := scanners[0].GPU == scanners[1].GPU
	for number, image := range scanners[0].Kernels() {
		id := image.Row.ID
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			taken := 0
			for _, problem := range ssmtest.CasesOf(image.Row)[:2] {
				var results [2]*ssmtest.Result
				var truth *ssmtest.Truth
				for i := range scanners {
					device := (number + i) % 2
					have, err := ssmtest.Kernel(scanners[device].Device(), scanners[device].Loaded(id))(problem)
					if errors.Is(err, ssmtest.ErrUnsupported) {
						break
					}
					if err != nil {
						t.Fatalf("device %d: %v", device, err)
					}
					if truth == nil {
						taken++
						truth = ssmtest.Reference(problem)
					}
					if _, err := ssmtest.Check(problem, truth, have); err != nil {
						t.Errorf("device %d, %v: %v", device, problem, err)
					}
					results[device] = have
				}
				if alike && truth != nil {
					sameBits(t, results[0], results[1])
				}
			}
			if taken == 0 {
				t.Errorf("want a case that it takes, have none")
			}
		})
	}
}

// The launches of a plan of several kernels, none of which ran before, are captured; the graph then runs two batches of
// other lengths.
func TestACapturedPlanRunsOtherContents(t *testing.T) {
	scanner := open(t, 0)
	device := scanner.Device()
	first := newMixed(t, scanner, []int{1, 20, 3, 40, 1, 8, 9}, false)
	if len(first.plan.Parts) < 2 {
		t.Errorf("want a plan of several parts, have %+v", first.plan.Parts)
	}
	args, blob := first.place(t)
	stream := newStream(t, device)
	graph, err := device.Capture(stream, func() error { return scanner.Launch(stream, first.plan, args, blob) })
	if err != nil {
		t.Fatal(err)
	}
	y := make([]byte, 4)
	if err := errors.Join(device.Synchronize(stream), device.Download(y, args.Y)); err != nil {
		t.Fatal(err)
	}
	if value := math.Float32frombits(binary.LittleEndian.Uint32(y)); value == value {
		t.Errorf("y after the capture: want NaN, as nothing ran, have %v", value)
	}
	for _, lengths := range [][]int{{1, 20, 3, 40, 1, 8, 9}, {33, 1, 2, 1, 90, 1, 1}} {
		m := newMixed(t, scanner, lengths, false)
		m.plan = first.plan
		m.upload(t, args, blob)
		if err := graph.Launch(stream); err != nil {
			t.Fatal(err)
		}
		m.check(t, m.read(t, stream, args))
	}
	if err := graph.Close(); err != nil {
		t.Error(err)
	}
}

// The first launch of every kernel is within a capture.
func TestEveryKernelIsCaptured(t *testing.T) {
	scanner := open(t, 0)
	for _, image := range scanner.Kernels() {
		captured := ssmtest.Captured(scanner.Device(), scanner.Loaded(image.Row.ID))
		t.Run(image.Row.ID, func(t *testing.T) { ssmtest.RunCases(t, captured, ssmtest.CasesOf(image.Row)[:2]...) })
	}
}

func TestACaptureOfAnythingButLaunchesIsAnError(t *testing.T) {
	device := open(t, 0).Device()
	stream := newStream(t, device)
	var driver *ssmscan.DriverError
	graph, err := device.Capture(stream, func() error {
		_, err := device.Alloc(1)
		return err
	})
	if graph != nil || !errors.As(err, &driver) || driver.Op != "cuMemAlloc_v2" {
		t.Errorf("memory taken during a capture: want a DriverError of cuMemAlloc_v2, have %v and %v", graph, err)
	}
	graph, err = device.Capture(stream, func() error { return nil })
	if err != nil {
		t.Fatalf("an empty capture after that: %v", err)
	}
	if err := errors.Join(graph.Launch(stream), device.Synchronize(stream), graph.Close()); err != nil {
		t.Error(err)
	}
}

func TestLaunchesAllocateNothingAndACallersContextWillDo(t *testing.T) {
	scanner := open(t, 0)
	device, err := ssmscan.OpenContext(scanner.Device().Context())
	if err != nil {
		t.Fatal(err)
	}
	if device.GPU != scanner.Device().GPU {
		t.Errorf("the caller's context: want %+v, have %+v", scanner.Device().GPU, device.GPU)
	}
	theirs, err := device.Scanner(ssmscan.Options{}, everyImage...)
	if err != nil {
		t.Fatal(err)
	}
	m := newMixed(t, theirs, []int{2, 30}, false)
	m.check(t, m.run(t, 0))
	wrong := ssmscan.ScanArgs{X: 1} // refused before anything is launched
	var invalid *ssmscan.InvalidProblemError
	if err := theirs.Launch(0, m.plan, &wrong, 256); !errors.As(err, &invalid) {
		t.Errorf("an odd address: want an InvalidProblemError, have %v", err)
	}
	args, blob := m.place(t)
	allocations := testing.AllocsPerRun(5, func() {
		if err := theirs.Launch(0, m.plan, args, blob); err != nil {
			t.Fatal(err)
		}
	})
	if allocations != 0 {
		t.Errorf("a launch: want no allocation, have %v", allocations)
	}
	if err := errors.Join(device.Synchronize(0), theirs.Close(), device.Close()); err != nil {
		t.Error(err)
	}
}

func TestASessionForTimingRunsOverItsCopies(t *testing.T) {
	scanner := open(t, 0)
	shape := ssmtest.Shape{Lengths: []int{9, 70}, Heads: 2, HeadDim: 64, DState: 128, Groups: 1}
	p := ssmtest.Draw("session", 3, shape, ssmtest.Gate)
	session, err := ssmtest.Place(scanner.Device(), p)
	if err != nil {
		t.Fatal(err)
	}
	// x, y and z, B and C, and two states read and written, of which z is not counted.
	if want := int64(4 * (2*79*2*64 + 2*79*128 + 2*2*2*64*128)); session.Bytes != want {
		t.Errorf("want %d bytes, have %d", want, session.Bytes)
	}
	used := 0
	for _, image := range scanner.Kernels() {
		err := session.Use(scanner.Loaded(image.Row.ID))
		if errors.Is(err, ssmtest.ErrUnsupported) {
			continue
		}
		used++
		for range 70 { // all copies, and the first ones again
			if err == nil {
				err = session.Launch(0)
			}
		}
		if err != nil {
			t.Errorf("%s: %v", image.Row.ID, err)
		}
	}
	if used < 2 {
		t.Errorf("want several kernels that take the problem, have %d", used)
	}
	if err := errors.Join(scanner.Device().Synchronize(0), session.Close()); err != nil {
		t.Error(err)
	}
}

// benchmark times the kernel that selection picks for sequences of so many tokens at the Nano geometry, in f32.
func benchmark(b *testing.B, sequences, tokens int) {
	scanner := open(b, 0)
	choice, err := scanner.Select(ssmscan.Problem{
		Geometry: ssmscan.Geometry{
			Tokens: int32(sequences * tokens), Sequences: int32(sequences), Heads: 64, HeadDim: 64, Groups: 8, DState: 128,
			Longest: int32(tokens),
		},
		IO: ssmscan.F32, State: ssmscan.F32,
	}, false)
	if err != nil {
		b.Fatal(err)
	}
	kernel := scanner.Loaded(choice.ID)
	problem, err := ssmtest.Timed(kernel.Row, sequences, tokens)
	if err != nil {
		b.Fatal(err)
	}
	session, err := ssmtest.Place(scanner.Device(), problem)
	if err != nil {
		b.Fatal(err)
	}
	defer session.Close()
	if err := session.Use(kernel); err != nil {
		b.Fatal(err)
	}
	b.Log(choice.ID)
	b.SetBytes(session.Bytes)
	for b.Loop() {
		if err := session.Launch(0); err != nil {
			b.Fatal(err)
		}
	}
	if err := scanner.Device().Synchronize(0); err != nil {
		b.Fatal(err)
	}
}

func BenchmarkCUDASSMScanPrefill4096(b *testing.B) { benchmark(b, 1, 4096) }

func BenchmarkCUDASSMScanDecode16(b *testing.B) { benchmark(b, 16, 1) }

// BenchmarkCUDASSMScanLaunch is the CPU's time of a launch through this package, of a decode step that is little work, and
// what it adds to cuLaunchKernel itself.
func BenchmarkCUDASSMScanLaunch(b *testing.B) {
	scanner := open(b, 0)
	const heads, between = 8, 256 // launches that the driver queues without waiting
	m := newMixed(b, scanner, []int{1}, false)
	plan, err := scanner.Plan(ssmscan.Bounds{
		Tokens: 1, Sequences: 1, Longest: 1, Heads: heads, HeadDim: 64, Groups: 2, DState: 128, IO: "f32", State: "f32", PadSlot: -1,
	})
	if err != nil {
		b.Fatal(err)
	}
	m.plan = plan
	args, blob := m.place(b)
	part := &plan.Parts[0]
	if err := scanner.Launch(0, plan, args, blob); err != nil {
		b.Fatal(err)
	}
	var alone, through time.Duration
	for b.Loop() {
		start := time.Now()
		for range between {
			if err := scanner.Launch(0, plan, args, blob); err != nil {
				b.Fatal(err)
			}
		}
		through += time.Since(start)
		if err := scanner.Device().Synchronize(0); err != nil {
			b.Fatal(err)
		}
		own := *args
		plan.Fill(&own, part, blob)
		cost, err := scanner.Loaded(part.Kernel.Row.ID).LaunchCost(0, &part.KernelPlan, &own, between)
		if err != nil {
			b.Fatal(err)
		}
		alone += cost
		if err := scanner.Device().Synchronize(0); err != nil {
			b.Fatal(err)
		}
	}
	each := float64(through.Nanoseconds()) / float64(b.N) / between
	b.ReportMetric(each, "ns/launch")
	b.ReportMetric(each-float64(alone.Nanoseconds())/float64(b.N), "ns-added/launch")
}

// BenchmarkCUDASSMScanOpen opens the images of one family for this GPU: hash checks, and every module loaded. "first-ms" is
// the first time in this process, with the context there already.
func BenchmarkCUDASSMScanOpen(b *testing.B) {
	device, err := ssmscan.Open(0)
	if errors.Is(err, ssmscan.ErrNoCUDA) {
		b.Skipf("ErrNoCUDA: %v", err)
	}
	if err != nil {
		b.Fatal(err)
	}
	defer device.Close()
	families := map[string][]ssmscan.Images{}
	for _, images := range everyImage {
		if images.Target == device.Target() || images.Target == device.Target()+"a" {
			families[images.Family] = append(families[images.Family], images)
		}
	}
	if len(families) == 0 {
		b.Skipf("no images for %s", device.GPU)
	}
	for family, images := range families {
		b.Run(family, func(b *testing.B) {
			var first time.Duration
			kernels := 0
			for b.Loop() {
				start := time.Now()
				scanner, err := device.Scanner(ssmscan.Options{}, images...)
				if err != nil {
					b.Fatal(err)
				}
				if first == 0 {
					first, kernels = time.Since(start), len(scanner.Kernels())
				}
				if err := scanner.Close(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(first.Microseconds())/1000, "first-ms")
			b.ReportMetric(float64(kernels), "kernels")
		})
	}
}
