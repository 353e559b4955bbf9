"""Locks of files and folders. The system releases them when a process ends, however it ends."""

import os
from pathlib import Path

if os.name == "posix":
    import fcntl


def take_lock(path: Path) -> int | None:
    """A handle that locks a file or a folder, for `let_go`; None where somebody else has it. Where the system has no
    such locks it is always None: see `is_taken`."""
    if os.name != "posix":
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        pass  # a file system without locks
    _locks.add(handle)
    return handle


def is_taken(lock: int | None) -> bool:
    """Whether what `take_lock` gave means that somebody else has it."""
    return lock is None and os.name == "posix"


_locks: set[int] = set()
"""Handles of what this process has locked."""


def let_go(lock: int | None) -> None:
    """Of a lock, unless this process was forked from the one that took it."""
    if lock in _locks:
        _locks.remove(lock)
        os.close(lock)


def _let_go_of_all() -> None:
    """In a forked process: a lock lasts as long as any process has its handle open, and this one may live longer."""
    for lock in list(_locks):
        let_go(lock)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_all)
