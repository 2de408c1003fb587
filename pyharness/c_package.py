"""The C side of a package: tables of the manifest and the selection as data, and a launcher beside each source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyharness.grades import Proofs
from pyharness.manifest import Row
from pyharness.select import Table, table_document
from pyharness.spec import DTYPE_BYTES, KernelSpec
from pyharness.toolchain import ROOT

#: Hand-written headers, copied as they are.
HEADERS = ROOT / "templates" / "c"


def headers(folder: Path = HEADERS) -> dict[str, bytes]:
    """The hand-written headers by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.h"))}


def _text(value: object) -> str:
    return json.dumps(str(value))


def grid_initialiser(grid: Mapping[str, Any]) -> str:
    """A grid rule as the initialiser of an `ssm_grid`."""
    integers = ", ".join(
        f"{{{_text(name)}, {value}}}" for name, value in sorted(grid.items()) if isinstance(value, int)
    )
    return f"{{{_text(grid['rule'])}, {{{integers}}}}}"


def _image(lane: str, row: Row, target: str, proofs: Proofs) -> str:
    image = row.targets[target]
    grade = proofs.grade(row, target).level
    words = (lane, target, image.kind, image.sha256, grade)
    return f"{{{', '.join(map(_text, words))}, {image.bytes}, {image.dynamic_shared}}}"


def _kernel(rows: Mapping[str, Row], shipped: Mapping[str, Sequence[str]], proofs: Proofs) -> str:
    row = next(iter(rows.values()))
    limits = ", ".join(f"{{{_text(name)}, {low}, {high}}}" for name, (low, high) in sorted(row.limits.items()))
    images = [_image(lane, rows[lane], target, proofs) for lane in rows for target in shipped[lane]]
    words = (row.id, row.family, row.spec["io"], row.spec["state"], row.spec.get("precision", ""))
    names = ", ".join(map(_text, words))
    numbers = f"{row.kernel.operand_error}, {row.spec['d_state']}, {int(row.default)}, {row.block}"
    return (
        f"    {{{names}, {numbers},\n"
        f"     {{{', '.join(map(_text, row.entries))}}},\n"
        f"     {{{limits}}},\n"
        f"     {grid_initialiser(row.grid)},\n"
        "     {" + ",\n      ".join(images) + "}},"
    )


def tables(
    lanes: Mapping[str, Mapping[str, Any]],
    rows: Mapping[str, Mapping[str, Row]],
    shipped: Mapping[tuple[str, str], Sequence[str]],
    table: Table,
    proofs: Proofs,
    name: str = "ssm_package",
) -> bytes:
    """ssmscan_tables.h: lanes, manifest rows and the selection table.

    Args:
        lanes: by name, its "cuda", "ptx" and "min_driver"; in the file the newest comes first.
        rows: by lane and id.
        shipped: by lane and id, the targets whose images the package has.
        table: the selection table.
        proofs: by which images are graded.
        name: of the `ssm_tables`.
    """
    order = sorted(lanes, key=lambda lane: -lanes[lane]["cuda"])
    ids = sorted({kernel for lane in rows.values() for kernel in lane})
    kernels = []
    for kernel in ids:
        own = {lane: rows[lane][kernel] for lane in order if kernel in rows[lane]}
        kernels.append(_kernel(own, {lane: shipped.get((lane, kernel), ()) for lane in own}, proofs))
    document = table_document(table)
    entries = []
    for row in document["entries"]:
        words = (row["device"], row["target"], row["io"], row["state"], row["kernel"], row["source"])
        sizes = [float(row["microseconds"]), row["batch_heads"], row["tokens"]]
        sizes += [row["geometry"][size] for size in ("heads", "head_dim", "d_state", "groups")]
        entries.append(f"    {{{', '.join(map(_text, words))}, {', '.join(map(str, sizes))}}},")
    defaults = [
        f"    {{{_text(row['io'])}, {_text(row['state'])}, {_text(row['kernel'])}, {row['d_state']}}},"
        for row in document["defaults"]
    ]
    lines = [
        "// SPDX-License-Identifier: Apache-2.0",
        "//",
        "// The manifest and the selection table of this package as data, for ssmscan.h. Lists end in zeros.",
        "",
        "#ifndef SSMSCAN_TABLES_H",
        "#define SSMSCAN_TABLES_H",
        "",
        f"static const ssm_lane {name}_lanes[] = {{",
        *(
            f"    {{{_text(lane)}, {lanes[lane]['cuda']}, {lanes[lane]['ptx']}, {_text(lanes[lane]['min_driver'])}}},"
            for lane in order
        ),
        "    {0},",
        "};",
        "",
        f"static const ssm_kernel {name}_kernels[] = {{",
        *kernels,
        "    {0},",
        "};",
        "",
        f"static const ssm_entry {name}_entries[] = {{",
        *entries,
        "    {0},",
        "};",
        "",
        f"static const ssm_default {name}_defaults[] = {{",
        *defaults,
        "    {0},",
        "};",
        "",
        f"static const ssm_tables {name} = {{{name}_lanes, {name}_kernels, {name}_entries, {name}_defaults}};",
        "",
        "#endif  // SSMSCAN_TABLES_H",
        "",
    ]
    return "\n".join(lines).encode()


def machine_code_option(kernel: KernelSpec, target: str = "sm_90") -> str:
    """nvcc's option for machine code of a kernel alone: `-arch=sm_90a` compiles for sm_90 too, which has less."""
    number = kernel.image_target(target).removeprefix("sm_")
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def launcher(row: Row) -> bytes:
    """`<id>.launch.cu`: a host function that launches the kernel beside it, for engines that run nvcc themselves."""
    io, state = DTYPE_BYTES[row.spec["io"]], DTYPE_BYTES[row.spec["state"]]
    flags = "\n".join(
        f"  own.flags |= ssm_vector_flag(kFlagVector{bit}, reinterpret_cast<uintptr_t>(own.{name}), own.{name}_stride, "
        f"own.{inner}, {size});"
        for bit, name, inner, size in (
            ("X", "x", "head_dim", io),
            ("Z", "z", "head_dim", io),
            ("Y", "y", "head_dim", io),
            ("B", "B", "d_state", io),
            ("C", "C", "d_state", io),
            ("State", "state", "d_state", state),
        )
    )
    entries = ", ".join(f"reinterpret_cast<const void*>({entry})" for entry in row.entries)
    shared = max(image.dynamic_shared for image in row.targets.values())
    compiled = " ".join(flag for flag in row.flags if flag in ("-std=c++17", "-O3", "-fmad=false"))
    return f"""// SPDX-License-Identifier: Apache-2.0
//
// ssm_launch_{row.id}: launches the kernel beside this file by its plan on a stream and returns
// before it is done. lanes, rows, chunk and the flags of vector accesses are filled in; the workspace is the caller's.
//
//   nvcc {compiled} {machine_code_option(row.kernel)} -c {row.id}.launch.cu

#include <cuda_runtime.h>

#include "{row.id}.cu"

#include "../include/ssm_plan.h"

extern "C" cudaError_t ssm_launch_{row.id}(const ScanArgs* args, cudaStream_t stream) {{
  const ssm_grid grid = {grid_initialiser(row.grid)};
  const ssm_geometry sizes = {{args->tokens, args->sequences, args->heads,  args->head_dim,
                              args->groups, args->d_state,   -1,          0,
                              0}};
  const void* const entries[] = {{{entries}}};
  ssm_plan plan;
  if (ssm_make_plan(&grid, {row.block}, {shared}, &sizes, &plan) != 0) return cudaErrorInvalidValue;
  if (plan.workspace_bytes > args->workspace_bytes) return cudaErrorInvalidValue;
  ScanArgs own = *args;
  own.lanes = plan.lanes;
  own.rows = plan.rows;
  own.chunk = plan.chunk;
  own.flags &= kFlagSoftplus | kFlagPerColumnA | kFlagDtF32 | kFlagDtLimit;
{flags}
  void* parameters[] = {{&own}};
  for (int i = 0; i < plan.count; ++i) {{
    const ssm_shape& launch = plan.launches[i];
    const void* entry = entries[launch.entry];
    const int bytes = static_cast<int>(launch.shared_bytes);
    cudaError_t code = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess) return code;
    cudaLaunchAttribute overlaps = {{}};
    overlaps.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlaps.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {{}};
    config.gridDim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
    config.blockDim = dim3(launch.block[0], launch.block[1], launch.block[2]);
    config.dynamicSmemBytes = launch.shared_bytes;
    config.stream = stream;
    config.attrs = &overlaps;
    config.numAttrs = launch.overlaps ? 1 : 0;
    code = cudaLaunchKernelExC(&config, entry, parameters);
    if (code != cudaSuccess) return code;
  }}
  return cudaSuccess;
}}
""".encode()
