"""A host: an ordered list of segments with a slot after each of them but the last. That is the whole protocol."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from esper.kasmina.layers import Statistics, named_statistics, write_statistics
from esper.leyline import EsperError, HostMismatchError, SlotSpec, UnknownNameError

HostConfig = dict[str, int | bool | list[int]]
"""Constructor arguments of a built-in host, as JSON."""


class Segment(nn.Module):
    """A stretch of a host between two slots."""

    __call__: Callable[..., tuple[Tensor, Statistics]]

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        """The activation at the segment's end, and the batch statistics by buffer name (empty unless training)."""
        raise NotImplementedError


class Host(nn.Module):
    """Segments with slots between them. `slots[i]` lies after `segments[i]`."""

    KINDS: ClassVar[dict[str, type["Host"]]] = {}
    """Hosts that a checkpoint can rebuild from their configuration alone."""

    slots: tuple[SlotSpec, ...]
    conductance: Tensor

    def __init__(self, segments: Sequence[Segment], slots: Sequence[SlotSpec]) -> None:
        super().__init__()
        if not segments:
            raise HostMismatchError(f"{type(self).__name__} has no segments; a host needs at least one")
        if wrong := [f"{index}: {type(part).__name__}" for index, part in enumerate(segments) if not _is_segment(part)]:
            raise HostMismatchError(
                f"segments {wrong} are no Segment: subclass esper.kasmina.Segment, whose forward(h, train) returns "
                "(activation, statistics), or use attach() for a network of ordinary modules"
            )
        if len(slots) != len(segments) - 1:
            raise HostMismatchError(
                f"{len(segments)} segments have {len(segments) - 1} places between them, "
                f"but {len(slots)} slots were given"
            )
        if bad := [slot.slot_id for slot in slots if not slot.slot_id.isidentifier()]:
            raise HostMismatchError(f"slot ids {bad} are not names like r1c0")
        self.segments = nn.ModuleList(segments)
        self.slots = tuple(slots)
        # How much of what grows in each slot reaches the next segment. 1 in a sound host; 0 is a defect of some tasks.
        self.register_buffer("conductance", torch.ones(len(slots)))

    def forward(self, x: Tensor) -> Tensor:
        """The host alone, as an ordinary module: writes its running statistics in training mode."""
        h, written = self.run(x, train=self.training)
        write_statistics(self, written)
        return h

    def run(self, h: Tensor, train: bool, start: int = 0) -> tuple[Tensor, Statistics]:
        """From the input of segment `start` to the output; writes nothing."""
        statistics: Statistics = {}
        for index in range(start, len(self.segments)):
            h, found = self.run_segment(index, h, train)
            statistics |= named_statistics(f"segments.{index}", found)
        return h, statistics

    def run_segment(self, index: int, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        """One segment; an input that it cannot take is an error that names it."""
        segment = self.segments[index]
        try:
            activation, statistics = segment(h, train)
        except (EsperError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError) as error:
            raise HostMismatchError(
                f"segment {index} ({type(segment).__name__}) cannot run on what reaches it, shape {tuple(h.shape)} "
                f"of {h.dtype}: {error}"
            ) from error
        return activation, statistics

    def config(self) -> HostConfig | None:
        """Constructor arguments, for hosts that a checkpoint can rebuild; None for others."""
        return None

    def slot_index(self, slot_id: str) -> int:
        """Which segment the slot follows."""
        ids = [slot.slot_id for slot in self.slots]
        if slot_id not in ids:
            raise UnknownNameError("slot", slot_id, ids)
        return ids.index(slot_id)


def refuse_state(host: Host) -> None:
    """Raise where a segment holds a layer that writes or draws by itself.

    Segments are told by an argument whether they train, and return their statistics. A layer that goes by its own
    mode would write in rows that must not write.
    """
    for index, segment in enumerate(host.segments):
        for name, layer in segment.named_modules():
            if trouble := _own_state(layer):
                raise HostMismatchError(
                    f"segments.{index}.{name} of {type(host).__name__} is a {type(layer).__name__} that {trouble}: "
                    "use esper.kasmina.layers.BatchNorm2d, GroupNorm or LayerNorm and no dropout, "
                    "or attach() for foreign networks"
                )


def _own_state(layer: nn.Module) -> str | None:
    """What a layer of torch would do behind the caller's back."""
    if isinstance(layer, _NormBase) and layer.running_mean is not None:
        return "writes running statistics by itself"
    if isinstance(layer, _DropoutNd) and layer.p > 0:
        return "draws random numbers by itself"
    # Recurrent layers and MultiheadAttention have dropout as a number.
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0:
        return "draws random numbers by itself"
    return "draws random numbers by itself" if isinstance(layer, nn.RReLU) else None


def _is_segment(part: object) -> bool:
    return isinstance(part, Segment)
