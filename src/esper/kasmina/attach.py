"""Slots in any `nn.Module`: each lies behind a named submodule and acts as that submodule's forward hook.

    net = resnet18()
    model = attach(net, {"layer2": 128, "layer3": 256}, example=images[:2])
    model.germinate_seed("layer2", "conv_light")

The slots are installed empty, and hooks never change later, so a compiled host keeps its graph until a seed begins or
ceases to act; alpha is a buffer and costs nothing. Compile after attaching: `model.compile()` serves `model(x)` and
`model.losses(…)`; `torch.compile(model)` serves `model(x)` only. Give an `example` where `fullgraph=True` is wanted.

A host with hooks has no segments to start from, so a row runs the whole host from its input. Weights, batch statistics
and dropout masks are those of the main row, hence so is the stream in front of the slot.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from esper.kasmina.body import Body, Roles
from esper.kasmina.layers import Statistics
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.model import MorphogeneticModel, check_settings
from esper.kasmina.random_state import RandomState, random_state_kept
from esper.kasmina.slot import ISOLATIONS, TOPOLOGY_OF_AXES, WIDTH_AXIS, Isolation, Role, SeedSlot
from esper.leyline import BadValueError, HostMismatchError, SlotSpec, UnknownNameError

NEAR_NAMES = 8
"""Names that the error about an unknown submodule suggests."""


def attach(
    model: nn.Module,
    slots: Mapping[str, int],
    *,
    example: Tensor | None = None,
    isolation: Isolation = "shadow",
    config: LifecycleConfig | None = None,
    budget: int | None = None,
    rng_seed: int = 0,
) -> MorphogeneticModel:
    """Put slots behind named submodules: `{"layer2": 128}` is a slot of width 128 behind `model.layer2`.

    What passes there, images (B, C, H, W), tokens (B, T, C) or vectors (B, C), is learnt by one forward pass: of
    `example` now, or else of the first input. When attach refuses, nothing has changed.
    """
    if isolation not in ISOLATIONS:
        raise UnknownNameError("isolation", isolation, ISOLATIONS)
    check_settings(config, budget, rng_seed)
    _check_model(model)
    _check_slots(model, slots)
    ordered = {name: slots[name] for name, _ in model.named_modules(remove_duplicate=False) if name in slots}
    streams = None if example is None else probe(model, ordered, (example,), {})
    body = HookedBody(model, ordered, isolation, streams)
    grown = MorphogeneticModel(body, isolation=isolation, config=config, budget=budget, rng_seed=rng_seed)
    for part in (grown, body, *body.slots.modules()):
        part.training = model.training  # what wraps a host is in its mode; its own parts keep theirs
    return grown


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise BadValueError(f"attach() takes an nn.Module, not {type(model).__name__}")
    if isinstance(model, MorphogeneticModel):
        raise BadValueError("this model has slots already: attach() to its host, or name all slots in one call")
    if next(model.parameters(), None) is None:
        raise BadValueError(f"{type(model).__name__} has no parameters: there is nothing for a seed to grow beside")
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise BadValueError(
                f"submodule {name!r} is compiled already and would pass over the slots: attach first, then compile"
            )
        if any(isinstance(getattr(hook, "__self__", None), SeedSlot) for hook in module._forward_hooks.values()):
            raise BadValueError(f"submodule {name!r} has a slot already: name all slots in one call of attach()")


def _check_slots(model: nn.Module, slots: Mapping[str, int]) -> None:
    if not isinstance(slots, Mapping):
        raise BadValueError(f'slots {slots!r} are not names with their widths, such as {{"layer2": 128}}')
    if not slots:
        raise BadValueError('attach() needs at least one slot, such as {"layer2": 128}')
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name, width in slots.items():
        if not isinstance(name, str):
            raise BadValueError(f"slot {name!r} is not the name of a submodule, such as 'layer2'")
        if name not in names:
            near = difflib.get_close_matches(name, names, NEAR_NAMES, cutoff=0.5)
            raise UnknownNameError("submodule", name, near or names[:NEAR_NAMES])
        if "/" in name or hasattr(nn.ModuleDict, name):
            raise BadValueError(f"submodule {name!r} cannot have a slot under this name: rename it")
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise BadValueError(f"slot {name!r}: width {width!r} is not a positive integer")


# -- what passes there ------------------------------------------------------------------------------------------------


class _Sighting(NamedTuple):
    """What a named submodule returned, and how many layers had run by then."""

    output: object
    layers_before: int


class Stream(NamedTuple):
    """What passes a slot, and the name of a parameter whose dtype and device a seed there takes."""

    spec: SlotSpec
    like: str


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not type it
def probe(
    host: nn.Module, widths: Mapping[str, int], args: Sequence[object], kwargs: Mapping[str, Any]
) -> dict[str, Stream]:
    """Learn from one forward pass what each named submodule returns; changes nothing in the host."""
    sightings: dict[str, list[_Sighting]] = {name: [] for name in widths}
    layers = 0

    def count(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal layers
        layers += 1

    handles = [m.register_forward_hook(count) for m in host.modules() if next(m.children(), None) is None]
    for name, found in sightings.items():
        # A default argument binds the list of this turn of the loop.
        def see(module: nn.Module, inputs: object, output: object, found: list[_Sighting] = found) -> None:
            found.append(_Sighting(output, layers))

        handles.append(host.get_submodule(name).register_forward_hook(see))
    try:
        with torch.no_grad(), _mode(host, train=False), random_state_kept(host):
            functional_call(host, _cloned_buffers(host), tuple(args), dict(kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: Stream(_spec(name, width, sightings[name], layers), _like(host, sightings[name]))
        for name, width in widths.items()
    }


def _like(host: nn.Module, sightings: Sequence[_Sighting]) -> str:
    """The first parameter on the device and in the dtype of the stream: seeds go with it wherever the host is moved.

    Under autocast no parameter has the dtype of the stream, and the dtype of the weights is the right one.
    """
    (stream,) = (sighting.output for sighting in sightings)
    assert isinstance(stream, Tensor)

    def distance(item: tuple[str, nn.Parameter]) -> tuple[bool, bool]:
        return item[1].device != stream.device, item[1].dtype != stream.dtype

    return min(host.named_parameters(), key=distance)[0]


def _spec(name: str, width: int, sightings: list[_Sighting], layers: int) -> SlotSpec:
    if len(sightings) != 1:
        raise HostMismatchError(
            f"submodule {name!r} ran {len(sightings)} times in one forward pass; "
            "a slot needs a submodule that runs exactly once"
        )
    h, layers_before = sightings[0]
    if not isinstance(h, Tensor):
        raise HostMismatchError(f"submodule {name!r} returns {type(h).__name__}; a slot needs one tensor")
    if not h.is_floating_point():
        raise HostMismatchError(f"submodule {name!r} returns {h.dtype}; a slot needs a floating-point stream")
    topology = TOPOLOGY_OF_AXES.get(h.dim())
    if topology is None:
        raise HostMismatchError(
            f"submodule {name!r} returns a tensor of shape {tuple(h.shape)}; a slot needs an image (B, C, H, W), "
            "tokens (B, T, C) or a vector (B, C)"
        )
    if h.shape[WIDTH_AXIS[topology]] != width:
        raise HostMismatchError(
            f"slot {name!r} was declared with width {width}, but {topology} of width {h.shape[WIDTH_AXIS[topology]]} "
            f"pass there (shape {tuple(h.shape)})"
        )
    resolution = {"image": min(h.shape[-2:]), "tokens": h.shape[-2], "vector": None}[topology]
    return SlotSpec(name, width, topology, position=layers_before / max(layers, 1), resolution=resolution)


# -- rows -------------------------------------------------------------------------------------------------------------


@final
class HookedBody(Body):
    """A host of foreign layers. Only the main row writes; the others run on cloned buffers and their own modes."""

    def __init__(
        self,
        host: nn.Module,
        widths: Mapping[str, int],
        isolation: Isolation = "shadow",
        streams: Mapping[str, Stream] | None = None,
    ) -> None:
        """Without `streams`, the first main row is preceded by a probe."""
        slots = {name: SeedSlot(name, isolation) for name in widths}
        super().__init__(host, slots)
        self.slots.to(next(host.parameters()))
        self.widths = dict(widths)
        self.probed = False
        self._likes: dict[str, str] = {}
        self._frozen_norms: frozenset[str] = frozenset()
        if streams is not None:
            self._learn(streams)
        self._before_main: RandomState | None = None
        for name, slot in slots.items():
            host.get_submodule(name).register_forward_hook(slot.hook)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # Any: whatever the host takes
        """The host's own forward, with the slots acting behind their submodules."""
        output: Tensor = self.host(*args, **kwargs)
        return output

    def like(self, slot_id: str) -> Tensor:
        return self.host.get_parameter(self._likes[slot_id]) if slot_id in self._likes else super().like(slot_id)

    def call(self, train: bool, /, *args: Any, **kwargs: Any) -> Tensor:
        if not self.probed:
            self._learn(probe(self.host, self.widths, args, kwargs))
        output: Tensor
        if train == self.training:
            output = self(*args, **kwargs)
        else:
            with _mode(self, train):
                output = self(*args, **kwargs)
        return output

    def main(self, x: Tensor, train: bool, tapped: Collection[str] = ()) -> tuple[Tensor, dict[str, Tensor]]:
        if tapped:
            self._before_main = RandomState.of(self)
        return self.call(train, x), dict.fromkeys(tapped, x.detach())

    def shadow(self, slot_id: str, tap: Tensor, train: bool) -> Tensor:
        with self._row({slot_id: Role.SHADOW}, train):
            if self._before_main is not None:
                self._before_main.restore()
            output: Tensor = functional_call(self, self.weights_for(slot_id) | _cloned_buffers(self), (tap,))
        return output

    @torch.no_grad()
    def calibrate(self, x: Tensor, roles: Roles) -> Statistics:
        buffers = _cloned_buffers(self)
        frozen = self._norms_in_eval() if self.training else self._frozen_norms
        norms = {name: norm for name, norm in self._norms().items() if name not in frozen}
        with self._row(roles, train=False), _keeping_last_batch(norms.values()):
            functional_call(self, buffers, (x,))
        kept = [f"{name}.{statistic}" for name in norms for statistic in ("running_mean", "running_var")]
        return {name: buffers[name] for name in kept}

    def evaluate(self, x: Tensor, roles: Roles, statistics: Statistics | None) -> Tensor:
        with self._row(roles, train=False):
            output: Tensor = functional_call(self, _cloned_buffers(self) | (statistics or {}), (x,))
        return output

    def train(self, mode: bool = True) -> "HookedBody":
        """As for any module. On the way out of training it notes which norms the user keeps in eval mode."""
        if self.training and not mode:
            self._frozen_norms = self._norms_in_eval()
        super().train(mode)
        return self

    def _norms(self) -> dict[str, _NormBase]:
        """Layers with running statistics, by name."""
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, _NormBase) and module.running_mean is not None
        }

    def _norms_in_eval(self) -> frozenset[str]:
        """Norms that normalise by fixed statistics even in training: those are part of the host, not of a row."""
        return frozenset(name for name, norm in self._norms().items() if not norm.training)

    @contextmanager
    def _row(self, roles: Roles, train: bool) -> Iterator[None]:
        """For one row other than the main one: roles, mode, and a random stream that the main row never sees."""
        with self.playing(roles), _mode(self, train), random_state_kept(self):
            yield

    def _learn(self, streams: Mapping[str, Stream]) -> None:
        for slot_id, slot in self.slot_items():
            slot.learn(streams[slot_id].spec)
        self._likes = {slot_id: stream.like for slot_id, stream in streams.items()}
        self.probed = True


def _cloned_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@contextmanager
def _mode(module: nn.Module, train: bool) -> Iterator[None]:
    """Train or eval mode for a while. A module that is in that mode is left alone, frozen parts and all."""
    if module.training == train:
        yield
        return
    before = [(part, part.training) for part in module.modules()]
    module.train(train)
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode


@contextmanager
def _keeping_last_batch(norms: Collection[_NormBase]) -> Iterator[None]:
    """Norm layers that train with momentum 1: their running statistics become those of the batch."""
    before = [(norm, norm.training, norm.momentum) for norm in norms]
    try:
        for norm in norms:
            norm.training, norm.momentum = True, 1.0
        yield
    finally:
        for norm, mode, momentum in before:
            norm.training, norm.momentum = mode, momentum
