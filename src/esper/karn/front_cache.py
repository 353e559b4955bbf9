"""What the front of a long log came to, stored in the user's cache, so that it is read only once.

A run folder is never written to. An entry is used if the log still begins with the same bytes, and still has the same
bytes where the stored part ends. Commits and figures of episodes are stored, not their details.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from esper.karn.lines import Alarm, Commit, Episode
from esper.leyline.errors import EsperError
from esper.leyline.records import Json
from esper.storage.files import replace_file

VERSION = 1
HEAD, END = 1 << 16, 1 << 12
"""Bytes at the beginning and at the end of the stored part by which a log is recognised"""


class Front(NamedTuple):
    """The part of a log before its tail."""

    end: int
    """Bytes"""
    lines: int
    episodes: Mapping[int, list[Episode]]
    """By round, without curves"""
    commits: Mapping[int, list[tuple[int, Commit]]]
    """By round, each with its env"""
    alarms: list[Alarm]
    places: Mapping[int, tuple[int, int]]
    """Where rounds begin: bytes, lines before it"""


class FrontCache:
    """Stored fronts of logs, a file each."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = user_cache() if folder is None else folder

    def load(self, log: Path, longest: int) -> Front | None:
        """The stored front of a log, at most so many bytes; None if there is none that fits."""
        try:
            content = json.loads(self._file(log).read_text(encoding="utf-8"))
            if content["version"] != VERSION or content["end"] > longest:
                return None
            if _marks(log, content["end"]) != content["marks"]:
                return None
            return Front(
                content["end"],
                content["lines"],
                {int(number): [Episode(*row) for row in rows] for number, rows in content["episodes"].items()},
                {
                    int(number): [(env, Commit(*row)) for env, *row in rows]
                    for number, rows in content["commits"].items()
                },
                [Alarm(*row) for row in content["alarms"]],
                {int(number): (begin, lines) for number, (begin, lines) in content["places"].items()},
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None  # none is stored, or it is damaged: the log has everything

    def save(self, log: Path, front: Front) -> None:
        """Store a front. What goes wrong costs time at the next start, nothing else."""
        try:
            content: dict[str, Json] = {
                "version": VERSION,
                "log": str(log),
                "end": front.end,
                "lines": front.lines,
                "marks": _marks(log, front.end),
                "episodes": {number: [each[:5] for each in rows] for number, rows in front.episodes.items()},
                "commits": {number: [(env, *each) for env, each in rows] for number, rows in front.commits.items()},
                "alarms": front.alarms,
                "places": front.places,
            }
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._file(log), json.dumps(content, separators=(",", ":")))
        except (OSError, ValueError, EsperError):
            return

    def _file(self, log: Path) -> Path:
        return self.folder / f"{hashlib.sha256(str(log.resolve()).encode()).hexdigest()[:32]}.json"


def user_cache() -> Path:
    """The folder for logs that were read, in the user's cache. It need not exist yet."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a relative path.
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "esper" / "logs"


def _marks(log: Path, end: int) -> list[str]:
    """Digests of the beginning of a log and of the last bytes before `end`."""
    with log.open("rb") as file:
        head = file.read(min(HEAD, end))
        file.seek(max(0, end - END))
        return [hashlib.sha256(part).hexdigest() for part in (head, file.read(min(END, end)))]
