package ssmscan

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// Field is one field of ScanArgs as a manifest row states it: its byte offset, and its NumPy type string such as <u8.
type Field struct {
	Name   string `json:"name"`
	Offset int    `json:"offset"`
	Type   string `json:"type"`
}

// Usage is what one entry of an image uses: registers of a thread, and bytes.
type Usage struct {
	Registers    int `json:"registers"`
	StaticShared int `json:"static_shared"`
	LocalBytes   int `json:"local_bytes"`
}

// Image is what a manifest row says of the image for one target; sizes are in bytes, Usage is by symbol.
type Image struct {
	Kind          string           `json:"kind"`
	Bytes         int              `json:"bytes"`
	SHA256        string           `json:"sha256"`
	DynamicShared int              `json:"dynamic_shared"`
	Usage         map[string]Usage `json:"usage"`
}

// Spec is the part of a kernel's specification that a caller matches a problem against.
type Spec struct {
	DState    int32  `json:"d_state"`
	IO        DType  `json:"io"`
	State     DType  `json:"state"`
	Precision string `json:"precision"` // of f32 operands of matrix products: "split" or "tf32"
}

// Row is one kernel of the manifest, as pyharness/manifest.py describes it.
type Row struct {
	Schema       int                 `json:"schema"`
	ID           string              `json:"id"`
	Family       string              `json:"family"`
	Spec         Spec                `json:"spec"`
	Entries      []string            `json:"entries"`
	ArgsBytes    int                 `json:"args_bytes"`
	Args         []Field             `json:"args"`
	Block        int                 `json:"block"` // threads
	Grid         GridRule            `json:"grid"`
	Limits       map[string][2]int64 `json:"limits"`  // least and greatest of sizes; "longest" is that of a sequence
	Default      bool                `json:"default"` // what selection falls back on for its d_state and types
	Targets      map[string]Image    `json:"targets"`
	Excluded     map[string]string   `json:"excluded"` // by target, why there is no image
	SourceSHA256 string              `json:"source_sha256"`
	Compiler     string              `json:"compiler"`
	MinDriver    string              `json:"min_driver"` // first driver branch that loads the images
	Numerics     int                 `json:"numerics_revision"`
}

// schema is the form of the manifest that this package reads.
const schema = 1

// ParseRow reads one manifest file.
func ParseRow(text []byte) (*Row, error) {
	row := new(Row)
	if err := json.Unmarshal(text, row); err != nil {
		return nil, fmt.Errorf("ssmscan: manifest row: %w", err)
	}
	if row.Schema != schema {
		return nil, &ImageError{row.ID, "schema of the manifest row", strconv.Itoa(schema), strconv.Itoa(row.Schema)}
	}
	return row, nil
}

// Layout is the layout of ScanArgs as this package has it.
func Layout() []Field {
	kinds := map[reflect.Kind]string{
		reflect.Uint64: "<u8", reflect.Int64: "<i8", reflect.Int32: "<i4", reflect.Uint32: "<u4", reflect.Float32: "<f4",
	}
	args := reflect.TypeFor[ScanArgs]()
	layout := make([]Field, args.NumField())
	for i := range layout {
		field := args.Field(i)
		layout[i] = Field{field.Tag.Get("scan"), int(field.Offset), kinds[field.Type.Kind()]}
	}
	return layout
}

// CheckLayout compares the row's argument layout with ScanArgs: its size, then field by field.
func (r *Row) CheckLayout() error {
	if r.ArgsBytes != ScanArgsBytes {
		return &ImageError{r.ID, "bytes of ScanArgs", strconv.Itoa(ScanArgsBytes), strconv.Itoa(r.ArgsBytes)}
	}
	want := Layout()
	if len(r.Args) != len(want) {
		return &ImageError{r.ID, "fields of ScanArgs", strconv.Itoa(len(want)), strconv.Itoa(len(r.Args))}
	}
	for i, field := range want {
		if r.Args[i] != field {
			return &ImageError{r.ID, "ScanArgs." + field.Name, fmt.Sprint(field), fmt.Sprint(r.Args[i])}
		}
	}
	return nil
}

// noTarget is the error of an image that the row does not have.
func (r *Row) noTarget(target string) error {
	have := strings.Join(slices.Sorted(maps.Keys(r.Targets)), ", ")
	if reason, ok := r.Excluded[target]; ok {
		have += " (" + target + ": " + reason + ")"
	}
	return &ImageError{r.ID, "target", target, have}
}

// Refusal says why the kernel does not take a problem, or is empty.
func (r *Row) Refusal(p Problem) string {
	if r.Spec.IO != p.IO || r.Spec.State != p.State {
		return fmt.Sprintf("its io and state are %s and %s, the problem's %s and %s", r.Spec.IO, r.Spec.State, p.IO, p.State)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Limits)) {
		limits := r.Limits[name]
		if of, found := strings.CutSuffix(name, "_multiple"); found {
			if size, ok := p.size(of); !ok || size%max(limits[0], 1) != 0 {
				return fmt.Sprintf("it takes a %s that is a multiple of %d, the problem has %d", of, limits[0], size)
			}
			continue
		}
		if size, ok := p.size(name); !ok || size < limits[0] || size > limits[1] {
			return fmt.Sprintf("it takes a %s of %d to %d, the problem has %d", name, limits[0], limits[1], size)
		}
	}
	return ""
}

// OperandError is the relative norm of the error that rounding of what a kernel multiplies may cause, in one head of one
// sequence or slot, beyond that of f32 arithmetic: 0 but for matrix products, which are ssd's.
func (r *Row) OperandError() float64 {
	if r.Family != "ssd" {
		return 0
	}
	operand := r.Spec.Precision
	if operand == "" {
		operand = string(r.Spec.IO)
	}
	return map[string]float64{"bf16": 0x1p-7, "f16": 0x1p-10, "tf32": 0x1p-9, "split": 0x1p-15}[operand]
}

// mostShared is the most dynamic shared memory that a launch of an image asks for, in bytes: the first of two launches
// may want more than the other.
func (r *Row) mostShared(image *Image) int {
	return max(image.DynamicShared, int(r.Grid.Integers["gather_shared"]))
}

// check compares an image with what the row says of it for a target, and the row with this package.
func (r *Row) check(target string, image []byte) (*Image, error) {
	if err := r.CheckLayout(); err != nil {
		return nil, err
	}
	if len(r.Entries) == 0 {
		return nil, &ImageError{r.ID, "entries", "at least 1", "0"}
	}
	want, ok := r.Targets[target]
	if !ok {
		return nil, r.noTarget(target)
	}
	if len(image) != want.Bytes {
		return nil, &ImageError{r.ID, "image bytes", strconv.Itoa(want.Bytes), strconv.Itoa(len(image))}
	}
	sum := sha256.Sum256(image)
	if have := hex.EncodeToString(sum[:]); have != want.SHA256 {
		return nil, &ImageError{r.ID, "image sha256", want.SHA256, have}
	}
	return &want, nil
}
