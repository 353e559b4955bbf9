"""Accidents on purpose: a process that is killed (SIGKILL) when it is about to touch a file for the n-th time.

Between two such operations a kill finds nothing new but a file of which a part is written: `delay` lets it come that
many seconds later.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

TOUCHING = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"})
"""Python's audit events. What a folder is emptied of is named relative to an open folder, all else by its path."""


class FileKill:
    """Counts what this process does to files in a folder, from the moment it is made; `at`: the count that kills it."""

    def __init__(self, folder: Path, at: int | None = None, delay: float = 0.0) -> None:
        self.count = 0
        self._folder, self._at, self._delay = str(folder), at, delay
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in TOUCHING or not self._inside(arguments):
            return
        self.count += 1
        if self.count != self._at:
            return
        if self._delay:
            threading.Thread(target=_kill_later, args=(self._delay,), daemon=True).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def _inside(self, arguments: tuple[object, ...]) -> bool:
        path, last = arguments[0], arguments[-1]
        if isinstance(path, str | os.PathLike) and os.path.isabs(path):
            return os.fspath(path).startswith(self._folder)
        return isinstance(path, str) and isinstance(last, int) and last >= 0


def _kill_later(delay: float) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)
