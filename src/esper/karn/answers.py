"""What a statement gave, and how it is written down."""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from esper.leyline import BadValueError
from esper.leyline.records import encode

Cell = Any  # whatever a statement selects
STDOUT = Path("-")


class Answer:
    """Named columns, and rows that are handed over once. Use it as a context manager."""

    def __init__(self, columns: Sequence[str], rows: Iterator[tuple[Cell, ...]], close: Callable[[], None]) -> None:
        self.columns, self.rows, self._close = list(columns), rows, close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def write_csv(self, path: Path) -> int:
        """A line per row under a line of names; lists and maps as JSON. Returns how many rows."""
        with _opened(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            count = 0
            for row in self.rows:
                writer.writerow([as_json(cell) if isinstance(cell, list | dict) else cell for cell in row])
                count += 1
        return count

    def write_json(self, path: Path) -> int:
        """A list of objects, one per line. Returns how many rows."""
        if repeated := sorted({name for name in self.columns if self.columns.count(name) > 1}):
            raise BadValueError(f"several columns are called {repeated}: name them with AS")
        with _opened(path) as file:
            count = 0
            for row in self.rows:
                file.write((",\n" if count else "[\n") + as_json(dict(zip(self.columns, row, strict=True))))
                count += 1
            file.write("\n]\n" if count else "[]\n")
        return count


def as_json(cell: Cell) -> str:
    """As JSON; numbers that are not finite become words, and what it has no form for becomes text."""
    return json.dumps(encode(cell), default=_plain, allow_nan=False, ensure_ascii=False)


def _plain(cell: Cell) -> Cell:
    return float(cell) if isinstance(cell, Decimal) else str(cell)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The screen's output, or a file that is seen only when it is complete."""
    if path == STDOUT:
        yield sys.stdout
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("x", encoding="utf-8", newline="") as file:
            yield file
        beside.replace(path)
    except OSError as error:
        raise BadValueError(f"{path} cannot be written: {error}") from error
    finally:
        beside.unlink(missing_ok=True)
