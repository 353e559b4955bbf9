"""Exclusive locks of files and folders. The system releases them when their process ends, even if it is killed."""

import os
from pathlib import Path

from esper.leyline.errors import BadValueError

if os.name == "posix":
    import fcntl

_held: set[int] = set()  # handles of the locks that this process holds


def acquire(path: Path, *, wait: bool = False) -> int:
    """Lock a file or folder and return the handle for `release`. Raises BadValueError if it is locked, or waits."""
    if os.name != "posix":
        return -1  # no such locks
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        raise BadValueError(
            f"{path} is being written by another process, or by another object of this one; end that first"
        ) from None
    except OSError:
        pass  # a file system without locks
    _held.add(handle)
    return handle


def release(handle: int) -> None:
    """Release a lock, unless this process was forked from the one that holds it."""
    if handle in _held:
        _held.remove(handle)
        os.close(handle)


def _release_all() -> None:
    for handle in tuple(_held):
        release(handle)


if hasattr(os, "register_at_fork"):  # a lock lasts as long as any process has its handle, and a child may live longer
    os.register_at_fork(after_in_child=_release_all)
