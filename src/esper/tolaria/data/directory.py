"""The data directory, with a folder of original files per set; how missing files are fetched and archives are read.

A file appears under its name complete and verified against its published checksum, or not at all.
"""

import gzip
import hashlib
import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Literal, cast

from esper.leyline.errors import DataError
from esper.leyline.progress import progress_bar
from esper.storage.files import replace_file, waiting_lock

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its size in bytes, its checksum in hexadecimal, and the addresses to try in turn."""

    name: str
    size: int
    algorithm: Literal["md5", "sha256"]
    digest: str
    urls: tuple[str, ...]


def user_cache() -> Path:
    """The folder for data in the user's cache. It need not exist yet."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a relative path.
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "esper" / "data"


def data_directory(given: Path | str | None = None) -> Path:
    """The absolute data directory: the given one, else ESPER_DATA, else the user's cache. It need not exist yet."""
    return Path(given or os.environ.get("ESPER_DATA") or user_cache()).expanduser().resolve()


def prepare_folder(folder: Path) -> bool:
    """Make `folder` if allowed; returns whether files may be written there. Respects a missing write bit as root."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not existing.stat().st_mode & 0o222 or not os.access(existing, os.W_OK):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    return True


def checksum(path: Path, algorithm: Literal["md5", "sha256"]) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def locate(remote: RemoteFile, folder: Path) -> Path:
    """The verified path of `remote` in `folder`. Fetches the file if it is missing."""
    path = folder / remote.name
    try:
        if not path.exists():
            with waiting_lock(folder) if prepare_folder(folder) else nullcontext():
                if not path.exists():  # of several processes, the first has fetched it for all
                    return fetch(remote, folder)
        size = path.stat().st_size
        if size != remote.size:
            difference = f"{size} bytes instead of {remote.size}"
        elif (digest := checksum(path, remote.algorithm)) != remote.digest:
            difference = f"{remote.algorithm} {digest} instead of {remote.digest}"
        else:
            return path
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    # Never replaced automatically: it may be the user's only copy of something else.
    raise DataError(f"{path} is not the published file: {difference}; remove it to fetch it again, or {_remedy(path)}")


def fetch(remote: RemoteFile, folder: Path) -> Path:
    """Download `remote` into `folder` from the first address that delivers the right bytes."""
    path = folder / remote.name
    missing = f"{remote.name} ({remote.size} bytes, {remote.algorithm} {remote.digest}) is not at {path}"
    if not prepare_folder(folder):
        raise DataError(f"{missing} and cannot be fetched: {folder} is read-only or no folder; {_remedy(path)}")
    failures = []
    for url in remote.urls:
        try:
            replace_file(path, _download(url, remote))
            return path
        except (OSError, ValueError) as error:
            failures.append(f"{url} ({error})")
    raise DataError(f"{missing}; tried to fetch it from {'; '.join(failures)}; {_remedy(path)}")


def _download(url: str, remote: RemoteFile) -> bytes:
    """The content of `url`; raises ValueError or OSError unless it is exactly `remote`."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    content = io.BytesIO()
    request = Request(url, headers={"User-Agent": "esper"})  # some mirrors refuse urllib's own agent name
    show = progress_bar(remote.name, remote.size, in_bytes=True)
    try:
        with urlopen(request, timeout=TIMEOUT_SECONDS) as response, show as advance:
            while content.tell() <= remote.size and (chunk := response.read(CHUNK_BYTES)):
                advance(content.write(chunk))
    except HTTPError as error:
        error.close()
        raise OSError(f"HTTP {error.code} {error.reason}") from error
    except HTTPException as error:
        raise OSError(f"broken answer: {error!r}") from error
    if (size := content.tell()) != remote.size:
        delivered = f"more than {remote.size}" if size > remote.size else str(size)
        raise ValueError(f"delivered {delivered} bytes instead of {remote.size}")
    digest = hashlib.new(remote.algorithm, content.getbuffer(), usedforsecurity=False).hexdigest()
    if digest != remote.digest:
        raise ValueError(f"delivered {remote.algorithm} {digest} instead of {remote.digest}")
    return content.getvalue()


def _remedy(path: Path) -> str:
    inside = f"{path.parent.name}/{path.name}"
    return f"put the file at {path}, or point ESPER_DATA or --data-dir to a directory that holds {inside}"


SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")

_DAMAGE = (EOFError, OSError, RuntimeError, ValueError, zlib.error, tarfile.TarError, zipfile.BadZipFile)


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file, gunzipped if it is gzipped. gzip's reader notices truncation and checks the CRC."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw  # it reads like any file


def archive_files(path: Path, wanted: Callable[[str], bool], *, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file in the archive whose name is `wanted`, in archive order. Such a file must be no
    link, occur once, and have at most `max_bytes`. Raises DataError for damage and for names that lead out of it."""
    read = _zip_files if path.name.endswith(".zip") else _tar_files
    seen: set[str] = set()
    try:
        for raw_name, size, content in read(path):
            name = PurePosixPath(raw_name)  # without a leading './'
            if name.is_absolute() or ".." in name.parts or "\\" in raw_name:
                raise DataError(f"{path}: the name {raw_name!r} leads out of the archive; refusing all of it")
            if not wanted(str(name)):
                continue
            if str(name) in seen:
                raise DataError(f"{path}: holds {name} twice")
            if size > max_bytes:
                raise DataError(f"{path}: {name} has {size} bytes; at most {max_bytes} were expected")
            seen.add(str(name))
            if (data := content()) is None:
                raise DataError(f"{path}: {name} is a link or a device, not a file")
            yield str(name), data
    except DataError:
        raise
    except _DAMAGE as error:
        raise DataError(f"{path} is truncated or damaged: {error or type(error).__name__}") from error


# Name, size in bytes, and how to read the content; None for what is no file.
Member = tuple[str, int, Callable[[], bytes | None]]


def _tar_files(path: Path) -> Iterator[Member]:
    with open_unpacked(path) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
        while member := tar.next():
            tar.members = []  # type: ignore[attr-defined]  # else tarfile stores every header it has seen
            if not member.isdir():
                file = tar.extractfile(member) if member.isreg() else None
                yield member.name, member.size, file.read if file else lambda: None
        # tarfile takes a broken header for the end; the true end is a block of zeros.
        stream.seek(tar.offset)
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no end of archive at byte {tar.offset}")
        while stream.read(CHUNK_BYTES):
            pass  # to the end, where gzip checks the CRC


def _zip_files(path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                yield member.filename, member.file_size, partial(archive.read, member)
