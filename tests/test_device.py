"""The device layer as far as no GPU is needed."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from pyharness import args, device, gpus
from pyharness.errors import DeviceError, NoKernel
from pyharness.families import RecurrentSpec
from pyharness.gpus import Driver, Gpu


def with_driver(monkeypatch: pytest.MonkeyPatch, found: Driver) -> None:
    monkeypatch.setattr(gpus, "driver", lambda: found)


def test_without_a_driver_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, Driver(problem="no NVIDIA driver (libcuda.so.1 was not found)"))
    assert device.available().startswith("no NVIDIA driver (libcuda.so.1 was not found); install NVIDIA's driver, 580")
    with pytest.raises(DeviceError, match="GPU 0 was wanted, found no NVIDIA driver"):
        device.Device(0)


def test_without_a_gpu_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, Driver("580.1", problem="the driver sees no GPU"))
    assert device.available().startswith("the driver sees no GPU; ")


def test_a_gpu_without_pycuda_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, Driver("580.1", "13.0", (Gpu("NVIDIA H200", 9, 0),)))
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    message = device.available()
    assert message.startswith("there is a GPU (NVIDIA H200) but no PyCUDA; install it: ")
    assert device.INSTALL_PYCUDA in message
    assert device.graphs_available() == message


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((9, 0), "sm_90"),
        ((8, 0), "sm_80"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((12, 1), "sm_120"),
        ((10, 3), "sm_100"),
    ],
)
def test_a_device_gets_machine_code_of_its_major_version_and_at_most_its_minor(
    capability: tuple[int, int], target: str
) -> None:
    assert device.image_target(RecurrentSpec(d_state=128), capability) == target


def test_a_device_that_no_image_serves_is_told_what_is_on_offer() -> None:
    with pytest.raises(NoKernel) as caught:
        device.image_target(RecurrentSpec(d_state=16), (6, 1), "NVIDIA P40")
    message = str(caught.value)
    for part in ("NVIDIA P40", "sm_61", "sm_75, sm_80", "invoke generate --arch sm_61"):
        assert part in message
    with pytest.raises(NoKernel, match="sm_75 has no bf16 arithmetic"):
        device.image_target(RecurrentSpec(d_state=16, io="bf16"), (7, 5))


def test_the_argument_block_packs_as_raw_bytes_of_its_size() -> None:
    block = args.pack({"x": 2**40 + 1, "tokens": 7, "dt_max": 0.5})
    # PyCUDA packs by a fork of struct: a void dtype becomes "<size>s", which pads and swaps nothing.
    kind = np.dtype((np.void, len(block)))
    assert (kind.char, kind.itemsize) == ("V", args.SCAN_ARGS.itemsize)
    assert struct.pack(f"{kind.itemsize}s", block) == block
