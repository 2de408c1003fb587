"""The ceilings beside every timing: templates/kernels/ceiling.cu, timed in the same run by the same protocol."""

from __future__ import annotations

import struct

from pyharness import toolchain
from pyharness.args import SCAN_ARGS
from pyharness.device import Device, Entry, Memory
from pyharness.errors import DeviceError

SOURCE = toolchain.ROOT / "templates" / "kernels" / "ceiling.cu"

#: A block of `ceiling_slots` covers this many bytes of a slot; one of the others this many of its range.
SLOT_TILE = 2 * 4 * 128 * 4
RANGE_TILE = 256 * 4 * 16
#: Of `ceiling_products_*`: blocks a multiprocessor, threads of a block, products of a round, and their inner dimension.
_PRODUCT_BLOCKS, _PRODUCT_THREADS, _PRODUCT_STEPS = 2, 256, 16
_PRODUCT_DEPTH = {"bf16": 16, "tf32": 8}
_FMA_THREADS, _FMA_CHAINS, _FMA_REPEATS = 256, 16, 16
#: Multiplying by -1 changes every value and never reaches zero or infinity.
_FACTOR = -1.0


class Ceilings:
    """The ceiling kernels on a device. Methods queue one call; memory sizes are whole tiles.

    Raises:
        ToolchainError: there is no compiler.
        DeviceError: the device refused the image.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # Warp group products have their full rate only in code for the exact target.
        target = "sm_90a" if device.target == "sm_90" else device.target
        job = toolchain.Job("ceiling", SOURCE.read_text(encoding="utf-8"), target, toolchain.flags("recurrent"))
        image = toolchain.compile_cached(job, toolchain.find_compiler())
        module = device.module(image.data)
        self._entries = {symbol: Entry(device, module, symbol) for symbol in image.usage}

    def empty(self) -> None:
        """Launch one block that does nothing, with a parameter block as large as ScanArgs."""
        self._entries["ceiling_empty"].launch((1, 1, 1), (32, 1, 1), bytes(SCAN_ARGS.itemsize))

    def slots(self, pool: int, slots: int, sequences: int, slot_bytes: int) -> None:
        """Read and write the slots of some sequences in their order; addresses of f32 words and of i32 slots."""
        tiles = self._tiles("a state slot", slot_bytes, SLOT_TILE)
        arguments = struct.pack("<QQqif", pool, slots, slot_bytes // 4, tiles, _FACTOR)
        self._entries["ceiling_slots"].launch((sequences * tiles, 1, 1), (64, 1, 1), arguments)

    def contiguous(self, address: int, nbytes: int) -> None:
        """Read and write one range."""
        blocks = self._tiles("the state", nbytes, RANGE_TILE)
        arguments = struct.pack("<Qf", address, _FACTOR)
        self._entries["ceiling_contiguous"].launch((blocks, 1, 1), (256, 1, 1), arguments)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Read one range and write another, both of so many bytes rounded down to whole tiles."""
        arguments = struct.pack("<QQ", source, target)
        self._entries["ceiling_copy"].launch((max(1, nbytes // RANGE_TILE), 1, 1), (256, 1, 1), arguments)

    def fma(self, out: Memory, rounds: int) -> None:
        """Issue `fmas(rounds)` FMAs; `out` has `fma_bytes` bytes."""
        arguments = struct.pack("<Qiff", out.address, rounds, 0.5, 1.0)
        self._entries["ceiling_fma"].launch((self._fma_blocks, 1, 1), (_FMA_THREADS, 1, 1), arguments)

    def exponentials(self, out: Memory, rounds: int) -> None:
        """Issue as many exponentials as `fma` issues FMAs; `out` has `fma_bytes` bytes."""
        arguments = struct.pack("<Qi", out.address, rounds)
        self._entries["ceiling_exp"].launch((self._fma_blocks, 1, 1), (_FMA_THREADS, 1, 1), arguments)

    def products(self, out: Memory, rounds: int, operand: str) -> None:
        """Multiply matrices of bf16 or tf32: `product_flops(rounds, operand)`; `out` has `fma_bytes` bytes.

        Raises:
            DeviceError: the device has no such products.
        """
        symbol = f"ceiling_products_{operand}"
        if symbol not in self._entries:
            raise DeviceError(f"{self._device.name} ({self._device.target}) has no products of {operand}")
        grid = (_PRODUCT_BLOCKS * self._device.multiprocessors, 1, 1)
        self._entries[symbol].launch(grid, (_PRODUCT_THREADS, 1, 1), struct.pack("<Qi", out.address, rounds))

    def product_flops(self, rounds: int, operand: str) -> int:
        """Multiplications and additions of one call of `products`."""
        warps = _PRODUCT_BLOCKS * self._device.multiprocessors * _PRODUCT_THREADS // 32
        return 2 * warps * 16 * 128 * _PRODUCT_DEPTH[operand] * _PRODUCT_STEPS * rounds

    @property
    def fma_bytes(self) -> int:
        """Bytes that `fma` writes."""
        return 4 * self._fma_blocks * _FMA_THREADS

    def fmas(self, rounds: int) -> int:
        """FMAs of one call of `fma`, counted a thread."""
        return self._fma_blocks * _FMA_THREADS * _FMA_CHAINS * _FMA_REPEATS * rounds

    @property
    def _fma_blocks(self) -> int:
        return 16 * self._device.multiprocessors

    @staticmethod
    def _tiles(what: str, nbytes: int, tile: int) -> int:
        if nbytes % tile:
            raise DeviceError(
                f"the ceiling of {what} wants whole tiles of {tile} bytes, found {nbytes}: measure another"
            )
        return nbytes // tile
