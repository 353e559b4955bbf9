"""Measuring a whole fleet: main rows, auditions and ablations, together as far as they fit into memory."""

from typing import TYPE_CHECKING, NamedTuple

from esper.kasmina import lifecycle
from esper.kasmina.compare import PairedDifference, RowScore, paired_accuracy, paired_loss
from esper.leyline import SeedStage
from esper.tolaria.batches import Samples
from esper.tolaria.memory import PassMemory
from esper.tolaria.passes import score_rows
from esper.tolaria.rows import committed_rows, deployed_rows, eval_rows

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet


class FleetComparison(NamedTuple):
    """What was found, by env or by (env, slot)."""

    main: list[RowScore]
    deployed: list[RowScore]
    auditions: dict[tuple[int, str], PairedDifference]
    contributions: dict[tuple[int, str], PairedDifference]


def measure(fleet: "HostFleet", needs: PassMemory, *, deployed: bool = True) -> FleetComparison:
    """Audition every TRAINING seed and silence every acting one; notes what was found in their states.

    Without `deployed` the pass with running statistics, which nothing but a report needs, is left out.
    """
    samples, calibration = needs.samples, needs.calibration
    _ = fleet.plan  # settles the banks
    everyone = range(len(fleet.host.weights))
    found = FleetComparison([], [], {}, {})
    for part in needs.divide(everyone, fleet.validation_bytes):
        rows, whose = eval_rows(fleet, part.envs)
        scores = score_rows(fleet, rows, samples, calibration, chunk=part.chunk)
        found.main.extend(scores[: len(part.envs)])
        if deployed:
            found.deployed.extend(score_rows(fleet, deployed_rows(fleet, part.envs), samples, None, chunk=part.chunk))
        for row, (env, slot_id) in whose.items():
            _note(fleet, found, env, slot_id, scores[row])
    return found._replace(main=found.main[: fleet.n], deployed=found.deployed[: fleet.n])


def measure_committed(fleet: "HostFleet", needs: PassMemory, samples: Samples) -> list[RowScore]:
    """Every host as it will be hardened, with its fossils alone, calibrated, on these inputs."""
    _ = fleet.plan  # settles the banks
    found: list[RowScore] = []
    for part in needs.divide(range(len(fleet.host.weights)), fleet.validation_bytes):
        rows = committed_rows(fleet, part.envs)
        found += score_rows(fleet, rows, samples, needs.calibration, chunk=part.chunk)
    return found[: fleet.n]


def _note(fleet: "HostFleet", found: FleetComparison, env: int, slot_id: str, row: RowScore) -> None:
    """Compare a seed's row with its env's main row, which is there already; note the difference in its state."""
    state, main = fleet.states[env][slot_id], found.main[env]
    if state.stage is SeedStage.TRAINING:
        audition = PairedDifference(paired_accuracy(row, main), paired_loss(row, main))
        found.auditions[env, slot_id] = audition
        fleet.states[env][slot_id] = lifecycle.record_audition(state, audition.accuracy)
    else:
        contribution = PairedDifference(paired_accuracy(main, row), paired_loss(main, row))
        found.contributions[env, slot_id] = contribution
        fleet.states[env][slot_id] = lifecycle.record_contribution(state, contribution.accuracy)
