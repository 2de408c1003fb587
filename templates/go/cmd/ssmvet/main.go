//go:build cuda && cgo

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/ssmscan"
	"example.com/ssmscan/ssmtest"
)

// proof is what one image passed, in the form of generated/vetting.
type proof struct {
	Kernel        string             `json:"kernel"`
	Target        string             `json:"target"`
	Lane          string             `json:"lane"`
	Source        string             `json:"source_sha256"`
	Cases         int                `json:"cases"`
	Repeats       int                `json:"repeats"`
	Worst         float64            `json:"worst"`
	WorstCase     string             `json:"worst_case"`
	Registers     int                `json:"registers"`
	DynamicShared int                `json:"dynamic_shared"`
	Driver        string             `json:"driver"`
	Date          string             `json:"date"`
	Microseconds  map[string]float64 `json:"microseconds,omitempty"`
}

// document is what is written: the proofs of the images of one device, by sha256.
type document struct {
	Tool   string           `json:"tool"`
	Device string           `json:"device"`
	Target string           `json:"target"`
	CUDA   string           `json:"cuda"`
	Images map[string]proof `json:"images"`
}

const repeats = 5

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "ssmvet:", err)
		os.Exit(1)
	}
}

func run() error {
	ordinal := flag.Int("device", 0, "number of the GPU")
	family := flag.String("family", "", "prove only kernels of this family")
	names := flag.String("kernels", "", "prove only kernels of these ids, comma-separated")
	lane := flag.String("lane", "", "prove only images of this lane; by default of the newest that the driver loads")
	out := flag.String("out", "", "file to write; by default <device>.json")
	quick := flag.Bool("quick", false, "do not time")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("want no arguments, have %q", flag.Args())
	}
	device, err := ssmscan.Open(*ordinal)
	if err != nil {
		return err
	}
	defer device.Close()
	lanes, err := ofLane(*lane)
	if err != nil {
		return err
	}
	library, err := ssmscan.OpenImages(device.GPU, ssmscan.Options{}, lanes...)
	if err != nil {
		return err
	}
	images, err := chosen(library, *family, *names)
	if err != nil {
		return err
	}
	found := document{
		Tool: "ssmvet", Device: device.Name, Target: device.Target(), CUDA: cudaVersion(device.DriverVersion), Images: map[string]proof{},
	}
	var failed []string
	for _, image := range images {
		one, err := prove(device, image, *quick)
		if err != nil {
			failed = append(failed, image.Row.ID+": "+err.Error())
			fmt.Printf("%s for %s: FAILED: %v\n", image.Row.ID, image.Target, err)
			continue
		}
		found.Images[image.Row.Targets[image.Target].SHA256] = *one
		fmt.Printf("%s for %s: %d cases, worst %.3f of what is allowed (%s)%s\n",
			one.Kernel, one.Target, one.Cases, one.Worst, one.WorstCase, timings(one.Microseconds))
	}
	if len(failed) > 0 {
		return fmt.Errorf("nothing is written, %d images failed:\n%s", len(failed), strings.Join(failed, "\n"))
	}
	if *out == "" {
		*out = slug(device.Name) + ".json"
	}
	text, err := json.MarshalIndent(found, "", " ")
	if err != nil {
		return err
	}
	if err := write(*out, append(text, '\n')); err != nil {
		return err
	}
	fmt.Printf("%d images proven on %s: %s\n", len(found.Images), device.GPU, *out)
	return nil
}

// ofLane gives the images of a lane, or all.
func ofLane(name string) ([]ssmscan.Images, error) {
	var found []ssmscan.Images
	names := map[string]bool{}
	for _, set := range everyImage {
		names[set.Lane] = true
		if name == "" || set.Lane == name {
			found = append(found, set)
		}
	}
	if found == nil {
		return nil, fmt.Errorf("-lane: want one of %s, have %q", strings.Join(slices.Sorted(maps.Keys(names)), ", "), name)
	}
	return found, nil
}

// chosen gives the images of a family and of some ids, comma-separated, or all; those that are timed at one problem stand
// together. It is told before anything runs that there is no such image.
func chosen(library *ssmscan.Library, family, names string) ([]*ssmscan.Embedded, error) {
	images := library.Kernels()
	if names != "" {
		images = nil
		for id := range strings.SplitSeq(names, ",") {
			id = strings.TrimSpace(id)
			image := library.Kernel(id)
			if image == nil {
				return nil, fmt.Errorf("-kernels: want ids of images for %s, have %q; there are:\n%s",
					library.GPU, id, strings.Join(ids(library.Kernels()), "\n"))
			}
			if !slices.Contains(images, image) {
				images = append(images, image)
			}
		}
	}
	images = slices.DeleteFunc(images, func(image *ssmscan.Embedded) bool { return family != "" && image.Row.Family != family })
	if len(images) == 0 {
		return nil, fmt.Errorf("want images of family %q for %s, have none; there are:\n%s",
			family, library.GPU, strings.Join(ids(library.Kernels()), "\n"))
	}
	slices.SortStableFunc(images, func(a, b *ssmscan.Embedded) int {
		return strings.Compare(ssmtest.TimedName(a.Row, 1, 1), ssmtest.TimedName(b.Row, 1, 1))
	})
	return images, nil
}

func ids(images []*ssmscan.Embedded) []string {
	var found []string
	for _, image := range images {
		found = append(found, image.Row.ID)
	}
	return found
}

// write leaves the whole file or none.
func write(path string, data []byte) error {
	file, err := os.CreateTemp(filepath.Dir(path), ".ssmvet-*")
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	err = errors.Join(err, file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return nil
}

func cudaVersion(version int) string { return fmt.Sprintf("%d.%d", version/1000, version%1000/10) }

func timings(us map[string]float64) string {
	text := ""
	for _, point := range []string{prefill, decode} {
		if value, ok := us[point]; ok {
			text += fmt.Sprintf(", %s %.1f us", point, value)
		}
	}
	return text
}

// slug is the name of a device's file: "NVIDIA H200" is nvidia-h200.
func slug(name string) string {
	return strings.Trim(regexp.MustCompile(`[^a-z0-9]+`).ReplaceAllString(strings.ToLower(name), "-"), "-")
}

// driverBranch is the version of the kernel module, such as 580.65.06; without one the CUDA version stands for it.
func driverBranch(device *ssmscan.Device) string {
	text, err := os.ReadFile("/proc/driver/nvidia/version")
	if err == nil {
		if found := regexp.MustCompile(`\b\d{3,}\.\d+(\.\d+)?\b`).Find(text); found != nil {
			return string(found)
		}
	}
	return "CUDA " + cudaVersion(device.DriverVersion)
}

// cases are those of ssmtest, drawn once.
var cases = sync.OnceValue(ssmtest.Cases)

var truths = map[*ssmtest.Problem]*ssmtest.Truth{}

// right is what a problem has to give, worked out once for those that kernels share.
func right(problem *ssmtest.Problem) *ssmtest.Truth {
	if truth := truths[problem]; truth != nil {
		return truth
	}
	truth := ssmtest.Reference(problem)
	if slices.Contains(cases(), problem) {
		truths[problem] = truth
	}
	return truth
}

// prove holds one image against the reference, checks its bits, and times it.
func prove(device *ssmscan.Device, image *ssmscan.Embedded, quick bool) (*proof, error) {
	kernel, err := device.Load(image.Row, image.Target, image.Image)
	if err != nil {
		return nil, err
	}
	defer kernel.Close()
	scan := ssmtest.Kernel(device, kernel)
	target := image.Row.Targets[image.Target]
	one := &proof{
		Kernel: image.Row.ID, Target: image.Target, Lane: image.Lane, Source: image.Row.SourceSHA256,
		Repeats: repeats, DynamicShared: target.DynamicShared,
		Driver: driverBranch(device), Date: time.Now().UTC().Format(time.DateOnly),
	}
	for _, usage := range target.Usage {
		one.Registers = max(one.Registers, usage.Registers)
	}
	for _, problem := range append(slices.Clone(cases()), ssmtest.CasesOf(image.Row)...) {
		have, err := scan(problem)
		if errors.Is(err, ssmtest.ErrUnsupported) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%v: %w", problem, err)
		}
		errs, err := ssmtest.Check(problem, right(problem), have)
		if err != nil {
			return nil, fmt.Errorf("%v: %w", problem, err)
		}
		one.Cases++
		if share := errs.Share(); share >= one.Worst {
			one.Worst, one.WorstCase = math.Round(share*1000)/1000, problem.Name
		}
	}
	if one.Cases == 0 {
		return nil, fmt.Errorf("want a case that it takes, have none")
	}
	if err := sameBits(scan, image.Row); err != nil {
		return nil, err
	}
	if !quick {
		one.Microseconds, err = measure(device, kernel)
	}
	return one, err
}

func bits(result *ssmtest.Result, y, state []int) []byte {
	var text bytes.Buffer
	for _, value := range result.Y[y[0]:y[1]] {
		fmt.Fprintf(&text, "%08x", math.Float32bits(value))
	}
	for _, value := range result.State[state[0]:state[1]] {
		fmt.Fprintf(&text, "%08x", math.Float32bits(value))
	}
	return text.Bytes()
}

// sameBits runs one batch several times, and each of its sequences alone.
func sameBits(scan ssmtest.Implementation, row *ssmscan.Row) error {
	sizes, types := ssmtest.ShapeOf(row, 300, 1, 33)
	if limits, ok := row.Limits["longest"]; ok {
		sizes.Lengths = []int{int(limits[1]), 1, 2}
	}
	batch := ssmtest.Draw("bits", 94, sizes, types, ssmtest.Gate)
	whole, err := scan(batch)
	if err != nil {
		return err
	}
	all := []int{0, len(whole.Y)}
	states := []int{0, len(whole.State)}
	for run := 1; run < repeats; run++ {
		again, err := scan(batch)
		if err != nil {
			return err
		}
		if !bytes.Equal(bits(again, all, states), bits(whole, all, states)) {
			return fmt.Errorf("run %d of one batch: want the bits of the first, have others", run+1)
		}
	}
	inner, slot := batch.Heads*batch.HeadDim, batch.Heads*batch.HeadDim*batch.DState
	for s := range batch.Sequences {
		lone, first, last := *batch, int(batch.CuSeqlens[s]), int(batch.CuSeqlens[s+1])
		lone.Name, lone.Sequences, lone.Tokens = fmt.Sprintf("bits of sequence %d", s), 1, last-first
		lone.CuSeqlens = []int32{0, int32(last - first)}
		lone.ReadSlots, lone.WriteSlots, lone.Resume = batch.ReadSlots[s:s+1], batch.WriteSlots[s:s+1], batch.Resume[s:s+1]
		lone.X, lone.Z = batch.X[first*inner:last*inner], batch.Z[first*inner:last*inner]
		lone.DT = batch.DT[first*batch.Heads : last*batch.Heads]
		columns := batch.Groups * batch.DState
		lone.B, lone.C = batch.B[first*columns:last*columns], batch.C[first*columns:last*columns]
		have, err := scan(&lone)
		if err != nil {
			return err
		}
		stored := int(batch.WriteSlots[s]) * slot
		if !bytes.Equal(bits(have, []int{0, len(have.Y)}, []int{stored, stored + slot}),
			bits(whole, []int{first * inner, last * inner}, []int{stored, stored + slot})) {
			return fmt.Errorf("sequence %d alone: want the bits that it has in its batch, have others", s)
		}
	}
	return nil
}

// The timings.

const (
	prefill = "prefill_1x4096"
	decode  = "decode_16x1"
)

// measure times a kernel at the problems of ssmtest.Timed. Calls rotate over copies of the pool that no cache holds; a figure
// is the median of 5 rounds, in microseconds.
func measure(device *ssmscan.Device, kernel *ssmscan.Kernel) (map[string]float64, error) {
	found := map[string]float64{}
	for _, point := range []struct {
		name              string
		sequences, tokens int
	}{{prefill, 1, 4096}, {decode, 16, 1}} {
		us, err := timePoint(device, kernel, point.sequences, point.tokens)
		if errors.Is(err, ssmtest.ErrUnsupported) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", point.name, err)
		}
		found[point.name] = math.Round(us*1000) / 1000
	}
	return found, nil
}

// placed is the session of the last problem of so many tokens a sequence.
var placed = map[int]struct {
	of      string
	session *ssmtest.Session
}{}

// session gives a session that a kernel may use: the last one of so many tokens, where its problem is the same.
func session(device *ssmscan.Device, row *ssmscan.Row, sequences, tokens int) (*ssmtest.Session, error) {
	last, name := placed[tokens], ssmtest.TimedName(row, sequences, tokens)
	if last.of == name {
		return last.session, nil
	}
	problem, err := ssmtest.Timed(row, sequences, tokens)
	if err != nil {
		return nil, err
	}
	if last.session != nil {
		if err := last.session.Close(); err != nil {
			return nil, err
		}
	}
	delete(placed, tokens)
	last.of = name
	if last.session, err = ssmtest.Place(device, problem); err == nil {
		placed[tokens] = last
	}
	return last.session, err
}

func timePoint(device *ssmscan.Device, kernel *ssmscan.Kernel, sequences, tokens int) (float64, error) {
	const rounds = 5
	calls := 40
	if tokens <= ssmscan.DecodeTokens {
		calls = 200 // what starts a round is little of it
	}
	session, err := session(device, kernel.Row, sequences, tokens)
	if err != nil {
		return 0, err
	}
	if err := session.Use(kernel); err != nil {
		return 0, err
	}
	first, err := device.NewEvent()
	if err != nil {
		return 0, err
	}
	defer first.Close()
	last, err := device.NewEvent()
	if err != nil {
		return 0, err
	}
	defer last.Close()
	var us []float64
	for round := range rounds + 1 { // the first warms up
		if err := first.Record(0); err != nil {
			return 0, err
		}
		for range calls {
			if err := session.Launch(0); err != nil {
				return 0, err
			}
		}
		if err := last.Record(0); err != nil {
			return 0, err
		}
		elapsed, err := last.Since(first)
		if err != nil {
			return 0, err
		}
		if round > 0 {
			us = append(us, float64(elapsed)/float64(time.Microsecond)/float64(calls))
		}
	}
	slices.Sort(us)
	return us[rounds/2], nil
}
