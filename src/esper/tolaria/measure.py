"""Measuring a whole fleet in one pass: main rows, auditions and ablations, each with statistics of its own."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina import lifecycle
from esper.kasmina.compare import Difference, RowScore, paired_accuracy, paired_loss
from esper.kasmina.layers import Statistics
from esper.leyline import SeedStage
from esper.tolaria.batches import Samples
from esper.tolaria.rows import Rows

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

CHUNK = 512
"""Inputs per pass: bounds the memory, changes no result."""


class FleetComparison(NamedTuple):
    """What was found, by env or by (env, slot)."""

    main: list[RowScore]
    deployed: list[RowScore]
    auditions: dict[tuple[int, str], Difference]
    contributions: dict[tuple[int, str], Difference]


@torch.no_grad()
def score_rows(
    fleet: "HostFleet", rows: Rows, samples: Samples, calibration: Tensor | None, *, chunk: int = CHUNK
) -> list[RowScore]:
    """Score all rows on the same inputs, calibrated on training inputs or, with None, by the running statistics."""
    born_first = len(rows.births[0].parents)

    def spread(x: Tensor) -> Tensor:
        x = x.to(fleet.host.compute) if x.is_floating_point() else x
        return x.expand(born_first, *x.shape)

    statistics: list[Statistics] | None = None
    if calibration is not None:
        statistics = fleet.host.run(rows, spread(calibration), train=True).statistics
    correct, losses = [], []
    for inputs, targets in zip(samples.inputs.split(chunk), samples.targets.split(chunk), strict=True):
        logits = fleet.host.run(rows, spread(inputs), train=False, statistics=statistics).output
        wanted = targets.expand(len(logits), *targets.shape)
        loss = F.cross_entropy(logits.flatten(0, -2).to(fleet.dtype), wanted.flatten(), reduction="none")
        losses.append(loss.view(len(logits), -1))
        correct.append((logits.argmax(-1) == wanted).flatten(1))
    return [RowScore(*row) for row in zip(torch.cat(correct, 1), torch.cat(losses, 1), strict=True)]


def measure(fleet: "HostFleet", samples: Samples, calibration: Tensor, *, chunk: int = CHUNK) -> FleetComparison:
    """Audition every TRAINING seed and silence every acting one; notes what was found in their states."""
    rows, whose = fleet.evaluation_rows()
    scores = score_rows(fleet, rows, samples, calibration, chunk=chunk)
    deployed = score_rows(fleet, fleet.plan[0], samples, None, chunk=chunk)[: fleet.n]
    extras = scores[len(scores) - len(whose) :]
    auditions: dict[tuple[int, str], Difference] = {}
    contributions: dict[tuple[int, str], Difference] = {}
    for (env, slot_id), row in zip(whose, extras, strict=True):
        state, main = fleet.states[env][slot_id], scores[env]
        if state.stage is SeedStage.TRAINING:
            audition = Difference(paired_accuracy(row, main), paired_loss(row, main))
            auditions[env, slot_id] = audition
            fleet.states[env][slot_id] = lifecycle.record_audition(state, audition.accuracy)
        else:
            contribution = Difference(paired_accuracy(main, row), paired_loss(main, row))
            contributions[env, slot_id] = contribution
            fleet.states[env][slot_id] = lifecycle.record_contribution(state, contribution.accuracy)
    return FleetComparison(scores[: fleet.n], deployed, auditions, contributions)
