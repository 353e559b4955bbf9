"""Files straight out of a .tar, .tar.gz or .zip archive; nothing is ever unpacked to the disk."""

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

from esper.leyline.errors import DataError

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")

_DAMAGE = (EOFError, OSError, RuntimeError, ValueError, zlib.error, tarfile.TarError, zipfile.BadZipFile)


def archive_files(path: Path, wanted: Callable[[str], bool], *, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file in the archive whose name is `wanted`, in archive order.

    DataError for a truncated or damaged archive, a name that leads out of it, a link under a wanted name, a name that
    comes twice, or a wanted file of more than `max_bytes`.
    """
    read = _zip_files if path.name.endswith(".zip") else _tar_files
    seen: set[str] = set()
    try:
        for name, content in read(path, wanted, max_bytes):
            if name in seen:
                raise DataError(f"{path}: holds {name} twice")
            seen.add(name)
            yield name, content
    except DataError:
        raise
    except _DAMAGE as error:
        raise DataError(f"{path} is truncated or damaged: {error or type(error).__name__}") from error


def _checked_name(path: Path, raw: str) -> str:
    """The name without a leading './'."""
    name = PurePosixPath(raw)
    if name.is_absolute() or ".." in name.parts or "\\" in raw:
        raise DataError(f"{path}: the name {raw!r} leads out of the archive; it is refused whole")
    return str(name)


def _check_size(path: Path, name: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise DataError(f"{path}: {name} has {size} bytes; at most {max_bytes} were expected")


def _tar_files(path: Path, wanted: Callable[[str], bool], max_bytes: int) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        # gzip's own reader notices truncation and checks the CRC, which tarfile's does not; it reads like any file.
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            while member := tar.next():
                tar.members = []  # type: ignore[attr-defined]  # else tarfile keeps every header it has seen
                name = _checked_name(path, member.name)
                if member.isdir() or not wanted(name):
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    raise DataError(f"{path}: {name} is a link or a device, not a file")
                _check_size(path, name, member.size, max_bytes)
                yield name, content.read()
            # tarfile takes a broken header for the end; the true end is a block of zeros.
            stream.seek(tar.offset)
            if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise DataError(f"{path} is truncated or damaged: no end of archive at byte {tar.offset}")
            while stream.read(1 << 20):
                pass  # to the end, where gzip checks the CRC


def _zip_files(path: Path, wanted: Callable[[str], bool], max_bytes: int) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = _checked_name(path, member.filename)
            if member.is_dir() or not wanted(name):
                continue
            _check_size(path, name, member.file_size, max_bytes)
            yield name, archive.read(member)
