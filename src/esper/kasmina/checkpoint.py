"""A model on disk: a folder with `weights.safetensors` and `model.json`.

The JSON names the host, and for every slot what passes there and the state of its seed, so that a fresh process can
build every module again. The weights file holds tensors and nothing else: reading it executes nothing. Alpha is no
tensor of its own, it follows from the state.

Writing and proving the files is `leyline.stored`'s: a crash leaves the old checkpoint or the new one.
Reading: `read` proves the files, `restore` proves that they fit a body, and only then is anything changed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.body import Body, SegmentedBody
from esper.kasmina.hosts import Host
from esper.kasmina.lifecycle import MEASUREMENTS_KEPT, LifecycleConfig, SeedState
from esper.kasmina.slot import Isolation, SeedSlot
from esper.leyline import (
    ACTIVE_STAGES,
    BLEND_STYLES,
    LIVE_STAGES,
    CheckpointError,
    GateRefusedError,
    SeedStage,
    SlotSpec,
    UnknownNameError,
)
from esper.leyline.records import Json, decode, encode
from esper.storage.stored import StoredFormat, checkpoint_errors, read_stored, write_stored

DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class SavedHost:
    """Which host it is, and how to build it where that is possible from its configuration alone."""

    class_name: str
    kind: str | None
    """Name in `Host.KINDS`, or None for a host that only its user can build."""
    config: dict[str, Json] | None


@dataclass(frozen=True)
class SavedSlot:
    """One slot: what passes there (None while an attached host has not run yet), and its seed."""

    spec: SlotSpec | None
    state: SeedState


@dataclass(frozen=True)
class SavedModel:
    """Everything but the tensors. The fields are the keys of the JSON."""

    host: SavedHost
    dtype: str
    isolation: Isolation
    config: LifecycleConfig
    budget: int | None
    rng_seed: int
    slots: tuple[SavedSlot, ...]
    frozen: tuple[str, ...]
    """Parameters that do not train."""

    @property
    def slot_ids(self) -> tuple[str, ...]:
        """Ids in the host's order."""
        return tuple(saved.state.slot_id for saved in self.slots)


def check_model(model: SavedModel, where: str) -> None:
    """What the types do not tell."""
    with checkpoint_errors(where):
        if model.dtype not in DTYPES:
            raise UnknownNameError("dtype", model.dtype, DTYPES)
        if model.host.kind is not None and model.host.kind not in Host.KINDS:
            raise UnknownNameError("host kind", model.host.kind, Host.KINDS)
    if (model.host.kind is None) != (model.host.config is None):
        raise CheckpointError(
            f"{where}: host kind {model.host.kind!r} with config {model.host.config}; both or neither"
        )
    if len(set(model.slot_ids)) != len(model.slots):
        raise CheckpointError(f"{where}: slot ids must be unique, got {list(model.slot_ids)}")
    for saved in model.slots:
        check_state(saved.spec, saved.state, f"{where}: slot {saved.state.slot_id!r}")


def check_state(spec: SlotSpec | None, state: SeedState, where: str) -> None:
    """That the verbs of the lifecycle can have led to this state, and that its seed can be built."""
    for problem, holds in _life_conditions(state).items():
        if not holds:
            raise CheckpointError(f"{where}: {problem}")
    if spec is not None and spec.slot_id != state.slot_id:
        raise CheckpointError(f"{where}: its spec is that of slot {spec.slot_id!r}")
    if state.blueprint is not None:
        if spec is None:
            raise CheckpointError(f"{where}: a {state.blueprint!r} seed where nothing is known of what passes")
        with checkpoint_errors(where):
            misfit = BlueprintRegistry.spec(spec.topology, state.blueprint).misfit(spec.width, spec.resolution)
        if misfit is not None:
            raise CheckpointError(f"{where}: blueprint {state.blueprint!r} does not fit: {misfit}")


def _life_conditions(state: SeedState) -> dict[str, bool]:
    """What is wrong with a state, unless true."""
    stage, ramp = state.stage, state.controller
    live, blends = stage in LIVE_STAGES, stage is SeedStage.BLENDING
    # PRUNED lasts from the full timer of at least 3, RESETTING is its last tick.
    rest = {SeedStage.PRUNED: (3, math.inf), SeedStage.EMBARGOED: (2, math.inf), SeedStage.RESETTING: (1, 1)}
    least, most = rest.get(stage, (0, 0))
    goal = 0.0 if state.pruning or stage not in ACTIVE_STAGES else state.alpha_target
    low, high = sorted((ramp.start, ramp.target))
    counters = (state.tempo, state.steps_in_stage, state.age, state.germinations)
    return {
        f"blueprint {state.blueprint!r} in {stage.name}; just the live stages have one": live == bool(state.blueprint),
        f"style {state.style!r} is none of {BLEND_STYLES}": state.style in BLEND_STYLES,
        f"tempo, steps, age and germinations {counters} must be 0 or more": min(counters) >= 0,
        f"{state.germinations} germinations, but a seed in {stage.name}": state.germinations > 0 or not live,
        f"cooldown {state.cooldown} in {stage.name}; allowed: {least} to {most}": least <= state.cooldown <= most,
        f"alpha_target {state.alpha_target} is not in (0, 1]": 0.0 < state.alpha_target <= 1.0,
        f"alpha goes to {ramp.target} in {stage.name}; it must go to {goal}": ramp.target == goal,
        f"alpha {ramp.alpha} is not between {ramp.start} and {ramp.target}": low <= ramp.alpha <= high,
        f"alpha {ramp.alpha} holds beside its target {ramp.target}": state.ramping or ramp.alpha == ramp.target,
        f"a ramp in {stage.name}; only BLENDING seeds have one": blends or not (state.ramping or state.pruning),
        f"more than {MEASUREMENTS_KEPT} measurements": max(len(state.auditions), len(state.contributions))
        <= MEASUREMENTS_KEPT,
    }


MODEL = StoredFormat("esper-model", 1, "model.json", "weights.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint, proven whole and consistent in themselves."""

    folder: Path
    model: SavedModel
    tensors: Mapping[str, Tensor]

    def build_host(self) -> Host:
        """The host anew, its weights not yet restored; for hosts that a configuration can rebuild."""
        host, slot_ids = self.model.host, self.model.slot_ids
        if host.kind is None:
            raise CheckpointError(
                f"{self.folder}: its host {host.class_name} is none that a checkpoint can rebuild "
                f"({', '.join(Host.KINDS)}). Build a model around the host, with slots {list(slot_ids)}, "
                "and hand it in: load(folder, model)"
            )
        # Unknown arguments are a TypeError, values out of range a ValueError or torch's RuntimeError.
        with checkpoint_errors(f"{self.folder}: {host.kind} of {host.config}"), torch.random.fork_rng(devices=[]):
            built = Host.KINDS[host.kind](**host.config or {}).to(DTYPES[self.model.dtype])
            for slot_id in slot_ids:
                built.slot_index(slot_id)
        return built


# -- writing ----------------------------------------------------------------------------------------------------------


def save(
    folder: Path, body: Body, *, isolation: Isolation, config: LifecycleConfig, budget: int | None, rng_seed: int
) -> None:
    """Write a checkpoint. One that is there already is replaced as a whole, when the new one is complete."""
    slots = dict(body.slot_items())
    model = SavedModel(
        host=_saved_host(body),
        dtype=str(_like(body.host).dtype).removeprefix("torch."),
        isolation=isolation,
        config=config,
        budget=budget,
        rng_seed=rng_seed,
        slots=tuple(SavedSlot(_spec(slot), slot.state) for slot in slots.values()),
        frozen=tuple(name for name, p in _parameters(body.host, slots).items() if not p.requires_grad),
    )
    # Nothing is written that `read` and `restore` would refuse.
    with checkpoint_errors("the model cannot be stored so that it could be loaded again"):
        plain_model = encode(model)
        check_model(decode(SavedModel, json.loads(json.dumps(plain_model, allow_nan=False)), "model"), "the model")
    if model.host.kind is not None:
        _check_one_dtype(body.host, model)
    write_stored(folder, MODEL, {"model": plain_model}, _tensors(body.host, slots))


def _check_one_dtype(host: nn.Module, model: SavedModel) -> None:
    """A host is rebuilt from its configuration, all of it in one dtype."""
    wanted = DTYPES[model.dtype]
    for name, tensor in host.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != wanted:
            raise CheckpointError(
                f"host.{name} is of {tensor.dtype}, other weights of {wanted}: move all of a {model.host.kind} at once"
            )


def _saved_host(body: Body) -> SavedHost:
    host, kind = body.host, type(body.host)
    known = isinstance(body, SegmentedBody) and Host.KINDS.get(kind.__name__) is kind
    config = host.config() if known and isinstance(host, Host) else None
    class_name = f"{kind.__module__}.{kind.__qualname__}"
    return SavedHost(class_name, None, None) if config is None else SavedHost(class_name, kind.__name__, dict(config))


# -- reading ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Checkpoint:
    """The contents of a checkpoint, every one of them checked. Nothing in it is executed."""
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
    """Make `body` what was saved. Where it does not fit, CheckpointError, and nothing has changed."""
    saved, where = checkpoint.model, str(checkpoint.folder)
    slots = dict(body.slot_items())
    _check_place(saved, body, slots, where)
    planted = {entry.state.slot_id: _plant(entry, body, where) for entry in saved.slots}
    targets, parameters = _tensors(body.host, planted), _parameters(body.host, planted)
    _check_tensors(checkpoint.tensors, targets, where)
    if unknown := sorted(set(saved.frozen) - set(parameters)):
        raise CheckpointError(f"{where}: frozen parameters {unknown} do not exist; allowed: {sorted(parameters)}")

    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(checkpoint.tensors[name])
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in saved.frozen)
    for entry in saved.slots:
        slot, source = slots[entry.state.slot_id], planted[entry.state.slot_id]
        if entry.spec is not None and _spec(slot) is None:
            slot.learn(entry.spec)
        slot.seed, slot.gate, slot.isolation = source.seed, source.gate, saved.isolation
        slot.settle(entry.state)
        slot.train(body.training)


def _check_place(saved: SavedModel, body: Body, slots: Mapping[str, SeedSlot], where: str) -> None:
    """The same host, as far as its configuration tells, and the same slots."""
    given = _saved_host(body)
    if saved.host.kind is not None and (saved.host.kind, saved.host.config) != (given.kind, given.config):
        raise CheckpointError(
            f"{where} holds a {saved.host.kind} of {saved.host.config}, "
            f"the model handed in a {given.class_name} of {given.config}"
        )
    if list(slots) != list(saved.slot_ids):
        raise CheckpointError(f"{where} has slots {list(saved.slot_ids)}, the model handed in {list(slots)}")
    for entry in saved.slots:
        place, given_spec = f"{where}: slot {entry.state.slot_id!r}", _spec(slots[entry.state.slot_id])
        if entry.spec is None or given_spec is None:
            continue
        wanted, found = (f"{spec.topology} of width {spec.width}" for spec in (entry.spec, given_spec))
        if wanted != found:
            raise CheckpointError(f"{place} is for {wanted}, in the model handed in for {found}")
        check_state(given_spec, entry.state, place)


def _plant(entry: SavedSlot, body: Body, where: str) -> SeedSlot:
    """The slot anew, with its seed, beside the body."""
    slot = SeedSlot(entry.spec or entry.state.slot_id)
    if entry.state.blueprint is not None:
        with checkpoint_errors(f"{where}: slot {entry.state.slot_id!r}"):
            slot.plant(entry.state, 0, like=body.like(entry.state.slot_id))
    return slot


def _spec(slot: SeedSlot) -> SlotSpec | None:
    """What passes a slot, or None while that is not known."""
    try:
        return slot.spec
    except GateRefusedError:
        return None


def _like(host: nn.Module) -> Tensor:
    """The tensor whose device and dtype seeds take."""
    return next(host.parameters(), torch.empty(()))


def _tensors(host: nn.Module, slots: Mapping[str, SeedSlot]) -> dict[str, Tensor]:
    """All that is stored, by name, in the memory of the modules."""
    named: dict[str, Tensor] = {f"host.{name}": tensor for name, tensor in host.state_dict().items()}
    for slot_id, slot in slots.items():
        named |= {_name(slot_id, name): tensor for name, tensor in slot.state_dict().items() if name != "alpha"}
    return named


def _parameters(host: nn.Module, slots: Mapping[str, SeedSlot]) -> dict[str, nn.Parameter]:
    """The parameters among them."""
    named = {f"host.{name}": parameter for name, parameter in host.named_parameters()}
    for slot_id, slot in slots.items():
        named |= {_name(slot_id, name): parameter for name, parameter in slot.named_parameters()}
    return named


def _name(slot_id: str, name: str) -> str:
    """Ids of attached slots contain dots, which would make this ambiguous."""
    return f"slots.{slot_id.replace('.', '/')}.{name}"


def _check_tensors(given: Mapping[str, Tensor], targets: Mapping[str, Tensor], where: str) -> None:
    """The same names, shapes and dtypes."""
    missing, extra = sorted(set(targets) - set(given)), sorted(set(given) - set(targets))
    if missing or extra:
        raise CheckpointError(
            f"{where}: {MODEL.weights} lacks {missing}, and holds {extra} for which there is no place"
        )
    for name, target in targets.items():
        found, wanted = (f"{tuple(t.shape)} of {t.dtype}" for t in (given[name], target))
        if found != wanted:
            raise CheckpointError(f"{where}: {name} is {found}; the model needs {wanted}")
