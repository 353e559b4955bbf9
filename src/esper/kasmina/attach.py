"""Slots in any `nn.Module`, each behind a named submodule as its forward hook.

    net = resnet18()
    model = attach(net, {"layer2": 128, "layer3": 256}, example=images[:2])
    model.germinate_seed("layer2", "conv_light")

Slots are installed empty and hooks never change, so a compiled host keeps its graph until a seed starts or stops
acting. Compile after attaching: `model.compile()` covers `model(x)` and `model.losses(…)`, `torch.compile(model)` only
`model(x)`. `fullgraph=True` needs an `example`.

A host with hooks has no segments, so every row runs the whole host from its input. Weights, batch statistics and
dropout masks are those of the main row, and so is the stream in front of the slot.
"""

import difflib
import itertools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.layers import Statistics, cloned_buffers
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.model import MorphogeneticModel, check_settings
from esper.kasmina.slot import (
    TOPOLOGY_OF_AXES,
    WIDTH_AXIS,
    Body,
    Isolation,
    RandomState,
    Role,
    Roles,
    SeedSlot,
    fork_rng,
)
from esper.leyline import BadValueError, HostMismatchError, SlotSpec, UnknownNameError
from esper.leyline.numbers import refuse, require_whole

SUGGESTIONS = 8  # names in the error about an unknown submodule
Stream = tuple[SlotSpec, str]  # what passes a slot, and the name of a parameter with the dtype and device for a seed


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

    Images (B, C, H, W), tokens (B, T, C) or vectors (B, C) may pass there. One forward pass shows which: of `example`
    now, or else of the first input. If attach raises, nothing has changed.
    """
    check_settings(isolation, config, budget, rng_seed)
    check_model(model)
    check_slots(model, slots)
    ordered = {name: slots[name] for name, _ in model.named_modules(remove_duplicate=False) if name in slots}
    streams = None if example is None else probe(model, ordered, (example,), {})
    body = HookedBody(model, ordered, isolation, streams)
    grown = MorphogeneticModel(body, isolation=isolation, config=config, budget=budget, rng_seed=rng_seed)
    for part in (grown, body, *body.slots.modules()):
        part.training = model.training  # the host's own parts keep their modes
    return grown


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise BadValueError(f"attach() takes an nn.Module, not {type(model).__name__}")
    if isinstance(model, MorphogeneticModel):
        raise BadValueError("this model has slots already: attach() to its host, or name all slots in one call")
    if next(model.parameters(), None) is None:
        raise BadValueError(f"{type(model).__name__} has no parameters: there is nothing for a seed to grow beside")
    for name, module in model.named_modules():
        compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
        owners = [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]
        twice = f"submodule {name!r} has a slot already: name all slots in one call of attach()"
        bypass = f"submodule {name!r} is compiled already and would bypass the slots: attach first, then compile"
        refuse({bypass: compiled, twice: any(isinstance(owner, SeedSlot) for owner in owners)})


def check_slots(model: nn.Module, slots: Mapping[str, int]) -> None:
    if not isinstance(slots, Mapping) or not slots:
        needed = 'at least one slot is needed, such as {"layer2": 128}'
        raise BadValueError(f"slots {slots!r} are not names with their widths: {needed}")
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name, width in slots.items():
        if not isinstance(name, str):
            raise BadValueError(f"slot {name!r} is not the name of a submodule, such as 'layer2'")
        if name not in names:
            close = difflib.get_close_matches(name, names, SUGGESTIONS, cutoff=0.5)
            raise UnknownNameError("submodule", name, close or names[:SUGGESTIONS])
        if "/" in name or hasattr(nn.ModuleDict, name):
            raise BadValueError(f"submodule {name!r} cannot have a slot under this name: rename it")
        require_whole(f"slot {name!r}: width", width, 1)


# -- probe ------------------------------------------------------------------------------------------------------------


def probe(
    host: nn.Module, widths: Mapping[str, int], args: Sequence[object], kwargs: Mapping[str, Any]
) -> dict[str, Stream]:
    """Learn what each named submodule returns, from one forward pass that changes nothing in the host."""
    # Never compiled. The decorator would do, but it imports the compiler, which takes longer than torch itself.
    eager = torch.compiler.disable(_probe) if "torch._dynamo" in sys.modules else _probe
    return eager(host, widths, args, kwargs)


def _probe(
    host: nn.Module, widths: Mapping[str, int], args: Sequence[object], kwargs: Mapping[str, Any]
) -> dict[str, Stream]:
    calls = trace(host, args, kwargs)
    streams = {}
    for name, width in widths.items():
        own = [call for call in calls if call.module is host.get_submodule(name)]
        if len(own) != 1:
            raise HostMismatchError(
                f"submodule {name!r} ran {len(own)} times in one forward pass; "
                "a slot needs a submodule that runs exactly once"
            )
        streams[name] = stream_behind(host, name, own[0], width)
    return streams


class ModuleCall(NamedTuple):
    """One call of a submodule in a forward pass."""

    module: nn.Module
    input: object
    """Its first positional argument; None without one"""
    output: object
    position: float
    """Share of the layers, modules without children, that have run by its end"""


def trace(host: nn.Module, args: Sequence[object], kwargs: Mapping[str, Any]) -> list[ModuleCall]:
    """All calls of modules in one forward pass, in the order in which they end. Changes nothing in the host."""
    ended: list[tuple[nn.Module, object, object]] = []

    def record(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        ended.append((module, inputs[0] if inputs else None, output))

    handles = [module.register_forward_hook(record) for module in host.modules()]
    try:
        with torch.no_grad(), _mode(host, train=False), fork_rng(host):
            functional_call(host, cloned_buffers(host), tuple(args), dict(kwargs))
    finally:
        for handle in handles:
            handle.remove()
    layers = list(itertools.accumulate(next(module.children(), None) is None for module, *_ in ended))
    return [ModuleCall(*each, count / max(layers[-1], 1)) for each, count in zip(ended, layers, strict=True)]


def stream_behind(host: nn.Module, name: str, call: ModuleCall, width: int | None = None) -> Stream:
    """What passes a slot behind a submodule. A given `width` must be the true one."""
    h = call.output
    if not isinstance(h, Tensor):
        raise HostMismatchError(f"submodule {name!r} returns {type(h).__name__}; a slot needs one tensor")
    if not h.is_floating_point():
        raise HostMismatchError(f"submodule {name!r} returns {h.dtype}; a slot needs a floating-point stream")
    if h.is_nested:
        raise HostMismatchError(
            f"submodule {name!r} returns a nested tensor in eval mode; a slot needs a dense one: build "
            "nn.TransformerEncoder with enable_nested_tensor=False, or put the slot elsewhere"
        )
    topology = TOPOLOGY_OF_AXES.get(h.dim())
    if topology is None:
        needed = "a slot needs an image (B, C, H, W), tokens (B, T, C) or a vector (B, C)"
        raise HostMismatchError(f"submodule {name!r} returns a tensor of shape {tuple(h.shape)}; {needed}")
    actual = h.shape[WIDTH_AXIS[topology]]
    if width not in (None, actual):
        passes = f"{topology} of width {actual} pass there (shape {tuple(h.shape)})"
        raise HostMismatchError(f"slot {name!r} was declared with width {width}, but {passes}")
    resolution = {"image": min(h.shape[-2:]), "tokens": h.shape[-2], "vector": None}[topology]
    # Seeds follow this parameter when the host is moved. Under autocast none has the dtype of the stream.
    device, dtype = h.device, h.dtype
    like = min(host.named_parameters(), key=lambda item: (item[1].device != device, item[1].dtype != dtype))[0]
    return SlotSpec(name, actual, topology, position=call.position, resolution=resolution), like


# -- rows -------------------------------------------------------------------------------------------------------------


@final
class HookedBody(Body):
    """A host of foreign layers. Rows other than the main one run on cloned buffers."""

    def __init__(
        self, host: nn.Module, widths: Mapping[str, int], isolation: Isolation, streams: Mapping[str, Stream] | None
    ) -> None:
        """Without `streams`, a probe precedes the first main row."""
        slots = {name: SeedSlot(name, isolation) for name in widths}
        super().__init__(host, slots)
        self.slots.to(next(host.parameters()))
        self.widths = dict(widths)
        self._frozen_norms: frozenset[str] = frozenset()
        self._learn(streams or {})
        self._before_main: RandomState | None = None
        for name, slot in slots.items():
            slot.put_behind(host.get_submodule(name))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # Any: arguments of the host
        """Run the host's own forward, with the slots acting behind their submodules."""
        output: Tensor = self.host(*args, **kwargs)
        return output

    def like(self, slot_id: str) -> Tensor:
        if slot_id not in self._streams:
            return super().like(slot_id)
        return self.host.get_parameter(self._streams[slot_id][1])

    def call(self, train: bool, /, *args: Any, **kwargs: Any) -> Tensor:
        if not self._streams:
            self._learn(probe(self.host, self.widths, args, kwargs))
        with nullcontext() if train == self.training else _mode(self, train):
            output: Tensor = self(*args, **kwargs)
        return output

    def main(self, x: Tensor, train: bool, tapped: Collection[str] = ()) -> tuple[Tensor, dict[str, Tensor]]:
        if tapped:
            self._before_main = RandomState.of(self)
        return self.call(train, x), dict.fromkeys(tapped, x.detach())

    def shadow(self, slot_id: str, tap: Tensor, train: bool) -> Tensor:
        with self._row({slot_id: Role.SHADOW}, train):
            if self._before_main is not None:
                self._before_main.restore()
            output: Tensor = functional_call(self, self.weights_for(slot_id) | cloned_buffers(self), (tap,))
        return output

    @torch.no_grad()
    def calibrate(self, x: Tensor, roles: Roles) -> Statistics:
        buffers = cloned_buffers(self)
        frozen = self._norms_in_eval() if self.training else self._frozen_norms
        norms = {name: norm for name, norm in self._norms().items() if name not in frozen}
        with self._row(roles, train=False), gathering_statistics(norms.values(), momentum=1.0):
            functional_call(self, buffers, (x,))
        names = [f"{name}.{statistic}" for name in norms for statistic in ("running_mean", "running_var")]
        return {name: buffers[name] for name in names}

    def evaluate(self, x: Tensor, roles: Roles, statistics: Statistics | None) -> Tensor:
        with self._row(roles, train=False):
            output: Tensor = functional_call(self, cloned_buffers(self) | (statistics or {}), (x,))
        return output

    def train(self, mode: bool = True) -> "HookedBody":
        """Set the mode. On leaving training it remembers which norms the user had put into eval mode."""
        if self.training and not mode:
            self._frozen_norms = self._norms_in_eval()
        super().train(mode)
        return self

    def _norms(self) -> dict[str, _NormBase]:
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, _NormBase) and module.running_mean is not None
        }

    def _norms_in_eval(self) -> frozenset[str]:
        """Norms with fixed statistics even in training: these belong to the host, not to a row."""
        return frozenset(name for name, norm in self._norms().items() if not norm.training)

    @contextmanager
    def _row(self, roles: Roles, train: bool) -> Iterator[None]:
        """Set roles and mode for a row other than the main one, and undo its random draws."""
        with self.playing(roles), _mode(self, train), fork_rng(self):
            yield

    def _learn(self, streams: Mapping[str, Stream]) -> None:
        self._streams = dict(streams)
        for slot_id, (spec, _) in streams.items():
            adapters = BlueprintRegistry.adapter_offers(spec, self.host.get_submodule(slot_id))
            self.slot(slot_id).known_spec = replace(spec, blueprints=adapters)


@contextmanager
def _mode(module: nn.Module, train: bool) -> Iterator[None]:
    """Set train or eval mode, and restore the mode of every part on exit. Does nothing if the mode is set already."""
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
def gathering_statistics(norms: Collection[_NormBase], momentum: float | None) -> Iterator[None]:
    """Train norms: at momentum 1 they keep the statistics of the last batch, at None the mean over batches."""
    before = [(norm, norm.training, norm.momentum) for norm in norms]
    try:
        for norm in norms:
            norm.training, norm.momentum = True, momentum
        yield
    finally:
        for norm, mode, own in before:
            norm.training, norm.momentum = mode, own
