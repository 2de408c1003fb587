package ssmscan

import (
	"encoding/json"
	"fmt"
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

// invariant is what an invariant choice is made for: 16 sequences of 1 token for decode, 1 of 4096 for prefill.
func (p Problem) invariant() Problem {
	if p.longest() <= DecodeTokens {
		p.Sequences, p.Tokens, p.Longest = 16, 16, DecodeTokens
	} else {
		p.Sequences, p.Tokens, p.Longest = 1, 4096, 4096
	}
	return p
}

// entry is one line of the selection table: the kernel that was best for a problem on a device.
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

func (e *entry) alike(p Problem) bool {
	return e.Geometry.DState == p.DState && e.IO == p.IO && e.State == p.State
}

func (e *entry) same(p Problem) bool {
	g := e.Geometry
	return g.Heads == p.Heads && g.HeadDim == p.HeadDim && g.Groups == p.Groups &&
		e.BatchHeads == p.batchHeads() && e.Tokens == int64(p.Tokens)
}

// Choice is the kernel that was selected, why, and every step down on the way to it.
type Choice struct {
	ID    string
	Why   string
	Steps []string
	Proof Proof
}

// choose picks among rows that fit, by the rule that pyharness/select.py states. device and target are those of the GPU.
func (t *table) choose(p Problem, device, target string, fitting map[string]*Row) Choice {
	var steps []string
	if target != "" {
		if found, ok := t.fromEntries(p, device, target, fitting, &steps); ok {
			found.Steps = steps
			return found
		}
	}
	found := t.fromDefaults(p, fitting, &steps)
	found.Steps = steps
	return found
}

func (t *table) fromEntries(p Problem, device, target string, fitting map[string]*Row, steps *[]string) (Choice, bool) {
	var own, kin []*entry
	for i := range t.Entries {
		e := &t.Entries[i]
		if !e.alike(p) || fitting[e.Kernel] == nil {
			continue
		}
		if e.Device == device {
			own = append(own, e)
		} else if e.Target == target && fitting[e.Kernel].Spec.Precision != "split" {
			kin = append(kin, e) // whether split operands are worth it depends on the device
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
			if e.same(p) && (best == nil || e.Kernel < best.Kernel) {
				best = e
			}
		}
		if best != nil {
			return Choice{ID: best.Kernel, Why: best.Source + " for this problem on " + best.Device}, true
		}
		*steps = append(*steps, "no entry for this problem on "+place.where)
		for _, e := range place.rows {
			if e.Source == "reported" { // it says nothing of kernels that came later
				continue
			}
			if best == nil || e.distance(p) < best.distance(p) ||
				e.distance(p) == best.distance(p) && e.Kernel < best.Kernel {
				best = e
			}
		}
		if best != nil {
			why := fmt.Sprintf("%s on %s for the nearest problem, %d octaves away", best.Source, best.Device, best.distance(p))
			return Choice{ID: best.Kernel, Why: why}, true
		}
		*steps = append(*steps, fmt.Sprintf("no entry with d_state %d, %s, %s on %s", p.DState, p.IO, p.State, place.where))
	}
	return Choice{}, false
}

func (t *table) fromDefaults(p Problem, fitting map[string]*Row, steps *[]string) Choice {
	var named, defaults, recurrent, special, all []string
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
