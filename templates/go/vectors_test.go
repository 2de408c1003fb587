package ssmscan

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/fstest"
)

// vectors is testdata/vectors.json: cases with what Python makes of them, written by pyharness/vectors.py.
type vectors struct {
	Rows     map[string]string
	PlanRows map[string]struct { // rows that are there for a plan alone, made of the first of the others
		Grid    GridRule
		Entries []string
	} `json:"plan_rows"`
	OperandErrors map[string]float64 `json:"operand_errors"` // by id
	Table         json.RawMessage
	Selections    []struct {
		Problem Problem
		Device  *struct {
			Name, Target string
			SharedLimit  int `json:"shared_limit"`
		}
		Invariant bool
		ID        string
		Steps     int
	}
	Plans []struct {
		ID, Target string
		Geometry   Geometry
		Launches   []struct {
			Entry       string
			Grid, Block [3]uint32
			SharedBytes uint32 `json:"shared_bytes"`
			Overlaps    bool
		}
		WorkspaceBytes     int64 `json:"workspace_bytes"`
		Lanes, Rows, Chunk int32
	}
	Batches []struct {
		Tokens    int32
		Slots     int64
		CuSeqlens []int32 `json:"cu_seqlens"`
		ReadSlots []int32 `json:"read_slots"`
		Fresh     []int
		Refused   string
	}
}

const vectorLane = "cuda13"

// readShared gives the shared vectors, with their catalogue and its images.
func readShared(t *testing.T) (*vectors, *Catalogue, []Images) {
	t.Helper()
	found := new(vectors)
	if err := json.Unmarshal(read(t, "testdata/vectors.json"), found); err != nil {
		t.Fatal(err)
	}
	folder := fstest.MapFS{
		"lanes.json":     {Data: []byte(`{"cuda13": {"cuda": 13000, "ptx": 13000, "min_driver": "580", "compiler": "13.0.88"}}`)},
		"proofs.json":    {Data: []byte(`{"images": {}, "sources": {}}`)},
		"selection.json": {Data: found.Table},
	}
	for name, text := range found.Rows {
		folder[vectorLane+"/manifest/"+name] = &fstest.MapFile{Data: []byte(text)}
	}
	catalogue, err := ReadCatalogue(folder)
	if err != nil {
		t.Fatal(err)
	}
	sets := map[[2]string]fstest.MapFS{}
	for _, id := range catalogue.IDs(vectorLane) {
		row := catalogue.Row(vectorLane, id)
		for target := range row.Targets {
			key := [2]string{target, row.Family}
			if sets[key] == nil {
				sets[key] = fstest.MapFS{}
			}
			sets[key][id+".cubin"] = &fstest.MapFile{Data: []byte(id + " for " + target)}
		}
	}
	var images []Images
	for key, files := range sets {
		images = append(images, Images{vectorLane, key[0], key[1], files})
	}
	return found, catalogue, images
}

func TestSelectionAgreesWithPython(t *testing.T) {
	shared, catalogue, images := readShared(t)
	for i, test := range shared.Selections {
		name := fmt.Sprintf("case %d, %v, invariant %v, %+v", i, test.Problem, test.Invariant, test.Device)
		problem := test.Problem
		if test.Invariant {
			problem = problem.invariant()
		}
		if test.Device == nil {
			on := newOffer()
			for _, row := range catalogue.rows[vectorLane] {
				on.add(row, problem, "")
			}
			have, _ := catalogue.table.choose(problem, "", "", on)
			if have.ID != test.ID || len(have.Steps) != test.Steps {
				t.Errorf("%s: want %q after %d steps, have %q after %q", name, test.ID, test.Steps, have.ID, have.Steps)
			}
			continue
		}
		gpu := GPU{Name: test.Device.Name, SharedLimit: test.Device.SharedLimit, DriverVersion: 13000}
		if _, err := fmt.Sscanf(test.Device.Target, "sm_%1d%1d", &gpu.Major, &gpu.Minor); err != nil {
			t.Fatal(err)
		}
		library, err := OpenImages(gpu, Options{Catalogue: catalogue}, images...)
		if err != nil {
			t.Fatal(err)
		}
		have, err := library.Select(test.Problem, test.Invariant)
		var none *NoKernelError
		if err != nil && !errors.As(err, &none) {
			t.Errorf("%s: want a NoKernelError or a choice, have %v", name, err)
		}
		if have.ID != test.ID || len(have.Steps) != test.Steps {
			t.Errorf("%s: want %q after %d steps, have %q after %q (%v)", name, test.ID, test.Steps, have.ID, have.Steps, err)
		}
	}
}

func TestOperandErrorsAgreeWithPython(t *testing.T) {
	shared, catalogue, _ := readShared(t)
	if len(shared.OperandErrors) != len(catalogue.IDs(vectorLane)) {
		t.Errorf("want the operand error of each of %d kernels, have %d", len(catalogue.IDs(vectorLane)), len(shared.OperandErrors))
	}
	for id, want := range shared.OperandErrors {
		if have := catalogue.Row(vectorLane, id).OperandError(); have != want {
			t.Errorf("%s: want %v, have %v", id, want, have)
		}
	}
}

func TestPlansAgreeWithPython(t *testing.T) {
	shared, catalogue, _ := readShared(t)
	for _, test := range shared.Plans {
		row := catalogue.Row(vectorLane, test.ID)
		if extra, ok := shared.PlanRows[test.ID]; ok {
			made := *catalogue.Row(vectorLane, shared.Plans[0].ID)
			made.ID, made.Grid, made.Entries = test.ID, extra.Grid, extra.Entries
			row = &made
		}
		have, err := row.Plan(test.Target, test.Geometry)
		if err != nil {
			t.Error(err)
			continue
		}
		want := KernelPlan{WorkspaceBytes: test.WorkspaceBytes, Lanes: test.Lanes, Rows: test.Rows, Chunk: test.Chunk}
		for _, launch := range test.Launches {
			entry := -1
			for i, symbol := range row.Entries {
				if symbol == launch.Entry {
					entry = i
				}
			}
			want.Launches = append(want.Launches, Launch{entry, launch.Grid, launch.Block, launch.SharedBytes, launch.Overlaps})
		}
		if fmt.Sprint(have) != fmt.Sprint(want) {
			t.Errorf("%s at %+v: want %+v, have %+v", test.ID, test.Geometry, want, have)
		}
	}
}

func TestBatchesAreRefusedAsPythonRefusesThem(t *testing.T) {
	shared, _, _ := readShared(t)
	for _, test := range shared.Batches {
		plan := &Plan{Bounds: Bounds{Tokens: test.Tokens, Sequences: 4, PadSlot: -1}}
		plan.readSlots, plan.resume, plan.BatchBytes = 20, 36, 40
		fresh := make([]bool, len(test.Fresh))
		for i, value := range test.Fresh {
			fresh[i] = value != 0
		}
		err := plan.NewBatch(test.Slots).Set(test.CuSeqlens, test.ReadSlots, fresh)
		have := ""
		var invalid *InvalidProblemError
		if errors.As(err, &invalid) {
			have = invalid.Field
		} else if err != nil {
			t.Errorf("%+v: want an InvalidProblemError or none, have %v", test, err)
		}
		if have != test.Refused {
			t.Errorf("%+v: want a refusal of %q, have %v", test, test.Refused, err)
		}
	}
}

// openVectors opens the shared vectors' images for an H200.
func openVectors(t *testing.T, options Options) (*Library, error) {
	t.Helper()
	_, catalogue, images := readShared(t)
	options.Catalogue = catalogue
	return OpenImages(GPU{Name: "NVIDIA H200", Major: 9, SharedLimit: 227 << 10, DriverVersion: 13000}, options, images...)
}

func TestOpeningTakesTheBestImageAndRefusesWhatIsNotProven(t *testing.T) {
	_, catalogue, images := readShared(t)
	for _, test := range []struct {
		major, minor int
		want         string
	}{{9, 0, "sm_90"}, {8, 6, "sm_86"}, {8, 9, "sm_86"}, {8, 0, "sm_80"}, {7, 5, "sm_75"}, {12, 0, ""}} {
		library, err := OpenImages(GPU{Major: test.major, Minor: test.minor}, Options{Catalogue: catalogue}, images...)
		var none *NoKernelError
		if test.want == "" {
			if !errors.As(err, &none) || !strings.Contains(none.Error(), "for sm_90") {
				t.Errorf("%d.%d: want a NoKernelError that names what is there, have %v", test.major, test.minor, err)
			}
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		for _, kernel := range library.Kernels() {
			want := test.want
			if _, exact := kernel.Row.Targets[want+"a"]; exact {
				want += "a"
			}
			if kernel.Target != want {
				t.Errorf("%d.%d: %s: want the image for %s, have that for %s", test.major, test.minor, kernel.Row.ID, want, kernel.Target)
			}
		}
	}
	var none *NoKernelError
	if _, err := openVectors(t, Options{RequireProven: true}); !errors.As(err, &none) || !strings.Contains(err.Error(), "unproven") {
		t.Errorf("RequireProven: want a NoKernelError that says unproven, have %v", err)
	}
	row := catalogue.Row(vectorLane, catalogue.IDs(vectorLane)[0])
	catalogue.images[row.Targets["sm_90"].SHA256] = Proof{Grade: ProvenOnDevice, Device: "a device"}
	library, err := OpenImages(GPU{Major: 9}, Options{Catalogue: catalogue, RequireProven: true}, images...)
	if err != nil || len(library.Kernels()) != 1 || library.Kernel(row.ID) == nil {
		t.Errorf("RequireProven: want the one proven kernel %s, have %v", row.ID, err)
	}
}

func TestOpeningRefusesWhatIsNotWhatItClaims(t *testing.T) {
	_, catalogue, images := readShared(t)
	gpu := GPU{Major: 9, DriverVersion: 13000}
	for _, set := range images {
		if set.Target != "sm_90" {
			continue
		}
		for name, file := range set.Files.(fstest.MapFS) {
			file.Data[3] ^= 1
			var image *ImageError
			_, err := OpenImages(gpu, Options{Catalogue: catalogue}, images...)
			if !errors.As(err, &image) || image.Field != "image sha256" || image.Kernel+".cubin" != name {
				t.Errorf("%s: one flipped bit: want an ImageError of its sha256, have %v", name, err)
			}
			file.Data[3] ^= 1
		}
	}
	var old *DriverTooOldError
	gpu.DriverVersion = 12040
	if _, err := OpenImages(gpu, Options{Catalogue: catalogue}, images...); !errors.As(err, &old) || old.Have != "CUDA 12.4" ||
		!strings.Contains(old.Want, "CUDA 13.0") || !strings.Contains(old.Want, "R580") {
		t.Errorf("CUDA 12.4: want a DriverTooOldError with both versions, have %v", err)
	}
}

func TestTheLaneIsTheNewestThatTheDriverLoads(t *testing.T) {
	_, catalogue, images := readShared(t)
	catalogue.lanes = append(catalogue.lanes, Lane{Name: "cuda12", CUDA: 12000, MinDriver: "525"})
	catalogue.rows["cuda12"] = catalogue.rows[vectorLane]
	for _, set := range images {
		set.Lane = "cuda12"
		images = append(images, set)
	}
	for driver, want := range map[int]string{13000: vectorLane, 13020: vectorLane, 12090: "cuda12", 0: vectorLane} {
		library, err := OpenImages(GPU{Major: 9, DriverVersion: driver}, Options{Catalogue: catalogue}, images...)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, kernel := range library.Kernels() {
			if kernel.Lane != want {
				t.Errorf("driver for CUDA %d: want lane %s, have %s", driver, want, kernel.Lane)
			}
		}
	}
	var old *DriverTooOldError
	if _, err := OpenImages(GPU{Major: 9, DriverVersion: 11080}, Options{Catalogue: catalogue}, images...); !errors.As(err, &old) ||
		!strings.Contains(old.Want, "CUDA 12.0") {
		t.Errorf("CUDA 11.8: want a DriverTooOldError that asks for CUDA 12.0, have %v", err)
	}
}

func TestPTXIsTakenOnlyWhereTheDriverReadsIt(t *testing.T) {
	_, catalogue, _ := readShared(t)
	id := catalogue.IDs(vectorLane)[0]
	row := catalogue.Row(vectorLane, id)
	row.Targets = map[string]Image{"compute_80": row.Targets["sm_90"]}
	ptx := row.Targets["compute_80"]
	ptx.Kind = "ptx"
	row.Targets["compute_80"] = ptx
	catalogue.lanes[0].CUDA, catalogue.lanes[0].PTX = 12000, 12090
	set := Images{vectorLane, "compute_80", row.Family, fstest.MapFS{id + ".ptx": {Data: []byte(id + " for sm_90")}}}
	for driver, taken := range map[int]bool{12080: false, 12090: true, 13000: true, 0: true} {
		_, err := OpenImages(GPU{Major: 9, DriverVersion: driver}, Options{Catalogue: catalogue, AllowJIT: true}, set)
		var none *NoKernelError
		if taken && err != nil || !taken && (!errors.As(err, &none) || !strings.Contains(err.Error(), "has to serve CUDA 12.9, it serves 12.8")) {
			t.Errorf("CUDA %d: want PTX of CUDA 12.9 taken, %v, have %v", driver, taken, err)
		}
	}
}

func TestPTXIsTakenOnlyWhereItIsAllowed(t *testing.T) {
	gpu := GPU{Major: 8, Minor: 6}
	for _, test := range []struct {
		target    string
		jit, fits bool
	}{
		{"compute_80", false, false}, {"compute_80", true, true}, {"compute_90", true, false}, {"sm_86", false, true},
		{"sm_80", false, true}, {"sm_89", false, false}, {"sm_75", true, false}, {"sm_90a", true, false}, {"sm_86a", false, true},
	} {
		if have := gpu.fit(test.target, test.jit) > 0; have != test.fits {
			t.Errorf("%s on sm_86, JIT %v: want %v, have %v", test.target, test.jit, test.fits, have)
		}
	}
	if !(gpu.fit("sm_86a", true) > gpu.fit("sm_86", true) && gpu.fit("sm_86", true) > gpu.fit("sm_80", true) &&
		gpu.fit("sm_80", true) > gpu.fit("compute_80", true)) {
		t.Error("sm_86: want its exact target, then itself, then sm_80, then PTX")
	}
}
