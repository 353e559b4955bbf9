"""How much memory the activations of a validation need, and how to divide one that needs too much.

Measured once for the host and once for each bank, on a few inputs, and added up: a bound, never less than what a pass
takes. Scratch space inside kernels is not seen.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from esper.kasmina.layers import Statistics
from esper.kasmina.row_layout import take_rows
from esper.tolaria.banks import Bank
from esper.tolaria.batches import Samples
from esper.tolaria.memory import PROBES, Need
from esper.tolaria.planning import deployed_rows, eval_rows
from esper.tolaria.rows import LEAST_ROWS, Rows
from esper.tolaria.scoring import CHUNK, calibrate, score, spread

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

CPU_BUDGET = 1 << 30
CUDA_SHARE = 4
"""A validation may take a quarter of the device: weights, graphs and the minibatch live beside it."""


def default_budget(device: torch.device) -> int:
    """Bytes of activations that a validation may take."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // CUDA_SHARE
    return CPU_BUDGET


LEAST_PART = 4
"""Envs: in passes of fewer rows some kernels round differently."""


class Part(NamedTuple):
    """Envs that are measured together, and how many inputs at a time."""

    envs: Sequence[int]
    chunk: int


class PassNeeds:
    """What rows of a fleet need in a validation."""

    @torch.no_grad()
    def __init__(self, fleet: "HostFleet", samples: Samples, calibration: Tensor) -> None:
        self.fleet, self.samples, self.calibration = fleet, samples, calibration
        rows = deployed_rows(fleet, range(LEAST_ROWS))
        bare = Rows(rows.env, rows.births)
        found: list[Statistics] = []

        def calibrating(inputs: int) -> None:
            found[:] = calibrate(fleet, bare, calibration[:inputs])

        self._calibrating = Need.of(calibrating)
        self._scoring = Need.of(lambda inputs: score(fleet, bare, self._some(inputs), found))
        x = spread(fleet, bare, calibration[: PROBES[-1]])
        self._streams = fleet.host.run(bare, x, train=False, tapped=fleet.places.values()).taps
        self._banks: dict[tuple[str, str, frozenset[str]], Need] = {}

    def _some(self, inputs: int) -> Samples:
        return Samples(self.samples.inputs[:inputs], self.samples.targets[:inputs])

    @torch.no_grad()
    def divide(self, envs: Sequence[int], budget: int) -> list[Part]:
        """Envs in parts whose passes have at most `budget` bytes of activations alive at once.

        Calibration takes its whole batch at once, so there the envs are divided, each with all rows that are born from
        it; scoring takes as many inputs as fit. A part of fewer than twice `LEAST_PART` envs is not divided further,
        nor an input, whatever they need.
        """
        rows, _ = eval_rows(self.fleet, envs)
        if self.calibrating(rows, len(self.calibration)) > budget and len(envs) >= 2 * LEAST_PART:
            half = len(envs) // 2
            return self.divide(envs[:half], budget) + self.divide(envs[half:], budget)
        chunks = range(1, CHUNK[self.fleet.device.type] + 1)
        chunk = bisect_right(chunks, budget, key=lambda inputs: self.scoring(rows, inputs))
        return [Part(envs, max(chunk, 1))]

    def calibrating(self, rows: Rows, inputs: int) -> int:
        """Bytes alive at once in the train-mode pass over so many inputs."""
        return self._host_share(self._calibrating, rows, inputs) + self._most_of_acts(rows, inputs)

    def scoring(self, rows: Rows, inputs: int) -> int:
        """Bytes alive at once while so many inputs are scored."""
        return self._host_share(self._scoring, rows, inputs) + self._most_of_acts(rows, inputs)

    def _host_share(self, need: Need, rows: Rows, inputs: int) -> int:
        return -(-need.at(inputs) * len(rows) // LEAST_ROWS)

    def _most_of_acts(self, rows: Rows, inputs: int) -> int:
        """Where a bank acts, or rows are born, the streams of all rows are there twice, beside what the bank makes."""
        found = [0]
        for place, stream in self._streams.items():
            again = inputs * len(rows) * stream[0, 0].numel() * stream.element_size()
            acts = rows.acts.get(place, ())
            found.append(again)
            found += [again + -(-self._bank(act.bank, stream).at(inputs) * len(act.rows) // LEAST_ROWS) for act in acts]
        return max(found)

    def _bank(self, bank: Bank, stream: Tensor) -> Need:
        """For `LEAST_ROWS` of its members, with the styles that it has now."""
        key = bank.slot.slot_id, bank.blueprint, bank.styles
        if key not in self._banks:
            members = torch.arange(LEAST_ROWS, device=bank.device)
            valid = torch.ones_like(members, dtype=torch.bool)

            def run(inputs: int) -> Tensor:
                taken = take_rows(stream[:, :inputs], members)
                return bank.effect(taken, members, bank.full[:LEAST_ROWS], valid, valid)

            self._banks[key] = Need.of(run)
        return self._banks[key]
