"""nvcc: find it, compile one source for one target, read what the kernel uses, and never compile the same thing twice.

The compiler is the pinned one from PyPI, which needs no CUDA toolkit and no GPU; another nvcc is used only when it is
asked for. An image depends on the source, the flags and the compiler's version alone: not on the folder, the user, the
machine or the hour.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from pyharness.errors import ToolchainError

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "cache"

#: The compiler that the committed manifest is made with.
PINNED_VERSION = "13.0.88"
#: The oldest nvcc whose images were proven on a device.
OLDEST_VERSION = (12, 4)
#: The first nvcc that knows a target, where that is a later one.
FIRST_VERSION = {"sm_100": (12, 8), "sm_120": (12, 8)}
#: The first driver whose CUDA is that of the compiler's major version; cubins and PTX need it.
MIN_DRIVER = {12: "525", 13: "580"}
_WHEELS = {"nvidia-cuda-nvcc": PINNED_VERSION, "nvidia-cuda-crt": PINNED_VERSION, "nvidia-nvvm": PINNED_VERSION}

#: Families whose kernels say fmaf where they mean it: the compiler may not contract on its own.
F32_FAMILIES = frozenset({"recurrent", "update", "selective", "ssd"})
# No -lineinfo and no -G: both put paths into the image. -Xptxas -v is stated here because ptxas records its options in
# the image: leaving it out gives other bytes. Host code is preprocessed, never compiled, so a host compiler newer than
# those that nvcc knows will do.
_BASE_FLAGS = ("-std=c++17", "-O3", "-Xptxas=-v", "-ccbin=g++", "-allow-unsupported-compiler")

# nvcc names modules after this file, so it is the same for every kernel.
_SOURCE_NAME = "kernel.cu"
_COMPILE_SECONDS = 900
# In the names of static functions and unnamed namespaces that were not inlined, followed by a hash of the folder.
_FOLDER_NAME = b"_INTERNAL_"


def flags(family: str) -> tuple[str, ...]:
    """The nvcc flags of a family; the target comes on top."""
    return (*_BASE_FLAGS, "-fmad=false") if family in F32_FAMILIES else _BASE_FLAGS


@dataclass(frozen=True)
class Compiler:
    """An nvcc that was found.

    Attributes:
        nvcc: the program.
        version: as nvcc writes it, "13.0.88".
        pinned: whether it is the one from PyPI.
    """

    nvcc: Path
    version: str
    pinned: bool

    @property
    def min_driver(self) -> str:
        """The first driver branch that loads what this compiler makes."""
        major = int(self.version.split(".")[0])
        if major not in MIN_DRIVER:
            raise ToolchainError(
                f"the driver that nvcc {self.version} needs is not known, found entries for CUDA "
                f"{', '.join(map(str, MIN_DRIVER))}: add it to MIN_DRIVER in pyharness/toolchain.py"
            )
        return MIN_DRIVER[major]


@dataclass(frozen=True)
class Usage:
    """What one entry of a cubin uses, as ptxas reports it: registers a thread, the rest in bytes.

    Attributes:
        local_bytes: stack frame of a thread; spilled registers live there too.
    """

    registers: int
    static_shared: int
    local_bytes: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Job:
    """One source to compile for one target.

    Attributes:
        name: for messages; kernels use their id.
        target: "sm_90" gives a cubin, "compute_80" gives PTX.
        flags: of `flags(family)`.
    """

    name: str
    source: str
    target: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Image:
    """A compiled job.

    Attributes:
        kind: "cubin" or "ptx".
        usage: by symbol; empty for PTX, whose registers the driver chooses.
        warnings: what the compiler complained about, empty if nothing.
        seconds: of compiling, 0 if it came from the cache.
    """

    name: str
    target: str
    kind: str
    data: bytes
    usage: dict[str, Usage]
    warnings: str
    seconds: float

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def _wheel_root() -> Path | None:
    """The folder of the pinned compiler, nvidia/cu13 among the installed packages."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec and spec.submodule_search_locations) or ():
        root = Path(location) / "cu13"
        if (root / "bin" / "nvcc").is_file():
            return root
    return None


def _pinned_root() -> Path:
    root = _wheel_root()
    found = {}
    for wheel in _WHEELS:
        try:
            found[wheel] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            found[wheel] = "nothing"
    wrong = [f"{wheel} {found[wheel]}" for wheel, version in _WHEELS.items() if found[wheel] != version]
    if root is None or wrong:
        raise ToolchainError(
            f"the CUDA compiler {PINNED_VERSION} from PyPI was wanted, found {', '.join(wrong) or 'no nvcc in it'} in "
            f"the Python that runs this: use `uv run invoke ...`, which installs it, or name another with --nvcc PATH"
        )
    return root


def find_compiler(nvcc: str | None = None) -> Compiler:
    """The pinned nvcc, or the one asked for by `nvcc` (a path or a name on PATH) or, failing that, by NVCC.

    Raises:
        ToolchainError: it is not there, is older than `OLDEST_VERSION`, or there is no g++ to preprocess with.
    """
    return _find_compiler(nvcc or os.environ.get("NVCC") or None)


@functools.cache
def _find_compiler(asked: str | None) -> Compiler:
    if shutil.which("g++") is None:
        raise ToolchainError("g++ was wanted (nvcc preprocesses with it), found none on PATH: install g++")
    if asked is None:
        if not sys.platform.startswith("linux"):
            raise ToolchainError(
                f"the pinned compiler runs on Linux, found {sys.platform}: name an nvcc with --nvcc PATH"
            )
        program = _pinned_root() / "bin" / "nvcc"
        for tool in (program, program.with_name("ptxas"), program.parents[1] / "nvvm" / "bin" / "cicc"):
            if not os.access(tool, os.X_OK):
                raise ToolchainError(f"{tool} is not executable: install nvidia-cuda-nvcc and nvidia-nvvm again")
        return Compiler(program, PINNED_VERSION, pinned=True)
    where = shutil.which(asked)
    if where is None:
        raise ToolchainError(f"nvcc {asked!r} was asked for, found no such program: give its path, or unset NVCC")
    program = Path(where).absolute()
    shown = _run([str(program), "--version"], Path.cwd())
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", shown.stdout)
    if shown.returncode or match is None:
        raise ToolchainError(
            f"{program} --version was to name a version, found {(shown.stdout + shown.stderr).strip()!r}"
        )
    if (int(match[1]), int(match[2])) < OLDEST_VERSION:
        wanted = ".".join(map(str, OLDEST_VERSION))
        raise ToolchainError(
            f"nvcc {wanted} or newer was wanted, found {match[0][1:]} at {program}: leave --nvcc and NVCC out"
        )
    return Compiler(program, match[0][1:], pinned=False)


def cuda_library_dir() -> Path:
    """The folder of the pinned CUDA runtime's libraries.

    Raises:
        ToolchainError: they are not installed.
    """
    folder = _pinned_root() / "lib"
    if not (folder / "libcudart_static.a").is_file():
        raise ToolchainError(
            f"libcudart_static.a was wanted in {folder}, found none: install nvidia-cuda-runtime again"
        )
    return folder


def cuda_include_dirs() -> list[Path]:
    """Folders with CUDA headers (cuda_bf16.h and so on, then CCCL), for any C++ compiler: those of the pinned compiler
    or, where it is not installed and NVCC names another, of the toolkit of that one.

    Raises:
        ToolchainError: they are not installed.
    """
    other = os.environ.get("NVCC") if _wheel_root() is None else None
    root = find_compiler(other).nvcc.resolve().parents[1] if other else _pinned_root()
    folders = [root / "include", root / "include" / "cccl"]
    for header, folder in (("cuda_runtime.h", folders[0]), ("cuda/std/version", folders[1])):
        if not (folder / header).is_file():
            raise ToolchainError(
                f"{header} was wanted in {folder}, found none: use `uv run`, which installs the headers"
            )
    return folders


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # nvcc reads extra flags from the environment, and messages are parsed: neither may depend on who runs this.
    hidden = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"LC_ALL": "C", "TMPDIR": str(folder)}
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, text=True, capture_output=True, timeout=_COMPILE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ToolchainError(f"{command[0]} ran for {_COMPILE_SECONDS} s and was stopped") from error


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_usage(log: str) -> dict[str, Usage]:
    """Usage by symbol from what `ptxas -v` prints.

    Raises:
        ToolchainError: ptxas prints something that this does not know.
    """
    usage = {}
    blocks = _ENTRY.split(log)[1:]
    for symbol, text in zip(blocks[::2], blocks[1::2], strict=True):
        frame, used, shared = _FRAME.search(text), _USED.search(text), _SHARED.search(text)
        if frame is None or used is None:
            raise ToolchainError(
                f"ptxas -v was to tell what {symbol} uses, found {text.strip()!r}: use the pinned nvcc"
            )
        local, stores, loads = map(int, frame.groups())
        usage[symbol] = Usage(int(used[1]), int(shared[1]) if shared else 0, local, stores, loads)
    return usage


def _warnings(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if re.search(r"\bwarning\b", line, re.IGNORECASE))


def compile_source(job: Job, compiler: Compiler) -> Image:
    """Compile one job, without the cache.

    Raises:
        ToolchainError: nvcc refused it (the message has the command and what nvcc said), or the image would depend on
            the folder.
    """
    kind = "ptx" if job.target.startswith("compute_") else "cubin"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ssm-") as name:
        folder = Path(name)
        (folder / _SOURCE_NAME).write_text(job.source, encoding="utf-8", newline="\n")
        output = folder / f"kernel.{kind}"
        arguments = [*job.flags, f"-arch={job.target}", f"-{kind}", "-o", output.name, _SOURCE_NAME]
        done = _run([str(compiler.nvcc), *arguments], folder)
        log = done.stdout + done.stderr
        if done.returncode or not output.is_file():
            raise ToolchainError(
                f"{job.name} for {job.target}: nvcc {compiler.version} was to compile it and ended with "
                f"{done.returncode}\n{log.strip()}\ncommand: nvcc {' '.join(arguments)}"
            )
        data = output.read_bytes()
    if _FOLDER_NAME in data:
        raise ToolchainError(
            f"{job.name} for {job.target}: an image that does not depend on the folder was wanted, found functions or "
            f"variables with internal linkage, which nvcc names after the folder: make them `inline` or a template"
        )
    usage = parse_usage(log) if kind == "cubin" else {}
    return Image(job.name, job.target, kind, data, usage, _warnings(log), time.perf_counter() - start)


def cache_key(job: Job, compiler: Compiler) -> str:
    """The sha256 over all that decides the image: source, target, flags, compiler version."""
    parts = [compiler.version, job.target, *job.flags, hashlib.sha256(job.source.encode()).hexdigest()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def publish(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees all of it or none: to a name of its own, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def publish_json(path: Path, document: object) -> None:
    """`publish` a document as stored results are written: sorted keys, an indent of one, a line end at the end."""
    publish(path, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())


def _cached(job: Job, key: str, cache: Path) -> Image | None:
    try:
        facts = json.loads((cache / f"{key}.json").read_text(encoding="utf-8"))
        data = (cache / f"{key}.image").read_bytes()
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        return None
    usage = {symbol: Usage(**numbers) for symbol, numbers in facts["usage"].items()}
    return Image(job.name, job.target, facts["kind"], data, usage, facts["warnings"], 0.0)


def compile_cached(job: Job, compiler: Compiler, cache: Path = CACHE) -> Image:
    """The image of a job, from the cache or compiled into it.

    Raises:
        ToolchainError: nvcc refused it.
    """
    key = cache_key(job, compiler)
    image = _cached(job, key, cache)
    if image is None:
        image = compile_source(job, compiler)
        publish(cache / f"{key}.image", image.data)
        usage = {symbol: asdict(numbers) for symbol, numbers in image.usage.items()}
        facts = {"kind": image.kind, "sha256": image.sha256, "usage": usage, "warnings": image.warnings}
        # The facts come last: they say that the image beside them is whole.
        publish(cache / f"{key}.json", json.dumps(facts, sort_keys=True).encode())
    return image


def check_targets(compiler: Compiler, targets: Iterable[str]) -> None:
    """Refuse targets that a compiler does not know.

    Raises:
        ToolchainError: there are such.
    """
    version = tuple(map(int, compiler.version.split(".")[:2]))
    later = {target: FIRST_VERSION[target] for target in targets if FIRST_VERSION.get(target, version) > version}
    if later:
        major, minor = max(later.values())
        raise ToolchainError(
            f"nvcc {major}.{minor} or newer was wanted for {', '.join(sorted(later))}, found {compiler.version}: name "
            f"other targets with --arch"
        )


def compile_many(
    jobs: Iterable[Job],
    compiler: Compiler,
    *,
    workers: int = 0,
    cache: Path = CACHE,
    done: Callable[[Image], None] | None = None,
) -> list[Image]:
    """Compile jobs in parallel, in the cache's presence; images come in the order of the jobs.

    Args:
        workers: compilers at a time; 0 is one for each core.
        done: called in this thread with each image as it is ready.

    Raises:
        ToolchainError: nvcc does not know a target, or refused a source; those not started are left.
    """
    jobs = list(jobs)
    check_targets(compiler, dict.fromkeys(job.target for job in jobs))
    if workers < 0:
        raise ToolchainError(f"the number of parallel compilers must be at least 1, found {workers}")
    images: dict[int, Image] = {}
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        waiting: dict[Future[Image], int] = {
            pool.submit(compile_cached, job, compiler, cache): index for index, job in enumerate(jobs)
        }
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    index = waiting.pop(future)
                    images[index] = future.result()
                    if done is not None:
                        done(images[index])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [images[index] for index in range(len(jobs))]


def worst(images: Sequence[Image], field: str) -> int:
    """The largest value of a `Usage` field over all entries of some images."""
    return max((getattr(usage, field) for image in images for usage in image.usage.values()), default=0)
