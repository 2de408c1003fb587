"""The GPU: loads images, launches kernel entries, moves arrays, replays graphs.

The only module that imports PyCUDA and cuda.bindings, and only when a `Device` is made: pyharness imports without them.
Images are loaded from memory, so the bytes that run are the bytes that the toolchain made. Each load and each launch is
checked where it happens. A plan in which a launch overlaps the one before it needs a launch attribute, which PyCUDA's
calls do not take: it goes through libcuda itself (launcher.py), the same bytes in the same context.

After `Device.run`, every byte that no writable array owns must be what it was, and every output element must have been
written: see placement.py.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from pyharness import build, gpus, toolchain
from pyharness.args import SCAN_ARGS
from pyharness.doctor import INSTALL_PYCUDA
from pyharness.errors import DeviceError, ImageError, NoKernel
from pyharness.launcher import Launcher, LoadedKernel
from pyharness.placement import (
    GUARD_BYTES,
    GUARD_PATTERN,
    POISON,
    Array,
    Buffer,
    Bytes,
    Region,
    bits,
    regions,
    runs,
    unwritten,
)
from pyharness.spec import SHARED_LIMIT, KernelSpec, Plan

_SMI = "look at what nvidia-smi says"


def available() -> str:
    """Why kernels cannot run on a GPU here, with the command that helps, or an empty string if they can."""
    problem = gpus.driver().problem
    if problem:
        return f"{problem}; install NVIDIA's driver, {toolchain.MIN_DRIVER[13]} or newer, and {_SMI}"
    name = gpus.driver().gpus[0].name
    if importlib.util.find_spec("pycuda") is None:
        return f"there is a GPU ({name}) but no PyCUDA; install it: {INSTALL_PYCUDA}"
    try:
        importlib.import_module("pycuda.driver")
    except ImportError as error:
        return f"there is a GPU ({name}) but PyCUDA does not load ({error}); install it again: {INSTALL_PYCUDA}"
    return ""


def graphs_available() -> str:
    """Why launches cannot be timed in CUDA graphs here, with the command that helps, or an empty string if they can."""
    missing = available()
    if missing:
        return missing
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        return f"there is a GPU and PyCUDA but no cuda-bindings ({error}); install it: {INSTALL_PYCUDA}"
    return ""


def image_target(spec: KernelSpec, capability: tuple[int, int], device: str = "this device") -> str:
    """The target whose machine code serves a device: its own, else the next lower minor of the same major version.

    PTX is never chosen: what would run then are bytes that the driver made.

    Raises:
        NoKernel: the kernel has no image that serves the device.
    """
    major, minor = capability
    own = f"sm_{major}{minor}"
    exact = str(getattr(spec, "exact", ""))
    family = f"sm_{major}"
    minors = [int(name[-1]) for name in spec.targets() if name[:-1] == family and name[-1].isdigit()]
    fitting = [value for value in minors if value <= minor]
    if exact == own + "a":
        return exact
    if fitting:
        return f"{family}{max(fitting)}"
    reason = spec.excluded(own) if own in SHARED_LIMIT else "no image is made for it"
    raise NoKernel(
        f"{device} wants machine code for {own}, and {spec.id} has none: {reason or 'none was made'}; on offer: "
        f"{', '.join(spec.targets())}. Choose another kernel, or build for it: invoke generate --arch {own}"
    )


class Memory:
    """Device memory, freed with the object. Offsets and sizes are in bytes."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes
        with device.checked(f"allocation of {nbytes} bytes"):
            self._allocation = device.driver.mem_alloc(max(nbytes, 1))
        self.address = int(self._allocation)

    def fill(self, byte: int, offset: int = 0, nbytes: int | None = None) -> None:
        """Set bytes, by default to the end."""
        count = self.nbytes - offset if nbytes is None else nbytes
        if count:
            with self._device.checked(f"filling {count} bytes"):
                self._device.driver.memset_d8(self.address + offset, byte, count)

    def write(self, array: Array, offset: int = 0) -> None:
        """Copy a host array here in C order."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._inside(offset, data.nbytes)
        if data.nbytes:
            with self._device.checked(f"copy of {data.nbytes} bytes to the device"):
                self._device.driver.memcpy_htod(self.address + offset, data)

    def read(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Bytes from here, by default to the end."""
        data = np.empty(self.nbytes - offset if nbytes is None else nbytes, np.uint8)
        self._inside(offset, data.nbytes)
        if data.nbytes:
            with self._device.checked(f"copy of {data.nbytes} bytes from the device"):
                self._device.driver.memcpy_dtoh(data, self.address + offset)
        return data

    def repeat(self, nbytes: int, offset: int) -> None:
        """Copy the first bytes to an offset."""
        self._inside(offset, nbytes)
        if nbytes:
            with self._device.checked(f"copy of {nbytes} bytes on the device"):
                self._device.driver.memcpy_dtod(self.address + offset, self.address, nbytes)

    def _inside(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise DeviceError(f"a copy of {nbytes} bytes at {offset} does not fit device memory of {self.nbytes} bytes")

    def free(self) -> None:
        """Free now; does nothing on a device that a failed kernel took down."""
        if not self._device.broken:
            with self._device.checked("free"):
                self._allocation.free()


class Entry:
    """One entry of a loaded image.

    Attributes:
        symbol: its name.
        registers: of a thread.
        local_bytes, static_shared: of a thread and of a block, in bytes.
        max_threads: most threads of a block.
    """

    def __init__(self, device: Device, module: Any, symbol: str) -> None:
        self._device = device
        self.symbol = symbol
        with device.checked(f"look-up of {symbol} in its image"):
            self._function = module.get_function(symbol)
            self.registers = int(self._function.num_regs)
            self.local_bytes = int(self._function.local_size_bytes)
            self.static_shared = int(self._function.shared_size_bytes)
            self.max_threads = int(self._function.max_threads_per_block)
        self._dynamic_limit = 0
        self._argument_bytes = -1

    def launch(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: bytes, shared_bytes: int = 0
    ) -> None:
        """Launch on the device's stream with the parameter block as it is.

        Raises:
            DeviceError: the block does not fit the device, or the driver refused the launch.
        """
        threads = block[0] * block[1] * block[2]
        if threads > self.max_threads:
            raise DeviceError(
                f"{self._device.name}: {self.symbol} takes blocks of at most {self.max_threads} threads with its "
                f"{self.registers} registers, wanted {threads}: use fewer rows or warps"
            )
        self._allow_shared(shared_bytes)
        if len(arguments) != self._argument_bytes:
            # A structured dtype packs as raw bytes, with the padding that the caller's struct has.
            self._function.prepare([np.dtype((np.void, len(arguments)))])
            self._argument_bytes = len(arguments)
        shape = f"grid {grid}, block {block}, {shared_bytes} bytes of shared memory"
        with self._device.checked(f"launch of {self.symbol} ({shape})"):
            self._function.prepared_async_call(grid, block, self._device.stream, arguments, shared_size=shared_bytes)

    def _allow_shared(self, shared_bytes: int) -> None:
        if shared_bytes <= self._dynamic_limit:
            return
        limit = self._device.shared_limit - self.static_shared
        if shared_bytes > limit:
            raise DeviceError(
                f"{self._device.name}: {self.symbol} wants {shared_bytes} bytes of dynamic shared memory, a block may "
                f"have {limit} ({self._device.shared_limit} less {self.static_shared} static): use a smaller chunk"
            )
        attribute = self._device.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._device.checked(f"opt-in of {self.symbol} to {shared_bytes} bytes of shared memory"):
            self._function.set_attribute(attribute, shared_bytes)
        self._dynamic_limit = shared_bytes


class Kernel:
    """A spec whose image is loaded on a device.

    Attributes:
        spec, target: what was loaded.
        sha256: of the image.
        entries: by symbol, loaded when the kernel is.
    """

    def __init__(self, device: Device, spec: KernelSpec, image: toolchain.Image) -> None:
        self._device = device
        self.spec = spec
        self.target = image.target
        self.sha256 = image.sha256
        self._image = image
        module = device.module(image.data)
        if not image.usage:
            raise ImageError(f"{spec.id} for {image.target}: the toolchain reports no entry: build it again")
        self.entries = {symbol: Entry(device, module, symbol) for symbol in image.usage}
        for symbol, entry in self.entries.items():
            self._check(entry, image.usage[symbol])

    def _check(self, entry: Entry, wanted: toolchain.Usage) -> None:
        local = max(entry.local_bytes, wanted.local_bytes)
        if local:
            raise ImageError(
                f"{entry.symbol} keeps {local} bytes a thread in local memory, wanted 0: use a smaller tile"
            )
        found = {"registers": entry.registers, "static_shared": entry.static_shared}
        for name, value in found.items():
            if value != getattr(wanted, name):
                raise ImageError(
                    f"{self._device.name}: {entry.symbol} has {name} {value} as loaded, the toolchain says "
                    f"{getattr(wanted, name)}: the image is not the one that was built; run invoke clean, then build"
                )

    @functools.cached_property
    def _with_attributes(self) -> LoadedKernel:
        """The same image once more, for launches with attributes, which PyCUDA has not got."""
        return self._device.launcher.load(self.spec.id, self._image)

    def launch(self, plan: Plan, arguments: bytes) -> None:
        """Queue the launches of a plan.

        Raises:
            DeviceError: the arguments are not one ScanArgs, or a launch was refused.
        """
        # The driver does not notice a parameter block of another size.
        if len(arguments) != SCAN_ARGS.itemsize:
            raise DeviceError(f"{self.spec.id} takes {SCAN_ARGS.itemsize} bytes of arguments, found {len(arguments)}")
        for launch in plan.launches:
            if launch.entry not in self.entries:
                raise ImageError(f"{self.spec.id}: no entry {launch.entry}; on offer: {', '.join(self.entries)}")
        if any(launch.overlaps for launch in plan.launches):
            with self._device.checked(f"launch of {self.spec.id}"):
                self._with_attributes.launch(plan, arguments, self._device.stream.handle)
            return
        for launch in plan.launches:
            self.entries[launch.entry].launch(launch.grid, launch.block, arguments, launch.shared_bytes)


class Graph:
    """Launches captured once, to be replayed; destroyed with the object."""

    def __init__(self, device: Device, launches: Iterable[Callable[[], None]]) -> None:
        self._device = device
        self._api = importlib.import_module("cuda.bindings.driver")
        # Relaxed: Python may free memory in the middle of a capture.
        mode = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        handle = device.stream.handle
        self._call("cuStreamBeginCapture", handle, mode)
        try:
            for launch in launches:
                launch()
        finally:
            graph = self._call("cuStreamEndCapture", handle)
        self._executable = self._call("cuGraphInstantiate", graph, 0)
        self._call("cuGraphDestroy", graph)
        self._call("cuGraphUpload", self._executable, handle)

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *values = getattr(self._api, function)(*arguments)
        if status != self._api.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{self._device.name}: {function} gave {status.name}")
        return values[0] if values else None

    def replay(self) -> None:
        """Queue one replay."""
        self._call("cuGraphLaunch", self._executable, self._device.stream.handle)

    def destroy(self) -> None:
        """Free it once queued replays have ended."""
        self._call("cuGraphExecDestroy", self._executable)


class Device:
    """One GPU through its primary context, which is current inside `with device:` and in the methods that say so.

    Attributes:
        name: "NVIDIA H200".
        capability: (9, 0).
        target: "sm_90".
        multiprocessors: how many.
        l2_bytes: of the second-level cache.
        shared_limit: most shared memory of a block, opt-in, in bytes.
        broken: why nothing more runs in this process, or an empty string.

    Raises:
        DeviceError: there is no GPU or no PyCUDA; the message has the command that helps.
    """

    def __init__(self, ordinal: int = 0) -> None:
        missing = available()
        if missing:
            raise DeviceError(f"GPU {ordinal} was wanted, found {missing}")
        self.driver: Any = importlib.import_module("pycuda.driver")
        self.driver.init()
        count = int(self.driver.Device.count())
        if not 0 <= ordinal < count:
            raise DeviceError(f"GPU {ordinal} was wanted, found {count}, numbered from 0: {_SMI}")
        self.ordinal = ordinal
        device = self.driver.Device(ordinal)
        attribute = self.driver.device_attribute
        self.name = str(device.name())
        major, minor = device.compute_capability()
        self.capability = (int(major), int(minor))
        self.target = f"sm_{major}{minor}"
        self.multiprocessors = int(device.get_attribute(attribute.MULTIPROCESSOR_COUNT))
        self.l2_bytes = int(device.get_attribute(attribute.L2_CACHE_SIZE))
        self.shared_limit = int(device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN))
        self._kernels: dict[str, Kernel] = {}
        self._modules: dict[str, Any] = {}
        self.broken = ""
        self._depth = 0
        self._context = device.retain_primary_context()
        with self:
            # Not the default stream, which cannot be captured. It waits for copies, which run on the default stream.
            self.stream = self.driver.Stream()

    @functools.cached_property
    def launcher(self) -> Launcher:
        """libcuda itself, in the same context."""
        return Launcher(self.ordinal)

    def __enter__(self) -> Device:
        if self._context is None:
            raise DeviceError(f"{self.name} was closed")
        if self._depth == 0:
            self._context.push()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            # A kernel that failed shows in any later call, this one too: it was reported where it was waited for.
            with suppress(self.driver.Error):
                self.driver.Context.pop()

    @contextmanager
    def checked(self, what: str) -> Iterator[None]:
        """Make the context current and turn a driver error into a DeviceError that says what was being done."""
        if self.broken:
            raise DeviceError(f"{self.name} runs nothing more in this process after: {self.broken}")
        with self:
            try:
                yield
            except self.driver.Error as error:
                raise DeviceError(f"{self.name}: {what} failed: {error}") from error

    def synchronize(self, what: str) -> None:
        """Wait for all queued work.

        Raises:
            DeviceError: a kernel failed. The context is lost then, and every later call says why.
        """
        try:
            with self.checked(what):
                self.driver.Context.synchronize()
        except DeviceError as error:
            self.broken = self.broken or str(error)
            raise

    def module(self, image: bytes) -> Any:
        """Load an image, or find it loaded.

        Raises:
            DeviceError: the driver refused it.
        """
        key = hashlib.sha256(image).hexdigest()
        if key not in self._modules:
            with self.checked(f"loading an image of {len(image)} bytes (sha256 {key[:12]}) on {self.target}"):
                self._modules[key] = self.driver.module_from_buffer(image)
        return self._modules[key]

    def kernel(self, spec: KernelSpec, image: toolchain.Image | None = None) -> Kernel:
        """Load a kernel, built first where no image is given.

        Raises:
            NoKernel: no image of it serves this device.
            ToolchainError: it does not compile.
            ImageError: what was loaded uses other resources than the toolchain says.
        """
        if spec.id not in self._kernels:
            target = image_target(spec, self.capability, self.name)
            self._kernels[spec.id] = Kernel(self, spec, image or build.image(spec, target))
        return self._kernels[spec.id]

    def run(
        self, spec: KernelSpec, plan: Plan, buffers: Sequence[Buffer], pack: Callable[[Mapping[str, int]], bytes]
    ) -> None:
        """Run a plan over host arrays and copy the writable ones back.

        Args:
            spec: the kernel.
            plan: its launches.
            buffers: the arrays.
            pack: makes the ScanArgs from the device address of each buffer's first element.

        Raises:
            DeviceError: a driver call failed, a byte outside the writable arrays changed, or an output element was not
                written; nothing is copied back then.
        """
        kernel = self.kernel(spec)
        with self:
            placed = [(region, Memory(self, region.nbytes)) for region in regions(buffers)]
            befores = [_upload(region, memory) for region, memory in placed]
            addresses = {
                buffer.name: memory.address + region.offset(buffer)
                for region, memory in placed
                for buffer in region.buffers
            }
            self.synchronize(f"copying the arrays of {spec.id}")
            kernel.launch(plan, pack(addresses))
            self.synchronize(f"running {spec.id}")
            results: list[tuple[Buffer, Array]] = []
            for (region, memory), before in zip(placed, befores, strict=True):
                results += self._download(spec, region, memory, before)
            for _, memory in placed:
                memory.free()
        for buffer, values in results:
            bits(buffer.array)[...] = values

    def _download(
        self, spec: KernelSpec, region: Region, memory: Memory, before: Bytes | None
    ) -> list[tuple[Buffer, Array]]:
        if before is None:
            stray = _sparse_stray(region, memory)
            views = {b.name: _download_runs(region, memory, b) for b in region.buffers if b.writable}
        else:
            after = memory.read()
            stray = region.stray_write(before, after)
            views = {b.name: region.view(after, b) for b in region.buffers if b.writable}
        if stray:
            raise DeviceError(f"{self.name}: {spec.id} wrote outside its outputs: {stray}")
        results = []
        for buffer in region.buffers:
            if buffer.writable:
                missed = unwritten(buffer, views[buffer.name])
                if missed:
                    raise DeviceError(f"{self.name}: {spec.id} left output unwritten: {missed}")
                results.append((buffer, views[buffer.name]))
        return results

    def time(self, graph: Graph, replays: int) -> float:
        """Microseconds that some replays of a graph take together, by events."""
        with self.checked(f"timing {replays} replays"):
            start, end = self.driver.Event(), self.driver.Event()
            start.record(self.stream)
            for _ in range(replays):
                graph.replay()
            end.record(self.stream)
            end.synchronize()
            return 1e3 * float(end.time_since(start))

    def close(self) -> None:
        """Unload everything and release the context. Calling it twice does nothing."""
        if self._context is None:
            return
        self._kernels.clear()
        with self:
            self._modules.clear()
            del self.stream
        with suppress(self.driver.Error):  # of a context that a failed kernel took down
            self._context.detach()
        self._context = None


def _upload(region: Region, memory: Memory) -> Bytes | None:
    """Fill the allocation of a region; returns its bytes unless it is sparse."""
    if not region.sparse:
        image = region.image()
        memory.write(image)
        return image
    memory.fill(GUARD_PATTERN, 0, region.lead)
    memory.fill(POISON, region.lead, region.span)
    memory.fill(GUARD_PATTERN, region.lead + region.span)
    for buffer in region.buffers:
        if buffer.initialised:
            for index, offset in runs(buffer.array):
                memory.write(bits(buffer.array[index]), region.offset(buffer) + offset)
    return None


def _download_runs(region: Region, memory: Memory, buffer: Buffer) -> Array:
    """The elements of a buffer of a sparse region, as unsigned integers."""
    values: Array = np.empty(buffer.array.shape, f"u{buffer.array.itemsize}")
    for index, offset in runs(buffer.array):
        run = values[index]
        run[...] = memory.read(region.offset(buffer) + offset, run.nbytes).view(values.dtype).reshape(run.shape)
    return values


def _sparse_stray(region: Region, memory: Memory) -> str:
    """Where a guard zone of a sparse region changed; its gaps are too large to look at."""
    for start, nbytes in ((0, region.lead), (region.lead + region.span, GUARD_BYTES)):
        changed = np.flatnonzero(memory.read(start, nbytes) != GUARD_PATTERN)
        if changed.size:
            return region.describe(start + int(changed[0]))
    return ""


def get(ordinal: int = 0) -> Device:
    """The device, made once and closed when the process ends.

    Raises:
        DeviceError: there is none; the message has the command that helps.
    """
    return _made(ordinal)


@functools.cache
def _made(ordinal: int) -> Device:
    device = Device(ordinal)
    atexit.register(device.close)
    return device


def identity(ordinal: int = 0) -> tuple[str, str, int]:
    """Name, target and opt-in shared memory of a block in bytes, as selection wants them."""
    device = get(ordinal)
    return device.name, device.target, device.shared_limit


def run(spec: KernelSpec, plan: Plan, buffers: Sequence[Buffer], pack: Callable[[Mapping[str, int]], bytes]) -> None:
    """`Device.run` on the first GPU."""
    get().run(spec, plan, buffers, pack)
