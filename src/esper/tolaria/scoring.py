"""Scoring rows: all of them on the same inputs, each with statistics of its own."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina.compare import RowScore
from esper.kasmina.layers import Statistics
from esper.tolaria.batches import Samples
from esper.tolaria.rows import Rows

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

CHUNK = {"cpu": 512, "cuda": 4096}
"""Most inputs per pass: what caches like, and what saves launches."""


@torch.no_grad()
def score_rows(
    fleet: "HostFleet", rows: Rows, samples: Samples, calibration: Tensor | None, *, chunk: int | None = None
) -> list[RowScore]:
    """Score all rows on the same inputs, calibrated on training inputs or, with None, by the running statistics."""
    chunk = chunk or CHUNK[fleet.device.type]
    statistics = None if calibration is None else calibrate(fleet, rows, calibration)
    correct, losses = [], []
    for inputs, targets in zip(samples.inputs.split(chunk), samples.targets.split(chunk), strict=True):
        found = score(fleet, rows, Samples(inputs, targets), statistics)
        correct.append(found.correct)
        losses.append(found.losses)
    return [RowScore(*row) for row in zip(torch.cat(correct, 1), torch.cat(losses, 1), strict=True)]


def spread(fleet: "HostFleet", rows: Rows, x: Tensor) -> Tensor:
    """The same inputs for every row that is born at the start."""
    x = x.to(fleet.compute) if x.is_floating_point() else x
    return x.expand(len(rows.births[0].parents), *x.shape)


def calibrate(fleet: "HostFleet", rows: Rows, inputs: Tensor) -> list[Statistics]:
    """Statistics of each row: one train-mode pass, as they are those of the whole batch."""
    return fleet.host.run(rows, spread(fleet, rows, inputs), train=True).statistics


def score(fleet: "HostFleet", rows: Rows, samples: Samples, statistics: list[Statistics] | None) -> RowScore:
    """All rows on a chunk of inputs: (R, predictions) both."""
    inputs, targets = samples
    logits = fleet.host.run(rows, spread(fleet, rows, inputs), train=False, statistics=statistics).output
    wanted = targets.expand(len(logits), *targets.shape)
    loss = F.cross_entropy(logits.flatten(0, -2).to(fleet.dtype), wanted.flatten(), reduction="none")
    return RowScore((logits.argmax(-1) == wanted).flatten(1), loss.view(len(logits), -1))
