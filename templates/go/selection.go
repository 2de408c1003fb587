package ssmscan

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/bits"
	"slices"
)

// Problem is what selection knows of a problem: sizes and storage types, and no array.
type Problem struct {
	Geometry
	IO    DType `json:"io"`
	State DType `json:"state"`
}

func (p Problem) String() string {
	return fmt.Sprintf("heads %d, head_dim %d, d_state %d, groups %d, io %s, state %s, %d sequences, %d tokens",
		p.Heads, p.HeadDim, p.DState, p.Groups, p.IO, p.State, p.Sequences, p.Tokens)
}

// batchHeads is the independent work of a call.
func (p Problem) batchHeads() int64 { return int64(p.Sequences) * int64(p.Heads) }

// DecodeTokens is the length up to which a sequence is decode: a mixed batch is split there.
const DecodeTokens = 8

// decode says whether every sequence is one of decode: by the longest, or by the average length where that is not known.
func (p Problem) decode() bool { return p.longest() <= DecodeTokens }

// invariant is what an invariant choice is made for: 16 sequences of 1 token for decode, 1 of 4096 for prefill.
func (p Problem) invariant() Problem {
	if p.decode() {
		p.Sequences, p.Tokens, p.Longest = 16, 16, DecodeTokens
	} else {
		p.Sequences, p.Tokens, p.Longest = 1, 4096, 4096
	}
	return p
}

// entry is one line of the selection table: the kernel of a family that was best for a problem on a device.
type entry struct {
	Device     string  `json:"device"`
	Target     string  `json:"target"`
	BatchHeads int64   `json:"batch_heads"`
	Tokens     int64   `json:"tokens"`
	IO         DType   `json:"io"`
	State      DType   `json:"state"`
	Kernel     string  `json:"kernel"`
	Micros     float64 `json:"microseconds"`
	Source     string  `json:"source"`
	Geometry   struct {
		Heads   int32 `json:"heads"`
		HeadDim int32 `json:"head_dim"`
		DState  int32 `json:"d_state"`
		Groups  int32 `json:"groups"`
	} `json:"geometry"`
}

type fallback struct {
	DState int32  `json:"d_state"`
	IO     DType  `json:"io"`
	State  DType  `json:"state"`
	Kernel string `json:"kernel"`
}

type table struct {
	Version  int        `json:"version"`
	Entries  []entry    `json:"entries"`
	Defaults []fallback `json:"defaults"`
}

const tableVersion = 1

func parseTable(text []byte) (*table, error) {
	t := new(table)
	if err := json.Unmarshal(text, t); err != nil {
		return nil, fmt.Errorf("ssmscan: selection table: %w", err)
	}
	if t.Version != tableVersion {
		return nil, fmt.Errorf("ssmscan: selection table: want version %d, have %d", tableVersion, t.Version)
	}
	return t, nil
}

func octaves(a, b int64) int {
	difference := bits.Len64(uint64(a)) - bits.Len64(uint64(b))
	return max(difference, -difference)
}

func (e *entry) distance(p Problem) int {
	return octaves(p.batchHeads(), e.BatchHeads) + octaves(int64(p.Tokens), e.Tokens)
}

// nearer says whether the entry's problem is nearer than another's: one of the same head_dim is, then octaves count.
func (e *entry) nearer(other *entry, p Problem) bool {
	own := e.Geometry.HeadDim == p.HeadDim
	if own != (other.Geometry.HeadDim == p.HeadDim) {
		return own
	}
	if difference := e.distance(p) - other.distance(p); difference != 0 {
		return difference < 0
	}
	return e.Kernel < other.Kernel
}

func (e *entry) alike(p Problem) bool {
	return e.Geometry.DState == p.DState && e.IO == p.IO && e.State == p.State
}

func (e *entry) same(p Problem) bool {
	g := e.Geometry
	return g.Heads == p.Heads && g.HeadDim == p.HeadDim && g.Groups == p.Groups &&
		e.BatchHeads == p.batchHeads() && e.Tokens == int64(p.Tokens)
}

// decode says whether the entry is for decode, by the average length.
func (e *entry) decode() bool {
	return ceilDiv(e.Tokens*int64(e.Geometry.Heads), max(e.BatchHeads, 1)) <= DecodeTokens
}

// sameProblem says whether two entries are for one problem, each on its device.
func (e *entry) sameProblem(other *entry) bool {
	return e.Geometry == other.Geometry && e.BatchHeads == other.BatchHeads && e.Tokens == other.Tokens
}

// faster orders entries for one problem.
func (e *entry) faster(other *entry) bool {
	if e.Micros != other.Micros {
		return e.Micros < other.Micros
	}
	return e.Kernel < other.Kernel
}

// Choice is the kernel that was selected, why, and every step down on the way to it.
type Choice struct {
	ID    string
	Why   string
	Steps []string
	Proof Proof
}

// offer is what selection picks from: the rows that fit a problem, and why the others do not.
type offer struct {
	fitting map[string]*Row
	unfit   map[string]string
}

// add puts a row where it belongs; reason says why it does not fit, besides what its own sizes say.
func (o *offer) add(row *Row, p Problem, reason string) {
	if refusal := row.Refusal(p); refusal != "" {
		reason = refusal
	} else if reason == "" && row.Spec.Precision == "tf32" {
		reason = "it rounds f32 operands to tf32 and runs by its full id alone"
	}
	if reason == "" {
		o.fitting[row.ID] = row
	} else {
		o.unfit[row.ID] = reason
	}
}

func newOffer() *offer { return &offer{map[string]*Row{}, map[string]string{}} }

// fits says whether an entry's kernel does.
func (o *offer) fits(e *entry) bool { return o.fitting[e.Kernel] != nil }

func (o *offer) reason(e *entry) string {
	if reason := o.unfit[e.Kernel]; reason != "" {
		return reason
	}
	return "it is not on offer here"
}

// reasons tells all of them, in the order of ids.
func (o *offer) reasons() []string {
	var found []string
	for _, id := range slices.Sorted(maps.Keys(o.unfit)) {
		found = append(found, fmt.Sprintf("%s (%s)", id, o.unfit[id]))
	}
	return found
}

// choose picks by the rule that pyharness/select.py states; false if nothing fits. device and target are those of the GPU.
func (t *table) choose(p Problem, device, target string, on *offer) (Choice, bool) {
	var steps []string
	found, ok := Choice{}, false
	if target != "" {
		found, ok = t.fromEntries(p, device, target, on, &steps)
	}
	// Whether split operands are worth it depends on the device: its own entries say so.
	for id, row := range on.fitting {
		if row.Spec.Precision == "split" && !ok {
			delete(on.fitting, id)
			on.unfit[id] = "it splits f32 operands and was not measured to be faster than recurrent on this device"
		}
	}
	if !ok && len(on.fitting) > 0 {
		found, ok = t.fromDefaults(p, on.fitting, &steps), true
	}
	found.Steps = steps
	return found, ok
}

func (t *table) fromEntries(p Problem, device, target string, on *offer, steps *[]string) (Choice, bool) {
	var own, kin []*entry
	for i := range t.Entries {
		e := &t.Entries[i]
		if !e.alike(p) {
			continue
		}
		if e.Device == device {
			own = append(own, e)
		} else if e.Target == target && !(on.fits(e) && on.fitting[e.Kernel].Spec.Precision == "split") {
			kin = append(kin, e)
		}
	}
	places := []struct {
		rows  []*entry
		where string
	}{{own, device}, {kin, "another " + target + " device"}}
	if device == "" {
		places = places[1:]
	}
	for _, place := range places {
		var best *entry
		for _, e := range place.rows {
			if e.same(p) && on.fits(e) && (best == nil || e.faster(best)) {
				best = e
			}
		}
		passed := ""
		for _, e := range place.rows {
			if e.same(p) && !on.fits(e) && (best == nil || e.faster(best)) {
				passed += fmt.Sprintf("; %s, %s for these sizes, cannot run it: %s", e.Kernel, e.Source, on.reason(e))
			}
		}
		if best != nil {
			if passed != "" {
				*steps = append(*steps, "a faster kernel was passed over"+passed)
			}
			return Choice{ID: best.Kernel, Why: best.Source + " for this problem on " + best.Device}, true
		}
		*steps = append(*steps, "no entry for this problem on "+place.where+passed)
		for _, e := range fastestOfEach(place.rows, on, p.decode()) {
			if best == nil || e.nearer(best, p) {
				best = e
			}
		}
		if best != nil {
			why := fmt.Sprintf("%s on %s for the nearest problem, %d octaves away", best.Source, best.Device, best.distance(p))
			if best.Geometry.HeadDim != p.HeadDim {
				why += fmt.Sprintf(" and of head_dim %d", best.Geometry.HeadDim)
			}
			return Choice{ID: best.Kernel, Why: why}, true
		}
		kind := "prefill"
		if p.decode() {
			kind = "decode"
		}
		*steps = append(*steps, fmt.Sprintf("no entry of %s with d_state %d, %s, %s on %s", kind, p.DState, p.IO, p.State, place.where))
	}
	return Choice{}, false
}

// fastestOfEach is, of the entries of decode or of those of prefill whose kernel fits, the fastest for each problem. What
// was reported is not among them: it says nothing of kernels that came later.
func fastestOfEach(entries []*entry, on *offer, decode bool) []*entry {
	var found []*entry
	for _, e := range entries {
		if !on.fits(e) || e.Source == "reported" || e.decode() != decode {
			continue
		}
		i := slices.IndexFunc(found, e.sameProblem)
		if i < 0 {
			found = append(found, e)
		} else if e.faster(found[i]) {
			found[i] = e
		}
	}
	return found
}

func (t *table) fromDefaults(p Problem, fitting map[string]*Row, steps *[]string) Choice {
	var named, decode, defaults, recurrent, special, all []string
	for _, d := range t.Defaults {
		if d.DState == p.DState && d.IO == p.IO && d.State == p.State && fitting[d.Kernel] != nil {
			named = append(named, d.Kernel)
		}
	}
	for id, row := range fitting {
		all = append(all, id)
		if row.Spec.DState == 0 {
			continue
		}
		special = append(special, id)
		if row.Family == "update" && row.Default && p.decode() && p.HeadDim > 1 {
			decode = append(decode, id)
		}
		if row.Family == "recurrent" {
			recurrent = append(recurrent, id)
			if row.Default {
				defaults = append(defaults, id)
			}
		}
	}
	switch {
	case named != nil:
		return Choice{ID: slices.Min(named), Why: "the default for this d_state, io and state"}
	case decode != nil:
		return Choice{ID: slices.Min(decode), Why: "the update kernel with default fields: nothing is tuned for this problem"}
	case defaults != nil:
		return Choice{ID: slices.Min(defaults), Why: "the recurrent kernel with default fields: nothing is tuned for this problem"}
	case recurrent != nil:
		return Choice{ID: slices.Min(recurrent), Why: "the first recurrent kernel: nothing is tuned for this problem"}
	}
	*steps = append(*steps, fmt.Sprintf("no recurrent kernel for d_state %d, io %s, state %s", p.DState, p.IO, p.State))
	if special != nil {
		return Choice{ID: slices.Min(special), Why: "the only family on offer for this problem"}
	}
	*steps = append(*steps, "the generic kernel, which is slower")
	return Choice{ID: slices.Min(all), Why: "generic takes what no other kernel does"}
}
