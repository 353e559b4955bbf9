"""Single safetensors files with a JSON header, readable without Esper.

The header is safetensors' own metadata, texts by name:

    format    the name of the format
    version   its version
    content   JSON, which says what the tensors mean
    sha256    digest of the content and of all tensors in the order of their names

Any reader of safetensors sees the tensors, and `json.loads(metadata["content"])` the rest.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from esper.leyline.errors import CheckpointError
from esper.leyline.records import Json, refuse_constant
from esper.storage.files import replace_file
from esper.storage.stored import storable

KEYS = ("format", "version", "content", "sha256")


class FileFormat(NamedTuple):
    """Name and version of a format, and what its files are called in errors."""

    name: str
    version: int
    noun: str


def write_tensor_file(path: Path, kind: FileFormat, content: Json, tensors: Mapping[str, Tensor]) -> None:
    """Write a file as a whole or not at all."""
    plain, text = storable(tensors), json.dumps(content, allow_nan=False)
    header = {"format": kind.name, "version": str(kind.version), "content": text, "sha256": _digest(text, plain)}
    replace_file(path, safetensors.torch.save(plain, header))


def read_header(path: Path, kind: FileFormat) -> Json:
    """The content of a file, without its tensors. Raises CheckpointError for anything else."""
    return json.loads(_header(path, kind)["content"], parse_constant=refuse_constant)


def read_tensor_file(path: Path, kind: FileFormat) -> tuple[Json, dict[str, Tensor]]:
    """The content and the tensors, proven to be those that were written."""
    header = _header(path, kind)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    if header["sha256"] != _digest(header["content"], tensors):
        raise CheckpointError(f"{path} was changed or damaged: its content does not have the digest that it states")
    return json.loads(header["content"], parse_constant=refuse_constant), tensors


def _header(path: Path, kind: FileFormat) -> dict[str, str]:
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is no {kind.noun}, or it is truncated ({error}); copy it again, or omit it"
        ) from error
    if header.get("format") != kind.name or set(header) != set(KEYS):
        raise CheckpointError(f"{path} is no {kind.noun}: its format is {header.get('format')!r}, not {kind.name!r}")
    if header["version"] != str(kind.version):
        raise CheckpointError(
            f"{path} has version {header['version']} of {kind.name}; this Esper reads version {kind.version}: make it "
            "again with this version"
        )
    return header


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
