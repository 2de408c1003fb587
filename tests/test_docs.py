"""Every command and example of README.md and docs/ is run, or is run by the test that is named here."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from invoke import Executor, Exit
from invoke.parser import Parser

import tasks
from pyharness import gpus, manifest
from pyharness.toolchain import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
GPU = bool(gpus.driver().gpus)
#: Commands that take minutes or write to the working tree, by how they begin, and the test that runs what they do.
ELSEWHERE = {
    "test": "test_tasks.py::test_ci_runs_the_test_command_of_the_readme",
    "build": "test_generated.py",
    "package": "test_package.py",
    "verify dist": "test_package.py",
    "vet --emulator": "test_vet.py",
    "fuzz": "test_tasks.py::test_fuzz_runs_counts_and_replays",
    "peers": "peers/test_suites.py",
    "go": "test_go.py",
    "bench --readme": "test_readme.py",
    "doctor --install-pycuda": "test_doctor.py",
    "lint": "test_tasks.py",
    "clean": "test_generated.py",
}
#: Without a GPU they say what is missing, in one line.
ON_A_GPU = ("test --gpu", "vet", "tune", "bench")


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of a page in a language; empty for those without one."""
    text = page.read_text(encoding="utf-8")
    return [
        body for said, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if said == language
    ]


def written(page: Path) -> list[str]:
    """Lines of a page's blocks that are not of a language, without remarks, and what its running text has as code."""
    blocks = [line.partition(" #")[0].strip() for line in "\n".join(fenced(page, "")).splitlines()]
    # In running text a command may go over the end of a line.
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return blocks + [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose)]


def commands(begin: str) -> dict[str, list[str]]:
    """What follows a beginning, with the pages that have it."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for line in written(page):
            for part in line.split(" && "):
                if part.startswith(begin):
                    found.setdefault(part.removeprefix(begin), []).append(page.name)
    return found


#: Arguments of `invoke`: those that are to be typed, and those of running text that name a command.
COMMANDS = commands("uv run invoke ")
NAMED = commands("invoke ")


@functools.cache
def parser() -> Parser:
    return Parser(contexts=tasks.ns.to_contexts(), ignore_unknown=False)


def shown_as(command: str) -> str:
    return command.replace(" ", "_")[:60]


def filled(command: str) -> list[str]:
    """The words of a command, with something in the place of NAME, N and FILE."""
    words = shlex.split(command)
    return [{"NAME": "bench", "N": "1", "FILE": "x", "FILE.json": "x.json"}.get(word, word) for word in words]


@pytest.mark.parametrize("command", COMMANDS | NAMED, ids=shown_as)
def test_a_command_of_the_docs_exists_with_its_options(command: str) -> None:
    if command.startswith("--"):
        assert command in ("--list", "--help NAME")
        return
    names = {context.name for context in tasks.ns.to_contexts()}
    # A name alone speaks of a command. Else this raises for a task or an option that is not there.
    named = command if command in NAMED and " " not in command else parser().parse_argv(filled(command))[0].name
    assert named in names


def _begins(command: str, *starts: str) -> str:
    """The longest of some starts that a command has, in whole words."""
    fitting = [start for start in starts if (command + " ").startswith(start + " ") or command.startswith(start + "/")]
    return max(fitting, key=len, default="")


def invoked(command: str) -> tuple[int, str]:
    """The exit code of a command, run in this process from the root of the repository, and the reason of a failure."""
    try:
        Executor(tasks.ns).execute(*parser().parse_argv(filled(command)))
    except Exit as end:
        return end.code, str(end)
    return 0, ""


@pytest.mark.parametrize("command", COMMANDS, ids=shown_as)
def test_a_command_of_the_docs_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    elsewhere, on_a_gpu = _begins(command, *ELSEWHERE), _begins(command, *ON_A_GPU)
    if on_a_gpu and len(on_a_gpu) >= len(elsewhere):
        if GPU:
            pytest.skip("takes minutes of the GPU: tests/gpu run what it does")
        code, reason = invoked(command)
        assert code == 1
        assert re.search(r"found (no NVIDIA driver|none: no NVIDIA driver|the driver sees no GPU)", reason)
        return
    if elsewhere:
        name, _, test = ELSEWHERE[elsewhere].partition("::")
        assert f"def {test}" in (ROOT / "tests" / name).read_text(encoding="utf-8")
        return
    if command.startswith("--"):
        words = [sys.executable, "-m", "invoke", *filled(command)]
        assert "bench" in subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=True).stdout
        return
    if command.startswith("generate") and "--arch" not in command:
        # The other targets are compiled by test_generated.py.
        command += " --arch sm_90"
    assert invoked(command) == (0, "")
    assert capsys.readouterr().out


def test_what_is_run_elsewhere_is_in_the_docs() -> None:
    used = {_begins(command, *ELSEWHERE) for command in COMMANDS}
    # Named in the table of commands, without uv.
    assert set(ELSEWHERE) - used <= {"lint", "clean", "peers", "fuzz", "go", "vet --emulator"}


#: The last line that each example prints, in the order of its page.
PRINTED: dict[str, list[str]] = {
    # As README.md says it does.
    "README.md": [r"update_n128_l32_r8_w2_c1_f32_sf32 \(6, 4, 16\) \(2, 4, 16, 128\)"],
    "operation.md": [r"(update|recurrent)_n128_\w+ \[2 5 7\]"],
    "reading.md": [r"(update|recurrent)_n128_l4_r32_c25_padded_f32_sf32 True"],
    "adding.md": [r"\(3, 2, 8\)"],
}


#: Examples that need what a machine without a GPU has not, and the test that runs what they show.
SHOWN_ONLY = {"torch.md": "gpu/test_torch.py"}
#: What a line or code that is a command begins with.
LOOKS_LIKE_ONE = re.compile(
    r"(?:\./\w|[A-Z_]+=\S+ \w|cd \S+ &&|(?:python3?|pip|uv|go|gcc|g\+\+|cc|nvcc|cmake|make|curl|cuobjdump|invoke) \S)"
)
#: Commands that are neither of invoke nor of Python here, by how they begin, and the test that runs them.
OTHER_COMMANDS = {
    r"GOPROXY=\S+ GONOSUMDB=\S+ go get ": "test_embedding.py::test_the_proxy_tree_serves_a_pure_go_engine",
    r"go mod vendor": "test_embedding.py::test_vendored_under_the_race_detector_and_cgocheck2",
    r"cd examples/c && cc .* && \./scan ": "test_embedding.py::test_the_c_example_passes_the_golden_vectors",
    r"\./ssmvet": "test_embedding.py::test_ssmvet_proves_every_image_and_its_file_is_merged",
    r"\./ssmscan\.test": "test_go.py",
    r"pip install uv(?: &&|$)": "test_tasks.py::test_ci_runs_the_test_command_of_the_readme",
    # A tool of the CUDA toolkit, which is not among what the project needs.
    r"cuobjdump -sass$": "",
    r"(?:uv run )?invoke ": "test_docs.py::test_a_command_of_the_docs_exists_with_its_options",
    r"(?:uv run (?:--with \S+ )*)?python ": "test_docs.py::test_a_python_command_of_the_docs_runs",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_known_to_be_run(page: Path) -> None:
    for line in filter(LOOKS_LIKE_ONE.match, written(page)):
        named = [test for pattern, test in OTHER_COMMANDS.items() if re.match(pattern, line)]
        assert named, f"name in OTHER_COMMANDS what runs: {line}"
        name, _, test = named[0].partition("::")
        assert not name or f"def {test}" in (ROOT / "tests" / name).read_text(encoding="utf-8")


PYTHON_COMMANDS = {
    words: None for page in PAGES for line in written(page) for words in re.findall(r"^(?:uv run .*)?python (.+)", line)
}
#: The test that runs what one does, by how it begins; all others need a GPU.
RUN_BY = {
    "first.py": "test_docs.py::test_examples_print_what_they_are_for",
    "-m pyharness.drift --store": "test_readme.py::test_the_readme_shows_what_storage_costs",
    "-m pyharness.counters": "gpu/test_counters.py",
    "-m pyharness.vectors": "test_vectors.py::test_the_stored_vectors_are_what_python_makes_of_them",
    "-m pyharness.native build": "test_native.py::test_a_folder_for_a_gpu_machine_has_every_binary",
    "examples/share_of_scan.py": "gpu/test_torch.py::test_the_examples_run",
    "examples/transformers_models.py": "gpu/test_torch.py::test_the_examples_run",
}


@pytest.mark.parametrize("command", PYTHON_COMMANDS, ids=shown_as)
def test_a_python_command_of_the_docs_runs(command: str, tmp_path: Path) -> None:
    run_by = _begins(command, *RUN_BY)
    if run_by:
        name, _, test = RUN_BY[run_by].partition("::")
        assert f"def {test}" in (ROOT / "tests" / name).read_text(encoding="utf-8")
        return
    if GPU:
        pytest.skip("takes minutes of the GPU: tests/gpu run what it does")
    words = [str(tmp_path / word) if word in ("FOLDER", "OUT") else word for word in shlex.split(command)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, text=True, capture_output=True, check=False)
    # What is missing is told in one line: a GPU, or the folder that another command makes.
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert re.match(r"error: (GPU 0|a folder .*) was wanted, found (no NVIDIA driver|none)", done.stderr)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_print_what_they_are_for(page: Path) -> None:
    examples = fenced(page, "python")
    if page.name in SHOWN_ONLY:
        assert (ROOT / "tests" / SHOWN_ONLY[page.name]).is_file()
        for example in examples:
            compile(example, page.name, "exec")
        return
    wanted = PRINTED.get(page.name, [])
    assert len(examples) == len(wanted), "name in PRINTED what each example prints"
    for example, pattern in zip(examples, wanted, strict=True):
        command: list[Any] = [sys.executable, "-c", example]
        shown = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
        assert re.fullmatch(pattern, shown.splitlines()[-1]), shown


def test_what_is_quoted_of_an_emitted_file_stands_in_it() -> None:
    page = ROOT / "docs" / "reading.md"
    (name,) = re.findall(r"goes through `(generated/kernels/\w+\.cu)`", page.read_text(encoding="utf-8"))
    source = (ROOT / name).read_text(encoding="utf-8")
    quoted = fenced(page, "cuda")
    assert quoted
    places = [source.find(text) for text in quoted]
    assert -1 not in places
    assert places == sorted(places), "in the order of the file"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_of_files_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = link.partition("#")
        target = page if not path else page.parent / path
        assert target.is_file(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, link
    for name in re.findall(r"`((?:pyharness|templates|tests|generated|examples|docs)/[\w./]+\.\w+)`", text):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_kernels_that_are_named_can_exist(page: Path) -> None:
    from pyharness.spec import parse_id

    families = r"(?:recurrent|update|ssd|selective)"
    names = re.findall(rf"`({families}_(?:n\d+|generic)\w*_s(?:f32|bf16|f16|i8)\w*)`", page.read_text(encoding="utf-8"))
    for name in names:
        # Raises for one that cannot.
        assert parse_id(name).id == name
    assert manifest.ids()
