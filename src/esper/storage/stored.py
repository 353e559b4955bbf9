"""Things on disk: a folder with tensors in safetensors and everything else in JSON, proven whole when it is read.

    model.json            {"format", "version", ...what is stored..., "weights": {"size", "sha256"}, "checksum"}
    weights.safetensors   tensors and nothing else: reading them executes nothing

The checksum is over all of the JSON but itself, and the JSON has the digest of the weights: no byte of either file
changes unnoticed, but for the layout of the JSON. Both files are complete in a temporary folder beside the target
before that is renamed into its place. What the content means, and which tensors there must be, the caller knows.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from esper.leyline.errors import CheckpointError, EsperError, StorageError
from esper.leyline.records import Json, decode, encode
from esper.storage.files import present_folder, replace_folder, sync_to_disk

OWN_KEYS = frozenset({"format", "version", "weights", "checksum"})
"""Keys of the JSON that are not the caller's."""


@dataclass(frozen=True)
class StoredFormat:
    """What a folder says of itself, and the names of its two files."""

    name: str
    version: int
    document: str
    """File name of the JSON."""
    weights: str
    """File name of the tensors."""
    history: Mapping[int, str] = field(default_factory=dict)
    """What other versions were, for the one who meets such a folder."""


@dataclass(frozen=True)
class StoredWeights:
    """The weights file as it was written."""

    size: int
    sha256: str


@contextmanager
def refusal(where: str) -> Iterator[None]:
    """What goes wrong inside is the fault of what is being stored or read, but for a disk that is full."""
    try:
        yield
    except (CheckpointError, StorageError):
        raise
    except (EsperError, SafetensorError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


# -- writing ----------------------------------------------------------------------------------------------------------


def write_stored(folder: Path, kind: StoredFormat, content: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
    """Write a folder. One of its kind that is there already is replaced as a whole, when the new one is complete."""
    if taken := sorted(OWN_KEYS & set(content)):
        raise CheckpointError(f"{folder}: the keys {taken} are the format's own; give the content other names")
    with refusal("the content cannot be stored as JSON"):
        plain = encode(dict(content))
        if json.loads(json.dumps(plain, allow_nan=False)) != plain:
            raise CheckpointError("the content would come back as another: keys of JSON objects are strings")
    with refusal("the weights cannot be stored"):
        # The digest is of these bytes: what the disk makes of them is not blessed by it.
        raw = safetensors.torch.save(_storable(tensors))
        safetensors.torch.load(raw)  # safetensors writes dtypes and names that it does not read
    weights = encode(StoredWeights(len(raw), _digest(raw)))
    document = {"format": kind.name, "version": kind.version, **plain, "weights": weights}
    text = json.dumps(document | {"checksum": checksum(document)}, indent=1, allow_nan=False)

    def write(new: Path) -> None:
        (new / kind.weights).write_bytes(raw)
        sync_to_disk(new / kind.weights)
        (new / kind.document).write_text(text + "\n", encoding="utf-8")
        sync_to_disk(new / kind.document)

    with refusal(str(folder)):
        replace_folder(folder.resolve(), write, (kind.document, kind.weights))


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, nothing lazy, and no two in the same memory (tied weights are stored twice)."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name} is a {type(tensor).__name__}; a checkpoint holds tensors only")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        place = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone() if place in seen else plain
        seen.add(place)
    return stored


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def checksum(content: Mapping[str, Json]) -> str:
    """Over the content in a form that does not depend on its layout."""
    return _digest(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


# -- reading ----------------------------------------------------------------------------------------------------------


def read_stored(folder: Path, kind: StoredFormat) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """The content and the tensors as they were written, or CheckpointError. Nothing in the folder is executed."""
    folder = present_folder(folder)
    document = _read_document(folder, kind)
    with refusal(str(folder / kind.document)):
        record: StoredWeights = decode(StoredWeights, document["weights"], "weights")
    content = {key: value for key, value in document.items() if key not in OWN_KEYS}
    return content, _read_weights(folder, kind, record)


def _read_file(folder: Path, name: str, kind: StoredFormat) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder / name} cannot be read ({error.strerror}); "
            f"a checkpoint is a folder with {kind.document} and {kind.weights}"
        ) from error


def _read_document(folder: Path, kind: StoredFormat) -> dict[str, Json]:
    """The JSON: of this format and version, and unchanged since it was written."""
    path, raw = folder / kind.document, _read_file(folder, kind.document, kind)
    try:
        document = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON, truncated or damaged: {error}") from error
    given = document if isinstance(document, dict) else {}
    if given.get("format") != kind.name:
        raise CheckpointError(f"{path}: format is {given.get('format')!r}; allowed: {kind.name!r}")
    version = given.get("version")
    if type(version) is not int or version != kind.version:
        known = f" ({kind.history[version]})" if type(version) is int and version in kind.history else ""
        raise CheckpointError(f"{path}: version is {version!r}{known}; this Esper reads version {kind.version}")
    if missing := sorted(OWN_KEYS - set(given)):
        raise CheckpointError(f"{path} has keys {sorted(given)}; it lacks {missing}")
    with refusal(str(path)):
        found = checksum({key: value for key, value in given.items() if key != "checksum"})
    if given["checksum"] != found:
        raise CheckpointError(f"{path} was changed: it states checksum {given['checksum']!r}, its content has {found}")
    return given


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is no JSON value")


def _read_weights(folder: Path, kind: StoredFormat, record: StoredWeights) -> dict[str, Tensor]:
    path, raw = folder / kind.weights, _read_file(folder, kind.weights, kind)
    if len(raw) != record.size:
        raise CheckpointError(f"{path} is truncated or was replaced: {len(raw)} bytes, {record.size} were written")
    if _digest(raw) != record.sha256:
        raise CheckpointError(f"{path} was changed: its sha256 is {_digest(raw)}, what was written had {record.sha256}")
    with refusal(f"{path} is no safetensors file"):
        loaded = safetensors.torch.load(raw)
        # In memory of their own: what is loaded are views of the buffers that the file was read into.
        return {name: loaded[name].clone() for name in sorted(loaded)}
