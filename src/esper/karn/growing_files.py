"""Files that another process appends to: their new complete lines, and whether they were cut or begun anew."""

import os
from pathlib import Path
from typing import NamedTuple

BLOCK = 1 << 18
"""Bytes that are read at once"""
MEMORY = 4096
"""Bytes before the place that was reached, by which a file is recognised"""


class Line(NamedTuple):
    """One complete line, without its end."""

    number: int
    """From 1"""
    begin: int
    """Where it begins in the file"""
    raw: bytes


class GrowingFile:
    """Reads a file line by line as it grows. A torn last line waits until it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restart()

    def restart(self) -> None:
        """Read from the beginning again."""
        self.offset = self.number = 0  # bytes and lines that were read
        self._before = b""

    def size(self) -> int | None:
        """Its size now; None if there is no such file."""
        try:
            return self.path.stat().st_size
        except OSError:
            return None

    def has_more(self) -> bool:
        """Whether it is longer than what was read."""
        return (self.size() or 0) > self.offset

    def was_cut(self) -> bool:
        """Whether what was read is no longer there: the file was cut, or replaced."""
        if not self.offset:
            return False
        try:
            with self.path.open("rb") as file:
                return self._memory(file.fileno()) != self._before
        except OSError:
            return False  # it is gone; `size` says so

    def _memory(self, file: int) -> bytes:
        begin = max(0, self.offset - MEMORY)
        return os.pread(file, self.offset - begin, begin)

    def read(self, limit: int = BLOCK) -> list[Line]:
        """New complete lines of at least `limit` bytes together; empty if there are none yet."""
        try:
            with self.path.open("rb") as file:
                block = os.pread(file.fileno(), limit, self.offset)
                while b"\n" not in block and len(block) >= limit:  # a line longer than the limit
                    limit *= 2
                    block = os.pread(file.fileno(), limit, self.offset)
                end = block.rfind(b"\n") + 1
                lines, begin = [], self.offset
                for raw in block[:end].split(b"\n")[:-1]:
                    self.number += 1
                    lines.append(Line(self.number, begin, raw))
                    begin += len(raw) + 1
                self.offset += end
                if end:
                    self._before = self._memory(file.fileno())
                return lines
        except OSError:
            return []

    def seek(self, offset: int, number: int) -> None:
        """Continue at the beginning of a line, with its number minus 1."""
        self.offset, self.number, self._before = offset, number, b""
        try:
            with self.path.open("rb") as file:
                self._before = self._memory(file.fileno())
        except OSError:
            pass


class LiveTail(GrowingFile):
    """Reads a file that is emptied now and then. Its first line says which filling it is, so none is mistaken."""

    def restart(self) -> None:
        super().restart()
        self.header = b""

    def read(self, limit: int = BLOCK) -> list[Line]:
        """New lines of the present filling, its header first."""
        header = self._header()
        if header != self.header:
            self.restart()
            self.header = header
        if not header:
            return []
        lines = super().read(limit)
        if self._header() == header:
            return lines
        self.restart()  # it was emptied while it was read
        return []

    def _header(self) -> bytes:
        """The complete first line; empty if there is none."""
        try:
            with self.path.open("rb") as file:
                return os.pread(file.fileno(), 4096, 0).partition(b"\n")[0] + b"\n" if self.size() else b""
        except OSError:
            return b""
