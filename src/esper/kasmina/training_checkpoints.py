"""Checkpoints of a training loop of one's own: everything that it needs to go on as if nothing had happened.

    runs/mine/step-00042/model/      the model with its seeds: `MorphogeneticModel.load` reads it alone, too
    runs/mine/step-00042/training/   optimiser, schedulers and others; random streams; the machine

A step's folder is there as a whole or not at all, so model and optimiser are always of one moment; the last few are
kept.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from esper.kasmina import checkpoint
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.random_state import RandomState
from esper.leyline import CheckpointError
from esper.leyline.numbers import require_whole
from esper.leyline.records import Json, decode, encode
from esper.storage.files import folder_lock, replace_folder, storage_errors
from esper.storage.series import KEEP, Series
from esper.storage.stored import Machine, StoredFormat, checkpoint_errors, read_stored, write_stored

State = Any  # nested dicts, lists and tuples of tensors, numbers, words and None


def split_state(state: State, name: str, tensors: dict[str, Tensor]) -> Json:
    """The JSON of a state; its tensors are added to `tensors`, under names that begin with `name`."""
    if isinstance(state, Tensor):
        if name in tensors:  # keys may hold a slash
            name = f"{name}#{len(tensors)}"
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, dict):
        kind = "counter" if isinstance(state, Counter) else "dict"
        return {kind: [[_key(key, name), split_state(value, f"{name}/{key}", tensors)] for key, value in state.items()]}
    if isinstance(state, list | tuple):
        items = [split_state(value, f"{name}/{index}", tensors) for index, value in enumerate(state)]
        return items if isinstance(state, list) else {"tuple": items}
    if isinstance(state, float) and not math.isfinite(state):
        return {"float": str(state)}
    if state is None or type(state) in (bool, int, float, str):
        return state
    raise CheckpointError(
        f"{name} is a {type(state).__name__}; a checkpoint holds tensors, numbers, words, None, and lists, tuples and "
        "dicts of them"
    )


def _key(key: object, name: str) -> int | str:
    if type(key) in (int, str):
        return key  # type: ignore[return-value]  # it is
    raise CheckpointError(f"{name} has the key {key!r}; those of a state are numbers or words")


def join_state(plain: Json, tensors: dict[str, Tensor]) -> State:
    """The state of this JSON."""
    if isinstance(plain, list):
        return [join_state(value, tensors) for value in plain]
    if not isinstance(plain, dict):
        return plain
    [(kind, value)] = plain.items()
    made: dict[str, Callable[[], State]] = {
        "tensor": lambda: tensors[value],
        "tuple": lambda: tuple(join_state(each, tensors) for each in value),
        "dict": lambda: {key: join_state(each, tensors) for key, each in value},
        "counter": lambda: Counter({key: join_state(each, tensors) for key, each in value}),
        "float": lambda: float(value),
    }
    return made[kind]()


TRAINING = StoredFormat("esper-training", 1, "training.json", "training.safetensors")
FOLDERS = ("model", "training")


class Stateful(Protocol):
    """What can be kept beside a model: optimisers, schedulers, scalers, loaders, objects of one's own."""

    def state_dict(self) -> dict[str, Any]: ...  # Any: numbers, tensors … by name

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...  # Any: most return None


Parts = Mapping[str, Stateful | torch.Generator]


@dataclass(frozen=True)
class SavedTraining:
    """What the JSON tells beside the states."""

    step: int
    machine: Machine


class _Found(NamedTuple):
    model: checkpoint.Checkpoint
    saved: SavedTraining
    random: RandomState
    parts: dict[str, State]


class _Hold:
    """A folder that this process alone saves in, until the last object that has the hold is gone."""

    def __init__(self, folder: Path) -> None:
        taken = ExitStack()
        taken.enter_context(folder_lock(folder))
        finalize(self, taken.close)


_HOLDS: WeakValueDictionary[tuple[int, Path], _Hold] = WeakValueDictionary()
"""By process, for a fork has its parent's, and by folder: two objects of one process, as in a notebook, share it."""


def _hold(folder: Path) -> _Hold:
    held = _HOLDS.get((os.getpid(), folder)) or _Hold(folder)
    return _HOLDS.setdefault((os.getpid(), folder), held)


class TrainingCheckpoints:
    """The checkpoints of one training loop, in a folder of their own.

    `load` at the start, which tells how many steps are done (0 in an empty folder), `save` after every step, epoch, or
    whatever is counted. The same loop then begins and goes on. From the first `save` on the folder belongs to this
    process: in another one `save` is refused.
    """

    def __init__(self, folder: str | Path, *, keep: int = KEEP) -> None:
        self.series = Series(Path(folder).resolve(), "step", keep)
        self._held: _Hold | None = None

    def save(self, step: int, model: MorphogeneticModel, parts: Parts) -> None:
        """Write a checkpoint after so many steps; older ones than the last few are removed then.

        The newest may be saved again; a step below it is refused: `load` would not return it.

        `parts` are kept by name: the optimiser, and whatever else has a state (torch.Generator too). The random streams
        of torch that the model draws from are kept by themselves.
        """
        require_whole("step", step, 1, remark=": a checkpoint is of so many steps done")
        tensors: dict[str, Tensor] = {}
        random = RandomState.of(model)
        content = {
            "training": encode(SavedTraining(step, Machine.here())),
            "random": split_state({"cpu": random.cpu, "cuda": random.cuda}, "random", tensors),
            "parts": {name: split_state(_state(part), f"parts/{name}", tensors) for name, part in parts.items()},
        }

        def write(new: Path) -> None:
            model.save(new / "model")
            write_stored(new / "training", TRAINING, content, tensors)

        place = self.series.path_of(step)
        with storage_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        self._held = _hold(place.parent)
        self.series.require_newest(step)
        replace_folder(place, write, FOLDERS)
        self.series.prune()

    def load(self, model: MorphogeneticModel, parts: Parts) -> int:
        """Make model, parts and random streams what they were at the newest good checkpoint, and tell its step.

        0 where there is none, and all is left as it is. Build model and parts as for a new run. A damaged checkpoint is
        told as a warning and set aside; where all are damaged, CheckpointError.
        """
        found = self.series.read_newest(_read)
        if found is None:
            return 0
        if set(found.parts) != set(parts):
            raise CheckpointError(
                f"{self.series.folder} was saved with parts {sorted(found.parts)}, given are {sorted(parts)}: "
                "hand in the same"
            )
        found.saved.machine.warn_of_differences()
        model.restore(found.model)
        for name, part in parts.items():
            with checkpoint_errors(f"{self.series.folder}: {name}"):
                _restore(part, found.parts[name])
        found.random.restore()
        return found.saved.step


def _read(step: int, place: Path) -> _Found:
    """All of a checkpoint, proven whole."""
    model = checkpoint.read(place / "model")
    content, tensors = read_stored(place / "training", TRAINING)
    with checkpoint_errors(str(place)):
        saved: SavedTraining = decode(SavedTraining, content["training"], "training")
        if saved.step != step:
            raise CheckpointError(f"{place} holds the checkpoint of step {saved.step}: it was copied or renamed")
        random = RandomState(**join_state(content["random"], tensors))
        return _Found(
            model, saved, random, {name: join_state(each, tensors) for name, each in content["parts"].items()}
        )


def _state(part: Stateful | torch.Generator) -> State:
    return {"generator": part.get_state()} if isinstance(part, torch.Generator) else part.state_dict()


def _restore(part: Stateful | torch.Generator, state: State) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(state["generator"])
    else:
        part.load_state_dict(state)
