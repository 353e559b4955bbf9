"""Checkpoints of a user's training loop: everything that it needs to resume exactly.

    runs/mine/step-00042/model/      the model with its seeds; `MorphogeneticModel.load` reads it too
    runs/mine/step-00042/training/   optimiser, schedulers and others; random streams; the machine

A step's folder is complete or absent, so model and optimiser always match. The last few folders are kept.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from esper.kasmina import checkpoint
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import RandomState
from esper.leyline import CheckpointError
from esper.leyline.numbers import require_whole
from esper.leyline.records import Json, decode, encode
from esper.storage.files import folder_lock, replace_folder, storage_errors
from esper.storage.series import KEEP, Series
from esper.storage.stored import Machine, StoredFormat, checkpoint_errors, read_stored, write_stored

State = Any  # nested dicts, lists and tuples of tensors, numbers, strings and None


def split_state(state: State, name: str, tensors: dict[str, Tensor]) -> Json:
    """Encode a state as JSON. Its tensors go into `tensors`, under names that begin with `name`."""
    if isinstance(state, Tensor):
        name = f"{name}#{len(tensors)}" if name in tensors else name  # keys may contain a slash
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, dict):
        if wrong := [key for key in state if type(key) not in (int, str)]:
            raise CheckpointError(f"{name} has the key {wrong[0]!r}; keys of a state must be integers or strings")
        kind = "counter" if isinstance(state, Counter) else "dict"
        return {kind: [[key, split_state(value, f"{name}/{key}", tensors)] for key, value in state.items()]}
    if isinstance(state, list | tuple):
        items = [split_state(value, f"{name}/{index}", tensors) for index, value in enumerate(state)]
        return items if isinstance(state, list) else {"tuple": items}
    if isinstance(state, float) and not math.isfinite(state):
        return {"float": str(state)}
    if state is None or type(state) in (bool, int, float, str):
        return state
    allowed = "tensors, numbers, strings, None, and lists, tuples and dicts of them"
    raise CheckpointError(f"{name} is a {type(state).__name__}; a checkpoint holds {allowed}")


def join_state(encoded: Json, tensors: dict[str, Tensor]) -> State:
    """Decode what `split_state` returned."""
    if isinstance(encoded, list):
        return [join_state(value, tensors) for value in encoded]
    if not isinstance(encoded, dict):
        return encoded
    [(kind, value)] = encoded.items()
    if kind in ("dict", "counter"):
        items = {key: join_state(each, tensors) for key, each in value}
        return Counter(items) if kind == "counter" else items
    if kind == "tuple":
        return tuple(join_state(value, tensors))
    return float(value) if kind == "float" else tensors[value]


TRAINING = StoredFormat("esper-training", 1, "training.json", "training.safetensors")


class Stateful(Protocol):
    """What can be stored with a model: optimisers, schedulers, scalers, loaders, your own objects."""

    def state_dict(self) -> dict[str, Any]: ...  # Any: numbers, tensors, … by name

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...  # Any: most return None


Parts = Mapping[str, Stateful | torch.Generator]


@dataclass(frozen=True)
class SavedTraining:
    """What the JSON holds besides the states."""

    step: int
    machine: Machine


class _Lock:
    """Makes this process the only one that saves in a folder, until the last object with the lock is gone."""

    def __init__(self, folder: Path) -> None:
        stack = ExitStack()
        stack.enter_context(folder_lock(folder))
        finalize(self, stack.close)


# By process, because a fork inherits its parent's, and by folder: objects of one process share a lock.
_LOCKS: WeakValueDictionary[tuple[int, Path], _Lock] = WeakValueDictionary()


class TrainingCheckpoints:
    """The checkpoints of one training loop, in a folder of their own.

    Call `load` at the start: it returns the number of completed steps, 0 in an empty folder. Call `save` after every
    step or epoch. The same loop then starts and resumes. From the first `save`, other processes may not save there.
    """

    def __init__(self, folder: str | Path, *, keep: int = KEEP) -> None:
        self.series = Series(Path(folder).resolve(), "step", keep)
        self._lock: _Lock | None = None

    def save(self, step: int, model: MorphogeneticModel, parts: Parts) -> None:
        """Write a checkpoint after `step` steps, and remove all but the last few.

        The newest may be saved again. A lower step is refused, because `load` would not return it. `parts` are the
        optimiser and whatever else has a state, also torch.Generator. Torch's own random streams are always stored.
        """
        require_whole("step", step, 1, remark=": it is the number of completed steps")
        tensors: dict[str, Tensor] = {}
        random = RandomState.of(model)
        states = {
            name: {"generator": part.get_state()} if isinstance(part, torch.Generator) else part.state_dict()
            for name, part in parts.items()
        }
        content = {
            "training": encode(SavedTraining(step, Machine.here())),
            "random": split_state({"cpu": random.cpu, "cuda": random.cuda}, "random", tensors),
            "parts": {name: split_state(state, f"parts/{name}", tensors) for name, state in states.items()},
        }

        def write(new: Path) -> None:
            model.save(new / "model")
            write_stored(new / "training", TRAINING, content, tensors)

        path, key = self.series.path_of(step), (os.getpid(), self.series.folder)
        with storage_errors(path):
            self.series.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _LOCKS.get(key) or _Lock(self.series.folder)
        _LOCKS[key] = self._lock
        self.series.require_newest(step)
        replace_folder(path, write, ("model", "training"))
        self.series.prune()

    def load(self, model: MorphogeneticModel, parts: Parts) -> int:
        """Restore model, parts and random streams from the newest good checkpoint, and return its step.

        Returns 0, with nothing changed, if there is none. Build model and parts as for a new run. A damaged checkpoint
        is set aside with a warning. Raises CheckpointError if all are damaged.
        """
        stored = self.series.read_newest(_read)
        if stored is None:
            return 0
        saved_model, saved, random, states = stored
        if set(states) != set(parts):
            raise CheckpointError(f"{self.series.folder} has parts {sorted(states)}, not {sorted(parts)}; pass those")
        saved.machine.warn_of_differences()
        model.restore(saved_model)
        for name, part in parts.items():
            with checkpoint_errors(f"{self.series.folder}: {name}"):
                if isinstance(part, torch.Generator):
                    part.set_state(states[name]["generator"])
                else:
                    part.load_state_dict(states[name])
        random.restore()
        return saved.step


def _read(step: int, path: Path) -> tuple[checkpoint.Checkpoint, SavedTraining, RandomState, dict[str, State]]:
    model = checkpoint.read(path / "model")
    content, tensors = read_stored(path / "training", TRAINING)
    with checkpoint_errors(str(path)):
        saved: SavedTraining = decode(SavedTraining, content["training"], "training")
        if saved.step != step:
            raise CheckpointError(f"{path} holds the checkpoint of step {saved.step}: it was copied or renamed")
        random = RandomState(**join_state(content["random"], tensors))
        states = {name: join_state(each, tensors) for name, each in content["parts"].items()}
    return model, saved, random, states
