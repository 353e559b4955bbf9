"""Numbered folders, of which the newest counts and the last few stay: round-00001, round-00002, …"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from esper.leyline.errors import BadValueError, CheckpointError
from esper.leyline.numbers import require_whole
from esper.storage.files import discard_folder, free_path, remove_leftovers, storage_errors

KEEP = 3
T = TypeVar("T")


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


class Series:
    """The folders `<word>-<number>` in a folder. Leaves other names alone."""

    def __init__(self, folder: Path, word: str, keep: int = KEEP) -> None:
        require_whole("keep", keep, 1, remark=": the newest is always kept")
        self.folder, self.word, self.keep = folder, word, keep

    def path_of(self, number: int) -> Path:
        """Path of the folder with this number."""
        return self.folder / f"{self.word}-{number:05d}"

    def numbers(self) -> list[int]:
        """The numbers that exist, in ascending order."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        matches = (re.fullmatch(rf"{self.word}-(\d{{5,}})", path.name) for path in paths)
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> Path | None:
        """Path of the folder with the highest number."""
        numbers = self.numbers()
        return self.path_of(numbers[-1]) if numbers else None

    def require_newest(self, number: int) -> None:
        """Refuse a number below the newest: its folder would be removed at once, or never be read."""
        remove_leftovers(self.folder)
        newest = max(self.numbers(), default=number)
        if number < newest:
            raise BadValueError(
                f"{self.word} {number} is below {self.word} {newest}, the newest in {self.folder}; "
                "continue from that one, remove the newer ones, or use another folder"
            )

    def prune(self) -> None:
        """Remove all but the last `keep`."""
        for number in self.numbers()[: -self.keep]:
            discard_folder(self.path_of(number))

    def read_newest(self, read: Callable[[int, Path], T], report: Callable[[str], None] = _warn) -> T | None:
        """What `read` returns for the newest folder that it accepts; None if there are no folders.

        Renames each folder that it refuses (CheckpointError) to `refused-<name>`, and reports it. If it refuses all of
        them, raises CheckpointError and renames nothing.
        """
        remove_leftovers(self.folder)
        refused: dict[Path, CheckpointError] = {}
        for number in reversed(self.numbers()):
            path = self.path_of(number)
            try:
                content = read(number, path)
            except CheckpointError as error:
                refused[path] = error
                continue
            for bad, reason in refused.items():
                with storage_errors(bad):
                    aside = bad.rename(free_path(bad.with_name(f"refused-{bad.name}")))
                report(f"{bad.name} is not used: {reason}. It is kept as {aside.name}; continuing from {path.name}")
            self.prune()
            return content
        if refused:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in refused.items())
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} can be used ({reasons}); "
                "restore the original files, or begin anew in another folder"
            )
        return None
