"""Append-only files of JSON objects, one per line, with one writer at a time."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

from esper.leyline.errors import BadValueError
from esper.leyline.records import Json, refuse_constant
from esper.storage.files import free_path, replace_file, storage_errors, sync_to_disk
from esper.storage.locks import acquire, release


class JsonLines(AbstractContextManager["JsonLines"]):
    """Appends objects to a file; `flush` brings them to the disk."""

    def __init__(self, path: Path, offset: int | None = None) -> None:
        """Open a file for appending. With `offset`, move what follows it to `<name>.tail-<offset>` first."""
        self.path = path
        with storage_errors(path), ExitStack() as opened:
            self._file = opened.enter_context(path.open("a", encoding="utf-8"))
            opened.callback(release, acquire(path))  # on its own handle: forked processes inherit the file, but no lock
            if offset is not None:
                _truncate(path, offset)
                self._file.seek(0, os.SEEK_END)
            self._digest = digest_of(path, self._file.tell())
            sync_to_disk(path.parent)
            self._opened = opened.pop_all()

    def write(self, **fields: Json) -> None:
        """Append one object."""
        try:
            line = json.dumps(fields, allow_nan=False, separators=(",", ":")) + "\n"
        except ValueError as error:
            raise BadValueError(f"{self.path.name}: {fields} is not JSON: {error}") from error
        with storage_errors(self.path):
            self._file.write(line)
            self._digest.update(line.encode())

    def flush(self) -> int:
        """Flush everything to the disk and return the size of the file, where a resumed run continues."""
        with storage_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()

    @property
    def sha256(self) -> str:
        """Digest of all lines so far, which a resumed run checks."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Flush and close. Raises StorageError if the disk is full; the file is closed either way."""
        try:
            self.flush()
        finally:
            with suppress(OSError):  # raised by `flush` already
                self._opened.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def digest_of(path: Path, size: int) -> "hashlib._Hash":
    """SHA-256 of the first `size` bytes of a file. A gigabyte takes a second or two."""
    digest, left = hashlib.sha256(), size
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest


def _truncate(path: Path, offset: int) -> None:
    """Cut a file at an offset. What follows is stored in its own file first."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size < offset:
            raise BadValueError(f"{path} has {size} bytes, the checkpoint was written after {offset}: lines are lost")
        if size > offset:
            file.seek(offset)
            replace_file(free_path(path.with_name(f"{path.name}.tail-{offset}")), file.read())
            file.truncate(offset)
            os.fsync(file.fileno())


def end_of_lines(path: Path) -> int:
    """Where the last complete line of a small file ends. A killed process may have left part of a line."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def read_lines(path: Path) -> Iterator[dict[str, Json]]:
    """All objects of a file. Skips an incomplete last line, which a killed process may have left."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line, parse_constant=refuse_constant)
            except (ValueError, RecursionError) as error:
                raise BadValueError(f"{path}, line {number} is not JSON: {error}") from error
