"""A model on disk: a folder with `weights.safetensors` and `model.json`.

The JSON names the host, and for every slot what passes there and the state of its seed, so that a fresh process can
build every module again. The weights file holds tensors and nothing else: reading it executes nothing. Alpha is no
tensor of its own, it follows from the state.

Writing: both files are complete in a temporary folder beside the target before that is renamed into its place.
Reading: `read` proves the files, `restore` proves that they fit a body, and only then is anything changed.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.body import Body, SegmentedBody
from esper.kasmina.host import Host
from esper.kasmina.lifecycle import MEASUREMENTS_KEPT, LifecycleConfig, SeedState
from esper.kasmina.slot import Isolation, SeedSlot
from esper.leyline import (
    ACTIVE_STAGES,
    BLEND_STYLES,
    LIVE_STAGES,
    CheckpointError,
    EsperError,
    GateRefusedError,
    Measurement,
    SeedStage,
    SlotSpec,
    UnknownNameError,
)

FORMAT = "esper-model"
VERSION = 1
DOCUMENT = "model.json"
WEIGHTS = "weights.safetensors"
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}

Json = Any  # parsed JSON, or what will become JSON


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
        with _refusal(f"{self.folder}: {host.kind} of {host.config}"), torch.random.fork_rng(devices=[]):
            built = Host.KINDS[host.kind](**host.config or {}).to(DTYPES[self.model.dtype])
            for slot_id in slot_ids:
                built.slot_index(slot_id)
        return built


@contextmanager
def _refusal(where: str) -> Iterator[None]:
    """What goes wrong inside is the fault of what is being stored or read."""
    try:
        yield
    except CheckpointError:
        raise
    except (EsperError, SafetensorError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


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
    _check_model(model, "the model")
    tensors = _storable(_tensors(body.host, slots))

    def write(new: Path) -> None:
        with _refusal("the weights cannot be stored"):
            safetensors.torch.save_file(tensors, new / WEIGHTS)
        _sync(new / WEIGHTS)
        raw = (new / WEIGHTS).read_bytes()
        content = {
            "format": FORMAT,
            "version": VERSION,
            "model": model,
            "weights": StoredWeights(len(raw), _digest(raw)),
        }
        with _refusal("the model cannot be stored as JSON"):
            plain = {key: _encode(value) for key, value in content.items()}
            text = json.dumps(plain | {"checksum": _checksum(plain)}, indent=1, allow_nan=False)
        (new / DOCUMENT).write_text(text + "\n", encoding="utf-8")
        _sync(new / DOCUMENT)

    _publish(folder.resolve(), write)


def _publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder beside the target, then put it in the target's place."""
    if folder.exists():
        strangers = {path.name for path in folder.iterdir()} - {DOCUMENT, WEIGHTS} if folder.is_dir() else {"a file"}
        if strangers:
            raise CheckpointError(
                f"{folder} is or holds {sorted(strangers)}; a checkpoint replaces its folder: give it one of its own"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    new, old = work / "new", work / "old"
    try:
        new.mkdir()
        write(new)
        _sync(new)
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
        _sync(folder.parent)
    finally:
        if folder.exists() or not old.exists():
            shutil.rmtree(work, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have a file, or the names in a folder, reach the disk (folders where the system can be asked to)."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


# -- values to JSON and back ------------------------------------------------------------------------------------------


def _encode(value: Json) -> Json:
    """Plain JSON. It has no infinity: such floats become the strings 'inf', '-inf' and 'nan'."""
    if is_dataclass(value) and not isinstance(value, type):
        return _encode(asdict(value))
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decode(hint: Any, value: Json, where: str) -> Any:  # Any: a type, and a value of it
    """`value` as `hint` says, strictly: objects have exactly the fields of their dataclass, an int is no bool."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None else _decode(next(h for h in inner if h is not NoneType), value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if hint is Measurement and isinstance(value, list) and len(value) == 2:
        return Measurement(*(_decode(float, item, where) for item in value))
    if is_dataclass(hint) and isinstance(value, dict):
        return _decode_object(hint, value, where)
    if isinstance(value, str) and isinstance(hint, type) and issubclass(hint, Enum) and value in hint.__members__:
        return hint[value]
    if hint is float and (type(value) in (int, float) or value in ("inf", "-inf", "nan")):
        return float(value)
    if (origin is Literal and value in inner) or type(value) is (origin or hint):
        return value
    allowed = list(hint.__members__) if isinstance(hint, type) and issubclass(hint, Enum) else inner or hint.__name__
    raise CheckpointError(f"{where} is {value!r}; allowed: {allowed}")


def _decode_object(hint: Any, values: dict[str, Json], where: str) -> Any:  # Any: a dataclass, and one of it
    names, hints = {f.name for f in fields(hint)}, get_type_hints(hint)
    if set(values) != names:
        unknown, missing = sorted(set(values) - names), sorted(names - set(values))
        raise CheckpointError(f"{where} has unknown keys {unknown} and lacks {missing}; allowed: {sorted(names)}")
    decoded = {name: _decode(hints[name], values[name], f"{where}.{name}") for name in values}
    with _refusal(where):
        return hint(**decoded)


# -- reading ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Checkpoint:
    """The contents of a checkpoint, every one of them checked. Nothing in it is executed."""
    document = _read_document(folder / DOCUMENT)
    model: SavedModel = _decode(SavedModel, document["model"], f"{folder / DOCUMENT}: model")
    stored: StoredWeights = _decode(StoredWeights, document["weights"], f"{folder / DOCUMENT}: weights")
    _check_model(model, str(folder / DOCUMENT))
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
    with _refusal(str(path)):
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
    with _refusal(f"{path} is no safetensors file"):
        tensors: dict[str, Tensor] = safetensors.torch.load(raw)
    return tensors


def _check_model(model: SavedModel, where: str) -> None:
    """What the types do not tell."""
    with _refusal(where):
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
        _check_state(saved.spec, saved.state, f"{where}: slot {saved.state.slot_id!r}")


def _check_state(spec: SlotSpec | None, state: SeedState, where: str) -> None:
    """That the verbs of the lifecycle can have led to this state, and that its seed can be built."""
    for problem, holds in _life_conditions(state).items():
        if not holds:
            raise CheckpointError(f"{where}: {problem}")
    if spec is not None and spec.slot_id != state.slot_id:
        raise CheckpointError(f"{where}: its spec is that of slot {spec.slot_id!r}")
    if state.blueprint is not None:
        if spec is None:
            raise CheckpointError(f"{where}: a {state.blueprint!r} seed where nothing is known of what passes")
        with _refusal(where):
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
        _check_state(given_spec, entry.state, place)


def _plant(entry: SavedSlot, body: Body, where: str) -> SeedSlot:
    """The slot anew, with its seed, beside the body."""
    slot = SeedSlot(entry.spec or entry.state.slot_id)
    if entry.state.blueprint is not None:
        with _refusal(f"{where}: slot {entry.state.slot_id!r}"):
            slot.plant(entry.state, 0, like=_like(body.host))
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
