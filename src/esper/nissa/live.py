"""The live file of a run: the steps of the present round, for those who watch it.

    {"kind":"live","version":1,"round":3,"began":1763532000123456789}
    {"kind":"step","time":1763532001.25,"round":3,"task":"digits_blind","step":0, …}

It is emptied when a round begins and when the run ends; by then the log has everything. Nothing is synced to the disk
and nobody reads it to continue a run. So whatever goes wrong here costs a view, never the run.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO

from esper.leyline.records import encode
from esper.nissa.events import StepTaken, as_line

LIVE = "live.jsonl"
VERSION = 1
LARGEST = 1 << 24
"""Bytes after which the file is emptied in the middle of a round: a Grower has one round only"""


class LiveFile(AbstractContextManager["LiveFile"]):
    """Writes `live.jsonl`. The first failure is printed and ends the writing; no method raises."""

    def __init__(self, folder: Path) -> None:
        """Write in this folder; the file is opened when the first round begins."""
        self.path, self.failed = folder / LIVE, False
        self._file: IO[str] | None = None
        self._round = -1

    def begin(self, round_index: int) -> None:
        """Empty the file for a round."""
        self._round = round_index
        self._attempt(self._empty)

    def write(self, build: Callable[[], StepTaken]) -> None:
        """Build a step's event and append it."""
        if self._file is not None:
            self._attempt(lambda: self._append(build()))

    def close(self) -> None:
        """Empty the file and close it."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.truncate(0)
            with suppress(OSError):
                file.close()

    def _empty(self) -> None:
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")  # appends, so that it stands at the end after a cut
        self._file.truncate(0)
        header = {"kind": "live", "version": VERSION, "round": self._round, "began": time.time_ns()}
        self._put(json.dumps(header, separators=(",", ":")))

    def _append(self, event: StepTaken) -> None:
        line = as_line(event)
        try:
            text = json.dumps(line, allow_nan=False, separators=(",", ":"))
        except ValueError:  # a number that is not finite; rare, so looked for only now
            text = json.dumps(encode(line), separators=(",", ":"))
        assert self._file is not None
        if self._file.tell() + len(text) > LARGEST:
            self._empty()
        self._put(text)

    def _put(self, text: str) -> None:
        assert self._file is not None
        self._file.write(f"{text}\n")
        self._file.flush()

    def _attempt(self, act: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            act()
        except Exception as error:  # also one of the builder: the run does not depend on being watched
            self.failed = True
            with suppress(Exception):
                print(f"{self.path} is no longer written ({error}); the run continues", file=sys.stderr)
            self.close()

    def __exit__(self, *error: object) -> None:
        self.close()
