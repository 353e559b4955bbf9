"""A host: an ordered list of segments with a slot after each of them but the last. That is the whole protocol."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from esper.kasmina.layers import Statistics, named_statistics, write_statistics
from esper.leyline import HostMismatchError, SlotSpec, UnknownNameError

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
            h, found = self.segments[index](h, train)
            statistics |= named_statistics(f"segments.{index}", found)
        return h, statistics

    def config(self) -> HostConfig | None:
        """Constructor arguments, for hosts that a checkpoint can rebuild; None for others."""
        return None

    def slot_index(self, slot_id: str) -> int:
        """Which segment the slot follows."""
        ids = [slot.slot_id for slot in self.slots]
        if slot_id not in ids:
            raise UnknownNameError("slot", slot_id, ids)
        return ids.index(slot_id)
