"""Archives that are the same bytes for the same files, and in which every byte is checked.

A package is a gzipped tar. The comment in its gzip header is the sha256 of all bytes after the header, so that no byte
of the file is free: the header is known, the comment is checked, and the rest is hashed.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
import zlib
from collections.abc import Mapping

from pyharness.errors import ImageError

# Magic, deflate, a comment follows, no time, best compression, no operating system.
_HEADER = b"\x1f\x8b\x08\x10\0\0\0\0\x02\xff"
_COMMENT = b"sha256:"
_START = len(_HEADER) + len(_COMMENT) + 64 + 1


def _tar(files: Mapping[str, bytes], prefix: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{prefix}/{name}")
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def pack(files: Mapping[str, bytes], prefix: str) -> bytes:
    """A gzipped tar of files in their order, below one folder."""
    plain = _tar(files, prefix)
    compress = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = compress.compress(plain) + compress.flush()
    body += zlib.crc32(plain).to_bytes(4, "little") + (len(plain) & 0xFFFFFFFF).to_bytes(4, "little")
    return _HEADER + _COMMENT + hashlib.sha256(body).hexdigest().encode() + b"\0" + body


def _salvage(body: bytes) -> tuple[dict[str, bytes], str]:
    """What can still be read of a damaged body, and the folder of its files."""
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    plain = bytearray()
    try:
        for start in range(0, len(body), 512):
            plain += inflate.decompress(body[start : start + 512])
    except zlib.error:
        pass
    files: dict[str, bytes] = {}
    prefix, position = "", 0
    while position + 512 <= len(plain):
        try:
            member = tarfile.TarInfo.frombuf(bytes(plain[position : position + 512]), "ascii", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError, ValueError):
            break
        prefix, _, name = member.name.partition("/")
        data = bytes(plain[position + 512 : position + 512 + member.size])
        files[name] = data
        position += 512 + -(-member.size // 512) * 512
    return files, prefix


def unpack(data: bytes, name: str) -> tuple[dict[str, bytes], str, str]:
    """The files of an archive that `pack` made, their folder, and what is damaged (empty where nothing is).

    Of a damaged archive the files are those that could still be read.

    Raises:
        ImageError: it is no such archive at all.
    """
    found = next((i for i, byte in enumerate(_HEADER) if data[i : i + 1] != bytes([byte])), -1)
    if found >= 0 and sum(a != b for a, b in zip(_HEADER, data, strict=False)) > 1:
        raise ImageError(f"{name}: an archive of `invoke package` was wanted, found another file")
    files, prefix = _salvage(data[_START:])
    if found >= 0:
        return files, prefix, f"byte {found} of the gzip header"
    comment, body = data[len(_HEADER) : _START], data[_START:]
    if comment[: len(_COMMENT)] != _COMMENT or comment[-1:] != b"\0":
        return files, prefix, "the comment of the gzip header"
    if hashlib.sha256(body).hexdigest().encode() != comment[len(_COMMENT) : -1]:
        return files, prefix, "its sha256"
    return files, prefix, "" if _tar(files, prefix) == zlib.decompress(body, -zlib.MAX_WBITS) else "a header of the tar"


def module_zip(files: Mapping[str, bytes], module: str, version: str) -> bytes:
    """The zip of a Go module, as a module proxy serves it: nested modules are left out."""
    nested = {name.rpartition("/")[0] + "/" for name in files if name.endswith("/go.mod")}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            if any(name.startswith(folder) for folder in nested):
                continue
            member = zipfile.ZipInfo(f"{module}@{version}/{name}", (1980, 1, 1, 0, 0, 0))
            member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(member, files[name])
    return buffer.getvalue()
