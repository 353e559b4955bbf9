"""A model on disk: a folder with `weights.safetensors` and `model.json`.

The JSON names the host, and for every slot what passes there and the state of its seed, so that a fresh process can
build every module again. The weights file holds tensors and nothing else: reading it executes nothing. Alpha is no
tensor of its own, it follows from the state.

Writing: both files are complete in a temporary folder beside the target before that is renamed into its place.
Reading: `read` proves the files, `restore` proves that they fit a body, and only then is anything changed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from esper.kasmina.body import Body, SegmentedBody
from esper.kasmina.host import Host
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.saved import DTYPES, SavedHost, SavedModel, SavedSlot, check_model, check_state, refusal
from esper.kasmina.slot import Isolation, SeedSlot
from esper.leyline import CheckpointError, GateRefusedError, SlotSpec
from esper.leyline.files import replace_folder, sync_to_disk
from esper.leyline.records import Json, decode, encode

FORMAT = "esper-model"
VERSION = 1
DOCUMENT = "model.json"
WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class StoredWeights:
    """The weights file as it was written."""

    size: int
    sha256: str


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
    tensors = _storable(_tensors(body.host, slots))
    if model.host.kind is not None:
        _check_one_dtype(body.host, model)

    def write(new: Path) -> None:
        with refusal("the weights cannot be stored"):
            safetensors.torch.save_file(tensors, new / WEIGHTS)
        sync_to_disk(new / WEIGHTS)
        raw = (new / WEIGHTS).read_bytes()
        content = {
            "format": FORMAT,
            "version": VERSION,
            "model": plain_model,
            "weights": StoredWeights(len(raw), _digest(raw)),
        }
        with refusal("the model cannot be stored as JSON"):
            plain = {key: encode(value) for key, value in content.items()}
            text = json.dumps(plain | {"checksum": _checksum(plain)}, indent=1, allow_nan=False)
        (new / DOCUMENT).write_text(text + "\n", encoding="utf-8")
        sync_to_disk(new / DOCUMENT)

    with refusal(str(folder)):
        replace_folder(folder.resolve(), write, (DOCUMENT, WEIGHTS))


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and no two in the same memory (tied weights are stored twice)."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name} is a {type(tensor).__name__}; a checkpoint holds tensors only")
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone() if place in seen else plain
        seen.add(place)
    return stored


def _check_one_dtype(host: nn.Module, model: SavedModel) -> None:
    """A host is rebuilt from its configuration, all of it in one dtype."""
    wanted = DTYPES[model.dtype]
    for name, tensor in host.state_dict().items():
        if tensor.is_floating_point() and tensor.dtype != wanted:
            raise CheckpointError(
                f"host.{name} is of {tensor.dtype}, other weights of {wanted}: move all of a {model.host.kind} at once"
            )


def _saved_host(body: Body) -> SavedHost:
    host, kind = body.host, type(body.host)
    known = isinstance(body, SegmentedBody) and Host.KINDS.get(kind.__name__) is kind
    config = host.config() if known and isinstance(host, Host) else None
    class_name = f"{kind.__module__}.{kind.__qualname__}"
    return SavedHost(class_name, None, None) if config is None else SavedHost(class_name, kind.__name__, dict(config))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _checksum(content: Mapping[str, Json]) -> str:
    """Over the content in a form that does not depend on its layout."""
    return _digest(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


# -- reading ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Checkpoint:
    """The contents of a checkpoint, every one of them checked. Nothing in it is executed."""
    document = _read_document(folder / DOCUMENT)
    with refusal(str(folder / DOCUMENT)):
        model: SavedModel = decode(SavedModel, document["model"], "model")
        stored: StoredWeights = decode(StoredWeights, document["weights"], "weights")
    check_model(model, str(folder / DOCUMENT))
    return Checkpoint(folder, model, _read_weights(folder / WEIGHTS, stored))


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); a checkpoint is a folder with {DOCUMENT} and {WEIGHTS}"
        ) from error


def _read_document(path: Path) -> dict[str, Json]:
    """The JSON: of this format and version, and unchanged since it was written."""
    raw = _read_file(path)
    try:
        document = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON, truncated or damaged: {error}") from error
    given = document if isinstance(document, dict) else {}
    if given.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format is {given.get('format')!r}; allowed: {FORMAT!r}")
    if given.get("version") != VERSION:
        raise CheckpointError(f"{path}: version is {given.get('version')!r}; this Esper reads version {VERSION}")
    keys = {"format", "version", "model", "weights", "checksum"}
    if set(given) != keys:
        raise CheckpointError(f"{path} has keys {sorted(given)}; allowed: {sorted(keys)}")
    with refusal(str(path)):
        found = _checksum({key: value for key, value in given.items() if key != "checksum"})
    if given["checksum"] != found:
        raise CheckpointError(f"{path} was changed: it states checksum {given['checksum']!r}, its content has {found}")
    return given


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is no JSON value")


def _read_weights(path: Path, stored: StoredWeights) -> dict[str, Tensor]:
    raw = _read_file(path)
    if len(raw) != stored.size:
        raise CheckpointError(f"{path} is truncated or was replaced: {len(raw)} bytes, {stored.size} were written")
    if _digest(raw) != stored.sha256:
        raise CheckpointError(f"{path} was changed: its sha256 is {_digest(raw)}, what was written had {stored.sha256}")
    with refusal(f"{path} is no safetensors file"):
        tensors: dict[str, Tensor] = safetensors.torch.load(raw)
    return tensors


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
        raise CheckpointError(f"{where}: {WEIGHTS} lacks {missing}, and holds {extra} for which there is no place")
    for name, target in targets.items():
        found, wanted = (f"{tuple(t.shape)} of {t.dtype}" for t in (given[name], target))
        if found != wanted:
            raise CheckpointError(f"{where}: {name} is {found}; the model needs {wanted}")
