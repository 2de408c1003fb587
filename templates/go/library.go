package ssmscan

import (
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
)

// Images are the images of one family for one target in one lane: what a package below images/ embeds.
type Images struct {
	Lane, Target, Family string
	Files                fs.FS // <id>.cubin or <id>.ptx
}

// Options say which images may be used.
type Options struct {
	// RequireProven takes only images whose very bytes were proven on a device. Without it those whose source was proven
	// on the emulator are taken too, and what a package holds besides; Library.Kernels tells the grade of each.
	RequireProven bool
	// AllowJIT takes PTX where no cubin fits: the driver compiles it when it is loaded.
	AllowJIT bool
	// Catalogue is that of the images; nil is the one that this package embeds.
	Catalogue *Catalogue
}

// Embedded is one kernel's image that fits a GPU, its hash checked against the manifest.
type Embedded struct {
	Row    *Row
	Lane   string
	Target string
	Image  []byte
	Proof  Proof
}

// Library is the kernels of some images that a GPU can run, at most one image for each kernel. It is never changed.
type Library struct {
	GPU       GPU
	catalogue *Catalogue
	kernels   map[string]*Embedded
	refused   []string // images that were left out, with the reason
}

// OpenImages picks, for each kernel, the best image for a GPU, and checks its bytes: the GPU's exact target, then its own,
// then a lower minor version of the same major, then PTX where it is allowed; of several lanes the newest that the driver
// loads. Nothing is loaded.
//
// The error is a *DriverTooOldError if the driver loads no lane that was given, a *NoKernelError if no image fits, and an
// *ImageError if one is not what the manifest says.
func OpenImages(gpu GPU, options Options, images ...Images) (*Library, error) {
	catalogue := options.Catalogue
	if catalogue == nil {
		var err error
		if catalogue, err = Standard(); err != nil {
			return nil, err
		}
	}
	library := &Library{GPU: gpu, catalogue: catalogue, kernels: map[string]*Embedded{}}
	loadable, err := catalogue.loadable(gpu, images)
	if err != nil {
		return nil, err
	}
	for _, lane := range loadable { // the newest first: an older lane only adds what that has not
		best := map[string]int{}
		for _, set := range images {
			if set.Lane == lane.Name {
				if err := library.add(lane, set, options, best); err != nil {
					return nil, err
				}
			}
		}
	}
	if len(library.kernels) == 0 {
		return nil, &NoKernelError{"an image for " + gpu.Target(), gpu.String(), library.refused}
	}
	return library, nil
}

// loadable gives the lanes of some images that the GPU's driver loads, the newest first.
func (c *Catalogue) loadable(gpu GPU, images []Images) ([]Lane, error) {
	given := map[string]bool{}
	for _, set := range images {
		if c.rows[set.Lane] == nil {
			return nil, &NoKernelError{"images of a lane of this package", gpu.String(), []string{"images of lane " + set.Lane}}
		}
		given[set.Lane] = true
	}
	var found, old []Lane
	for _, lane := range c.lanes {
		if !given[lane.Name] {
			continue
		}
		if gpu.serves(lane.CUDA) {
			found = append(found, lane)
		} else {
			old = append(old, lane)
		}
	}
	if len(found) == 0 && len(old) > 0 {
		oldest := old[len(old)-1]
		return nil, &DriverTooOldError{
			Have: "CUDA " + version(gpu.DriverVersion),
			Want: fmt.Sprintf("CUDA %s, driver branch R%s", version(oldest.CUDA), oldest.MinDriver),
		}
	}
	return found, nil
}

// serves says whether the driver serves a CUDA version; one of unknown version is taken to.
func (g GPU) serves(cuda int) bool { return g.DriverVersion == 0 || g.DriverVersion >= cuda }

func version(cuda int) string { return fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10) }

// add takes the images of one set that fit better than what the lane gave so far.
func (l *Library) add(lane Lane, set Images, options Options, best map[string]int) error {
	reads := l.GPU.serves(lane.PTX)
	fit := l.GPU.fit(set.Target, options.AllowJIT && reads)
	if fit == 0 {
		reason := ""
		if strings.HasPrefix(set.Target, "compute_") && !options.AllowJIT {
			reason = ", which is PTX and taken only with AllowJIT"
		} else if strings.HasPrefix(set.Target, "compute_") && !reads {
			reason = fmt.Sprintf(", which is PTX: the driver has to serve CUDA %s, it serves %s", version(lane.PTX), version(l.GPU.DriverVersion))
		}
		l.refused = append(l.refused, fmt.Sprintf("%s for %s%s", set.Family, set.Target, reason))
		return nil
	}
	rows := l.catalogue.rows[set.Lane]
	for _, id := range slices.Sorted(maps.Keys(rows)) {
		row := rows[id]
		want, ok := row.Targets[set.Target]
		if !ok || row.Family != set.Family {
			continue
		}
		if have := l.kernels[id]; have != nil && (have.Lane != set.Lane || best[id] >= fit) {
			continue
		}
		image, err := fs.ReadFile(set.Files, id+"."+want.Kind)
		if err != nil {
			l.refused = append(l.refused, fmt.Sprintf("%s for %s is not in the package", id, set.Target))
			continue
		}
		if _, err := row.check(set.Target, image); err != nil {
			return err
		}
		proof := l.catalogue.Proof(row, set.Target)
		if options.RequireProven && proof.Grade != ProvenOnDevice {
			l.refused = append(l.refused, fmt.Sprintf("%s for %s: %s", id, set.Target, proof))
			continue
		}
		l.kernels[id] = &Embedded{row, set.Lane, set.Target, image, proof}
		best[id] = fit
	}
	return nil
}

// Kernels gives what was opened, by id.
func (l *Library) Kernels() []*Embedded {
	var found []*Embedded
	for _, id := range slices.Sorted(maps.Keys(l.kernels)) {
		found = append(found, l.kernels[id])
	}
	return found
}

// Kernel gives one kernel by its id, nil where it was not opened.
func (l *Library) Kernel(id string) *Embedded { return l.kernels[id] }

// unusable says why a kernel that was opened cannot run on the GPU, or is empty.
func (l *Library) unusable(k *Embedded) string {
	need := k.Row.Targets[k.Target].DynamicShared
	if l.GPU.SharedLimit > 0 && need > l.GPU.SharedLimit {
		return fmt.Sprintf("it needs %d bytes of shared memory, the GPU has %d", need, l.GPU.SharedLimit)
	}
	return ""
}

// Select picks the kernel for a problem by the rule and the table of the package. With invariant it looks at the geometry
// and at the length of the longest sequence alone, so that bits do not change with the batch.
func (l *Library) Select(p Problem, invariant bool) (Choice, error) {
	asked := p
	if invariant {
		asked = p.invariant()
	}
	on := newOffer()
	for _, kernel := range l.kernels {
		on.add(kernel.Row, asked, l.unusable(kernel))
	}
	choice, ok := l.catalogue.table.choose(asked, l.GPU.Name, l.GPU.baseTarget(), on)
	if !ok {
		return Choice{}, &NoKernelError{p.String(), l.GPU.String(), append(on.reasons(), l.refused...)}
	}
	choice.Proof = l.kernels[choice.ID].Proof
	return choice, nil
}
