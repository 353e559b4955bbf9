"""The data directory: where the sets lie, and how a missing file gets there.

    data directory        given > ESPER_DATA > the user's cache
    └── fashion_mnist/    one folder a set
        └── *.gz          the original files, checked against their published checksums

A file arrives under its name whole and verified, or not at all.
"""

import gzip
import hashlib
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Literal, cast

from esper.leyline.errors import DataError
from esper.leyline.progress import progress_bar

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its name, its size and checksum, and the addresses to try in turn."""

    name: str
    size: int
    """Bytes."""
    algorithm: Literal["md5", "sha256"]
    digest: str
    """Lower-case hexadecimal."""
    urls: tuple[str, ...]


def user_cache() -> Path:
    """The folder for data in the user's cache; it need not exist yet."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification has a relative path ignored.
        root = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    except RuntimeError as error:
        raise DataError(f"no cache for data: {error}; set XDG_CACHE_HOME to an absolute path") from error
    return root / "esper" / "data"


def data_directory(given: Path | str | None = None) -> Path:
    """The absolute data directory: what is given, else ESPER_DATA, else the user's cache. It need not exist yet."""
    chosen = given or os.environ.get("ESPER_DATA") or user_cache()
    return Path(chosen).expanduser().resolve()


def is_writable(folder: Path) -> bool:
    """Whether files may be put in `folder`; a folder without a write bit is left alone even by root."""
    return folder.is_dir() and bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)


def prepare_folder(folder: Path) -> bool:
    """Make `folder` where that is allowed; whether files may be put in it."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not is_writable(existing):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    return True


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Write `path` through a temporary file that takes its name when the block succeeds and vanishes when it fails."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a data directory is often shared
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def checksum(path: Path, algorithm: Literal["md5", "sha256"]) -> str:
    """Hexadecimal digest of a file; computed once a process for as long as the file stays the same."""
    status = path.stat()
    return _checksum(path, algorithm, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _checksum(path: Path, algorithm: Literal["md5", "sha256"], size: int, modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def locate(remote: RemoteFile, folder: Path) -> Path:
    """The verified path of `remote` in `folder`, fetched first when it is missing."""
    path = folder / remote.name
    try:
        if not path.exists():
            return fetch(remote, folder)
        size = path.stat().st_size
        if size != remote.size:
            found = f"{size} bytes instead of {remote.size}"
        elif (digest := checksum(path, remote.algorithm)) != remote.digest:
            found = f"{remote.algorithm} {digest} instead of {remote.digest}"
        else:
            return path
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    # Never replaced by itself: it may be the user's only copy of something else.
    raise DataError(f"{path} is not the published file: {found}; remove it to fetch it anew, or {_remedy(path)}")


def fetch(remote: RemoteFile, folder: Path) -> Path:
    """Download `remote` into `folder` from the first address that delivers the right bytes."""
    path = folder / remote.name
    wanted = f"{remote.name} ({remote.size} bytes, {remote.algorithm} {remote.digest}) is not at {path}"
    try:
        writable = prepare_folder(folder)
    except OSError as error:
        raise DataError(f"{wanted}, and its folder cannot be made: {error}; {_remedy(path)}") from error
    if not writable:
        raise DataError(f"{wanted}, and it cannot be fetched, as that folder is read-only; {_remedy(path)}")
    failures = []
    for url in remote.urls:
        try:
            with atomic_file(path) as file:
                _download(url, remote, file)
            return path
        except (OSError, ValueError) as error:
            failures.append(f"{url} ({error})")
    tried = "; ".join(failures) or "nowhere, as no address is known"
    raise DataError(f"{wanted}; tried to fetch it from {tried}; {_remedy(path)}")


def _download(url: str, remote: RemoteFile, file: IO[bytes]) -> None:
    """Copy what `url` delivers into `file`; ValueError or OSError unless it is exactly `remote`."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    digest = hashlib.new(remote.algorithm, usedforsecurity=False)
    size = 0
    try:
        # Some mirrors refuse urllib's own agent name.
        request = Request(url, headers={"User-Agent": "esper"})
        with (
            urlopen(request, timeout=TIMEOUT_SECONDS) as response,
            progress_bar(remote.name, remote.size, in_bytes=True) as advance,
        ):
            while size <= remote.size and (chunk := response.read(CHUNK_BYTES)):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                advance(len(chunk))
    except HTTPError as error:
        error.close()
        raise OSError(f"HTTP {error.code} {error.reason}") from error
    except HTTPException as error:
        raise OSError(f"broken answer: {error!r}") from error
    if size != remote.size:
        found = f"more than {remote.size}" if size > remote.size else str(size)
        raise ValueError(f"delivered {found} bytes instead of {remote.size}")
    if digest.hexdigest() != remote.digest:
        raise ValueError(f"delivered {remote.algorithm} {digest.hexdigest()} instead of {remote.digest}")


def _remedy(path: Path) -> str:
    inside = f"{path.parent.name}/{path.name}"
    return f"put the file at {path}, or point ESPER_DATA or --data-dir to a directory that holds {inside}"


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
