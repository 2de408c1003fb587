package ssmscan

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"sync"
)

//go:embed catalogue
var embedded embed.FS

// Grade is how far an image is proven.
type Grade int

// The grades, from the weakest to the strongest.
const (
	Unproven         Grade = iota
	ProvenOnEmulator       // the source that the image was compiled from
	ProvenOnDevice         // these very bytes
)

// Proof is what an image, or the source that it was compiled from, was proven on.
type Proof struct {
	Grade  Grade   `json:"-"`
	Device string  `json:"device"`
	Driver string  `json:"driver"`
	Date   string  `json:"date"`
	Cases  int     `json:"cases"`
	Worst  float64 `json:"worst"` // the largest error over what is allowed
}

func (p Proof) String() string {
	switch p.Grade {
	case ProvenOnDevice:
		return fmt.Sprintf("proven on %s, driver %s, %s", p.Device, p.Driver, p.Date)
	case ProvenOnEmulator:
		return "proven on the emulator"
	}
	return "unproven"
}

// Lane is the images of one CUDA major version.
type Lane struct {
	Name      string `json:"-"`
	CUDA      int    `json:"cuda"` // the CUDA version that a driver must serve: 1000 * major + 10 * minor
	PTX       int    `json:"ptx"`  // the same for PTX, which no older driver of the same major version reads
	MinDriver string `json:"min_driver"`
	Compiler  string `json:"compiler"`
}

// Catalogue is what a package knows of its kernels, without their images. It is never changed.
type Catalogue struct {
	lanes   []Lane // the newest first
	rows    map[string]map[string]*Row
	table   *table
	images  map[string]Proof
	sources map[string]Proof
}

var standard = sync.OnceValues(func() (*Catalogue, error) {
	folder, err := fs.Sub(embedded, "catalogue")
	if err != nil {
		return nil, err
	}
	return ReadCatalogue(folder)
})

// Standard is the catalogue that this package embeds. It is read on first use.
func Standard() (*Catalogue, error) { return standard() }

func readJSON(folder fs.FS, name string, value any) ([]byte, error) {
	text, err := fs.ReadFile(folder, name)
	if err != nil {
		return nil, fmt.Errorf("ssmscan: catalogue: want %s: %w", name, err)
	}
	if err := json.Unmarshal(text, value); err != nil {
		return nil, fmt.Errorf("ssmscan: catalogue: %s: %w", name, err)
	}
	return text, nil
}

// ReadCatalogue reads a folder as catalogue/README.md describes it, and checks each row against the index.
func ReadCatalogue(folder fs.FS) (*Catalogue, error) {
	lanes := map[string]Lane{}
	if _, err := readJSON(folder, "lanes.json", &lanes); err != nil {
		return nil, err
	}
	c := &Catalogue{rows: map[string]map[string]*Row{}}
	for name, lane := range lanes {
		lane.Name = name
		c.lanes = append(c.lanes, lane)
		rows, err := readRows(folder, path.Join(name, "manifest"))
		if err != nil {
			return nil, err
		}
		c.rows[name] = rows
	}
	slices.SortFunc(c.lanes, func(a, b Lane) int { return b.CUDA - a.CUDA })
	if len(c.lanes) == 0 {
		return nil, fmt.Errorf("ssmscan: catalogue: want a lane in lanes.json, have none")
	}
	var proofs struct{ Images, Sources map[string]Proof }
	if _, err := readJSON(folder, "proofs.json", &proofs); err != nil {
		return nil, err
	}
	c.images, c.sources = graded(proofs.Images, ProvenOnDevice), graded(proofs.Sources, ProvenOnEmulator)
	text, err := fs.ReadFile(folder, "selection.json")
	if err != nil {
		return nil, fmt.Errorf("ssmscan: catalogue: want selection.json: %w", err)
	}
	c.table, err = parseTable(text)
	return c, err
}

func graded(proofs map[string]Proof, grade Grade) map[string]Proof {
	found := map[string]Proof{}
	for sum, proof := range proofs {
		proof.Grade = grade
		found[sum] = proof
	}
	return found
}

func readRows(folder fs.FS, where string) (map[string]*Row, error) {
	var index struct{ Kernels map[string]string }
	if _, err := readJSON(folder, path.Join(where, "index.json"), &index); err != nil {
		return nil, err
	}
	rows := map[string]*Row{}
	for id, want := range index.Kernels {
		text, err := fs.ReadFile(folder, path.Join(where, id+".json"))
		if err != nil {
			return nil, fmt.Errorf("ssmscan: catalogue: want %s.json: %w", id, err)
		}
		sum := sha256.Sum256(text)
		if have := hex.EncodeToString(sum[:]); have != want {
			return nil, &ImageError{id, "sha256 of the manifest row", want, have}
		}
		row, err := ParseRow(text)
		if err != nil {
			return nil, err
		}
		if row.ID != id {
			return nil, &ImageError{id, "id of the manifest row", id, row.ID}
		}
		rows[id] = row
	}
	return rows, nil
}

// Lanes gives the lanes, the newest CUDA first.
func (c *Catalogue) Lanes() []Lane { return slices.Clone(c.lanes) }

// IDs gives the ids of the kernels of a lane, sorted.
func (c *Catalogue) IDs(lane string) []string { return slices.Sorted(maps.Keys(c.rows[lane])) }

// Row gives the manifest row of a kernel in a lane, nil where there is none. It must not be changed.
func (c *Catalogue) Row(lane, id string) *Row { return c.rows[lane][id] }

// Proof gives what a kernel's image for a target was proven on.
func (c *Catalogue) Proof(row *Row, target string) Proof {
	if proof, ok := c.images[row.Targets[target].SHA256]; ok {
		return proof
	}
	return c.sources[row.SourceSHA256]
}

// GPU is what opening images and selecting kernels need to know of a device.
type GPU struct {
	Name          string
	Major, Minor  int // compute capability
	SharedLimit   int // dynamic shared memory that a block may opt in to, in bytes; 0 for that of the target
	DriverVersion int // the CUDA version that the driver serves, 1000 * major + 10 * minor; 0 if it is not known
}

// Target is the name of the GPU's compute capability, such as sm_90.
func (g GPU) Target() string { return "sm_" + strconv.Itoa(g.Major) + strconv.Itoa(g.Minor) }

func (g GPU) String() string { return fmt.Sprintf("%s (%s)", g.Name, g.Target()) }

// fit ranks a target for the GPU: its own exact target, then its own, then lower minor versions of the same major, then
// PTX where a JIT is allowed; 0 does not fit.
func (g GPU) fit(target string, jit bool) int {
	const exact, cubin, ptx = 1000, 100, 1
	var number int
	if _, err := fmt.Sscanf(target, "compute_%d", &number); err == nil {
		if jit && number <= 10*g.Major+g.Minor {
			return ptx
		}
		return 0
	}
	if target == g.Target()+"a" {
		return exact
	}
	number, err := strconv.Atoi(target[min(len("sm_"), len(target)):])
	if err != nil || number/10 != g.Major || number%10 > g.Minor {
		return 0
	}
	return cubin + number%10
}

// portable is the compute capabilities of the targets that packages have, PTX aside.
var portable = []int{75, 80, 86, 89, 90, 100, 120}

// baseTarget is the target by which the selection table knows the GPU: its own, else the next lower minor version of the
// same major, else PTX.
func (g GPU) baseTarget() string {
	best := 0
	for _, number := range portable {
		if number/10 == g.Major && number%10 <= g.Minor {
			best = number
		}
	}
	if best == 0 {
		return "compute_80"
	}
	return "sm_" + strconv.Itoa(best)
}
