"""A model on disk: a folder with `weights.safetensors` and `model.json`.

The JSON names the host, and for every slot what passes there and the state of its seed, so that a new process can
rebuild every module. The weights file holds only tensors: reading it executes nothing. Alpha follows from the state.

`storage.stored` writes and verifies the files: a crash leaves the old checkpoint or the new one. `read` checks the
files, `restore` checks that they fit a body, and only then changes anything.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.hosts import Host
from esper.kasmina.lifecycle import MEASUREMENTS_KEPT, LifecycleConfig, SeedState
from esper.kasmina.slot import Body, Isolation, SeedSlot, SegmentedBody
from esper.leyline import (
    ACTIVE_STAGES,
    BLEND_STYLES,
    LIVE_STAGES,
    CheckpointError,
    SeedStage,
    SlotSpec,
)
from esper.leyline.numbers import refuse, require_known
from esper.leyline.records import Json, decode, encode
from esper.storage.stored import StoredFormat, checkpoint_errors, read_stored, write_stored

if TYPE_CHECKING:
    from esper.kasmina.model import MorphogeneticModel

DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class SavedHost:
    """The host's class, and its configuration if that is enough to rebuild it."""

    class_name: str
    kind: str | None  # in `Host.KINDS`; None if only the user can build it
    config: dict[str, Json] | None


@dataclass(frozen=True)
class SavedSlot:
    """One slot: what passes there (None until an attached host has run), and its state."""

    spec: SlotSpec | None
    state: SeedState


@dataclass(frozen=True)
class SavedModel:
    """Everything except the tensors. The fields are the keys of the JSON."""

    host: SavedHost
    dtype: str
    isolation: Isolation
    config: LifecycleConfig
    budget: int | None
    rng_seed: int
    slots: tuple[SavedSlot, ...]
    frozen: tuple[str, ...]  # names of parameters

    @property
    def slot_ids(self) -> tuple[str, ...]:
        """Ids in the host's order."""
        return tuple(saved.state.slot_id for saved in self.slots)


def check_model(model: SavedModel, where: str) -> None:
    """Check what the types do not express."""
    with checkpoint_errors(where):
        for what, name, known in (("dtype", model.dtype, DTYPES), ("host kind", model.host.kind, Host.KINDS)):
            if name is not None:
                require_known(what, name, known)
    kind, config, slot_ids = model.host.kind, model.host.config, model.slot_ids
    problems = {
        f"{where}: host kind {kind!r} with config {config}; both or neither": (kind is None) != (config is None),
        f"{where}: slot ids must be unique, got {list(slot_ids)}": len(set(slot_ids)) != len(slot_ids),
    }
    refuse(problems, CheckpointError)
    for saved in model.slots:
        check_state(saved.spec, saved.state, f"{where}: slot {saved.state.slot_id!r}")


def check_state(spec: SlotSpec | None, state: SeedState, where: str) -> None:
    """Check that the lifecycle can lead to this state, and that its seed can be built."""
    problems = {f"{where}: {problem}": not holds for problem, holds in _life_conditions(state).items()}
    refuse(problems, CheckpointError)
    if spec is not None and spec.slot_id != state.slot_id:
        raise CheckpointError(f"{where}: its spec is that of slot {spec.slot_id!r}")
    if state.blueprint is not None:
        if spec is None:
            raise CheckpointError(f"{where}: a {state.blueprint!r} seed, but what passes the slot is not known")
        with checkpoint_errors(where):
            misfit = BlueprintRegistry.spec(spec.topology, state.blueprint).misfit_in(spec)
        if misfit is not None:
            raise CheckpointError(f"{where}: blueprint {state.blueprint!r} does not fit: {misfit}")


def _life_conditions(state: SeedState) -> dict[str, bool]:
    """Messages about a state, each with the condition under which it is fine."""
    stage, ramp = state.stage, state.controller
    live, blends = stage in LIVE_STAGES, stage is SeedStage.BLENDING
    # PRUNED lasts from the full timer of at least 3, RESETTING is its last tick.
    rest = {SeedStage.PRUNED: (3, math.inf), SeedStage.EMBARGOED: (2, math.inf), SeedStage.RESETTING: (1, 1)}
    least, most = rest.get(stage, (0, 0))
    goal = 0.0 if state.pruning or stage not in ACTIVE_STAGES else state.alpha_target
    low, high = sorted((ramp.start, ramp.target))
    counters = (state.tempo, state.steps_in_stage, state.age, state.germinations)
    return {
        f"blueprint {state.blueprint!r} in {stage.name}; only live stages have one": live == bool(state.blueprint),
        f"style {state.style!r} is none of {BLEND_STYLES}": state.style in BLEND_STYLES,
        f"tempo, steps, age and germinations {counters} must be 0 or more": min(counters) >= 0,
        f"{state.germinations} germinations, but a seed in {stage.name}": state.germinations > 0 or not live,
        f"cooldown {state.cooldown} in {stage.name}; allowed: {least} to {most}": least <= state.cooldown <= most,
        f"alpha_target {state.alpha_target} is not in (0, 1]": 0.0 < state.alpha_target <= 1.0,
        f"alpha goes to {ramp.target} in {stage.name}; it must go to {goal}": ramp.target == goal,
        f"alpha {ramp.alpha} is not between {ramp.start} and {ramp.target}": low <= ramp.alpha <= high,
        f"alpha {ramp.alpha} holds away from its target {ramp.target}": state.ramping or ramp.alpha == ramp.target,
        f"a ramp in {stage.name}; only BLENDING seeds have one": blends or not (state.ramping or state.pruning),
        f"more than {MEASUREMENTS_KEPT} measurements": max(len(state.auditions), len(state.contributions))
        <= MEASUREMENTS_KEPT,
    }


MODEL = StoredFormat("esper-model", 1, "model.json", "weights.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint, complete and consistent."""

    folder: Path
    model: SavedModel
    tensors: Mapping[str, Tensor]

    def build_host(self) -> Host:
        """A new host from the stored configuration, without its weights."""
        host, slot_ids = self.model.host, self.model.slot_ids
        if host.kind is None:
            raise CheckpointError(
                f"{self.folder}: a checkpoint cannot rebuild its host {host.class_name} "
                f"(only {', '.join(Host.KINDS)}). Build a model around the host, with slots {list(slot_ids)}, "
                "and call load(folder, model)"
            )
        kind, config = Host.KINDS[host.kind], host.config or {}
        with checkpoint_errors(f"{self.folder}: {host.kind} of {host.config}"), torch.random.fork_rng(devices=[]):
            with torch.device("meta"):  # a forged size costs no memory here
                weights = kind(**config).to(DTYPES[self.model.dtype]).state_dict()
            sketch = {f"host.{name}": tensor for name, tensor in weights.items()}
            stored = {name: tensor for name, tensor in self.tensors.items() if name in sketch}
            _check_tensors(stored, sketch, str(self.folder))
            built = kind(**config).to(DTYPES[self.model.dtype])
            for slot_id in slot_ids:
                built.slot_index(slot_id)
        return built


# -- writing ----------------------------------------------------------------------------------------------------------


def save(folder: Path, grown: "MorphogeneticModel") -> None:
    """Write a checkpoint. An existing one is replaced as a whole once the new one is complete."""
    body = grown.body
    model = SavedModel(
        host=_saved_host(body),
        dtype=str(next(body.host.parameters(), torch.empty(())).dtype).removeprefix("torch."),
        isolation=grown.isolation,
        config=grown.config,
        budget=grown.budget,
        rng_seed=grown.rng_seed,
        slots=tuple(SavedSlot(slot.known_spec, slot.state) for _, slot in body.slot_items()),
        frozen=tuple(name for name, parameter in body.named_parameters() if not parameter.requires_grad),
    )
    # Nothing is written that `read` and `restore` would refuse.
    with checkpoint_errors("the model could not be loaded again"):
        encoded = encode(model)
        check_model(decode(SavedModel, json.loads(json.dumps(encoded, allow_nan=False)), "model"), "the model")
    wanted = DTYPES[model.dtype]
    for name, tensor in body.host.state_dict().items():  # a host is rebuilt in one dtype
        floating = isinstance(tensor, Tensor) and tensor.is_floating_point()
        if model.host.kind is not None and floating and tensor.dtype != wanted:
            raise CheckpointError(f"host.{name} is of {tensor.dtype}, other weights of {wanted}: move all at once")
    write_stored(folder, MODEL, {"model": encoded}, _tensors(body))


def _saved_host(body: Body) -> SavedHost:
    host, kind = body.host, type(body.host)
    known = isinstance(body, SegmentedBody) and Host.KINDS.get(kind.__name__) is kind
    config = host.config() if known and isinstance(host, Host) else None
    class_name = f"{kind.__module__}.{kind.__qualname__}"
    return SavedHost(class_name, None, None) if config is None else SavedHost(class_name, kind.__name__, dict(config))


# -- reading ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Checkpoint:
    """Read and check a checkpoint. Nothing in it is executed."""
    content, tensors = read_stored(folder, MODEL)
    where = str(folder / MODEL.document)
    if set(content) != {"model"}:
        raise CheckpointError(f"{where} holds {sorted(content)}; allowed: ['model']")
    with checkpoint_errors(where):
        model: SavedModel = decode(SavedModel, content["model"], "model")
    check_model(model, where)
    return Checkpoint(folder, model, tensors)


# -- restoring --------------------------------------------------------------------------------------------------------


def restore(checkpoint: Checkpoint, body: Body) -> None:
    """Restore `body` from a checkpoint. Raises CheckpointError, with nothing changed, if it does not fit."""
    saved, where = checkpoint.model, str(checkpoint.folder)
    slots = dict(body.slot_items())
    _check_fit(saved, body, slots, where)
    planted = {key: _plant(entry, body, where) for key, entry in zip(body.slots, saved.slots, strict=True)}
    whole = nn.ModuleDict({"host": body.host, "slots": nn.ModuleDict(planted)})
    targets, parameters = _tensors(whole), dict(whole.named_parameters())
    _check_tensors(checkpoint.tensors, targets, where)
    if unknown := sorted(set(saved.frozen) - set(parameters)):
        raise CheckpointError(f"{where}: frozen parameters {unknown} do not exist; allowed: {sorted(parameters)}")

    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(checkpoint.tensors[name])
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in saved.frozen)
    for entry, source in zip(saved.slots, planted.values(), strict=True):
        slot = slots[entry.state.slot_id]
        slot.known_spec = slot.known_spec or entry.spec
        slot.seed, slot.gate, slot.isolation = source.seed, source.gate, saved.isolation
        slot.settle(entry.state)
        slot.train(body.training)


def _check_fit(saved: SavedModel, body: Body, slots: Mapping[str, SeedSlot], where: str) -> None:
    given = _saved_host(body)
    if saved.host.kind is not None and (saved.host.kind, saved.host.config) != (given.kind, given.config):
        model = f"the given model a {given.class_name} of {given.config}"
        raise CheckpointError(f"{where} holds a {saved.host.kind} of {saved.host.config}, {model}")
    if list(slots) != list(saved.slot_ids):
        raise CheckpointError(f"{where} has slots {list(saved.slot_ids)}, the given model {list(slots)}")
    for entry in saved.slots:
        label, spec = f"{where}: slot {entry.state.slot_id!r}", slots[entry.state.slot_id].known_spec
        if entry.spec is None or spec is None:
            continue
        stored, actual = (f"{each.topology} of width {each.width}" for each in (entry.spec, spec))
        if stored != actual:
            raise CheckpointError(f"{label} is for {stored}, in the given model for {actual}")
        check_state(spec, entry.state, label)


def _plant(entry: SavedSlot, body: Body, where: str) -> SeedSlot:
    slot = SeedSlot(entry.spec or entry.state.slot_id)
    if entry.state.blueprint is not None:
        with checkpoint_errors(f"{where}: slot {entry.state.slot_id!r}"):
            slot.plant(entry.state, 0, like=body.like(entry.state.slot_id))
    return slot


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """All stored tensors by name, sharing memory with the module. Alpha follows from the state of its slot."""
    alpha = re.compile(r"slots\.[^.]+\.alpha")
    return {name: tensor for name, tensor in module.state_dict().items() if not alpha.fullmatch(name)}


def _check_tensors(given: Mapping[str, Tensor], targets: Mapping[str, Tensor], where: str) -> None:
    missing, extra = sorted(set(targets) - set(given)), sorted(set(given) - set(targets))
    if missing or extra:
        raise CheckpointError(f"{where}: {MODEL.weights} lacks {missing}, and holds {extra}, unknown to the model")
    for name, target in targets.items():
        stored, expected = (f"{tuple(t.shape)} of {t.dtype}" for t in (given[name], target))
        if stored != expected:
            raise CheckpointError(f"{where}: {name} is {stored}; the model needs {expected}")
