"""Writing files so that a crash leaves the old or the new, never a half.

What is written is complete, and on the disk, in a work folder beside its target before it is renamed into its place:

    .checkpoint.k3x_0q9a/new    what is being written
    .checkpoint.k3x_0q9a/old    what it replaces, for the moment between two renames

A process that is killed leaves its work folder behind. The next one that writes there finishes or removes it; whether
the writer still lives is told by a lock, which the system takes back however a process ends.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from esper.leyline.errors import BadValueError, StorageError
from esper.storage.locks import is_taken, let_go, take_lock

NEW, OLD = "new", "old"
ATTEMPTS = 10
WORK = re.compile(r"\.(.+)\.[a-z0-9_]{8}")
"""Names of work folders: the target's, and eight characters of tempfile's."""


@contextmanager
def storing(target: Path) -> Iterator[None]:
    """What the system refuses inside is a StorageError that names the target."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise StorageError(f"{target} cannot be written ({why}); make room there, or make it writable") from error


def replace_folder(folder: Path, write: Callable[[Path], None], names: Collection[str]) -> None:
    """Let `write` fill a temporary folder beside the target with files of these names, then put it in its place.

    Whatever goes wrong, the target is what it was or what it should be. A target that holds anything else is refused:
    it would be lost.
    """
    with storing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent, folder.name)
        if folder.exists():
            strangers = {path.name for path in folder.iterdir()} - set(names) if folder.is_dir() else {"a file"}
            if strangers:
                raise BadValueError(
                    f"{folder} is or holds {sorted(strangers)}; what is written replaces the folder: "
                    "give it one of its own"
                )
        with _work_folder(folder) as work:
            new, old = work / NEW, work / OLD
            new.mkdir()
            write(new)
            sync_to_disk(new)
            if folder.exists():
                folder.rename(old)
            try:
                new.rename(folder)
            except BaseException:
                if old.exists() and not folder.exists():
                    old.rename(folder)
                raise
            sync_to_disk(folder.parent)


def replace_file(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with storing(path):
        remove_leftovers(path.parent, path.name)
        with _work_folder(path) as work:
            new = work / NEW
            new.write_text(text, encoding="utf-8")
            sync_to_disk(new)
            new.replace(path)
            sync_to_disk(path.parent)


def discard_folder(folder: Path) -> None:
    """Remove a folder: under its name it is there as a whole or not at all."""
    with storing(folder), _work_folder(folder) as work:
        folder.rename(work / OLD)
        sync_to_disk(folder.parent)


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target to write in, gone afterwards unless the target would be lost with it."""
    work, lock = _new_work_folder(target)
    try:
        yield work
    finally:
        let_go(lock)
        if target.exists() or not _holds_both(work):
            shutil.rmtree(work, ignore_errors=True)


def _new_work_folder(target: Path) -> tuple[Path, int | None]:
    """It and its lock. Before it is locked another process may take it for a leftover and remove it: then once more."""
    for _ in range(ATTEMPTS):
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        with suppress(FileNotFoundError):
            lock = take_lock(work)
            if work.exists() and not is_taken(lock):
                return work, lock
            let_go(lock)  # whoever has the lock, or had it, removes the folder
    raise StorageError(f"{target} cannot be written: another process removes what is begun there; end that first")


# -- what killed processes left behind --------------------------------------------------------------------------------


def remove_leftovers(parent: Path, name: str | None = None) -> None:
    """Finish or remove what killed processes have left in a folder, of one target or of all."""
    for work in parent.iterdir() if parent.is_dir() else ():
        with suppress(FileNotFoundError):  # another process was quicker
            if is_leftover(work, name):
                _remove_leftover(work)


def _remove_leftover(work: Path) -> None:
    lock = take_lock(work)
    if is_taken(lock):
        return  # its writer lives
    match = WORK.fullmatch(work.name)
    target = work.with_name(match[1] if match else "")
    if _holds_both(work) and not target.exists():
        (work / NEW).rename(target)
        sync_to_disk(work.parent)
    shutil.rmtree(work, ignore_errors=True)
    let_go(lock)  # after that: a writer that finds its new folder unlocked takes it for its own


def is_leftover(path: Path, name: str | None = None) -> bool:
    """Whether this is a work folder, of a target of this name or of any."""
    found = WORK.fullmatch(path.name)
    if found is None or (name is not None and found[1] != name) or not path.is_dir():
        return False
    return {entry.name for entry in path.iterdir()} <= {NEW, OLD}


def present_folder(folder: Path) -> Path:
    """Where a folder can be read: in its place or, of a writer killed between its two renames, in the work folder."""
    if folder.exists() or not folder.parent.is_dir():
        return folder
    works = [path for path in sorted(folder.parent.iterdir()) if is_leftover(path, folder.name)]
    return next((work / NEW for work in works if _holds_both(work)), folder)


def _holds_both(work: Path) -> bool:
    """Then the new one is complete: the old one is moved only after that."""
    return (work / NEW).exists() and (work / OLD).exists()


@contextmanager
def folder_taken(folder: Path) -> Iterator[None]:
    """Inside, nobody else takes this folder. The lock is the system's: it ends with the process, however that ends, and
    processes that it has forked do not hold it."""
    with storing(folder):
        lock = take_lock(folder)
    if is_taken(lock):
        raise BadValueError(
            f"{folder} is being written by another process, or by another object of this one: one at a time, end that "
            "first"
        )
    try:
        yield
    finally:
        let_go(lock)


# -- the system -------------------------------------------------------------------------------------------------------


def sync_to_disk(path: Path) -> None:
    """Have a file, or the names in a folder, reach the disk (folders where the system can be asked to)."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
