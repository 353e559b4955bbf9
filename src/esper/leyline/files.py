"""Writing files so that a crash leaves the old or the new, never a half."""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from esper.leyline.errors import BadValueError


def replace_folder(folder: Path, write: Callable[[Path], None], names: Collection[str]) -> None:
    """Let `write` fill a temporary folder beside the target with files of these names, then put it in its place.

    Whatever goes wrong, the target is what it was or what it should be. A target that holds anything else is refused:
    it would be lost.
    """
    if folder.exists():
        strangers = {path.name for path in folder.iterdir()} - set(names) if folder.is_dir() else {"a file"}
        if strangers:
            raise BadValueError(
                f"{folder} is or holds {sorted(strangers)}; what is written replaces the folder: give it one of its own"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    new, old = work / "new", work / "old"
    try:
        new.mkdir()
        write(new)
        sync_to_disk(new)
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
        sync_to_disk(folder.parent)
    finally:
        if folder.exists() or not old.exists():
            shutil.rmtree(work, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Have a file, or the names in a folder, reach the disk (folders where the system can be asked to)."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
