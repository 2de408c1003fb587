"""generated/ is what the templates emit and the pinned compiler makes of it; and building makes just that."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from pyharness import args, build, gpus, manifest, toolchain
from pyharness.catalogue import CATALOGUE
from pyharness.errors import ImageError, NoKernel, ToolchainError
from pyharness.families import RecurrentSpec
from pyharness.render import render
from pyharness.spec import SHARED_LIMIT, TARGETS, KernelSpec, parse_id

REFRESH = "run `invoke build` and commit generated/"
#: The one kernel that is compiled for every target here; the rest are compiled for sm_90.
EVERYWHERE = RecurrentSpec(d_state=128)
#: A kernel of each template is compiled twice.
REPEATED = (EVERYWHERE, RecurrentSpec(d_state=128, layout="block"), RecurrentSpec(d_state=128, layout="padded"))
#: More shared memory than sm_75 has, less than a portable kernel may use.
LARGE = RecurrentSpec(d_state=1024, layout="padded", chunk=10)


def _compiled(spec: KernelSpec, target: str) -> toolchain.Image:
    return toolchain.compile_cached(build.job(spec, target), toolchain.find_compiler())


def test_the_manifest_lists_the_catalogue() -> None:
    assert manifest.ids() == tuple(sorted(spec.id for spec in CATALOGUE)), REFRESH


def test_generated_holds_what_the_templates_emit() -> None:
    wanted = build.expected(manifest.read_all(), {spec.id: render(spec) for spec in CATALOGUE})
    assert build.differences(wanted) == {}, REFRESH


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.id)
def test_a_row_is_that_of_its_spec(spec: KernelSpec) -> None:
    row = manifest.read(spec.id)
    assert row.kernel == spec
    assert row.source_sha256 == manifest.source_sha256(render(spec)), REFRESH
    assert (row.args, row.args_bytes) == (args.layout(), args.SCAN_ARGS.itemsize)
    assert (row.compiler, row.flags) == (toolchain.PINNED_VERSION, list(toolchain.flags(spec.family)))
    assert (row.grid, row.block, row.numerics_revision) == (spec.grid_rule, spec.threads, spec.numerics_revision)


def test_a_launch_that_overlaps_waits_itself_and_is_for_devices_that_can() -> None:
    for spec in CATALOGUE:
        if spec.grid_rule.get("overlaps"):
            text = render(spec)
            assert "griddepcontrol.wait" in text, spec.id
            # What the launch before leaves is in the workspace, which is reached by Kept alone, behind the wait.
            kept = text.partition("struct Kept {")[2].partition("\n};")[0]
            assert text.count("a.workspace") == kept.count("a.workspace") > 0, spec.id
            before, _, behind = (
                text.partition("void carry_state(")[2].partition("\n}\n")[0].partition("await_launch_before()")
            )
            assert "load_state<" in behind, spec.id
            assert not re.search(r"load_state<|\bKept\b", before), spec.id
            # Every block waits before it ends.
            assert text.rstrip().endswith("await_launch_before();\n}"), spec.id
            assert {target.rstrip("a") for target in spec.targets()} <= {"sm_90", "sm_100", "sm_120"}, spec.id


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.id)
def test_a_row_has_every_target_or_the_reason(spec: KernelSpec) -> None:
    row = manifest.read(spec.id)
    assert set(row.targets) | set(row.excluded) == set(TARGETS)
    assert tuple(name for name in TARGETS if name in row.targets) == spec.targets()
    assert row.excluded == {target: spec.excluded(target) for target in TARGETS if spec.excluded(target)}
    for target, image in row.targets.items():
        assert image.kind == ("ptx" if target.startswith("compute_") else "cubin")
        static = max((usage["static_shared"] for usage in image.usage.values()), default=0)
        assert image.dynamic_shared + static <= SHARED_LIMIT[target]


@pytest.mark.parametrize(
    "kernel",
    [
        "selective_n16_l4_r16_w8_c4_bf16_sbf16",
        "selective_n16_l2_r32_w8_c1_s8_f16_sf16",
        "selective_n16_l2_r32_w1_c1_s1_bf16_sf32",
        "selective_n8_l2_r32_w8_c4_bf16_sf32",
        "selective_n32_l8_r8_w8_c4_bf16_sf32",
        "ssd_n256_p64_r16_w4_c32_t4_f32_sf32_split",
    ],
)
def test_kernels_beside_the_catalogue_that_are_short_of_registers_spill_nothing(kernel: str) -> None:
    assert toolchain.worst([_compiled(parse_id(kernel), "sm_90")], "local_bytes") == 0


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.id)
def test_no_kernel_spills_and_every_block_fits_the_registers(spec: KernelSpec) -> None:
    for image in manifest.read(spec.id).targets.values():
        for usage in image.usage.values():
            assert usage["local_bytes"] == 0
            assert usage["registers"] * spec.threads <= 65536


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.id)
def test_the_pinned_compiler_makes_the_image_of_the_manifest(spec: KernelSpec) -> None:
    target = spec.image_target("sm_90")
    image = _compiled(spec, target)
    manifest.check(manifest.read(spec.id), target, image.data)
    assert image.warnings == ""
    assert toolchain.worst([image], "local_bytes") == toolchain.worst([image], "spill_stores") == 0


@pytest.mark.parametrize("target", EVERYWHERE.targets())
def test_one_kernel_is_that_of_the_manifest_on_every_target(target: str) -> None:
    manifest.check(manifest.read(EVERYWHERE.id), target, _compiled(EVERYWHERE, target).data)


@pytest.mark.parametrize("spec", REPEATED, ids=lambda spec: spec.id)
def test_compiling_again_gives_the_same_bytes(spec: KernelSpec, tmp_path: Path) -> None:
    again = toolchain.compile_cached(build.job(spec, "sm_90"), toolchain.find_compiler(), tmp_path)
    assert again.data == _compiled(spec, "sm_90").data


def test_an_image_is_held_against_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    row = manifest.read(EVERYWHERE.id)
    image = build.image(EVERYWHERE, "sm_90")
    assert image.sha256 == row.targets["sm_90"].sha256
    wrong = dataclasses.replace(row.targets["sm_90"], sha256="0" * 64)
    monkeypatch.setattr(manifest, "read", lambda _: dataclasses.replace(row, targets={"sm_90": wrong}))
    with pytest.raises(ImageError, match="0000 were wanted"):
        build.image(EVERYWHERE, "sm_90")


# Building, on a catalogue of one kernel.


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("build")


def _targets_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two targets show what nine would.
    monkeypatch.setattr(build, "TARGETS", ("sm_75", "sm_90"))


def _build(generated: Path, cache: Path, *specs: KernelSpec, check: bool = False) -> build.Built:
    return build.build(check=check, catalogue=specs or (LARGE,), generated=generated, build=cache)


def test_a_build_leaves_out_what_does_not_fit_and_repeats_without_work(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _targets_of_two(monkeypatch)
    built = _build(tmp_path, cache)
    assert sorted(built.changed.values()) == ["missing"] * 3
    row = manifest.read(LARGE.id, tmp_path / "manifest")
    assert set(row.targets) == {"sm_90"}
    assert row.excluded == {"sm_75": f"needs {LARGE.shared_bytes} bytes of shared memory, sm_75 allows 65536"}
    assert (tmp_path / "kernels" / f"{LARGE.id}.cu").read_text() == render(LARGE)
    image = cache / "images" / "sm_90" / f"{LARGE.id}.cubin"
    manifest.check(row, "sm_90", image.read_bytes())

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    before = {path: path.stat().st_mtime_ns for folder in (tmp_path, cache) for path in folder.rglob("*")}
    monkeypatch.setattr(subprocess, "run", started)
    again = _build(tmp_path, cache)
    assert again.changed == {}
    assert before == {path: path.stat().st_mtime_ns for folder in (tmp_path, cache) for path in folder.rglob("*")}
    assert _build(tmp_path, cache, check=True).rows == built.rows


def test_a_stale_file_is_found_and_the_command_named(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _targets_of_two(monkeypatch)
    _build(tmp_path, cache)
    source = tmp_path / "kernels" / f"{LARGE.id}.cu"
    source.write_text(source.read_text().replace("constexpr", "constexpr ", 1))
    (tmp_path / "kernels" / "recurrent_gone.cu").write_text("gone\n")
    (tmp_path / "manifest" / "index.json").unlink()
    with pytest.raises(ImageError, match="run `invoke build`") as caught:
        _build(tmp_path, cache, check=True)
    assert str(caught.value).splitlines()[1:] == [
        f"generated/kernels/{LARGE.id}.cu: stale",
        "generated/manifest/index.json: missing",
        "generated/kernels/recurrent_gone.cu: not in the catalogue",
    ]
    assert (tmp_path / "kernels" / "recurrent_gone.cu").is_file()
    _build(tmp_path, cache)
    assert source.read_text() == render(LARGE)
    assert not (tmp_path / "kernels" / "recurrent_gone.cu").exists()


def test_a_kernel_that_left_the_catalogue_leaves_the_folders(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "TARGETS", ("sm_90",))
    small = RecurrentSpec(d_state=16, layout="slices")
    _build(tmp_path, cache, LARGE, small)
    _build(tmp_path, cache, small)
    left = {path.name for folder in (tmp_path, cache / "images") for path in folder.rglob("*") if path.is_file()}
    assert left == {f"{small.id}.cu", f"{small.id}.json", f"{small.id}.cubin", "index.json"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Refused(RecurrentSpec):
    """A kernel whose source nvcc refuses."""


def test_a_refused_source_changes_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TARGETS", ("sm_90",))
    emit = render
    refused = _Refused(d_state=32, layout="slices")
    monkeypatch.setattr(build, "render", lambda spec: emit(spec) + ("!\n" if isinstance(spec, _Refused) else ""))
    small = RecurrentSpec(d_state=16, layout="slices")
    for call in (
        lambda: _build(tmp_path, cache, small, refused),
        lambda: build.generate(build.Choice((small, refused), {}), ("sm_90",), generated=tmp_path, build=cache),
    ):
        with pytest.raises(ToolchainError, match=f"{refused.id} for sm_90"):
            call()
    assert not list(tmp_path.iterdir())
    assert not (cache / "kernels").exists()


def test_the_manifest_is_made_by_the_pinned_version_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(toolchain.find_compiler(), version="13.1.5", pinned=False)
    monkeypatch.setattr(toolchain, "find_compiler", lambda _=None: other)
    with pytest.raises(ToolchainError, match=r"made with nvcc 13\.0\.88, found 13\.1\.5"):
        _build(tmp_path, tmp_path)


# What `generate` chooses.


def test_a_d_state_alone_means_the_layouts_of_the_catalogue() -> None:
    same = ("recurrent", 128, "f32", "f32")
    wanted = [s for s in CATALOGUE if (s.family, s.d_state, s.io, s.state) == same]
    assert build.choose(128).specs == tuple(wanted)
    assert build.choose(48).specs == (RecurrentSpec(d_state=48),)


def test_sizes_apply_to_each_layout_that_takes_them() -> None:
    choice = build.choose(128, lanes=8)
    assert {spec.fields()["lanes"] for spec in choice.specs} == {8}
    assert set(choice.refused) == {"block"}
    assert "has no lanes" in choice.refused["block"]


def test_a_layout_and_sizes_mean_one_kernel() -> None:
    wanted = RecurrentSpec(d_state=64, layout="padded", lanes=4, chunk=8, io="bf16")
    assert build.choose(64, layout="padded", lanes=4, chunk=8, io="bf16").specs == (wanted,)
    assert build.choose(64, layout="generic").specs == (RecurrentSpec(d_state=0, layout="generic"),)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lanes": 3}, "lanes must be a power of two from 1 to 32, found 3"),
        ({"layout": "padded", "chunk": 65}, "chunk must be 1 to 64 tokens, found 65"),
        ({"layout": "woven"}, "layout must be one of .*, found 'woven'"),
        ({"io": "f64"}, "io must be one of f32, bf16, f16, found 'f64'"),
        ({"family": "other"}, "family must be one of recurrent.*, found 'other'"),
    ],
)
def test_options_that_mean_no_kernel_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(NoKernel, match=reason):
        build.choose(128, **options)  # type: ignore[arg-type]


def test_targets_are_those_asked_for_or_present_or_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.targets("sm_90, sm_86,sm_90") == ("sm_90", "sm_86")
    monkeypatch.setattr(gpus, "driver", lambda: gpus.Driver(gpus=(gpus.Gpu("a", 8, 9), gpus.Gpu("b", 8, 9))))
    assert build.targets() == ("sm_89",)
    monkeypatch.setattr(gpus, "driver", lambda: gpus.Driver(problem="none"))
    assert build.targets() == ("sm_80", "sm_86", "sm_90", "sm_120")
    for wrong in ("sm_1", ","):
        with pytest.raises(NoKernel, match=r"--arch must name some of sm_75, .*, found"):
            build.targets(wrong)


def test_generating_only_what_no_target_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoKernel, match=f"nothing to compile\n{LARGE.id} for sm_75: needs"):
        build.generate(build.Choice((LARGE,), {}), ("sm_75",), generated=tmp_path, build=tmp_path)
    with pytest.raises(NoKernel, match=f"{LARGE.id} has no image for sm_75: needs"):
        build.image(LARGE, "sm_75")


def test_sources_of_the_catalogue_go_to_generated_and_others_to_build(tmp_path: Path) -> None:
    other = RecurrentSpec(d_state=128, layout="padded", chunk=7)
    ours = next(spec for spec in CATALOGUE if getattr(spec, "layout", "") == "padded")
    made = build.generate(
        build.Choice((ours, other), {}), ("sm_90", "compute_80"), generated=tmp_path / "g", build=tmp_path / "b"
    )
    assert (tmp_path / "g" / "kernels" / f"{ours.id}.cu").read_text() == render(ours)
    assert (tmp_path / "b" / "kernels" / f"{other.id}.cu").read_text() == render(other)
    cubin, ptx = (row for row in made.listing() if row["id"] == other.id)
    assert (cubin["target"], cubin["spills"]) == ("sm_90", 0)
    assert cubin["shared"] >= other.shared_bytes
    assert (ptx["target"], ptx["registers"], ptx["spills"]) == ("compute_80", "-", "-")
    assert ptx["bytes"] == (tmp_path / "b" / "images" / "compute_80" / f"{other.id}.ptx").stat().st_size


_SPILLING = """\
extern "C" __global__ void SYMBOL(const int* x, float* y) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[x[i] & 63] = x[i];
  y[threadIdx.x] = kept[x[threadIdx.x] & 63];
}
"""


def test_an_image_that_spills_is_left_out_and_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spills, fine = RecurrentSpec(d_state=16, chunk=7), RecurrentSpec(d_state=16, layout="block")
    emit = render
    source = _SPILLING.replace("SYMBOL", spills.symbol())
    monkeypatch.setattr(build, "render", lambda spec: source if spec == spills else emit(spec))
    old = tmp_path / "images" / "sm_86" / f"{spills.id}.cubin"
    toolchain.publish(old, b"an image of an older source")
    choice = build.Choice((spills, fine), {})
    made = build.generate(choice, ("sm_86",), generated=tmp_path / "generated", build=tmp_path)
    assert [row["id"] for row in made.listing()] == [fine.id]
    assert made.spilled == (f"{spills.id} for sm_86",)
    assert made.left_out == {f"{spills.id} for sm_86": "spills 256 bytes a thread; use more lanes or fewer rows"}
    assert [path.name for path in tmp_path.glob("images/*/*")] == [f"{fine.id}.cubin"]
    assert made.sources[spills.id].read_text() == source


def test_cleaning_removes_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "build" / "images").mkdir(parents=True)
    assert build.clean((tmp_path / "build", tmp_path / "dist")) == [tmp_path / "build"]
    assert not list(tmp_path.iterdir())
