"""The suites of invoke bench, and what the command says of earlier figures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from invoke import Context, Exit

import tasks
from pyharness import device, figures, gpus, history, measure, suites, toolchain
from pyharness.build import silent
from pyharness.errors import DeviceError, NoKernel
from pyharness.families import RecurrentSpec
from pyharness.workload import DECODE, PREFILL, Point, point_named


def test_a_suite_is_found_by_name_by_family_and_by_its_points() -> None:
    assert [suite.name for suite in suites.chosen()] == ["ancestor", "decode", "prefill", "mamba1", "launch"]
    assert [suite.name for suite in suites.chosen("launch, decode")] == ["launch", "decode"]
    assert [suite.stored for suite in suites.chosen(family="ssd")] == ["ssd"]
    assert [suite.name for suite in suites.chosen(points=[DECODE[0]])] == ["decode"]
    shared = point_named("prefill_1x4096_bf16")
    assert shared in PREFILL
    assert [suite.name for suite in suites.chosen(points=[shared])] == ["ancestor", "prefill"]
    with pytest.raises(NoKernel, match="--suite must name some of ancestor, .*, found speed"):
        suites.chosen("decode,speed")
    with pytest.raises(NoKernel, match="'woven' has no table"):
        suites.chosen(family="woven")
    with pytest.raises(NoKernel, match="no suite of decode times family 'ssd'"):
        suites.chosen("decode", "ssd")


def test_every_family_has_a_suite_and_the_readme_a_place_for_it() -> None:
    assert {suite.family for suite in suites.SUITES} == {*measure.TABLES, ""}
    assert all(suite.stored == (suite.family or "launch") for suite in suites.SUITES)
    readme = (toolchain.ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"<!-- bench:{suite.stored} -->" in readme for suite in suites.SUITES)


def test_the_launch_suite_has_points_and_kernels_of_its_own() -> None:
    with pytest.raises(NoKernel, match="leave --points and --kernels out"):
        suites.run(suites.SUITES[-1], [DECODE[0]])


# A run.

POINT = point_named("decode_16x1_f32")
OTHER = point_named("prefill_1x4096_f32")
STOP = None
KERNEL = RecurrentSpec(d_state=128).id


def row(us: float, image: str = "a", **more: Any) -> dict[str, Any]:
    return {
        "kernel": KERNEL,
        "point": POINT.name,
        "us": {"median": us, "low": us - 0.1, "high": us + 0.1},
        "ceilings": {"slots": 18.0, "us": 18.0},
        "ratio": round(us / 18.0, 3),
        "image": {"target": "sm_90", "sha256": image * 64},
        "registers": 100,
        "error": 0.1,
    } | more


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A device whose timings are set by the test: `bench.rows` is what the next run measures, until one says stop."""
    state = SimpleNamespace(rows=[], folder=tmp_path / "bench" / "nvidia-h200", steps=[])
    gpu = SimpleNamespace(name="NVIDIA H200", target="sm_90")

    def measured(chosen: Any, protocol: Any, ordinal: int, progress: Any, ascending: int, peers: bool) -> Any:
        progress("compiling")
        state.steps.append((list(chosen), peers))
        for row in state.rows:
            if row is STOP:
                raise KeyboardInterrupt
            yield point_named(row["point"]), [row]

    monkeypatch.setattr(measure, "measuring", measured)
    monkeypatch.setattr(measure, "get", lambda _: gpu)
    monkeypatch.setattr(device, "get", lambda _: gpu)
    monkeypatch.setattr(measure.toolchain, "find_compiler", lambda: toolchain.Compiler(Path("nvcc"), "13.0.88", True))
    monkeypatch.setattr(gpus, "driver", lambda: gpus.Driver("580.1", "13.0", ()))
    monkeypatch.setattr(figures, "BENCH", tmp_path / "bench")
    monkeypatch.setattr(history, "FOLDER", tmp_path / "history")
    monkeypatch.setattr(tasks.selection, "refresh", lambda: None)
    return state


def test_a_run_stores_rows_with_their_date_and_keeps_what_it_replaces(bench: Any) -> None:
    suite = suites.chosen("ancestor")[0]
    bench.rows = [row(22.0)]
    document = suites.run(suite)
    assert document["rows"] == [row(22.0, date=document["date"])]
    assert json.loads((bench.folder / "recurrent.json").read_text(encoding="utf-8")) == document
    bench.rows = [row(20.0, "b")]
    suites.run(suite, [POINT], peers=True)
    assert [points for points, _ in bench.steps] == [list(measure.TABLES["recurrent"]), [POINT]]
    assert [peers for _, peers in bench.steps] == [False, True]
    assert [entry["us"] for entry in history.read("NVIDIA H200")] == [22.0]
    bench.rows = [row(20.0) | {"failed": "it is wrong"}]
    with pytest.raises(DeviceError, match="of their points nothing is stored:\n.*it is wrong"):
        suites.run(suite, track=silent)
    assert [one["us"]["median"] for one in stored(bench)["rows"]] == [20.0]


def stored(bench: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bench.folder / "recurrent.json").read_text(encoding="utf-8"))
    return found


def timings(bench: Any) -> dict[tuple[str, str], float]:
    return {(one["point"], one["kernel"]): one["us"]["median"] for one in stored(bench)["rows"]}


def test_a_run_that_is_cut_short_keeps_what_it_measured_beside_what_was_stored(bench: Any) -> None:
    suite = suites.chosen("ancestor")[0]
    gone = KERNEL.replace("_c40", "_c8")
    bench.rows = [row(22.0), row(23.0, kernel=gone), row(700.0, point=OTHER.name)]
    suites.run(suite)
    bench.rows = [row(20.0, "b"), row(9.0, kernel="mamba-ssm", peer=True), STOP, row(500.0, point=OTHER.name)]
    with pytest.raises(KeyboardInterrupt):
        suites.run(suite, peers=True)
    kept = {(POINT.name, KERNEL): 20.0, (POINT.name, gone): 23.0, (OTHER.name, KERNEL): 700.0}
    assert timings(bench) == kept | {(POINT.name, "mamba-ssm"): 9.0}
    assert [path.name for path in bench.folder.iterdir()] == ["recurrent.json"]
    assert [entry["us"] for entry in history.read("NVIDIA H200")] == [22.0]
    # A whole run that ends has its own rows alone.
    bench.rows = [row(20.0, "b"), row(600.0, "b", point=OTHER.name)]
    suites.run(suite)
    assert timings(bench) == {(POINT.name, KERNEL): 20.0, (OTHER.name, KERNEL): 600.0}
    assert [entry["us"] for entry in history.read("NVIDIA H200")] == [22.0, 700.0]


def test_a_whole_run_under_another_driver_takes_the_place_of_the_table_and_keeps_its_history(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = suites.chosen("ancestor")[0]
    bench.rows = [row(22.0), row(700.0, point=OTHER.name)]
    suites.run(suite)
    monkeypatch.setattr(gpus, "driver", lambda: gpus.Driver("590.1", "13.0", ()))
    with pytest.raises(DeviceError, match="the stored table has driver '580.1', this run '590.1': measure it whole"):
        suites.run(suite, [POINT])
    bench.rows = [row(20.0, "b"), row(500.0, "b", point=OTHER.name)]
    document = suites.run(suite)
    assert (document["driver"], len(document["rows"])) == ("590.1", 2)
    assert [entry["us"] for entry in history.read("NVIDIA H200")] == [22.0, 700.0]


def test_a_point_with_a_kernel_that_failed_is_left_as_it_was(bench: Any) -> None:
    suite = suites.chosen("ancestor")[0]
    bench.rows = [row(22.0), row(700.0, point=OTHER.name)]
    suites.run(suite)
    wrong = {"kernel": KERNEL, "point": POINT.name, "failed": "its y is wrong"}
    bench.rows = [wrong, row(9.0, kernel="mamba-ssm", peer=True), row(600.0, point=OTHER.name)]
    with pytest.raises(DeviceError, match="its y is wrong"):
        suites.run(suite, peers=True)
    assert timings(bench) == {(POINT.name, KERNEL): 22.0, (OTHER.name, KERNEL): 600.0}


def test_steps_are_counted_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    kernels = {Point("decode", 2, 1, True): ["a", "b"], Point("decode", 4, 1, True, io="bf16"): ["c"]}
    monkeypatch.setattr(measure, "get", lambda _: SimpleNamespace(broken=""))
    monkeypatch.setattr(measure, "compile_all", lambda ids, _: (dict.fromkeys(ids, "image"), {}))
    monkeypatch.setattr(measure, "Ceilings", lambda _: None)
    monkeypatch.setattr(measure, "Workload", lambda _, point: SimpleNamespace(point=point, sets=1, free=lambda: None))
    monkeypatch.setattr(measure, "parse_id", lambda _: None)
    monkeypatch.setattr(measure, "time_ceilings", lambda *_: {"us": 1.0})
    monkeypatch.setattr(measure, "_timed_row", lambda *_, **order: {"kernel": _[1], "us": {"median": 1.0}} | order)
    monkeypatch.setattr(measure.peer_kernels, "time_peer", lambda *_: ([1.0], measure.Norms(0, 0)))
    for ascending, peers in ((0, False), (1, False), (3, True)):
        told.clear()
        rows = measure.measure(kernels, measure.SHORT, 0, told.append, ascending, peers)
        assert len(rows) == len(told) - 1 - len(kernels)
        assert len(told) == measure.steps(kernels, ascending, peers)


def invoked(**options: Any) -> None:
    tasks.bench.body(Context(), suite="ancestor", **options)


def test_slower_kernels_are_named_and_fail_on_request(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.rows = [row(20.0)]
    invoked()
    assert "20.00" in capsys.readouterr().out
    bench.rows = [row(21.5)]
    # What is stored is read before it is replaced.
    invoked(against=True)
    told = capsys.readouterr().err
    assert f"slower: decode_16x1_f32 {KERNEL}: 20.00 -> 21.50 us (+7.5 %)" in told
    assert "1 of our timings compared, 1 slower beyond the spread, 0 faster, median change +7.5 %" in told
    kept = bench.folder.parent / "kept.json"
    (bench.folder / "recurrent.json").rename(kept)
    bench.rows = [row(23.0)]
    invoked(against=str(kept), fail_slower="8%")
    with pytest.raises(Exit, match="1 timings got slower by more than 5%: decode_16x1_f32") as failure:
        invoked(against=str(kept), fail_slower="5%")
    assert failure.value.code == 1
    assert "23.00" in capsys.readouterr().out, "the table is shown all the same"
    with pytest.raises(Exit, match="a percentage such as 5% was wanted, found 'some'"):
        invoked(fail_slower="some")


def test_a_first_run_has_nothing_to_be_compared_with(bench: Any) -> None:
    with pytest.raises(Exit, match="earlier figures of recurrent were wanted to compare with, found nothing at"):
        invoked(fail_slower="5%")
    assert not bench.steps, "that is told before minutes are spent"
