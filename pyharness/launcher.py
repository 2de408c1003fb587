"""Launches through libcuda alone, in the primary context of a GPU: the one that PyTorch and the CUDA runtime work in.

For code that lives beside another user of the GPU and launches on that user's streams, over that user's memory. No
context is made, nothing is allocated and nothing is waited for; PyCUDA and cuda-bindings are not needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from pyharness import gpus, toolchain
from pyharness.args import SCAN_ARGS
from pyharness.errors import DeviceError, ImageError
from pyharness.spec import Launch, Plan

LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR, _SHARED_OPTIN = 75, 76, 97  # CU_DEVICE_ATTRIBUTE_*
_LOCAL_BYTES, _REGISTERS = 3, 4  # CU_FUNC_ATTRIBUTE_*
_MAX_DYNAMIC_SHARED = 8
_STATIC_SHARED = 1
#: CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END.
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, None
_Extra = ctypes.c_void_p * 5
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_*


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; the value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_OVERLAPS = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", (1,))


class Launcher:
    """One GPU through its primary context, which stays retained as long as the process lives.

    Args:
        ordinal: of the GPU, as PyTorch counts.
        library: libcuda.

    Attributes:
        name: "NVIDIA H200".
        capability: (9, 0).
        target: "sm_90".
        shared_limit: most shared memory of a block, opt-in, in bytes.

    Raises:
        DeviceError: there is no driver or no such GPU.
    """

    def __init__(self, ordinal: int = 0, library: str = LIBRARY) -> None:
        try:
            self.cuda = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError(f"NVIDIA's driver was wanted, found none ({error}): install it") from error
        self.name = f"GPU {ordinal}"
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), device)
        self.name = name.value.decode()
        self.capability = (self._attribute(_MAJOR, device), self._attribute(_MINOR, device))
        self.target = gpus.target_for(*self.capability)
        self.shared_limit = self._attribute(_SHARED_OPTIN, device)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        #: Where a pop writes what nobody looks at.
        self._popped = ctypes.byref(ctypes.c_void_p())
        self._kernels: dict[str, LoadedKernel] = {}

    def _attribute(self, attribute: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def call(self, function: str, *arguments: object) -> None:
        """Call the driver.

        Raises:
            DeviceError: it gave an error; the message has its name.
        """
        code = getattr(self.cuda, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(text))
            raise DeviceError(f"{self.name}: {function} gave {(text.value or b'').decode() or code}")

    @contextmanager
    def current(self) -> Iterator[None]:
        """The primary context as the current one of this thread, which gets back what it had."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", self._popped)

    def loaded(self, kernel: str) -> LoadedKernel | None:
        """A kernel that was loaded before, by its id."""
        return self._kernels.get(kernel)

    def load(self, kernel: str, image: toolchain.Image, argument_bytes: int = SCAN_ARGS.itemsize) -> LoadedKernel:
        """Load the image of a kernel for good; its entries take one struct of so many bytes.

        Raises:
            DeviceError: the driver refused it.
            ImageError: what was loaded uses other resources than the toolchain says.
        """
        with self.current():
            module = ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), image.data)
            self._kernels[kernel] = LoadedKernel(self, kernel, image, module, argument_bytes)
        return self._kernels[kernel]


class LoadedKernel:
    """A kernel in the primary context, ready to be launched.

    Attributes:
        id: what was loaded.
    """

    def __init__(
        self, launcher: Launcher, kernel: str, image: toolchain.Image, module: ctypes.c_void_p, argument_bytes: int
    ) -> None:
        self._launcher = launcher
        self.id = kernel
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._dynamic_limit: dict[str, int] = {}
        for symbol, usage in image.usage.items():
            function = ctypes.c_void_p()
            launcher.call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode())
            # Else the driver loads it at its first launch, which a capture does not allow.
            launcher.call("cuFuncLoad", function)
            self._functions[symbol] = function
            found = {
                "registers": self._function_attribute(_REGISTERS, function),
                "static_shared": self._function_attribute(_STATIC_SHARED, function),
                "local_bytes": self._function_attribute(_LOCAL_BYTES, function),
            }
            for name, value in found.items():
                if value != getattr(usage, name):
                    raise ImageError(
                        f"{launcher.name}: {symbol} has {name} {value} as loaded, the toolchain says "
                        f"{getattr(usage, name)}: the image is not the one that was built; run invoke clean"
                    )
        self._size = ctypes.c_size_t(argument_bytes)
        self._arguments = ctypes.c_char * argument_bytes

    def _function_attribute(self, attribute: int, function: ctypes.c_void_p) -> int:
        value = ctypes.c_int()
        self._launcher.call("cuFuncGetAttribute", ctypes.byref(value), attribute, function)
        return value.value

    def launch(self, plan: Plan, arguments: bytes | bytearray, stream: int) -> None:
        """Queue the launches of a plan on a stream of this GPU's primary context, by its handle.

        Raises:
            DeviceError: the arguments are not what the kernel takes, or a launch was refused.
        """
        if len(arguments) != self._size.value:
            raise DeviceError(f"{self.id} takes {self._size.value} bytes of arguments, found {len(arguments)}")
        # The driver copies the arguments during the call.
        held = self._arguments.from_buffer_copy(arguments)
        extra = _Extra(_BUFFER_POINTER, ctypes.addressof(held), _BUFFER_SIZE, ctypes.addressof(self._size), _END)
        on = ctypes.c_void_p(stream)
        with self._launcher.current():
            for launch in plan.launches:
                shared = launch.shared_bytes
                if shared > self._dynamic_limit.get(launch.entry, 0):
                    self._allow_shared(launch)
                function = self._functions[launch.entry]
                if launch.overlaps:
                    config = _Config(launch.grid, launch.block, shared, on, ctypes.pointer(_OVERLAPS), 1)
                    self._launcher.call("cuLaunchKernelEx", ctypes.byref(config), function, None, extra)
                else:
                    shape = (*launch.grid, *launch.block, shared)
                    self._launcher.call("cuLaunchKernel", function, *shape, on, None, extra)

    def _allow_shared(self, launch: Launch) -> None:
        function = self._functions[launch.entry]
        self._launcher.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, launch.shared_bytes)
        self._dynamic_limit[launch.entry] = launch.shared_bytes
