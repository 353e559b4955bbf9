"""A model on disk: a folder with `weights.safetensors` and `model.json`.

The JSON names the host, and for every slot what passes there and the state of its seed, so that a fresh process can
build every module again. The weights file holds tensors and nothing else: reading it executes nothing. Alpha is no
tensor of its own, it follows from the state.

Writing and proving the files is `leyline.stored`'s: a crash leaves the old checkpoint or the new one.
Reading: `read` proves the files, `restore` proves that they fit a body, and only then is anything changed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from esper.kasmina.body import Body, SegmentedBody
from esper.kasmina.host import Host
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.saved import DTYPES, SavedHost, SavedModel, SavedSlot, check_model, check_state
from esper.kasmina.slot import Isolation, SeedSlot
from esper.leyline import CheckpointError, GateRefusedError, SlotSpec
from esper.leyline.records import decode, encode
from esper.leyline.stored import StoredFormat, read_stored, refusal, write_stored

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
        with refusal(f"{self.folder}: {host.kind} of {host.config}"), torch.random.fork_rng(devices=[]):
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
    with refusal("the model cannot be stored so that it could be loaded again"):
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
    with refusal(where):
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
        with refusal(f"{where}: slot {entry.state.slot_id!r}"):
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
