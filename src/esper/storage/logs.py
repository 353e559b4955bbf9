"""A file of JSON objects, one per line: append-only, written by one process, in order."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from esper.leyline import BadValueError
from esper.storage.files import storing, sync_to_disk
from esper.storage.locks import is_taken, let_go, take_lock

Json = Any  # what will become JSON, or was


class JsonLines:
    """Appends objects to a file. What was written is on its way to the disk after `flush`."""

    def __init__(self, path: Path, offset: int | None = None) -> None:
        """Open for appending. With `offset`, what lies behind it is moved aside first (`<name>.tail-<offset>`)."""
        self.path = path
        with storing(path):
            self._file: IO[str] = path.open("a", encoding="utf-8")
            self._lock = take_lock(path)  # on a handle of its own: a forked process has this file open, and no lock
            try:
                if is_taken(self._lock):
                    raise BadValueError(f"{path} is being written by another process: one at a time, end that first")
                if offset is not None:
                    _truncate(path, offset)
                    self._file.seek(0, os.SEEK_END)
                self._digest = digest_of(path, self._file.tell())
                sync_to_disk(path.parent)
            except BaseException:
                let_go(self._lock)
                self._file.close()
                raise

    def write(self, **fields: Json) -> None:
        """Append one object."""
        try:
            line = json.dumps(fields, allow_nan=False, separators=(",", ":"))
        except ValueError as error:
            raise BadValueError(f"{self.path.name}: {fields} is no JSON: {error}") from error
        with storing(self.path):
            self._file.write(line + "\n")
            self._digest.update(f"{line}\n".encode())

    def flush(self) -> int:
        """Hand everything to the disk; returns the size of the file, from where a resumed run goes on."""
        with storing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()

    @property
    def sha256(self) -> str:
        """Of all lines so far: what a resumed run must find again."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Flush and close. What the disk does not take is a StorageError, and closed it is all the same."""
        try:
            self.flush()
        finally:
            let_go(self._lock)
            with suppress(OSError):  # it was told above
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def digest_of(path: Path, size: int) -> "hashlib._Hash":
    """SHA-256 of the first bytes of a file; a gigabyte takes a second or two."""
    digest, left = hashlib.sha256(), size
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest


def _truncate(path: Path, offset: int) -> None:
    """Cut a file off at an offset. What lies behind it is on the disk in a file of its own before it is cut."""
    size = path.stat().st_size if path.exists() else 0
    if size < offset:
        raise BadValueError(f"{path} has {size} bytes, the checkpoint was written after {offset}: lines are lost")
    if size == offset:
        return
    with path.open("r+b") as file:
        file.seek(offset)
        tail = _tail(path, offset)
        try:
            with tail.open("xb") as kept:
                kept.write(file.read())
                kept.flush()
                os.fsync(kept.fileno())
        except OSError:
            tail.unlink(missing_ok=True)
            raise
        sync_to_disk(path.parent)
        file.truncate(offset)
        os.fsync(file.fileno())


def _tail(path: Path, offset: int) -> Path:
    """A name that is not taken: a run may be killed twice in the same round."""
    names = (f"{path.name}.tail-{offset}{f'.{n}' if n else ''}" for n in count())
    return next(found for name in names if not (found := path.with_name(name)).exists())


def end_of_lines(path: Path) -> int:
    """Where the last whole line of a file ends: a line that was torn by a kill must not be written on. Small files."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def read_lines(path: Path) -> Iterator[dict[str, Json]]:
    """All objects of a file; a torn last line, of a run that was killed, is left out."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise BadValueError(f"{path}, line {number} is no JSON: {error}") from error
