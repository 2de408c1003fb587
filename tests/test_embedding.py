"""Packages as an engine uses them: Go by replace, vendor and proxy; C by the loader; ssmvet and its proofs merged."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyharness import c_package, golden, grades, manifest, merge, package, select, vectors
from pyharness.errors import ImageError, ToolchainError
from pyharness.families import RecurrentSpec, SsdSpec
from tests.fake_cuda import build_driver, write_facts

#: Prefill and decode of d_state 128, prompts in two launches, a small kernel, and the generic one.
SPECS = (
    RecurrentSpec(d_state=128),
    RecurrentSpec(d_state=128, lanes=16, rows=8, warps=1, chunk=2),
    SsdSpec(d_state=128, rows=16, warps=4, segments=8, precision="split"),
    SsdSpec(d_state=128, rows=16, warps=16, segments=4, io="bf16", exact="sm_90a"),
    RecurrentSpec(d_state=16),
    RecurrentSpec(d_state=0, layout="generic"),
)
#: A device on which the package's table has prompts of f32 split faster than any other kernel.
MEASURED = {"FAKECUDA_NAME": "NVIDIA H200"}
SPLIT = select.Entry(
    *(MEASURED["FAKECUDA_NAME"], "sm_90", "ssd", 64, 64, 128, 8, "f32", "f32", 64, 4096, SPECS[2].id, 1.0, "measured")
)


def _row(kernel: str, read: Callable[..., manifest.Row] = manifest.read) -> manifest.Row:
    """A kernel's row of the manifest; of the one in two launches that C runs too, as if the second overlapped.

    The first of the two asks for more shared memory than the second, as Hopper's own kernels of 64 columns do.
    """
    row = read(kernel)
    if kernel != SPECS[2].id:
        return row
    most = max(image.dynamic_shared for image in row.targets.values()) + 1024
    return replace(row, grid=row.grid | {"overlaps": 1, "gather_shared": most})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> package.Package:
    dist = tmp_path_factory.mktemp("dist")
    table = select.committed_table()
    measured = replace(table, entries=(*table.entries, SPLIT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "committed_table", lambda: measured)
        patch.setattr(manifest, "read", _row)
        # The standard library as the other tests have it, so that go compiles it once.
        patch.setattr(package, "VET_FLAGS", ())
        return package.package("sm_90,sm_90a", catalogue=SPECS, dist=dist, include_unproven=True)


@pytest.fixture(scope="module")
def tree(made: package.Package, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package.write_tree(made.files, tmp_path_factory.mktemp("tree") / "package")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which libcuda computes on the CPU and knows the kernels of SPECS."""
    folder = build_driver(tmp_path_factory.mktemp("driver"))
    facts = write_facts(folder / "facts", [_row(spec.id) for spec in SPECS])
    return {"LD_LIBRARY_PATH": str(folder), "FAKECUDA_FACTS": str(facts)}


@pytest.fixture
def no_driver(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without a driver, also on one that has one."""
    (tmp_path / "libcuda.so.1").write_bytes(b"not a library")
    return {"LD_LIBRARY_PATH": str(tmp_path)}


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    own = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(command, cwd=folder, env=own, text=True, capture_output=True, check=False)


# Go.


def test_a_packed_module_is_formatted_and_tests_itself(tree: Path) -> None:
    gofmt = Path(golden.run_go(["env", "GOROOT"], tree, cgo=False).strip()) / "bin" / "gofmt"
    assert subprocess.run([gofmt, "-l", "."], cwd=tree, text=True, capture_output=True, check=True).stdout == ""
    golden.run_go(["vet", "-tags", "cuda", "./..."], tree, cgo=True)


@pytest.fixture(scope="module")
def example_test(tree: Path) -> Path:
    """The example's tests as a binary, through `replace`."""
    golden.run_go(["vet", "-tags", "cuda", "."], tree / "examples" / "go", cgo=True)
    golden.run_go(["test", "-c", "-tags", "cuda", "-o", "example.test", "."], tree / "examples" / "go", cgo=True)
    return tree / "examples" / "go" / "example.test"


def test_an_engine_that_replaces_the_module_passes_every_case(example_test: Path, driver: dict[str, str]) -> None:
    done = _run([str(example_test), "-test.v"], example_test.parent, driver)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "KernelsThatAreSelectedAreRight",
        "AMixedBatchIsRight",
        "ManyGoroutines",
        "GoroutinesOnTwoDevicesAtOnce",
        "EveryKernelOnTwoDevicesAtOnce",
        "ACapturedPlanRunsOtherContents",
        "EveryKernelIsCaptured",
        "ACaptureOfAnythingButLaunchesIsAnError",
        "ASessionForTiming",
    ):
        assert f"--- PASS: Test{name}" in done.stdout
    assert "--- PASS: TestInvariantBitsDoNotChangeWithTheBatch" in done.stdout
    assert "golden_varlen_n16_f32" in done.stdout
    # What only kernels in other types take is skipped, and says so.
    skipped = [line for line in done.stdout.splitlines() if "--- SKIP" in line]
    assert len(skipped) < done.stdout.count("--- PASS") / 2
    assert all(word in line for line in skipped for word in ["TestKernelsThatAreSelectedAreRight/"])


def test_where_prompts_were_measured_fastest_in_two_launches_plans_have_both(
    example_test: Path, driver: dict[str, str]
) -> None:
    which = "MixedBatch|Invariant|KernelsThatAreSelected/ssd_lengths|KernelsThatAreSelected/a_fresh"
    done = _run([str(example_test), "-test.v", "-test.run", which], example_test.parent, driver | MEASURED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--- PASS: TestAMixedBatchIsRight" in done.stdout
    assert f"by {SPECS[2].id}" in done.stdout


def test_what_may_overlap_runs_in_turn_on_a_driver_without_attributes(
    tree: Path, example_test: Path, driver: dict[str, str], tmp_path: Path
) -> None:
    old = driver | {"LD_LIBRARY_PATH": str(build_driver(tmp_path, "-DWITHOUT_ATTRIBUTES"))}
    which = f"EveryKernelIsCaptured/{SPECS[2].id}"
    for environment, launched in ((driver, "overlapping"), (old, "in turn")):
        done = _run([str(example_test), "-test.v", "-test.run", which], example_test.parent, environment)
        assert done.returncode == 0, launched + done.stdout + done.stderr
        assert f"--- PASS: Test{which}" in done.stdout
    program, folder = tmp_path / "scan", tree / "examples" / "c"
    _cc((folder / "scan.c").read_text(), program, tree / "include")
    done = _run([str(program), str(tree), str(folder / "vectors" / "prompt_n128_f32.flat")], tmp_path, old)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"by {SPECS[2].id}" in done.stdout


def test_a_binary_with_the_tag_starts_without_a_driver(example_test: Path, no_driver: dict[str, str]) -> None:
    done = _run([str(example_test), "-test.v"], example_test.parent, no_driver)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ErrNoCUDA" in done.stdout
    assert "--- PASS" not in done.stdout


def test_vendored_under_the_race_detector_and_cgocheck2(tree: Path, driver: dict[str, str], tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(tree / "examples" / "go", engine, ignore=shutil.ignore_patterns("*.test"))
    text = (engine / "go.mod").read_text()
    (engine / "go.mod").write_text(text.replace("=> ../..", f"=> {tree}"))
    golden.run_go(["mod", "vendor"], engine, cgo=False)
    assert (engine / "vendor" / "example.com" / "ssmscan" / "driver.c").is_file()
    vendored = "-mod=vendor -buildvcs=false"
    shown = golden.run_go(
        ["test", "-race", "-v", "-tags", "cuda", "-run", "Goroutines|Allocate", "."],
        engine,
        cgo=True,
        environment=driver | {"GOEXPERIMENT": "cgocheck2", "GOFLAGS": vendored},
    )
    assert "--- PASS: TestManyGoroutinesWithStreamsOfTheirOwn" in shown
    assert "--- PASS: TestGoroutinesOnTwoDevicesAtOnce" in shown
    assert "--- PASS: TestLaunchesAllocateNothingAndACallersContextWillDo" in shown
    assert "SKIP" not in shown


def test_the_proxy_tree_serves_a_pure_go_engine(made: package.Package, tmp_path: Path) -> None:
    (zipped,) = (path for path in made.paths if path.suffix == ".zip")
    proxy = zipped.parents[3]
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "go.mod").write_text("module example.com/engine\n\ngo 1.24\n\nrequire example.com/ssmscan v0.1.0\n")
    (engine / "main.go").write_text("""package main

import (
	"fmt"

	"example.com/ssmscan"
	sm90 "example.com/ssmscan/images/cuda13/sm_90/recurrent"
)

func main() {
	gpu := ssmscan.GPU{Name: "NVIDIA H200", Major: 9, SharedLimit: 227 << 10, DriverVersion: 13000}
	library, err := ssmscan.OpenImages(gpu, ssmscan.Options{}, sm90.Images)
	if err != nil {
		panic(err)
	}
	plan, err := library.Plan(ssmscan.Bounds{
		Tokens: 4096, Sequences: 1, Heads: 64, HeadDim: 64, Groups: 8, DState: 128,
		IO: "f32", State: "f32", PadSlot: -1,
	})
	if err != nil {
		panic(err)
	}
	fmt.Println(plan.Parts[0].Kernel.Row.ID, plan.Parts[0].Launches, plan.Parts[0].Kernel.Proof)
	gpu.DriverVersion = 12080
	_, err = ssmscan.OpenImages(gpu, ssmscan.Options{}, sm90.Images)
	fmt.Println(err)
}
""")
    environment = {
        "GOPROXY": f"file://{proxy}",
        "GOFLAGS": "-mod=mod -modcacherw -buildvcs=false",
        "GONOSUMDB": "example.com",
        "GOPATH": str(tmp_path / "path"),
    }
    listed = golden.run_go(
        ["list", "-m", "-versions", "example.com/ssmscan"], engine, cgo=False, environment=environment
    )
    assert listed.strip() == "example.com/ssmscan v0.1.0"
    shown = golden.run_go(["run", "."], engine, cgo=False, environment=environment)
    # A block a head and 32 of 64 rows: 128 blocks of 256 threads with 96000 bytes.
    assert f"{SPECS[0].id} [{{0 [128 1 1] [256 1 1] 96000 false}}] proven on NVIDIA H200, driver " in shown
    assert "the driver is too old: want CUDA 13.0, driver branch R580, have CUDA 12.8" in shown


def test_the_example_runs_a_stack_of_layers(tree: Path, driver: dict[str, str], no_driver: dict[str, str]) -> None:
    golden.run_go(["build", "-tags", "cuda", "-o", "stack", "."], tree / "examples" / "go", cgo=True)
    options = ["-layers", "2", "-prompt", "20", "-steps", "3", "-heads", "8", "-sequences", "2"]
    done = _run(["./stack", *options], tree / "examples" / "go", driver)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "decode: 3 steps of 2 sequences" in done.stdout
    assert "rows of the last layer against float64: relative error " in done.stdout
    wrong = _run(["./stack", *options, "-heads", "7"], tree / "examples" / "go", driver)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "a multiple of 8 heads" in wrong.stderr
    none = _run(["./stack", *options], tree / "examples" / "go", no_driver)
    assert none.returncode == 1
    assert "no CUDA driver or device: cannot open libcuda.so.1" in none.stderr


# C.


def _cc(source: str, output: Path, *include: Path, flags: tuple[str, ...] = ()) -> None:
    command = ["cc", "-std=gnu99", "-Wall", "-Wextra", "-Werror", "-O1", *flags, *(f"-I{folder}" for folder in include)]
    done = subprocess.run(
        [*command, "-x", "c", "-o", str(output), "-", "-ldl", "-lm"],
        input=source,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_c_example_passes_the_golden_vectors(tree: Path, driver: dict[str, str], tmp_path: Path) -> None:
    folder = tree / "examples" / "c"
    program = tmp_path / "scan"
    _cc((folder / "scan.c").read_text(), program, tree / "include")
    flat = sorted(str(path) for path in (folder / "vectors").glob("*.flat"))
    assert len(flat) == len(golden.vectors(golden.SMALL_D_STATE, ("f32",))) + 2
    done = _run([str(program), str(tree), *flat], tmp_path, driver)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(", which is selected") == len(flat)
    # Every kernel that takes a vector runs it, the one in two launches among them.
    assert done.stdout.count("ok ") > len(flat)
    assert all(f"by {spec.id}" in done.stdout for spec in SPECS[2:4])
    assert "WRONG" not in done.stdout
    done = _run([str(program), str(tree), *flat], tmp_path, driver | MEASURED)
    assert f"by {SPECS[2].id} " in done.stdout.split("prompt_n128_f32")[1].split(", which is selected")[0]
    done = _run([str(program), "-devices", "2", str(tree), flat[0]], tmp_path, driver)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout.count("on device 0 by") == done.stdout.count("on device 1 by") == done.stdout.count("ok ") / 2 > 0
    )
    done = _run([str(program), "-devices", "3", str(tree), flat[0]], tmp_path, driver)
    assert (done.returncode, done.stdout) == (1, "")
    assert "scan: open: " in done.stderr
    # A wrong expectation is seen: the last bytes of a file are of the state that is expected.
    data = bytearray(Path(flat[0]).read_bytes())
    data[-1] ^= 0x80
    (tmp_path / "wrong.flat").write_bytes(data)
    done = _run([str(program), str(tree), str(tmp_path / "wrong.flat")], tmp_path, driver)
    assert (done.returncode, done.stdout[:5]) == (1, "WRONG")
    # So is an image that is not the package's.
    image = next((tree / "images").glob("*/sm_90/recurrent/*_n16_*.cubin"))
    kept = image.read_bytes()
    try:
        image.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        done = _run([str(program), str(tree), flat[0]], tmp_path, driver)
    finally:
        image.write_bytes(kept)
    assert done.returncode == 1
    assert "want sha256 " in done.stderr
    done = _run([str(program), str(tree), flat[0]], tmp_path, driver | {"FAKECUDA_CUDA": "12040"})
    assert "the driver is too old: want CUDA 13.0, driver branch R580, have CUDA 12.4" in done.stderr


def _c_words(*words: object) -> str:
    return ", ".join(json.dumps(word) if isinstance(word, str) else str(word) for word in words)


def _selection_program(document: dict[str, Any]) -> str:
    """A program that prints what the C rules make of the shared vectors, a line a case."""
    lines = []
    for case in document["selections"]:
        p, device = case["problem"], case["device"] or {"name": "", "target": "", "shared_limit": 0}
        sizes = [p[name] for name in ("tokens", "sequences", "heads", "head_dim", "groups", "d_state", "longest")]
        sizes += [int(p.get("per_column_a", 0)), p.get("checkpoint_step", 0)]
        problem = f"{{{{{_c_words(*sizes)}}}, {_c_words(p['io'], p['state'])}}}"
        lines.append(
            f"  select_case((ssm_problem){problem}, "
            f"{_c_words(device['name'], device['target'], device['shared_limit'], int(case['invariant']))});"
        )
    for case in document["plans"]:
        g = case["geometry"]
        sizes = [g[name] for name in ("tokens", "sequences", "heads", "head_dim", "groups", "d_state", "longest")]
        sizes += [int(g.get("per_column_a", 0)), g.get("checkpoint_step", 0)]
        geometry = f"(ssm_geometry){{{_c_words(*sizes)}}}"
        extra = document["plan_rows"].get(case["id"])
        if extra is None:
            lines.append(f"  plan_case({json.dumps(case['id'])}, {geometry});")
        else:
            first = vectors.row(vectors.SPECS[0])
            numbers = f"{first.block}, {first.targets['sm_90'].dynamic_shared}"
            grid, names = c_package.grid_initialiser(extra["grid"]), _c_words(*extra["entries"])
            lines.append(f"  print_plan(&(ssm_grid){grid}, {numbers}, (const char* const[]){{{names}}}, {geometry});")
    return (
        """#define SSM_NO_TABLES
#include "ssmscan.h"
#include "ssmscan_tables.h"

// A device runs the images of its target and of its exact target.
static const ssm_image* image_of(const ssm_kernel* kernel, const char* target) {
  const size_t length = strlen(target);
  for (int i = 0; i < SSM_MAX_IMAGES && kernel->images[i].target != NULL; i++) {
    const char* own = kernel->images[i].target;
    if (strncmp(own, target, length) == 0 && (own[length] == 0 || strcmp(own + length, "a") == 0))
      return &kernel->images[i];
  }
  return NULL;
}

static void select_case(ssm_problem problem, const char* device, const char* target, int limit, int invariant) {
  unsigned char fits[SSM_MAX_KERNELS] = {0};
  int32_t steps;
  if (invariant) problem = ssm_invariant(&problem);
  for (int k = 0; ssm_package.kernels[k].id != NULL; k++) {
    const ssm_kernel* kernel = &ssm_package.kernels[k];
    const ssm_image* image = image_of(kernel, target);
    const int usable = target[0] == 0 || (image != NULL && (limit == 0 || image->dynamic_shared <= limit));
    fits[k] = usable && ssm_takes(kernel, &problem);
  }
  const int found = ssm_choose(&ssm_package, &problem, device, target, fits, &steps);
  printf("%s %d\\n", found < 0 ? "" : ssm_package.kernels[found].id, found < 0 ? 0 : steps);
}

static void print_plan(const ssm_grid* grid, int block, int shared, const char* const* entries, ssm_geometry sizes) {
  ssm_plan plan;
  if (ssm_make_plan(grid, block, shared, &sizes, &plan)) exit(1);
  for (int i = 0; i < plan.count; i++) {
    const ssm_shape* s = &plan.launches[i];
    printf("%s %u %u %u %u %u %u %u %d ", entries[s->entry], s->grid[0], s->grid[1], s->grid[2], s->block[0],
           s->block[1], s->block[2], s->shared_bytes, s->overlaps);
  }
  printf("%lld %d %d %d\\n", (long long)plan.workspace_bytes, plan.lanes, plan.rows, plan.chunk);
}

static void plan_case(const char* id, ssm_geometry sizes) {
  for (int k = 0; ssm_package.kernels[k].id != NULL; k++) {
    const ssm_kernel* kernel = &ssm_package.kernels[k];
    if (strcmp(kernel->id, id) == 0)
      print_plan(&kernel->grid, kernel->block, image_of(kernel, "sm_90")->dynamic_shared, kernel->entries, sizes);
  }
}

int main(void) {
"""
        + "\n".join(lines)
        + "\n  return 0;\n}\n"
    )


def _plan_line(case: dict[str, Any]) -> str:
    words: list[object] = []
    for launch in case["launches"]:
        words += [launch["entry"], *launch["grid"], *launch["block"], launch["shared_bytes"], int(launch["overlaps"])]
    words += [case[name] for name in ("workspace_bytes", "lanes", "rows", "chunk")]
    return " ".join(map(str, words))


def test_c_selects_and_plans_as_python_does(tmp_path: Path) -> None:
    document = json.loads(vectors.PATH.read_text())
    rows = {spec.id: vectors.row(spec) for spec in vectors.SPECS}
    shipped = {("cuda13", kernel): list(row.targets) for kernel, row in rows.items()}
    lanes = {"cuda13": {"cuda": 13000, "ptx": 13000, "min_driver": "580"}}
    tables = c_package.tables(lanes, {"cuda13": rows}, shipped, vectors.TABLE, grades.Proofs({}, {}))
    (tmp_path / "ssmscan_tables.h").write_bytes(tables)
    program = tmp_path / "rules"
    _cc(_selection_program(document), program, c_package.HEADERS, tmp_path, flags=("-O0",))
    shown = subprocess.run([program], text=True, capture_output=True, check=True).stdout.splitlines()
    wanted = [f"{case['id']} {case['steps']}" for case in document["selections"]]
    wanted += [_plan_line(case) for case in document["plans"]]
    assert len(shown) == len(wanted) > 300
    for number, (have, want) in enumerate(zip(shown, wanted, strict=True)):
        assert have == want, f"case {number}"


def test_the_loader_is_cpp_too(tree: Path, tmp_path: Path) -> None:
    source = '#include "ssmscan.h"\nint main() { return ssm_error()[0]; }\n'
    # Lists of the tables end in {0}, which C++ calls incomplete.
    flags = ["-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror", f"-I{tree / 'include'}"]
    command = ["g++", "-std=c++11", *flags, "-x", "c++", "-"]
    done = subprocess.run(
        [*command, "-o", tmp_path / "cpp", "-ldl"], input=source, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_c_hashes_as_the_standard_says(tmp_path: Path) -> None:
    source = """#define SSM_NO_TABLES
#include "ssmscan.h"
int main(void) {
  unsigned char data[200];
  char hex[65];
  for (int i = 0; i < 200; i++) data[i] = (unsigned char)(7 * i);
  for (int bytes = 0; bytes < 200; bytes++) {
    ssm_sha256(data, (size_t)bytes, hex);
    puts(hex);
  }
  return 0;
}
"""
    _cc(source, tmp_path / "hash", c_package.HEADERS)
    shown = subprocess.run([tmp_path / "hash"], text=True, capture_output=True, check=True).stdout.split()
    data = bytes(7 * i % 256 for i in range(200))
    assert shown == [hashlib.sha256(data[:size]).hexdigest() for size in range(200)]


# ssmvet, and its proofs merged.


@pytest.fixture(scope="module")
def vetted(made: package.Package, driver: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ssmvet writes of the kernels of SPECS."""
    (program,) = (path for path in made.paths if path.name == "ssmvet")
    folder = tmp_path_factory.mktemp("vetted")
    done = _run([str(program), "-quick", "-out", "card.json"], folder, driver)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SPECS)} images proven on fake device (sm_90): card.json" in done.stdout
    return folder / "card.json"


def test_ssmvet_proves_every_image_and_its_file_is_merged(vetted: Path, tmp_path: Path) -> None:
    document = json.loads(vetted.read_text())
    assert {image["kernel"] for image in document["images"].values()} == {spec.id for spec in SPECS}
    assert all(image["cases"] > 3 and image["worst"] <= 1 for image in document["images"].values())
    # The stand-in rounds once, which in 16 bits leaves nothing beyond the unit in the last place that is allowed.
    assert all(image["worst"] > 0 for image in document["images"].values() if "_f32_" in image["kernel"])
    where, count = merge.merge(vetted, tmp_path)
    assert (where, count) == (tmp_path / "fake-device.json", len(SPECS))
    grade = grades.stored(tmp_path).grade(manifest.read(SPECS[0].id), "sm_90")
    assert (grade.level, grade.device) == ("device", "fake device")
    kept = json.loads(where.read_text())
    kept["images"]["other"] = kept["images"][next(iter(kept["images"]))]
    where.write_text(json.dumps(kept))
    merge.merge(vetted, tmp_path)
    assert set(json.loads(where.read_text())["images"]) == {*document["images"], "other"}
    # A proof of more cases stays; what it gains is the time.
    sha256, proof = next(iter(kept["images"].items()))
    kept["images"][sha256] = proof | {"cases": 1000, "by": "another"}
    where.write_text(json.dumps(kept))
    document["images"][sha256]["microseconds"] = {"decode_16x1": 20.5}
    (tmp_path / "timed.json").write_text(json.dumps(document))
    merge.merge(tmp_path / "timed.json", tmp_path)
    merged = json.loads(where.read_text())["images"][sha256]
    assert (merged["cases"], merged["by"], merged["microseconds"]) == (1000, "another", {"decode_16x1": 20.5})


def test_a_proof_of_another_lane_is_merged_by_its_source(vetted: Path, tmp_path: Path) -> None:
    document = json.loads(vetted.read_text())
    sha256, proof = next(iter(document["images"].items()))
    assert (proof["lane"], proof["source_sha256"]) == ("cuda13", manifest.read(proof["kernel"]).source_sha256)
    other = proof | {"lane": "cuda12"}
    document["images"] = {"1" * 64: other}
    (tmp_path / "card.json").write_text(json.dumps(document))
    merge.merge(tmp_path / "card.json", tmp_path / "proofs")
    row = manifest.read(proof["kernel"])
    second = {"sm_90": replace(row.targets[proof["target"]], sha256="1" * 64)}
    assert grades.stored(tmp_path / "proofs").grade(replace(row, targets=second), "sm_90").level == "device"
    document["images"] = {"1" * 64: other | {"source_sha256": "0" * 64}}
    (tmp_path / "card.json").write_text(json.dumps(document))
    with pytest.raises(ImageError, match="the source with sha256 .* was wanted, found a proof of 0000"):
        merge.merge(tmp_path / "card.json", tmp_path / "proofs")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.update(images={}), "proofs of images by sha256 were wanted, found none"),
        (lambda d: d.pop("device"), "device was wanted, found None"),
        (lambda d: next(iter(d["images"].values())).update(worst=1.5), "an error within what is allowed"),
        (lambda d: next(iter(d["images"].values())).update(worst="0"), "worst as float was wanted, found '0'"),
        (
            lambda d: next(iter(d["images"].values())).update(kernel="recurrent_other"),
            "is not an image of the manifest",
        ),
        (
            lambda d: next(iter(d["images"].values())).update(microseconds={"decode_16x1": 0}),
            "microseconds by point, above 0, were wanted",
        ),
        (lambda d: d["images"].update({"0" * 64: next(iter(d["images"].values()))}), "found a proof of 0000"),
    ],
    ids=["empty", "no device", "wrong", "malformed", "unknown kernel", "no time", "other bytes"],
)
def test_a_file_that_proves_nothing_is_not_merged(vetted: Path, damage: Any, message: str, tmp_path: Path) -> None:
    document = json.loads(vetted.read_text())
    damage(document)
    (tmp_path / "card.json").write_text(json.dumps(document))
    with pytest.raises(ImageError, match=message):
        merge.merge(tmp_path / "card.json", tmp_path / "proofs")
    assert not (tmp_path / "proofs").exists()


def test_ssmvet_fails_on_an_image_that_is_wrong(made: package.Package, driver: dict[str, str], tmp_path: Path) -> None:
    (program,) = (path for path in made.paths if path.name == "ssmvet")
    facts = [line.split() for line in Path(driver["FAKECUDA_FACTS"]).read_text().splitlines()]
    other = [f"{symbol} {int(registers) + 1} {' '.join(rest)}\n" for symbol, registers, *rest in facts]
    (tmp_path / "facts").write_text("".join(other))
    environment = driver | {"FAKECUDA_FACTS": str(tmp_path / "facts")}
    done = _run([str(program), "-quick", "-out", "card.json"], tmp_path, environment)
    assert done.returncode == 1
    assert f"nothing is written, {len(SPECS)} images failed" in done.stderr
    registers = int(facts[0][1])
    assert f"registers: want {registers}, have {registers + 1}" in done.stderr
    assert not (tmp_path / "card.json").exists()


def test_ssmvet_says_what_it_lacks(made: package.Package, no_driver: dict[str, str], tmp_path: Path) -> None:
    (program,) = (path for path in made.paths if path.name == "ssmvet")
    done = _run([str(program)], tmp_path, no_driver)
    assert (done.returncode, done.stdout) == (1, "")
    assert "ssmvet: ssmscan: no CUDA driver or device: cannot open libcuda.so.1" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["-kernels", f"{SPECS[0].id}, recurrent_n128_typo"],
            'want ids of images for fake device (sm_90), have "recurrent_n128_typo"',
        ),
        (["-lane", "cuda12"], '-lane: want one of cuda13, have "cuda12"'),
        (["-family", "woven"], 'want images of family "woven" for fake device (sm_90), have none'),
        (["-family", "ssd", "-kernels", SPECS[0].id], 'want images of family "ssd" for fake device (sm_90), have none'),
    ],
    ids=["id", "lane", "family", "id of another family"],
)
def test_ssmvet_refuses_a_name_before_it_proves_anything(
    made: package.Package, driver: dict[str, str], options: list[str], message: str, tmp_path: Path
) -> None:
    (program,) = (path for path in made.paths if path.name == "ssmvet")
    done = _run([str(program), *options], tmp_path, driver)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "-lane" in options or all(spec.id in done.stderr for spec in SPECS), "what there is"
    assert not list(tmp_path.iterdir())


def test_a_package_that_go_refuses_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> str:
        raise ToolchainError("go refused")

    monkeypatch.setattr(golden, "run_go", refused)
    with pytest.raises(ToolchainError, match="go refused"):
        package.package("sm_90", catalogue=SPECS[2:3], dist=tmp_path / "dist", include_unproven=True)
    assert not (tmp_path / "dist").exists()
