"""The command line, and how a run of the tests reports what it did not test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from invoke import Context, Exit

import tasks
from pyharness import build, doctor, gpus, lint, listing, manifest, problem_file, suite
from pyharness.cases import Shape, draw
from pyharness.errors import DeviceError, SsmError
from pyharness.families import RecurrentSpec
from pyharness.toolchain import ROOT

H200 = gpus.Driver("580.65.06", "13.0", (gpus.Gpu("NVIDIA H200", 9, 0),))
TASKS = (
    *("generate", "build", "test", "vet", "tune", "bench", "report", "select", "package", "verify", "go"),
    *("peers", "fuzz", "doctor", "lint", "clean"),
)


def invoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "invoke", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)


def test_every_task_says_what_it_does() -> None:
    shown = json.loads(invoke("--list", "--list-format=json").stdout)
    assert {one["name"] for one in shown["tasks"]} == set(TASKS)
    assert all(one["help"].endswith(".") for one in shown["tasks"])


def test_generate_emits_compiles_and_lists() -> None:
    spec = RecurrentSpec(d_state=16, layout="slices", chunk=5)
    arguments = ("generate", "--dstate", "16", "--layout", "slices", "--chunk", "5", "--arch", "sm_90")
    shown = invoke(*arguments)
    header, row, where, images = shown.stdout.splitlines()
    assert header.split() == ["id", "target", "registers", "spills", "shared", "bytes", "seconds"]
    assert row.split()[:2] == [spec.id, "sm_90"]
    assert where == "sources: build/kernels/"
    assert images == "images: build/images/sm_90/"
    assert (ROOT / "build" / "images" / "sm_90" / f"{spec.id}.cubin").is_file()
    assert "compile 1/1" in shown.stderr
    assert "\x1b" not in shown.stdout + shown.stderr
    document = json.loads(invoke(*arguments, "--json").stdout)
    (as_json,) = document["images"]
    assert document["left_out"] == {}
    assert document["sources"] == {spec.id: f"build/kernels/{spec.id}.cu"}
    assert [str(as_json[name]) for name in header.split()[:-1]] == row.split()[:-1]
    assert as_json["seconds"] == 0  # from the cache
    source = ROOT / "build" / "kernels" / f"{spec.id}.cu"
    assert spec.symbol() in source.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lanes", "3"), "lanes must be a power of two from 1 to 32, found 3"),
        (("--lanes", "many"), "error: --lanes must be a whole number, found 'many'"),
        (("--layout", "padded", "--lanes=-1"), "lanes must be a power of two from 1 to 32, found -1"),
        (("--chunk", "65"), "chunk must be 1 to 64 tokens, found 65"),
        (("--arch", "sm_1"), "--arch must name some of sm_75,"),
        (("--nvcc", "/nowhere/nvcc"), "nvcc '/nowhere/nvcc' was asked for, found no such program"),
        (("--jobs=-1", "--arch", "sm_90"), "the number of parallel compilers must be at least 1, found -1"),
        (("--family", "other"), "family must be one of recurrent"),
    ],
)
def test_a_wrong_option_is_told_without_a_traceback(arguments: tuple[str, ...], message: str) -> None:
    shown = invoke("generate", "--dstate", "128", *arguments)
    assert shown.returncode == 1
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout == ""


def test_a_kernel_that_spills_is_listed_as_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = RecurrentSpec(d_state=16)
    left = {f"{spec.id} for sm_86": "spills 24 bytes a thread; use more lanes or fewer rows"}
    source = ROOT / "build" / "kernels" / f"{spec.id}.cu"
    made = build.Made((), {spec.id: spec}, {spec.id: source}, left, tuple(left))
    monkeypatch.setattr(build, "generate", lambda *_, **__: made)
    with pytest.raises(Exit, match=f"left out because they spill: {spec.id} for sm_86") as ended:
        tasks.generate(Context(), "16", arch="sm_86")
    assert ended.value.code == 1
    what, why = next(iter(left.items()))
    assert capsys.readouterr().out == f"left out: {what}: {why}\nsources: build/kernels/\n"
    with pytest.raises(Exit):
        tasks.generate(Context(), "16", arch="sm_86", json_=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"images": [], "left_out": left, "sources": {spec.id: f"build/kernels/{spec.id}.cu"}}


def test_the_go_task_takes_one_target_with_a_cubin() -> None:
    for arch, message in (
        ("sm_90,sm_86", "--arch must name one target, found sm_90, sm_86"),
        ("compute_80", "a target with a cubin was wanted"),
        ("sm_1", "--arch must name some of"),
    ):
        shown = invoke("go", "--arch", arch)
        assert (shown.returncode, shown.stdout) == (1, "")
        assert message in shown.stderr
        assert "Traceback" not in shown.stderr


def test_emitted_lines_fit_a_page(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("x" * 120 + "\n" + "x" * 121 + "\n")
    assert lint.long_lines(tmp_path.glob("*.cu")) == "a.cu:2: 121 columns"


def test_select_names_a_kernel_and_explains() -> None:
    arguments = ("select", "--tokens", "16", "--sequences", "16")
    assert invoke(*arguments).stdout.startswith("update_n128_")
    assert invoke("select", "--tokens", "160", "--sequences", "16").stdout.startswith("recurrent_n128_")
    chosen = json.loads(invoke(*arguments, "--json").stdout)
    assert invoke(*arguments, "--explain").stdout.splitlines()[:2] == [chosen["id"], chosen["why"]]
    for wrong, message in (
        (("--dstate", "2000"), "d_state must be 1 to 1024, found 2000"),
        (("--groups", "7"), "groups must divide heads, found 7 groups and 64 heads"),
        (("--device", "nothing"), "the device must be one that was measured"),
    ):
        refused = invoke("select", *wrong)
        assert (refused.returncode, refused.stderr[:6]) == (1, "error:")
        assert message in refused.stderr


def test_select_answers_for_a_gpu_that_is_elsewhere() -> None:
    for where in (("--device", "H200"), ("--arch", "sm_90")):
        assert "measured for this problem on NVIDIA H200" in invoke("select", *where, "--explain").stdout


def test_doctor_lists_what_is_here() -> None:
    found = {one["name"]: one for one in json.loads(invoke("doctor", "--json").stdout)}
    assert found["nvcc"]["found"].startswith("13.0.88")
    assert found["g++"]["state"] == "ok"


@pytest.mark.skipif(bool(gpus.driver().gpus), reason="there is a GPU here")
@pytest.mark.parametrize("arguments", [("test", "--gpu"), ("vet",), ("bench",), ("tune",)])
def test_gpu_work_without_a_gpu_fails(arguments: tuple[str, ...]) -> None:
    shown = invoke(*arguments)
    assert shown.returncode == 1
    assert "GPU" in shown.stderr
    assert "Traceback" not in shown.stderr


# The summary of a run of the tests.


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    calls: list[tuple[str, list[str]]] = []

    def pytest_run(name: str, arguments: list[str]) -> tuple[int, int, Counter[str]]:
        calls.append((name, arguments))
        return (1 if name == "gpu" else 0), 10, Counter({"needs a GPU": 2, f"needs {name}": 1})

    monkeypatch.setattr(suite, "_pytest", pytest_run)
    return calls


def _installed(monkeypatch: pytest.MonkeyPatch, driver: gpus.Driver, *names: str) -> None:
    monkeypatch.setattr(gpus, "driver", lambda: driver)
    monkeypatch.setattr(doctor, "version", lambda name: "1.0" if name in names else "")


def test_without_a_gpu_the_summary_says_so(ran: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, gpus.Driver(problem="no NVIDIA driver"))
    outcome = suite.run()
    assert (outcome.code, outcome.passed, [name for name, _ in ran]) == (0, 10, ["cpu"])
    assert outcome.summary() == "skipped 2: needs a GPU\nskipped 1: needs cpu\nnot run on a GPU: no NVIDIA driver"
    with pytest.raises(DeviceError, match="a GPU was wanted for the GPU tests, found none: no NVIDIA driver"):
        suite.run(gpu=True)


def test_a_gpu_without_pycuda_is_told_and_fails_where_asked_for(
    ran: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, H200, "cuda-bindings")
    (note,) = suite.run().notes
    assert note == "not run on the GPU: pycuda not installed: run `uv run invoke doctor --install-pycuda`"
    with pytest.raises(DeviceError, match="pycuda not installed: run `uv run invoke doctor --install-pycuda`"):
        suite.run(gpu=True)


def test_with_a_gpu_both_parts_run_and_either_fails_the_whole(
    ran: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, H200, "pycuda", "cuda-bindings")
    outcome = suite.run(gpu=True)
    assert [name for name, _ in ran] == ["cpu", "gpu"]
    assert "--ignore=tests/gpu" in ran[0][1]
    assert ran[1][1][-1] == "tests/gpu"
    assert (outcome.code, outcome.passed, outcome.notes) == (1, 20, ())
    assert outcome.skipped == {"needs a GPU": 4, "needs cpu": 1, "needs gpu": 1}


def test_a_report_is_read_by_file(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.test_a" name="a"/>'
        '<testcase classname="tests.test_a" name="b"><skipped message="no GPU"/></testcase>'
        '<testcase classname="tests.test_a" name="c"><failure/></testcase>'
        '<testcase classname="tests.test_a" name="d"><system-out/></testcase></testsuite></testsuites>'
    )
    assert suite.ended(report) == {"test_a": {"passed": 2, "failed": ["c"], "skipped": {"no GPU": 1}}}
    assert suite.ended(tmp_path / "none.xml") == {}


def test_how_gpu_tests_ended_is_kept_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="one"/>'
        '<testcase classname="tests.gpu.test_a" name="two"><skipped message="no g++"/></testcase>'
        '<testcase classname="tests.gpu.test_b.TestMore" name="three"><failure/></testcase></testsuite></testsuites>'
    )
    _installed(monkeypatch, H200, "pycuda", "cuda-bindings")
    suite.store_gpu([report], tmp_path / "kept")
    report.write_text('<testsuite><testcase classname="tests.gpu.test_b" name="three"/></testsuite>')
    path = suite.store_gpu([report], tmp_path / "kept")
    files = json.loads(path.read_text())["files"]
    assert files["test_a"] | {"date": "", "driver": ""} == {
        "passed": 1,
        "failed": [],
        "skipped": {"no g++": 1},
        "date": "",
        "driver": "",
    }
    assert (files["test_b"]["passed"], files["test_b"]["failed"]) == (1, [])
    assert path.name == "nvidia-h200.json"
    with pytest.raises(SsmError, match=r"tests were wanted in none\.xml"):
        suite.store_gpu([tmp_path / "none.xml"], tmp_path / "kept")


# Listings and checks.


def test_a_table_is_aligned() -> None:
    rows = [{"id": "a", "bytes": 5, "seconds": 1.25}, {"id": "longer", "bytes": "-", "seconds": 10.0}]
    assert listing.table(rows) == "id      bytes  seconds\na           5      1.2\nlonger      -     10.0"
    assert listing.table([]) == ""


def test_progress_in_a_pipe_is_plain_and_ends_with_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    with listing.Progress("compile", 3) as progress:
        for name in "abc":
            progress.step(name)
    assert capsys.readouterr().err == "compile 3/3 c\n"


def test_a_check_tells_by_exit_code_or_by_what_it_prints() -> None:
    python = sys.executable
    assert lint._said([python, "-c", "print('fine')"]) == ""
    assert lint._said([python, "-c", "print('fine')"], says_when_wrong=True) == "fine"
    assert lint._said([python, "-c", "print('wrong'); raise SystemExit(2)"]) == "wrong"
    assert lint._said([python, "-c", "raise SystemExit(2)"]).endswith("ended with 2")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install uv && uv run invoke test\n" in readme
    assert script[-2:] == ["uv run invoke test", "uv run invoke lint"]


def test_fuzz_runs_counts_and_replays(tmp_path: Path) -> None:
    shown = invoke("fuzz", "--minutes", "5", "--problems", "5", "--family", "update", "--seed", "3", "--json")
    assert json.loads(shown.stdout) == [{"family": "update", "problems": 5, "kernels": 1, "failures": 0}]
    kernel = "update_n16_l4_r64_w2_c1_f32_sf32"
    problem = draw(1, Shape((2, 1), 2, 3, 16))
    notes = {"kernel": kernel, "backend": "emulator", "seed": 1, "kind": "oracle"}
    problem_file.save(tmp_path / "right.npz", problem, notes)
    assert invoke("fuzz", "--replay", str(tmp_path / "right.npz")).stdout == f"{kernel}: right\n"
    refused = invoke("fuzz", "--replay", str(tmp_path / "absent.npz"))
    assert refused.returncode == 1
    assert "a file of `invoke fuzz` was wanted" in refused.stderr
    assert "family must be one of" in invoke("fuzz", "--family", "nothing").stderr


def test_peers_refuses_what_cannot_run() -> None:
    for arguments, message in (
        (("--family", "nothing"), "family must be one of"),
        (("--backend", "nothing"), "backend must be one of emulator, gpu"),
    ):
        refused = invoke("peers", *arguments)
        assert refused.returncode == 1
        assert message in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("package", "--version", "1.0"), "error: --version must be of the form v1.2.3, found '1.0'"),
        (("package", "--arch", "sm_1"), "error: --arch must name some of sm_75,"),
        (("package", "--family", "woven"), "error: --family must name some of recurrent"),
        (
            ("package", "--merge", "nowhere.json"),
            "error: a file that ssmvet wrote was wanted, found nothing at nowhere",
        ),
        (("verify", "nowhere.tar.gz"), "error: an archive of `invoke package` or its folder was wanted, found nothing"),
        (("verify", "LICENSE"), "error: LICENSE: an archive of `invoke package` was wanted, found another file"),
        (("tune", "--points", "nowhere"), "error: --points must name some of decode_1x1"),
        (("tune", "--device", "first"), "error: --device must be a whole number, found 'first'"),
        (("vet", "--emulator", "--family", "woven"), "error: family 'woven' has no kernel in the catalogue"),
    ],
    ids=lambda value: "_".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_packing_and_tuning_say_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    shown = invoke(*arguments)
    assert shown.returncode == 1
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_an_invariant_choice_says_its_grade_and_time() -> None:
    arguments = ("select", "--device", "H200", "--invariant", "--explain", "--sequences", "5", "--tokens", "5")
    chosen, *told = invoke(*arguments).stdout.splitlines()
    assert chosen in manifest.ids()
    assert any(line.startswith("grade: proven on ") for line in told)
    assert any(line.startswith("expected time: ") for line in told)
