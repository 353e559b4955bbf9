"""Host and slots together, and the rows that can be run through them.

A row is one forward evaluation: which role each seed plays, whether it trains, whose statistics it uses. Rows other
than the main one write nothing.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.kasmina.hosts import Host, refuse_state
from esper.kasmina.layers import Statistics, named_statistics, write_statistics
from esper.kasmina.slot import Role, SeedSlot
from esper.leyline import UnknownNameError

Roles = Mapping[str, Role]


class Pass(NamedTuple):
    """What one row gives: its output, its batch statistics, and the streams that were tapped before their slots."""

    output: Tensor
    statistics: Statistics
    taps: dict[str, Tensor]


class Body(nn.Module):
    """A host with slots. `host` and `slots` are its children; subclasses say how a row runs."""

    def __init__(self, host: nn.Module, slots: Mapping[str, SeedSlot]) -> None:
        super().__init__()
        self.host = host
        # Names of submodules contain dots, which module names may not.
        self.slots = nn.ModuleDict({slot_id.replace(".", "/"): slot for slot_id, slot in slots.items()})

    def slot_items(self) -> Iterator[tuple[str, SeedSlot]]:
        """Slot ids with their slots, in the host's order."""
        for key, slot in self.slots.items():
            assert isinstance(slot, SeedSlot)
            yield key.replace("/", "."), slot

    def slot(self, slot_id: str) -> SeedSlot:
        """The slot of that id."""
        found = dict(self.slot_items())
        if slot_id not in found:
            raise UnknownNameError("slot", slot_id, found)
        return found[slot_id]

    def like(self, slot_id: str) -> Tensor:
        """A tensor with the dtype and device that a seed there takes."""
        return next(self.host.parameters(), torch.empty(()))

    @contextmanager
    def playing(self, roles: Roles) -> Iterator[None]:
        """Let seeds play roles for one row."""
        with ExitStack() as stack:
            for slot_id, role in roles.items():
                stack.enter_context(self.slot(slot_id).playing(role))
            yield

    def weights_for(self, slot_id: str) -> dict[str, Tensor]:
        """All weights detached, but those of the seed (and gate) in one slot."""
        own = {id(parameter) for parameter in self.slot(slot_id).parameters()}
        return {
            name: parameter if id(parameter) in own else parameter.detach()
            for name, parameter in self.named_parameters()
        }

    def main(self, x: Tensor, train: bool, tapped: Collection[str] = ()) -> tuple[Tensor, dict[str, Tensor]]:
        """The main row. Writes statistics when it trains. Also what the shadows of the `tapped` slots start from."""
        raise NotImplementedError

    def call(self, train: bool, /, *args: Any, **kwargs: Any) -> Tensor:  # Any: whatever the host takes
        """The main row as a plain call: one input, or what a foreign host's own forward takes."""
        raise NotImplementedError

    def shadow(self, slot_id: str, tap: Tensor, train: bool) -> Tensor:
        """The shadow row of a seed: full effect, gradient for this seed alone, nothing written."""
        raise NotImplementedError

    def calibrate(self, x: Tensor, roles: Roles) -> Statistics:
        """The normalisation statistics of a row: one train-mode forward, nothing written."""
        raise NotImplementedError

    def evaluate(self, x: Tensor, roles: Roles, statistics: Statistics | None) -> Tensor:
        """A row in eval mode, with statistics of its own or, with None, the running ones."""
        raise NotImplementedError

    def write(self, statistics: Statistics) -> None:
        """Make these the running statistics."""
        for name, value in statistics.items():
            self.get_buffer(name).copy_(value)


class SegmentedBody(Body):
    """A host that is a list of segments: rows can start at any slot."""

    host: Host

    def __init__(self, host: Host, slots: Mapping[str, SeedSlot]) -> None:
        refuse_state(host)
        super().__init__(host, slots)
        self._slot_after = {host.slot_index(slot_id): slot_id for slot_id in slots}

    def forward(self, h: Tensor, train: bool, born_at: str | None = None, tapped: Collection[str] = ()) -> Pass:
        """From the input, or from the stream in front of slot `born_at`, to the output."""
        statistics: Statistics = {}
        taps: dict[str, Tensor] = {}
        first = 0
        if born_at is not None:
            place = self.host.slot_index(born_at)
            h, first = self._pass_slot(place, h), place + 1
        for index in range(first, len(self.host.segments)):
            h, found = self.host.run_segment(index, h, train)
            statistics |= named_statistics(f"host.segments.{index}", found)
            if self._slot_after.get(index) in tapped:
                taps[self._slot_after[index]] = h.detach()
            h = self._pass_slot(index, h)
        return Pass(h, statistics, taps)

    def _pass_slot(self, index: int, h: Tensor) -> Tensor:
        if index not in self._slot_after:
            return h
        slot = self.slots[self._slot_after[index]]
        passed: Tensor = slot(h, self.host.conductance[index])
        return passed

    def main(self, x: Tensor, train: bool, tapped: Collection[str] = ()) -> tuple[Tensor, dict[str, Tensor]]:
        done: Pass = self(x, train, tapped=tapped)
        write_statistics(self, done.statistics)
        return done.output, done.taps

    def call(self, train: bool, /, x: Tensor) -> Tensor:
        return self.main(x, train)[0]

    def shadow(self, slot_id: str, tap: Tensor, train: bool) -> Tensor:
        with self.playing({slot_id: Role.SHADOW}):
            done: Pass = functional_call(self, self.weights_for(slot_id), (tap, train), {"born_at": slot_id})
        return done.output

    def calibrate(self, x: Tensor, roles: Roles) -> Statistics:
        with self.playing(roles):
            done: Pass = self(x, True)
        return done.statistics

    def evaluate(self, x: Tensor, roles: Roles, statistics: Statistics | None) -> Tensor:
        with self.playing(roles):
            done: Pass = functional_call(self, statistics, (x, False)) if statistics else self(x, False)
        return done.output
