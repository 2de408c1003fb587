package ssmscan

import (
	"crypto/sha256"
	"embed"
	"errors"
	"path"
	"strings"
	"testing"

	"example.com/ssmscan/internal/golden"
)

// testdata holds only its README in the source tree: `invoke go` fills it in build/go.
//
//go:embed testdata
var testdata embed.FS

const unstaged = "nothing is staged: run `uv run invoke go` and test in build/go"

// stagedKernel is one kernel of testdata/kernels.
type stagedKernel struct {
	row   *Row
	image []byte
}

// readKernels gives the target and the kernels that were staged, or skips.
func readKernels(t *testing.T) (string, []stagedKernel) {
	t.Helper()
	target, err := testdata.ReadFile("testdata/kernels/target")
	if err != nil {
		t.Skip(unstaged)
	}
	var kernels []stagedKernel
	for _, name := range staged(t, "testdata/kernels", ".json") {
		row, err := ParseRow(read(t, name))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		kernels = append(kernels, stagedKernel{row, read(t, strings.TrimSuffix(name, ".json")+".cubin")})
	}
	return strings.TrimSpace(string(target)), kernels
}

// readVectors gives the golden vectors that were staged, or skips.
func readVectors(t *testing.T) []*golden.Vector {
	t.Helper()
	if _, err := testdata.ReadDir("testdata/golden"); err != nil {
		t.Skip(unstaged)
	}
	var vectors []*golden.Vector
	for _, name := range staged(t, "testdata/golden", ".golden") {
		vector, err := golden.Read(read(t, name))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		vectors = append(vectors, vector)
	}
	return vectors
}

func staged(t *testing.T, folder, suffix string) []string {
	t.Helper()
	entries, err := testdata.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), suffix) {
			names = append(names, path.Join(folder, entry.Name()))
		}
	}
	if len(names) == 0 {
		t.Fatalf("%s: want at least one %s, have none: stage again", folder, suffix)
	}
	return names
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	bytes, err := testdata.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

func TestManifestRowsAgreeWithThisPackageAndTheirImages(t *testing.T) {
	target, kernels := readKernels(t)
	for _, kernel := range kernels {
		if _, err := kernel.row.check(target, kernel.image); err != nil {
			t.Error(err)
			continue
		}
		t.Logf("%s for %s: %d bytes, sha256 %.6x", kernel.row.ID, target, len(kernel.image), sha256.Sum256(kernel.image))
		var image *ImageError
		flipped := append([]byte(nil), kernel.image...)
		flipped[len(flipped)/2] ^= 1
		if _, err := kernel.row.check(target, flipped); !errors.As(err, &image) || image.Field != "image sha256" {
			t.Errorf("%s: one flipped bit: want an ImageError of the sha256, have %v", kernel.row.ID, err)
		}
	}
}

func TestGoldenVectorsAreWhole(t *testing.T) {
	for _, vector := range readVectors(t) {
		y, state := vector.Expect["y"], vector.Expect["state"]
		elements := int(vector.Heads * vector.HeadDim)
		if want := int(vector.Tokens) * elements; len(y.Values) != want {
			t.Errorf("%s: y: want %d values, have %d", vector.Name, want, len(y.Values))
		}
		if want := len(state.Rows) * elements * int(vector.DState); len(state.Values) != want {
			t.Errorf("%s: state: want %d values, have %d", vector.Name, want, len(state.Values))
		}
		if errs := y.Compare(vector.IO, y.Values); errs.Norm != 0 || errs.Worst != 0 {
			t.Errorf("%s: y against itself: want no error, have %v", vector.Name, errs)
		}
	}
}
