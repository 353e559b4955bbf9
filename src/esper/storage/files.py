"""Writing files and folders so that a crash leaves the old content or the new, never a part.

New content is written to a work folder beside its target. Once it is on the disk it is renamed into place:

    .checkpoint.esper-tmp/new     a new folder
    .checkpoint.esper-tmp/old     the folder that it replaces, for the moment between two renames
    .config.json.esper-tmp/file   a new file

A killed process leaves its work folder behind. The next process that writes there removes it; if the target is missing,
it first puts `old` back. A lock on the work folder shows whether its process is alive.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory

from esper.leyline.errors import BadValueError, StorageError
from esper.storage.locks import acquire, release

FILE, NEW, OLD, SUFFIX = "file", "new", "old", ".esper-tmp"


@contextmanager
def storage_errors(target: Path) -> Iterator[None]:
    """Turn an OSError inside into a StorageError that names the target."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise StorageError(f"{target} cannot be written ({why}); make room there, or make it writable") from error


def check_writable(target: Path) -> None:
    """Raise unless a file can be written here, for callers that work for long before they write it."""
    folder = target.resolve().parent
    if not folder.is_dir():
        raise BadValueError(f"{target} cannot be written: there is no folder {target.parent}")
    try:
        with TemporaryDirectory(prefix=f".{target.name}.", dir=folder):  # permissions alone do not tell
            pass
    except OSError as error:
        raise BadValueError(f"{target} cannot be written: {error.strerror}; name another file") from None
    if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
        why = "write-protected" if target.is_file() else "no file"
        raise BadValueError(f"{target} cannot be written: it is {why}; name another file")


def replace_folder(folder: Path, write: Callable[[Path], None], names: Collection[str]) -> None:
    """Let `write` fill a new folder with files of these names, then replace `folder` by it.

    Refuses to replace a folder that holds anything else.
    """
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _work_folder(folder) as work:
            if folder.exists():
                others = {path.name for path in folder.iterdir()} - set(names) if folder.is_dir() else {"a file"}
                if others:
                    raise BadValueError(f"{folder} is or holds {sorted(others)}, which would be lost; use a new folder")
            (work / NEW).mkdir()
            write(work / NEW)
            sync_to_disk(work / NEW)
            if folder.exists():
                folder.rename(work / OLD)
            (work / NEW).rename(folder)
            sync_to_disk(folder.parent)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file as a whole or not at all."""
    with storage_errors(path), _work_folder(path) as work:
        (work / FILE).write_bytes(content.encode() if isinstance(content, str) else content)
        sync_to_disk(work / FILE)
        (work / FILE).replace(path)
        sync_to_disk(path.parent)


def discard_folder(folder: Path) -> None:
    """Remove a folder as a whole or not at all."""
    with storage_errors(folder), _work_folder(folder) as work:
        folder.rename(work / NEW)  # not to `old`, which would be put back
        sync_to_disk(folder.parent)


def existing_folder(folder: Path) -> Path:
    """The folder; or its old content, if a process was killed between the two renames that replace it."""
    old = _work_path(folder) / OLD
    return old if old.exists() and not folder.exists() else folder


def free_path(path: Path, separator: str = ".", first: int = 1) -> Path:
    """The path; or, if it exists, the first of <path>.1, <path>.2, … that does not."""
    numbered = (path.with_name(f"{path.name}{separator}{number}") for number in count(first))
    return next(each for each in chain([path], numbered) if not each.exists())


def _work_path(target: Path) -> Path:
    return target.with_name(f".{target.name}{SUFFIX}")


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """Yield an empty work folder that no other process uses, and remove it afterwards."""
    work = _work_path(target)
    lock = _lock_work_folder(work)
    try:
        _put_back(work)
        for name in (NEW, OLD):
            shutil.rmtree(work / name, ignore_errors=True)
        yield work
    finally:
        _remove(work, lock)


def _lock_work_folder(work: Path) -> int:
    """Create a work folder and lock it. Waits for a process that uses it, which then removes it."""
    while True:
        with suppress(FileExistsError):
            work.mkdir()
        with suppress(FileNotFoundError):  # the process before removed it, before or after it was locked here
            lock = acquire(work, wait=True)
            try:
                if lock < 0 or os.path.samestat(os.fstat(lock), work.stat()):
                    return lock
            except FileNotFoundError:
                release(lock)  # else whoever waits for it would wait forever
                raise
            release(lock)


def _put_back(work: Path) -> None:
    """Rename `old` back if nothing has replaced it."""
    target = work.with_name(work.name[1 : -len(SUFFIX)])
    if (work / OLD).exists() and not target.exists():
        (work / OLD).rename(target)
        sync_to_disk(target.parent)


def _remove(work: Path, lock: int) -> None:
    try:
        _put_back(work)
        shutil.rmtree(work, ignore_errors=True)
    finally:
        release(lock)


def is_leftover(path: Path) -> bool:
    """Whether a path is a work folder."""
    return path.name.startswith(".") and path.name.endswith(SUFFIX) and path.is_dir()


def remove_leftovers(parent: Path) -> None:
    """Remove the work folders that killed processes left in a folder. Those in use stay."""
    with storage_errors(parent):
        for work in filter(is_leftover, parent.iterdir() if parent.is_dir() else ()):
            with suppress(FileNotFoundError, BadValueError):  # removed meanwhile, or in use
                _remove(work, acquire(work))


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder exclusively. Raises BadValueError if somebody else does; forked processes do not hold it."""
    with storage_errors(folder):
        lock = acquire(folder)
    try:
        yield
    finally:
        release(lock)


@contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Hold a file or folder that exists, for work that only one process has to do; waits for those before."""
    with storage_errors(path):
        lock = acquire(path, wait=True)
    try:
        yield
    finally:
        release(lock)


def sync_to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk. Does nothing for folders where the system cannot."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
