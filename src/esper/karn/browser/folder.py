"""The runs in a folder, by name. Only what is listed can be read, so no name leads out of the folder."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from esper.karn.state import CONFIG, EVENTS, METRICS
from esper.leyline import BadValueError

DEPTH = 3
"""Levels of folders that are searched for runs"""
MOST_RUNS = 500
_FILES = (CONFIG, METRICS, EVENTS)


class Listed(NamedTuple):
    """A run of the folder."""

    name: str
    """Its path from the folder, with slashes; `.` is the folder itself"""
    path: Path
    changed: float
    """When its metrics last grew, in seconds since 1970"""


class RunFolders:
    """The runs in a folder. Folders and files that lead out of it by a link are not there."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise BadValueError(f"{root} is no folder; name a run, or a folder with runs")
        self.root = root.resolve()

    def runs(self) -> list[Listed]:
        """All runs, the one that changed last first."""
        found = [run for path in self._folders(self.root, DEPTH) if (run := self._listed(path)) is not None]
        return sorted(found[:MOST_RUNS], key=lambda run: (-run.changed, run.name))

    def find(self, name: str) -> Listed:
        """The run of a name. Names are compared, never joined to a path."""
        for run in self.runs():
            if run.name == name:
                return run
        raise BadValueError(f"there is no run {name!r} in this folder")

    def file(self, run: Listed, *parts: str) -> Path | None:
        """A file of a run that lies inside the folder; None if there is none."""
        path = run.path.joinpath(*parts)
        return path if path.is_file() and self._is_inside(path) else None

    def evaluations(self, run: Listed) -> list[Path]:
        """The evaluations in a run's folder."""
        return [path for path in sorted(run.path.glob("evaluation*.json")) if self.file(run, path.name)]

    def _folders(self, folder: Path, depth: int) -> Iterator[Path]:
        yield folder
        if depth and not self._is_run(folder):
            try:
                with os.scandir(folder) as entries:
                    inner = sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
            except OSError:  # removed meanwhile, or not ours to read
                return
            for path in inner:
                if not path.name.startswith("."):
                    yield from self._folders(path, depth - 1)

    def _listed(self, path: Path) -> Listed | None:
        if not self._is_run(path):
            return None
        try:
            changed = (path / METRICS).stat().st_mtime
        except OSError:
            return None
        return Listed(path.relative_to(self.root).as_posix(), path, changed)

    def _is_run(self, path: Path) -> bool:
        return all((path / name).is_file() and self._is_inside(path / name) for name in _FILES)

    def _is_inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.root)
