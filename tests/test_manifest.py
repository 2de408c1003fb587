"""The manifest: what a row says, that it reads back, and that whatever does not fit it is found."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest

from pyharness import args, manifest
from pyharness.errors import ImageError
from pyharness.families import RecurrentSpec
from pyharness.manifest import Row
from pyharness.toolchain import ROOT, Compiler, Image, Usage

SPEC = RecurrentSpec(d_state=16, layout="padded")
COMPILER = Compiler(Path("nvcc"), "13.0.88", pinned=True)
USAGE = Usage(registers=40, static_shared=128, local_bytes=0, spill_stores=0, spill_loads=0)


def image(target: str = "sm_90", usage: Usage = USAGE, entries: tuple[str, ...] = (SPEC.symbol(),)) -> Image:
    kind = "ptx" if target.startswith("compute") else "cubin"
    shown = {} if kind == "ptx" else dict.fromkeys(entries, usage)
    return Image(SPEC.id, target, kind, f"{kind} for {target}".encode(), shown, "", 0.5)


def row(*images: Image) -> Row:
    made = images or (image("sm_80"), image("sm_90"), image("compute_80"))
    return manifest.make_row(SPEC, "source", made, COMPILER, ("-O3",), {"sm_75": "too small"})


def write(folder: Path, *rows: Row) -> Path:
    for name, data in manifest.files(rows or (row(),)).items():
        (folder / name).write_bytes(data)
    return folder


def test_a_row_reads_back(tmp_path: Path) -> None:
    write(tmp_path)
    assert manifest.ids(tmp_path) == (SPEC.id,)
    found = manifest.read(SPEC.id, tmp_path)
    assert found == row()
    assert found.kernel == SPEC
    assert manifest.read_all(tmp_path) == [row()]


def test_a_row_says_what_a_launch_needs() -> None:
    made = row()
    assert (made.id, made.family, made.entries) == (SPEC.id, "recurrent", [f"ssm_{SPEC.id}"])
    assert RecurrentSpec(**made.spec) == SPEC
    assert (made.block, made.grid) == (SPEC.threads, {"rule": "rows", "rows": SPEC.rows})
    assert (made.compiler, made.flags, made.min_driver, made.numerics_revision) == ("13.0.88", ["-O3"], "580", 1)
    # sha256 of the six bytes "source".
    assert made.source_sha256 == "41cf6794ba4200b839c53531555f0f3998df4cbb01a4d5cb0b94e3ca5e23947d"
    cubin, ptx = made.targets["sm_90"], made.targets["compute_80"]
    assert cubin.usage == {SPEC.symbol(): {"registers": 40, "static_shared": 128, "local_bytes": 0}}
    assert (cubin.kind, cubin.bytes, cubin.dynamic_shared) == ("cubin", len(b"cubin for sm_90"), SPEC.shared_bytes)
    assert (ptx.kind, ptx.usage) == ("ptx", {})


def test_files_are_the_same_bytes_everywhere() -> None:
    made = manifest.files([row()])
    for data in made.values():
        text = data.decode()
        assert "\r" not in text
        assert text.endswith("}\n")
        assert str(ROOT) not in text
        keys = list(json.loads(text))
        assert keys == sorted(keys)
    assert manifest.dump({"b": [1, {"d": 2, "c": 3}], "a": {}}) == manifest.dump({"a": {}, "b": [1, {"c": 3, "d": 2}]})
    assert manifest.dump({"b": [1, {"d": 2}], "a": 0}) == b'{\n  "a": 0,\n  "b": [\n    1,\n    {"d": 2}\n  ]\n}\n'

    long = {str(number): "a" * 30 for number in range(4)}
    assert manifest.dump(long).decode().splitlines()[1:3] == [f'  "{number}": "{"a" * 30}",' for number in range(2)]


def test_scan_args_agree_between_cuda_numpy_and_manifest(tmp_path: Path) -> None:
    header = ROOT / "templates" / "ssm" / "args.cuh"
    text = header.read_text(encoding="utf-8")
    struct = re.search(r"struct ScanArgs \{(.*?)\n\};", text, re.DOTALL)
    assert struct is not None
    fields = re.findall(r"(\w+);", re.sub(r"//.*", "", struct[1]))
    lines = [
        f'std::printf("{name} %zu %zu\\n", offsetof(ScanArgs, {name}), sizeof(ScanArgs::{name}));' for name in fields
    ]
    probe = tmp_path / "probe.cpp"
    probe.write_text(
        "#include <cstddef>\n#include <cstdint>\n#include <cstdio>\n"
        f'{text}\nint main() {{ {"".join(lines)} std::printf("%zu\\n", sizeof(ScanArgs)); }}\n'
    )
    subprocess.run(["g++", "-std=c++17", "-o", "probe", probe.name], cwd=tmp_path, check=True)
    shown = subprocess.run([tmp_path / "probe"], text=True, capture_output=True, check=True).stdout.splitlines()
    in_cuda = [(name, int(offset), int(size)) for name, offset, size in map(str.split, shown[:-1])]
    in_manifest = [(field["name"], field["offset"], int(str(field["type"])[2:])) for field in row().args]
    assert in_cuda == in_manifest
    assert int(shown[-1]) == row().args_bytes == args.SCAN_ARGS.itemsize == 288
    # Each offset is asserted where CUDA compiles it, so a changed field fails there too.
    asserted = {name: int(offset) for name, offset in re.findall(r"offsetof\(ScanArgs, (\w+)\) == (\d+)", text)}
    assert asserted == {name: offset for name, offset, _ in in_cuda}


def test_flags_agree_between_cuda_and_numpy() -> None:
    text = (ROOT / "templates" / "ssm" / "args.cuh").read_text(encoding="utf-8")
    in_cuda = {name.upper(): int(bit) for name, bit in re.findall(r"kFlag(\w+) = 1u << (\d+)", text)}
    assert in_cuda == {flag.name.replace("_", ""): flag.value.bit_length() - 1 for flag in args.Flag if flag.name}


def test_an_image_is_checked_by_size_and_hash() -> None:
    made = row()
    manifest.check(made, "sm_90", b"cubin for sm_90")
    for data in (b"cubin for sm_91", b"cubin for sm_90\0"):
        with pytest.raises(ImageError, match=f"15 bytes with sha256 .* were wanted, found {len(data)} bytes"):
            manifest.check(made, "sm_90", data)


@pytest.mark.parametrize(("target", "reason"), [("sm_75", "too small"), ("sm_120", "its targets are sm_80, sm_90")])
def test_a_missing_image_has_its_reason(target: str, reason: str) -> None:
    with pytest.raises(ImageError, match=f"an image for {target} was wanted, found none: {reason}"):
        manifest.check(row(), target, b"")


def test_local_memory_is_refused() -> None:
    with pytest.raises(ImageError, match="found 16 bytes .* 40 registers for sm_80, 8 bytes .* for sm_90:"):
        row(
            image("sm_80", dataclasses.replace(USAGE, local_bytes=16)),
            image("sm_86"),
            image("sm_90", dataclasses.replace(USAGE, local_bytes=8)),
        )


@pytest.mark.parametrize("entries", [(), ("other",), (SPEC.symbol(), SPEC.symbol("second"))])
def test_entries_are_those_of_the_spec_on_every_target(entries: tuple[str, ...]) -> None:
    with pytest.raises(ImageError, match=f"the entries {SPEC.symbol()}.* were wanted"):
        row(image("sm_80"), image("sm_90", entries=entries))


def test_a_module_may_have_several_entries() -> None:
    both = (SPEC.symbol("one"), SPEC.symbol("two"))
    assert row(image("sm_80", entries=both), image("sm_90", entries=both)).entries == list(both)


def test_no_manifest_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="index.json was wanted in .*, found no such file: run `invoke build`"):
        manifest.ids(tmp_path)


def test_an_unknown_kernel_lists_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=f"'other' was wanted in the manifest, found {SPEC.id}"):
        manifest.read("other", write(tmp_path))


def _renamed(folder: Path) -> None:
    write(folder, dataclasses.replace(row(), id="other"))
    (folder / "other.json").rename(folder / f"{SPEC.id}.json")
    index = (folder / "index.json").read_text().replace("other", SPEC.id)
    (folder / "index.json").write_text(index)


def _edit(folder: Path, old: str, new: str, index: bool = False) -> None:
    path = write(folder) / ("index.json" if index else f"{SPEC.id}.json")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda folder: _edit(folder, '"registers": 40', '"registers": 41'), "is not the row that index.json names"),
        (lambda folder: _edit(folder, '"schema": 1', '"schema": 2'), "schema 1 was wanted, found 2"),
        (lambda folder: _edit(folder, '"schema": 1', '"schema": 0', index=True), "schema 1 was wanted, found 0"),
        (lambda folder: _edit(folder, "{", "", index=True), "was to be JSON"),
        (lambda folder: (write(folder) / f"{SPEC.id}.json").unlink(), "found no such file"),
        (_renamed, f"was to describe {SPEC.id}, found other"),
    ],
    ids=["edited", "newer schema", "older index", "no JSON", "row missing", "row of another"],
)
def test_a_damaged_manifest_is_not_believed(damage: object, found: str, tmp_path: Path) -> None:
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(ImageError, match=f"{found}.*invoke build"):
        manifest.read(SPEC.id, tmp_path)


def test_a_row_of_other_fields_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path)
    value = json.loads((tmp_path / f"{SPEC.id}.json").read_text())
    del value["entries"]
    data = manifest.dump(value)
    (tmp_path / f"{SPEC.id}.json").write_bytes(data)
    index = {"kernels": {SPEC.id: manifest.hashlib.sha256(data).hexdigest()}, "schema": manifest.SCHEMA}
    (tmp_path / "index.json").write_bytes(manifest.dump(index))
    with pytest.raises(ImageError, match="is not a manifest row .*entries"):
        manifest.read(SPEC.id, tmp_path)
