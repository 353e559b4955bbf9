"""Adapters on disk: what a frozen model has learned, without the model.

    adapter.safetensors    seeds, the parameters that learned with them (the head), and norm statistics if they changed
    adapter.json           where the seeds belong, digests of the base model that they were made for

Reading checks that the model is the one that the adapter was made for: its names and shapes, and its frozen weights.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from esper.grower.container import CHILD, ModelSlots, SavedSlot
from esper.grower.folding import fold_checked, refuse_unfoldable
from esper.kasmina.attach import check_model
from esper.kasmina.checkpoint import check_state
from esper.leyline import LIVE_STAGES, BadValueError, CheckpointError, HostMismatchError, StageError
from esper.leyline.records import decode, encode, refuse_constant
from esper.storage.files import existing_folder, replace_folder, sync_to_disk
from esper.storage.stored import checkpoint_errors

WEIGHTS, CONTENT = "adapter.safetensors", "adapter.json"
FORMAT, VERSION = "esper-adapter", 1
SEED, BASE = "seed", "base"  # prefixes of the tensors' names
SHOWN = 3  # names in an error
FINGERPRINT = 16  # hexadecimal digits per tensor
REMEDY = "Build the pretrained model as it was before its adaptation, with a head of the same size"


@dataclass(frozen=True)
class AdapterContent:
    """Everything but the tensors. The fields are the keys of the JSON."""

    format: str
    version: int
    host: str
    """Class of the model, for the reader"""
    statistics: str
    """Which norm statistics the model has: original or recalibrated"""
    shapes: dict[str, tuple[int, ...]]
    """Of all parameters and buffers of the base model, by name"""
    digests: dict[str, str]
    """Of the frozen parameters and of unchanged norm statistics, by name"""
    slots: tuple[SavedSlot, ...]
    sha256: str
    """Digest of the tensors of the adapter"""


def base_tensors(host: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the model by name, without Esper's own."""
    tensors = {**dict(host.named_parameters()), **dict(host.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{CHILD}.")}


# -- writing ----------------------------------------------------------------------------------------------------------


def save_adapter(slots: ModelSlots, statistics: str, folder: Path) -> None:
    """Write the seeds and all else that differs from the base model. The folder is replaced as a whole."""
    own, original = base_tensors(slots.host), slots.statistics
    parameters = dict(slots.host.named_parameters())
    changed = {
        name for name, value in original.items() if name in own and not torch.equal(own[name].cpu(), value.cpu())
    }
    learned = {name for name in own if name in parameters and parameters[name].requires_grad}
    kept = {f"{BASE}/{name}": own[name] for name in sorted(learned | changed)}
    live = slots.live()
    for slot_id, slot in live.items():
        kept |= {f"{SEED}/{slot_id}/{name}": parameter for name, parameter in slot.named_parameters()}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in kept.items()}
    same = {name for name in own if name in parameters and not parameters[name].requires_grad}
    same |= set(original) & set(own) - changed
    content = AdapterContent(
        FORMAT,
        VERSION,
        type(slots.host).__name__,
        statistics,
        {name: tuple(tensor.shape) for name, tensor in own.items()},
        {name: _digest({name: own[name]})[:FINGERPRINT] for name in sorted(same)},
        tuple(SavedSlot(slot.spec, slots.like[slot_id], slot.state) for slot_id, slot in live.items()),
        _digest(tensors),
    )

    def write(new: Path) -> None:
        save_file(tensors, new / WEIGHTS)
        (new / CONTENT).write_text(json.dumps(encode(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        for path in new.iterdir():
            sync_to_disk(path)

    replace_folder(folder.resolve(), write, (WEIGHTS, CONTENT))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


# -- reading ----------------------------------------------------------------------------------------------------------


def read_adapter(folder: Path) -> tuple[AdapterContent, dict[str, Tensor]]:
    """The content and the tensors of an adapter, checked."""
    folder = existing_folder(folder)
    if not (folder / CONTENT).is_file() or not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"{folder} holds no adapter: {CONTENT} and {WEIGHTS} are needed, as grower.save() writes them"
        )
    where = str(folder / CONTENT)
    with checkpoint_errors(where):
        text = (folder / CONTENT).read_text(encoding="utf-8")
        parsed = json.loads(text, parse_constant=refuse_constant)
        if not isinstance(parsed, dict) or parsed.get("format") != FORMAT:
            raise CheckpointError(f"{where} is no adapter of Esper")
        if parsed.get("version") != VERSION:
            raise CheckpointError(f"{where} has version {parsed.get('version')}; this version of Esper reads {VERSION}")
        shapes, digests = parsed.pop("shapes", None), parsed.pop("digests", None)
        plain: AdapterContent = decode(AdapterContent, {**parsed, "shapes": {}, "digests": {}}, where)
        content = AdapterContent(
            **{**vars(plain), "shapes": _as_shapes(shapes, where), "digests": _as_digests(digests, where)}
        )
    for entry in content.slots:
        check_state(entry.spec, entry.state, f"{where}: slot {entry.spec.slot_id!r}")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} is damaged ({error}); copy it again") from error
    if _digest(tensors) != content.sha256:
        raise CheckpointError(f"{folder / WEIGHTS} was changed or damaged: it does not have the digest in {CONTENT}")
    return content, tensors


def _as_shapes(given: object, where: str) -> dict[str, tuple[int, ...]]:
    if not isinstance(given, dict) or not all(
        isinstance(shape, list) and all(type(size) is int for size in shape) for shape in given.values()
    ):
        raise CheckpointError(f"{where}: shapes are no lists of sizes by name")
    return {name: tuple(shape) for name, shape in given.items()}


def _as_digests(given: object, where: str) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
        raise CheckpointError(f"{where}: digests are no texts by name")
    return dict(given)


def _check_base(host: nn.Module, content: AdapterContent, folder: Path) -> None:
    """Raise unless the model is the one that the adapter was made for."""
    own = base_tensors(host)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    made = f"the adapter in {folder} was made for another model (a {content.host})"
    missing, extra = (
        list(one.keys() - other.keys()) for one, other in ((content.shapes, shapes), (shapes, content.shapes))
    )
    if missing or extra:
        named = [f"lacks {_listed(missing)}"] * bool(missing) + [f"has {_listed(extra)} besides"] * bool(extra)
        raise HostMismatchError(f"{made}: this {type(host).__name__} {' and '.join(named)}. {REMEDY}")
    unlike = [name for name, shape in shapes.items() if content.shapes[name] != shape]
    if unlike:
        name = unlike[0]
        sizes = f"{shapes[name]} here, and {content.shapes[name]} there"
        raise HostMismatchError(f"{made}: {name!r} has shape {sizes}. {REMEDY}")
    digests = {name: _digest({name: own[name]})[:FINGERPRINT] for name in content.digests}
    other = [name for name, digest in content.digests.items() if digests[name] != digest]
    if other:
        raise HostMismatchError(
            f"{made}: the weights of {_listed(other)} differ. Load the pretrained weights that it was made for, in the "
            "same dtype, and merge no other adapter into them"
        )


def _listed(names: list[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(map(repr, ordered[:SHOWN])) + more


class LoadedAdapter:
    """An adapter that acts in a model. The model is the user's object; `merge` or `remove` makes it plain again."""

    def __init__(self, slots: ModelSlots, before: dict[str, Tensor]) -> None:
        self._slots, self._before = slots, before
        self.model = slots.host

    @property
    def parameters(self) -> int:
        """Parameters of all seeds."""
        return sum(parameter.numel() for parameter in self._slots.parameters())

    def merge(self) -> nn.Module:
        """Fold the seeds into the weights in front of them: the plain model, with its own names."""
        self._check_open()
        kept = list(self._slots.live())
        refuse_unfoldable(self._slots, kept, "Use the adapter as it is, or remove() it")
        fold_checked(self._slots, kept)
        self._slots.remove()
        return self.model

    @torch.no_grad()
    def remove(self) -> nn.Module:
        """Remove the adapter: the model computes what it did before."""
        self._check_open()
        own = base_tensors(self.model)
        for name, value in self._before.items():
            own[name].copy_(value)
        self._slots.remove()
        return self.model

    def _check_open(self) -> None:
        if getattr(self.model, CHILD, None) is not self._slots:
            raise StageError("the adapter was merged or removed already; load it again")


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> LoadedAdapter:
    """Let an adapter act in its base model. If it is that of another model, nothing changes."""
    if isinstance(model, nn.Module) and hasattr(model, CHILD):
        raise BadValueError(
            "the model has a Grower or an adapter already: finish(), merge() or remove() that one first"
        )
    check_model(model)
    content, tensors = read_adapter(folder)
    _check_base(model, content, folder)
    own = base_tensors(model)
    changed = {name.removeprefix(f"{BASE}/"): value for name, value in tensors.items() if name.startswith(f"{BASE}/")}
    if unknown := [name for name in changed if name not in own or own[name].shape != changed[name].shape]:
        raise CheckpointError(f"{folder / WEIGHTS} has tensors {_listed(unknown)} that do not fit the model")
    slots = ModelSlots(model)
    with checkpoint_errors(str(folder)):
        slots.install([(entry.spec, entry.like) for entry in content.slots])
        model.add_module(CHILD, slots)
        try:
            for entry in content.slots:
                _plant(slots, entry, tensors, folder)
        except Exception:
            slots.remove()
            raise
    before = {name: own[name].clone() for name in changed}
    for name, value in changed.items():
        own[name].copy_(value)
    slots.train(model.training)
    return LoadedAdapter(slots, before)


def _plant(slots: ModelSlots, entry: SavedSlot, tensors: Mapping[str, Tensor], folder: Path) -> None:
    slot_id = entry.spec.slot_id
    slot = slots[slot_id]
    if entry.state.stage not in LIVE_STAGES:
        raise CheckpointError(f"{folder / CONTENT}: slot {slot_id!r} holds no seed")
    slot.plant(entry.state, 0, like=slots.host.get_parameter(entry.like))
    for name, parameter in slot.named_parameters():
        value = tensors.get(f"{SEED}/{slot_id}/{name}")
        if value is None or value.shape != parameter.shape:
            raise CheckpointError(f"{folder / WEIGHTS} has no tensor for {name!r} of the seed behind {slot_id!r}")
        parameter.copy_(value)
