"""Numbered folders of which the newest counts: round-00001, round-00002 …, the last few of them kept."""

import re
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TypeVar

from esper.leyline.errors import BadValueError, CheckpointError
from esper.leyline.numbers import require_whole
from esper.storage.files import discard_folder, remove_leftovers, storing

KEEP = 3
T = TypeVar("T")


class Series:
    """The folders `<word>-<number>` in a folder. Others, of whatever name, are left alone."""

    def __init__(self, folder: Path, word: str, keep: int = KEEP) -> None:
        require_whole("keep", keep, 1, remark=": the newest is always kept")
        self.folder, self.word, self.keep = folder, word, keep

    def place(self, number: int) -> Path:
        """Where the one with this number is, or will be."""
        return self.folder / f"{self.word}-{number:05d}"

    def numbers(self) -> list[int]:
        """Of those that are there, the newest last."""
        if not self.folder.is_dir():
            return []
        matches = (re.fullmatch(rf"{self.word}-(\d{{5,}})", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> Path | None:
        """The one with the highest number."""
        numbers = self.numbers()
        return self.place(numbers[-1]) if numbers else None

    def require_newest(self, number: int) -> None:
        """Refuse a number below one that is there: it would be removed at once, or never be read."""
        with storing(self.folder):
            remove_leftovers(self.folder)  # a killed writer may have left the newest there
        newest = max(self.numbers(), default=number)
        if number < newest:
            raise BadValueError(
                f"{self.word} {number} is below {self.word} {newest}, the newest in {self.folder}; "
                "go on from that one, remove the newer ones, or take another folder"
            )

    def prune(self) -> None:
        """Remove all but the last `keep`."""
        for number in self.numbers()[: -self.keep]:
            discard_folder(self.place(number))

    def read_newest(self, read: Callable[[int, Path], T], tell: Callable[[str], None] | None = None) -> T | None:
        """What `read` makes of the newest that it does not refuse; None where there are none at all.

        Each that it refuses (CheckpointError) is told, by default as a warning, and set aside under another name, so
        that it is neither met again nor lost. Where all are refused, that is an error, and all stay in their places.
        What a killed writer has left or not yet removed is cleaned up.
        """
        with storing(self.folder):
            remove_leftovers(self.folder)
        refused: dict[Path, CheckpointError] = {}
        for number in reversed(self.numbers()):
            place = self.place(number)
            try:
                found = read(number, place)
            except CheckpointError as error:
                refused[place] = error
                continue
            for bad, why in refused.items():
                aside = _set_aside(bad)
                remark = f"{bad.name} is not used: {why}. It is kept as {aside.name}; going on from {place.name}"
                if tell is None:
                    warnings.warn(remark, RuntimeWarning, stacklevel=3)
                else:
                    tell(remark)
            self.prune()
            return found
        if refused:
            reasons = "; ".join(f"{place.name}: {why}" for place, why in refused.items())
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} can be used ({reasons}); "
                "put back what was there, or begin anew in another folder"
            )
        return None


def _set_aside(folder: Path) -> Path:
    names = (f"refused-{folder.name}{f'.{n}' if n else ''}" for n in count())
    aside = next(path for name in names if not (path := folder.with_name(name)).exists())
    with storing(folder):
        return folder.rename(aside)
