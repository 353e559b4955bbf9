"""Where a model can grow: slots chosen from one forward pass.

Stages and blocks come first: submodules with children that run once, return one tensor, have parameters and are not
part of the head. The outermost are taken; where there are fewer than three, they are opened. A model without blocks,
such as one flat `nn.Sequential`, gets its slots behind the last layer before each next convolution or linear layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from esper.kasmina.attach import ModuleCall, Stream, check_slots, stream_behind, trace
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.leyline import BadValueError, HostMismatchError

MOST = 8  # slots of a model
FEW = 3  # blocks below which the outermost are opened
CHANNELS_FIRST = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d)
MIXING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Embedding)


class Places:
    """The submodules of a model that can have a slot, from one forward pass."""

    def __init__(self, host: nn.Module, args: Sequence[object], kwargs: Mapping[str, Any]) -> None:
        self.host = host
        sizes = {len(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()}
        self.batch = sizes.pop() if len(sizes) == 1 else None
        """Samples in the pass, if the inputs agree"""
        self.names = {module: name for name, module in host.named_modules() if name}
        calls = trace(host, args, kwargs)
        self.calls: dict[str, ModuleCall] = {}
        """Submodules that run once, by name, in the order in which they end"""
        runs = [call.module for call in calls]
        for call in calls:
            if call.module in self.names and runs.count(call.module) == 1:
                self.calls[self.names[call.module]] = call
        self.tokens_first = {_leading_axes(call) for call in calls if _is_tokens_first(call.module)}
        """(tokens, batch) that pass modules with `batch_first=False`"""
        self.refusals: dict[str, str] = {}
        """Why a submodule cannot have a slot"""
        self.runs = {name: runs.count(module) for module, name in self.names.items()}
        # The last module with parameters in which no other ran; a fused module hides its parts.
        ran = [self.names[module] for module in runs if module in self.names and _has_parameters(module)]
        inner = [name for name in ran if not any(other.startswith(f"{name}.") for other in ran)]
        self.head = inner[-1] if inner else ""

    def choose(self, wanted: Mapping[str, int | None] | None = None) -> list[Stream]:
        """The slots that the user named, or at most eight, spread evenly over what was found."""
        if wanted is not None:
            return self.named(wanted)
        names = self.blocks()
        if len(names) < 2:
            names = self._behind_layers()
        streams = [stream for name in names if (stream := self._usable(name)) is not None]
        if not streams:
            reasons = "".join(f". {reason[0].upper()}{reason[1:]}" for reason in list(self.refusals.values())[-1:])
            raise BadValueError(
                "no submodule runs once and returns one tensor (images, tokens or vectors) that a seed fits: name the "
                f'slots yourself, such as slots=["layer2"]{reasons}'
            )
        step = (len(streams) - 1) / (MOST - 1)
        return streams if len(streams) <= MOST else [streams[round(index * step)] for index in range(MOST)]

    def named(self, slots: Mapping[str, int | None]) -> list[Stream]:
        """The slots that the user named, perhaps with their widths."""
        for name in slots:
            if self.runs[name] != 1:
                raise HostMismatchError(
                    f"submodule {name!r} ran {self.runs[name]} times in one forward pass; a slot needs one that runs "
                    "exactly once"
                )
            self._refuse_layout(name)
        ordered = [name for name in self.calls if name in slots]
        return [with_offers(stream_behind(self.host, name, self.calls[name], slots[name])) for name in ordered]

    # -- candidates ---------------------------------------------------------------------------------------------------

    def blocks(self) -> list[str]:
        """Stages or blocks: the outermost, opened where there are too few."""
        blocks = [
            name
            for name, call in self.calls.items()
            if not _is_layer(call.module)
            and _has_parameters(call.module)
            and self.before_head(name)
            and self._usable(name) is not None
        ]
        chosen = level = _outermost(blocks)
        while len(chosen) < FEW:
            opened = {name: _outermost([b for b in blocks if b.startswith(f"{name}.")]) for name in level}
            inner = [part for name in level for part in (opened[name] or [name])]
            if inner == level:
                break
            level = inner
            chosen = level if len(level) > len(chosen) else chosen
        return chosen

    def _behind_layers(self) -> list[str]:
        """Behind the last layer with the same output shape, after each layer that mixes channels."""
        chosen: list[str] = []
        last: str | None = None
        for name, call in self.calls.items():
            if not _is_layer(call.module) or not self.before_head(name):
                continue
            shape = _shape(call.output)
            if last is not None and (isinstance(call.module, MIXING) or shape != _shape(self.calls[last].output)):
                chosen.append(last)
                last = None
            if isinstance(call.module, MIXING) or last is not None:
                last = name
        return chosen if last is None else [*chosen, last]

    def before_head(self, name: str) -> bool:
        """Whether a submodule runs before the head, and does not contain it."""
        if f"{self.head}.".startswith(f"{name}."):
            return False
        order = list(self.calls)
        return self.head not in order or order.index(name) < order.index(self.head)

    def stream(self, name: str) -> Stream | None:
        """What passes behind a submodule; None if no slot can be there."""
        try:
            self._refuse_layout(name)
            return stream_behind(self.host, name, self.calls[name])
        except HostMismatchError as error:
            self.refusals[name] = str(error)
            return None

    def _usable(self, name: str) -> Stream | None:
        if (stream := self.stream(name)) is None:
            return None
        offered = with_offers(stream)
        return offered if offered[0].blueprints else None

    def _refuse_layout(self, name: str) -> None:
        """Refuse three axes that are not (batch, tokens, channels)."""
        shape = _shape(self.calls[name].output)
        if shape is None or len(shape) != 3:
            return
        around = [module for other, module in self.host.named_modules() if _related(other, name)]
        if any(map(_is_tokens_first, around)) or shape[:2] in self.tokens_first:
            raise HostMismatchError(
                f"submodule {name!r} returns (tokens, batch, channels), because batch_first is False there; seeds "
                "expect (batch, tokens, channels): build it with batch_first=True, or put the slot elsewhere"
            )
        if shape[1] == self.batch != shape[0]:
            raise HostMismatchError(
                f"submodule {name!r} returns {shape}, with the {self.batch} samples of the input on the "
                "second axis; seeds expect (batch, tokens, channels): put the slot elsewhere. If the second axis holds "
                "tokens, let the first batch have another size"
            )
        inside = [call.module for other, call in self.calls.items() if other == name or other.startswith(f"{name}.")]
        layers = [module for module in inside if _is_layer(module) and _has_parameters(module)]
        if layers and isinstance(layers[-1], CHANNELS_FIRST):
            raise HostMismatchError(
                f"submodule {name!r} returns (batch, channels, positions) of a {type(layers[-1]).__name__}; seeds "
                "expect (batch, tokens, channels): put the slot elsewhere"
            )


def with_offers(stream: Stream) -> Stream:
    """The stream with the blueprints that fit its slot."""
    spec, like = stream
    return replace(spec, blueprints=BlueprintRegistry.offers(spec)), like


def _outermost(names: Sequence[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _related(module: str, slot: str) -> bool:
    """Whether a module is inside the slot's submodule, around it, or a sibling of one of these."""
    if module == "" or f"{module}.".startswith(f"{slot}.") or slot.startswith(f"{module}."):
        return True
    parent = module.rpartition(".")[0]
    return slot.startswith(f"{parent}.") if parent else "." not in slot


def _is_tokens_first(module: nn.Module) -> bool:
    return getattr(module, "batch_first", True) is False


def _leading_axes(call: ModuleCall) -> tuple[int, ...] | None:
    """The first two axes of what a module returns; attention and recurrent layers return it first in a tuple."""
    shape = _shape(call.output[0] if isinstance(call.output, tuple) else call.output)
    return shape[:2] if shape is not None and len(shape) == 3 else None


def _is_layer(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _shape(output: object) -> tuple[int, ...] | None:
    """The axes of one dense tensor; nested tensors have none."""
    return tuple(output.shape) if isinstance(output, Tensor) and not output.is_nested else None


def named_widths(host: nn.Module, slots: Mapping[str, int] | Sequence[str]) -> Mapping[str, int | None]:
    """The slots that the user named, checked; None is a width that was not given."""
    if isinstance(slots, Mapping):
        check_slots(host, slots)
        wanted: dict[str, int | None] = dict(slots)
    else:
        names = list(slots) if isinstance(slots, list | tuple) else []
        if not names:
            raise BadValueError(f'slots {slots!r} are no names of submodules: pass a list of them, such as ["layer2"]')
        if twice := sorted({str(name) for name in names if names.count(name) > 1}):
            raise BadValueError(f"slots {', '.join(twice)} are named twice: a submodule has one slot")
        check_slots(host, dict.fromkeys(names, 1))
        wanted = dict.fromkeys(names)
    first_names = {module: name for name, module in host.named_modules()}
    for name in wanted:
        if (first := first_names[host.get_submodule(name)]) != name:
            raise BadValueError(f"submodule {name!r} is {first!r} under a second name: use {first!r}")
    return wanted
