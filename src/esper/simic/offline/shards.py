"""Record files: some episodes of one task as compact tensors, with their header as JSON.

Each is a tensor file (`storage/tensor_files.py`), so a reader needs safetensors alone. docs/offline.md lists its
tensors. What the actor saw and what only the critic may see are separate tensors, because the latter are filled in
after the episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline import BadValueError, CheckpointError
from esper.leyline.records import decode, encode
from esper.simic.offline.episodes import Episodes, RecordHeader
from esper.storage.files import storage_errors
from esper.storage.stored import checkpoint_errors
from esper.storage.tensor_files import FileFormat, read_header, read_tensor_file, write_tensor_file

RECORD_FILE = FileFormat("esper-records", 2, "record file")
SUFFIX = ".safetensors"
FLAGS = ("forced", "terminated", "truncated", "panics")
MEASURES = ("gain", "accuracy", "control_accuracy", "acting_parameters", "fossil_parameters")
MASK = "mask."  # prefix of the masks' names

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Content:
    """The JSON of a record file."""

    header: RecordHeader
    episodes: int
    source: str  # checksum of the training run's settings; empty for searches and evaluations


class Shard(NamedTuple):
    """A record file without its tensors."""

    path: Path
    content: Content
    size: int  # bytes


def columns(header: RecordHeader) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape per episode of each stored tensor, by name."""
    layout, table, critic = header.layout, header.table, len(header.layout.critic)
    index = torch.uint8 if max(head.size for head in table.heads) <= 256 else torch.int16
    by_step: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "observations": (torch.float32, (layout.size - critic,)),
        "critic": (torch.float32, (critic,)),
        **{f"{MASK}{head.name}": (torch.bool, table.mask_shape(head)) for head in table.heads},
        "actions": (index, (len(table),)),
        "log_probs": (torch.float32, (len(table),)),
        **dict.fromkeys(FLAGS, (torch.bool, ())),
        **dict.fromkeys(MEASURES, (torch.float32, ())),
    }
    return {
        **{name: (dtype, (header.steps, *shape)) for name, (dtype, shape) in by_step.items()},
        "host_parameters": (torch.float32, ()),
        "final_gain": (torch.float32, ()),
        "epsilon": (torch.float32, ()),
        "policy": (torch.int32, ()),
        "host_seed": (torch.int64, ()),
        "round": (torch.int32, ()),
    }


def episode_bytes(header: RecordHeader) -> int:
    """Bytes of one stored episode."""
    return sum(dtype.itemsize * prod(shape) for dtype, shape in columns(header).values())


def to_tensors(header: RecordHeader, episodes: Episodes) -> Tensors:
    """Episodes as they are stored, on the CPU. Raises BadValueError if they do not fit the header."""
    whole = episodes._asdict()
    masks: Tensors = whole.pop("masks")
    critic = len(header.layout.critic)
    if episodes.observations.shape[-1] != header.layout.size:
        raise BadValueError(
            f"observations have {episodes.observations.shape[-1]} columns; the header's layout has {header.layout.size}"
        )
    actor, critics = episodes.observations.split((header.layout.size - critic, critic), -1)
    given = whole | {"observations": actor, "critic": critics, **{MASK + name: mask for name, mask in masks.items()}}
    wanted = columns(header)
    if set(given) != set(wanted):
        raise BadValueError(f"masks for heads {sorted(masks)}; the header's table has {list(header.table.names)}")
    tensors = {name: given[name].to("cpu", dtype) for name, (dtype, _) in wanted.items()}
    if problem := _misfit(header, tensors, len(episodes.policy)):
        raise BadValueError(f"the episodes do not fit their header: {problem}")
    return tensors


def to_episodes(header: RecordHeader, tensors: Tensors) -> Episodes:
    """Stored episodes in memory: indices are long, and the critic's columns follow the actor's."""
    values = {name: tensor for name, tensor in tensors.items() if name in Episodes._fields}
    values |= {name: tensors[name].long() for name in ("actions", "policy", "round")}
    values["observations"] = _cat([tensors["observations"], tensors["critic"]], -1)
    return Episodes(masks={name: tensors[MASK + name] for name in header.table.names}, **values)


def _misfit(header: RecordHeader, tensors: Tensors, episodes: int) -> str:
    """The first thing in which tensors differ from what their header says, or an empty text."""
    wanted = columns(header)
    if set(tensors) != set(wanted):
        return f"unknown tensors {sorted(set(tensors) - set(wanted))}, missing {sorted(set(wanted) - set(tensors))}"
    for name, (dtype, shape) in wanted.items():
        own, needed = (tensors[name].dtype, tuple(tensors[name].shape)), (dtype, (episodes, *shape))
        if own != needed:
            return f"{name} is {own}, not {needed}"
    policy = tensors["policy"]
    if episodes and not 0 <= int(policy.min()) <= int(policy.max()) < len(header.policies):
        return f"policies are numbered from {int(policy.min())} to {int(policy.max())}, of {len(header.policies)}"
    return ""


def write_shard(path: Path, header: RecordHeader, tensors: Tensors, source: str = "") -> None:
    """Write a record file, whole or not at all. An existing file is not replaced."""
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise BadValueError(f"{path} exists: another process records to this folder; choose another one")
    content = Content(header, len(tensors["policy"]), source)
    write_tensor_file(path, RECORD_FILE, encode(content), tensors)


def open_shard(path: Path) -> Shard:
    """A record file without its tensors. Raises CheckpointError for a damaged or foreign one."""
    content = read_header(path, RECORD_FILE)
    with checkpoint_errors(str(path)):
        return Shard(path, decode(Content, content, "the header"), path.stat().st_size)


def read_shard(shard: Shard) -> Tensors:
    """The tensors of a record file, proven to be those that were written."""
    _, tensors = read_tensor_file(shard.path, RECORD_FILE)
    if problem := _misfit(shard.content.header, tensors, shard.content.episodes):
        raise CheckpointError(f"{shard.path} does not fit its header ({problem}); record it again, or omit it")
    return tensors


# Copies are numpy's: torch divides them among threads, and on a busy machine these wait for each other. With another
# job on one of two cores, an epoch took 30 s instead of 2.


def select(tensors: Tensors, rows: Tensor) -> Tensors:
    """Some episodes, by number."""
    index = rows.numpy()
    return {name: torch.from_numpy(tensor.numpy()[index]) for name, tensor in tensors.items()}


def join(parts: Sequence[Tensors]) -> Tensors:
    """The episodes of all parts in their order."""
    return parts[0] if len(parts) == 1 else {name: _cat([part[name] for part in parts], 0) for name in parts[0]}


def _cat(tensors: Sequence[Tensor], axis: int) -> Tensor:
    return torch.from_numpy(np.concatenate([tensor.numpy() for tensor in tensors], axis))


def record_files(folder: Path) -> list[Path]:
    """The record files of a folder, by name."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def check_folder(folder: Path) -> None:
    """Raise if a path cannot be a folder of records."""
    if folder.exists() and not folder.is_dir():
        raise BadValueError(f"--record {folder} is a file; name a folder")


def check_unused(folder: Path) -> None:
    """Raise if a folder already holds records, or is none."""
    check_folder(folder)
    if record_files(folder):
        raise BadValueError(f"--record {folder} already holds records; choose another folder")
