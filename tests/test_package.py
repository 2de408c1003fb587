"""Packages: the same bytes twice, every flipped byte found, refusals that leave nothing, and a second lane."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyharness import archive, go_module, grades, manifest, native, package, toolchain, verify
from pyharness.errors import ImageError, NoKernel, SsmError, ToolchainError
from pyharness.families import RecurrentSpec, UpdateSpec

#: A default kernel, a small one and the generic one: what the tests pack, for one target.
SPECS = (RecurrentSpec(d_state=128), RecurrentSpec(d_state=16), RecurrentSpec(d_state=0, layout="generic"))


def pack(dist: Path, **options: Any) -> package.Package:
    return package.package("sm_90", catalogue=SPECS, dist=dist, vet_binary=False, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> package.Package:
    return pack(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def tar(made: package.Package) -> Path:
    return next(path for path in made.paths if path.name.endswith(".tar.gz"))


def test_a_package_is_the_same_bytes_each_time(made: package.Package, tmp_path: Path) -> None:
    again = pack(tmp_path)
    assert [path.name for path in again.paths] == [path.name for path in made.paths]
    for ours, theirs in zip(made.paths, again.paths, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_package_holds_what_it_says(made: package.Package, tar: Path) -> None:
    unpacked, prefix, damage = archive.unpack(tar.read_bytes(), tar.name)
    assert (unpacked, prefix, damage) == (made.files, "ssmscan-v0.1.0", "")
    for spec in SPECS:
        row = manifest.read(spec.id)
        image = unpacked[f"images/cuda13/sm_90/recurrent/{spec.id}.cubin"]
        manifest.check(row, "sm_90", image)
        assert f"kernels/{spec.id}.cu" in unpacked
        assert f"ssm_launch_{spec.id}(" in unpacked[f"kernels/{spec.id}.launch.cu"].decode()
    assert {row["kernel"] for row in made.grades} == {spec.id for spec in SPECS}
    assert [row["images"] for row in made.sizes] == [3, 3, 3]
    assert made.sizes[-1]["bytes"] == tar.stat().st_size <= package.MOST_BYTES
    for name, data in unpacked.items():
        if name.endswith((".go", ".c", ".h", ".cu", ".md", ".mod")):
            assert b"SPDX-License-Identifier: Apache-2.0" in data, name
        assert str(toolchain.ROOT).encode() not in data, name
    assert unpacked["LICENSE"] == (toolchain.ROOT / "LICENSE").read_bytes()
    # Standard tools read it.
    listed = subprocess.run(["tar", "tzf", tar], text=True, capture_output=True, check=True).stdout.splitlines()
    assert listed == [f"ssmscan-v0.1.0/{name}" for name in unpacked]


def test_verify_takes_an_archive_and_its_folder(made: package.Package, tar: Path, tmp_path: Path) -> None:
    whole = verify.verify(tar)
    assert (whole.name, whole.files, whole.rows, whole.images) == ("ssmscan-v0.1.0", len(made.files), 3, 3)
    assert verify.verify(package.write_tree(made.files, tmp_path / "tree")) == whole


def test_any_flipped_byte_is_found(tar: Path, tmp_path: Path) -> None:
    data = tar.read_bytes()
    # Each part of the gzip header, its comment and the trailer, and the deflated files.
    places = [0, 1, 2, 3, 4, 8, 9, 10, 17, 50, 81, 82, *range(90, len(data) - 9, len(data) // 9), *range(-8, 0, 3), -1]
    damaged = tmp_path / "damaged.tar.gz"
    for place in places:
        damaged.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[len(data[:place]) + 1 :])
        with pytest.raises(ImageError, match=r"damaged\.tar\.gz"):
            verify.verify(damaged)
    for cut in (0, 5, 91, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:cut])
        with pytest.raises(ImageError, match=r"damaged\.tar\.gz"):
            verify.verify(damaged)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("images/cuda13/sm_90/recurrent/recurrent_n16_l4_r32_w1_c32_tiled_f32_sf32.cubin", "{name}: .* were wanted"),
        ("catalogue/selection.json", "{name}: .* were wanted"),
        ("driver.c", "{name}: .* were wanted"),
        ("package.json", "package.json: the sha256 of package.sha256 was wanted"),
        ("package.sha256", "package.json: the sha256 of package.sha256 was wanted"),
    ],
)
def test_a_flipped_byte_names_its_file(made: package.Package, name: str, message: str) -> None:
    data = bytearray(made.files[name])
    for place in (0, len(data) // 2, len(data) - 1):
        data[place] ^= 4
        with pytest.raises(ImageError, match=message.format(name=name)):
            verify.check(made.files | {name: bytes(data)})
        data[place] ^= 4


def _listed(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files whose package.json and package.sha256 are made to fit: what a careless editor would do."""
    index = json.loads(files[package.INDEX])
    index["files"] = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
        if name not in (package.INDEX, package.INDEX_SHA)
    }
    text = manifest.dump(index)
    sums = f"{hashlib.sha256(text).hexdigest()}  {package.INDEX}\n".encode()
    return files | {package.INDEX: text, package.INDEX_SHA: sums}


def test_verify_holds_images_against_rows_and_the_abi(made: package.Package) -> None:
    assert verify.check(_listed(made.files)).images == 3
    image = f"images/cuda13/sm_90/recurrent/{SPECS[0].id}.cubin"
    with pytest.raises(ImageError, match=f"{SPECS[0].id} for sm_90: .* were wanted"):
        verify.check(_listed(made.files | {image: made.files[image] + b"\0"}))
    with pytest.raises(ImageError, match="stray.cubin: an image that no manifest row promises"):
        verify.check(_listed(made.files | {"images/cuda13/sm_90/recurrent/stray.cubin": b"x"}))
    with pytest.raises(ImageError, match="extra: a file that package.json does not name"):
        verify.check(made.files | {"extra": b""})
    with pytest.raises(ImageError, match="LICENSE: a file of .* bytes was wanted, found none"):
        verify.check({name: data for name, data in made.files.items() if name != "LICENSE"})
    index = json.loads(made.files[package.INDEX]) | {"args_bytes": 296}
    with pytest.raises(ImageError, match="ABI: a ScanArgs of 288 bytes"):
        verify.check(_listed(made.files | {package.INDEX: manifest.dump(index)}))


def test_verify_says_what_it_wants(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="found nothing at"):
        verify.verify(tmp_path / "absent")
    (tmp_path / "other").write_bytes(b"another file that is no archive at all")
    with pytest.raises(ImageError, match="an archive of `invoke package` was wanted, found another file"):
        verify.verify(tmp_path / "other")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ImageError, match=r"package\.json and package\.sha256 were wanted"):
        verify.verify(tmp_path / "folder")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "1.2.3"}, "--version must be of the form v1.2.3, found '1.2.3'"),
        ({"version": "v1.02.3"}, "--version must be of the form"),
        ({"version": "v2.0.0", "module": "example.com/scan"}, "must end in /v2, found"),
        ({"version": "v1.0.0", "module": "example.com/scan/v3"}, "must end in no major version, found"),
        ({"version": "v2.0.0", "module": "example.com/scan/v2"}, "an ABI break is a new major version"),
        ({"module": "Scan Kernels"}, "--module must be a path such as"),
        ({"family": "woven"}, "--family must name some of recurrent, found woven"),
        ({"nvcc": "no-such-nvcc"}, "no such program"),
    ],
)
def test_what_cannot_be_packed_is_refused_and_leaves_nothing(
    options: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SsmError, match=message):
        pack(tmp_path / "dist", **options)
    assert not (tmp_path / "dist").exists()


def test_what_is_not_proven_is_left_out_or_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = grades.stored()
    unproven = manifest.read(SPECS[1].id)
    sources = {sha: grade for sha, grade in proofs.sources.items() if sha != unproven.source_sha256}
    images = {sha: grade for sha, grade in proofs.images.items() if sha != unproven.targets["sm_90"].sha256}
    monkeypatch.setattr(grades, "stored", lambda: grades.Proofs(images, sources))
    made = pack(tmp_path)
    assert list(made.left_out) == [f"{SPECS[1].id} for sm_90 (cuda13)"]
    assert {row["kernel"] for row in made.grades} == {SPECS[0].id, SPECS[2].id}
    assert not [name for name in made.files if SPECS[1].id in name]
    every = pack(tmp_path, include_unproven=True)
    assert {row["kernel"]: row["grade"] for row in every.grades}[SPECS[1].id] == "unproven"
    assert b'"unproven"' in every.files["include/ssmscan_tables.h"]
    monkeypatch.setattr(grades, "stored", lambda: grades.Proofs({}, {}))
    with pytest.raises(NoKernel, match="nothing to pack\nrecurrent_.*unproven: run `invoke vet --emulator`"):
        pack(tmp_path)


def test_a_changed_layout_needs_a_new_major_version(monkeypatch: pytest.MonkeyPatch) -> None:
    package.check_abi("v0.9.1")
    package.check_abi("v1.4.0")
    monkeypatch.setattr(package, "LAYOUTS", {1: "0" * 64, 2: package.layout_sha256()})
    package.check_abi("v2.0.0")
    with pytest.raises(SsmError, match="is not that of major version 1 but of v2"):
        package.check_abi("v1.4.0")


@pytest.fixture
def other_nvcc(tmp_path: Path) -> Path:
    """An nvcc of CUDA 12.9, as far as it says."""
    pinned = toolchain.find_compiler().nvcc
    program = tmp_path / "nvcc-12.9"
    program.write_text(
        "#!/bin/sh\n"
        # A version that no real nvcc has: images are cached by it.
        '[ "$1" = --version ] && echo "release 12.9, V12.9.99999" && exit 0\n'
        f'exec {pinned} "$@" -DSECOND_LANE\n'
    )
    program.chmod(0o755)
    return program


def test_another_nvcc_makes_a_second_lane(other_nvcc: Path, tmp_path: Path) -> None:
    made = package.package(
        "sm_90", catalogue=SPECS[1:2], dist=tmp_path / "dist", vet_binary=False, nvcc=str(other_nvcc)
    )
    lanes = json.loads(made.files["catalogue/lanes.json"])
    assert {name: (lane["cuda"], lane["min_driver"]) for name, lane in lanes.items()} == {
        "cuda12": (12000, "525"),
        "cuda13": (13000, "580"),
    }
    for lane in lanes:
        assert f"images/{lane}/sm_90/recurrent/{SPECS[1].id}.cubin" in made.files
        assert f'Lane: "{lane}"'.encode() in made.files[f"images/{lane}/sm_90/recurrent/images.go"]
    row = json.loads(made.files[f"catalogue/cuda12/manifest/{SPECS[1].id}.json"])
    assert (row["compiler"], row["min_driver"]) == ("12.9.99999", "525")
    assert verify.check(made.files).images == 2
    assert {entry["lane"] for entry in made.grades} == set(lanes)


def test_a_second_lane_is_of_another_major_version(tmp_path: Path) -> None:
    pinned = str(toolchain.find_compiler().nvcc)
    with pytest.raises(SsmError, match="an nvcc of another major version than 13.0.88 was wanted"):
        pack(tmp_path / "dist", nvcc=pinned)


def test_a_second_lane_has_no_targets_that_its_compiler_does_not_know(other_nvcc: Path, tmp_path: Path) -> None:
    other_nvcc.write_text(other_nvcc.read_text().replace("12.9", "12.7"))
    with pytest.raises(ToolchainError, match=r"nvcc 12.8 or newer was wanted for sm_120, found 12\.7\.99999"):
        package.package("sm_90,sm_120", catalogue=SPECS[1:2], dist=tmp_path / "dist", nvcc=str(other_nvcc))
    assert not (tmp_path / "dist").exists()


def test_a_proxy_serves_the_module_under_its_names(made: package.Package, tmp_path: Path) -> None:
    names = [path.name for path in made.paths]
    assert names == ["ssmscan-v0.1.0.tar.gz", "v0.1.0.zip", "v0.1.0.mod", "v0.1.0.info", "list"]
    (zipped,) = (path for path in made.paths if path.suffix == ".zip")
    with zipfile.ZipFile(zipped) as archive_:
        held = archive_.namelist()
    assert all(name.startswith("example.com/ssmscan@v0.1.0/") for name in held)
    assert not [name for name in held if "examples/go/" in name], "a nested module is not part of its parent"
    newer = pack(tmp_path, module="github.com/Someone/scan", version="v0.2.0")
    newest = pack(tmp_path, module="github.com/Someone/scan", version="v0.10.0")
    folder = tmp_path / "goproxy" / "github.com" / "!someone" / "scan" / "@v"
    assert {path.parent for path in newer.paths[1:]} == {folder}
    assert (folder / "list").read_text().split() == ["v0.10.0", "v0.2.0"]
    assert json.loads((folder / "v0.10.0.info").read_text()) == {"Version": "v0.10.0"}
    assert b"\nmodule github.com/Someone/scan\n" in newest.files["go.mod"]
    placeholder = go_module.PLACEHOLDER.encode()
    assert not [name for name, data in newest.files.items() if placeholder in data]


def test_a_stale_manifest_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = manifest.read(SPECS[1].id)
    stale = dict(row.targets) | {"sm_90": replace(row.targets["sm_90"], sha256="0" * 64)}
    monkeypatch.setattr(manifest, "read", lambda _: replace(row, targets=stale))
    with pytest.raises(ImageError, match="run `invoke build` if the change is meant"):
        package.package("sm_90", catalogue=SPECS[1:2], dist=tmp_path / "dist", vet_binary=False)
    assert not (tmp_path / "dist").exists()


def test_a_launcher_is_linked_with_the_runtime_into_the_c_example(made: package.Package, tmp_path: Path) -> None:
    tree = package.write_tree(made.files, tmp_path / "tree")
    program = tree / "launched"
    program.write_bytes(native.launched(tree, SPECS[2].id))
    program.chmod(0o755)
    names = subprocess.run(["nm", program], text=True, capture_output=True, check=True).stdout
    assert f" T ssm_launch_{SPECS[2].id}\n" in names
    assert " cudaLaunchKernelExC\n" in names
    done = subprocess.run([program], text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: scan")
    with pytest.raises(ToolchainError, match=r"launch\.cu was to succeed, ended with 1:"):
        native.launched(tree, UpdateSpec(d_state=16).id)
