"""Folders with tensors in safetensors and everything else in JSON. Reading one proves that it is complete.

    model.json            {"format", "version", ...the content..., "weights": {"size", "sha256"}, "checksum"}
    weights.safetensors   tensors only: reading them executes nothing

The checksum covers the rest of the JSON, and the JSON holds the digest of the weights. So no byte of either file can
change unnoticed, except for the formatting of the JSON. The caller knows what the content means and which tensors it
needs.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from esper.leyline.errors import CheckpointError, EsperError, StorageError
from esper.leyline.records import Json, checksum, encode, refuse_constant
from esper.storage.files import existing_folder, replace_folder, sync_to_disk

OWN_KEYS = frozenset({"format", "version", "weights", "checksum"})  # keys of the JSON that are not the caller's


@dataclass(frozen=True)
class StoredFormat:
    """Name and version of a format, and the names of its two files."""

    name: str
    version: int
    document: str  # file name of the JSON
    weights: str  # file name of the tensors


@contextmanager
def checkpoint_errors(where: str) -> Iterator[None]:
    """Turn an error that bad data can cause into a CheckpointError. A full disk stays a StorageError."""
    try:
        yield
    except (CheckpointError, StorageError):
        raise
    except (EsperError, SafetensorError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def write_stored(folder: Path, kind: StoredFormat, content: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
    """Write a folder, or replace one of the same format as a whole."""
    if clashes := sorted(OWN_KEYS & set(content)):
        raise CheckpointError(f"{folder}: the format itself uses the keys {clashes}; rename those of the content")
    with checkpoint_errors("the content cannot be stored as JSON"):
        plain = encode(dict(content))
        if json.loads(json.dumps(plain, allow_nan=False)) != plain:
            raise CheckpointError("the content would change when it is read: keys of JSON objects are strings")
    with checkpoint_errors("the weights cannot be stored"):
        raw = safetensors.torch.save(storable(tensors))  # hashed in memory, so that the digest proves the disk
        safetensors.torch.load(raw)  # safetensors writes dtypes and names that it does not read
    document = {"format": kind.name, "version": kind.version, **plain, "weights": _record(raw)}
    text = json.dumps(document | {"checksum": checksum(document)}, indent=1, allow_nan=False)

    def write(new: Path) -> None:
        (new / kind.weights).write_bytes(raw)
        (new / kind.document).write_text(text + "\n", encoding="utf-8")
        for name in (kind.weights, kind.document):
            sync_to_disk(new / name)

    with checkpoint_errors(str(folder)):
        replace_folder(folder.resolve(), write, (kind.document, kind.weights))


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU, contiguous, not lazy, and without shared storage (tied weights are stored twice)."""
    stored: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name} is a {type(tensor).__name__}; a checkpoint holds tensors only")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone() if storage in storages else plain
        storages.add(storage)
    return stored


def _record(raw: bytes) -> dict[str, Json]:
    return {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def read_stored(folder: Path, kind: StoredFormat) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """The content and the tensors as written, or CheckpointError. Executes nothing from the folder."""
    folder = existing_folder(folder)
    path, document = folder / kind.weights, _read_document(folder, kind)
    raw, written = _read_file(path, kind), document["weights"]
    if written != (actual := _record(raw)):
        raise CheckpointError(
            f"{path} was changed, is truncated or was replaced: it has {len(raw)} bytes and its sha256 is "
            f"{actual['sha256']}; written was {written}"
        )
    with checkpoint_errors(f"{path} is no safetensors file"):
        loaded = safetensors.torch.load(raw)
        # Cloned, because loaded tensors are views of the file's buffer.
        tensors = {name: loaded[name].clone() for name in sorted(loaded)}
    return {key: value for key, value in document.items() if key not in OWN_KEYS}, tensors


def _read_file(path: Path, kind: StoredFormat) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); "
            f"a checkpoint is a folder with {kind.document} and {kind.weights}"
        ) from error


def _read_document(folder: Path, kind: StoredFormat) -> dict[str, Json]:
    """The JSON, if it has this format and version and was not changed."""
    path = folder / kind.document
    raw = _read_file(path, kind)
    try:
        document = json.loads(raw, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON, truncated or damaged: {error}") from error
    given = document if isinstance(document, dict) else {}
    name, version = given.get("format"), given.get("version")
    if name != kind.name:
        raise CheckpointError(f"{path}: format is {name!r}; allowed: {kind.name!r}")
    if type(version) is not int or version != kind.version:
        raise CheckpointError(f"{path}: version is {version!r}; this Esper reads version {kind.version}")
    if missing := sorted(OWN_KEYS - set(given)):
        raise CheckpointError(f"{path} has keys {sorted(given)}; it lacks {missing}")
    stated = given["checksum"]
    with checkpoint_errors(str(path)):
        actual = checksum({key: value for key, value in given.items() if key != "checksum"})
    if stated != actual:
        raise CheckpointError(f"{path} was changed: it states checksum {stated!r}, its content has {actual}")
    return given


@dataclass(frozen=True)
class Machine:
    """What results depend on besides the seed; stored in checkpoints."""

    torch: str
    threads: int
    cpu: str  # the instruction set that kernels may use

    @classmethod
    def here(cls) -> "Machine":
        """The machine of this process."""
        return cls(torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())

    def differences(self) -> str:
        """What differs in this process, in words; empty if nothing does."""
        here = Machine.here()
        pairs = [(field.name, getattr(self, field.name), getattr(here, field.name)) for field in fields(self)]
        return ", ".join(f"{name} {then} → {now}" for name, then, now in pairs if then != now)

    def warn_of_differences(self) -> None:
        """Warn if results will differ from those on the stored machine."""
        if changed := self.differences():
            warnings.warn(f"the run continues, but not bit for bit: {changed}", RuntimeWarning, stacklevel=3)
