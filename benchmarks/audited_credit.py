"""Is a seed's contribution what the host would lose without it?

Hosts grow random seeds in all slots, of all blueprints. During the episode one HOLDING seed of each host is audited:

- Its contribution is measured on one half of the validation images, calibrated.
- For the truth, twins of one snapshot train on for five steps, one as it is and one with the seed cut at once. The
  difference of their accuracies is measured on the other half, calibrated too. Twins see the same minibatches at the
  same rates; both begin with empty momentum, as after any restored snapshot.

The result is Spearman's rank correlation, over all seeds and within slots. The latter is the mean over slots, weighted
by their number of seeds, so that telling good slots from bad ones does not count. Intervals are bootstrapped over
seeds, one per host.

    python benchmarks/audited_credit.py --live 400 --workers 16
    python benchmarks/audited_credit.py --task cifar_growth --live 400 --hosts 128 --device cuda --keep FOLDER
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
from harness import RESULTS, Json, print_table, stored, write_result
from numpy.typing import NDArray
from scipy.stats import rankdata

from esper.kasmina.compare import RowScore, paired_difference
from esper.leyline import EsperError, SeedStage, derive_seed
from esper.leyline.records import checksum, encode
from esper.simic.training.hosts import growth_fleet, host_seed
from esper.tolaria import HostFleet, get_task
from esper.tolaria.batches import Samples
from esper.tolaria.passes import score_rows
from esper.tolaria.rows import deployed_rows, eval_rows

AFTERWARDS = 5
"""Steps that twins train on."""
BAR = 0.6
BOOTSTRAPS = 2000
LATEST_SOWING = 5
SHADOW_STEPS = (2, 5)
AUDITED_AT = (11, 15)
"""By then most seeds hold; the five steps afterwards still belong to the episode."""


@dataclass(frozen=True)
class Audit:
    """One seed. Points of accuracy, and nats of loss."""

    host: int
    slot: str
    blueprint: str
    step: int
    seeds: int
    """Acting in this host, this one included."""
    contribution: float
    contribution_loss: float
    effect: float
    """Of keeping the seed instead of cutting it."""
    effect_loss: float


@dataclass(frozen=True)
class Sowing:
    """A seed to come."""

    slot_id: str
    blueprint: str
    step: int
    shadow_steps: int


@dataclass(frozen=True)
class Job:
    """One fleet."""

    task: str
    number: int
    hosts: int
    rng_seed: int
    batches: int | None
    """Minibatches per step; None: as the task has it."""
    device: str
    data_dir: Path | None


class Halves:
    """The validation images in two, and the calibrated scores of rows on either."""

    def __init__(self, fleet: HostFleet) -> None:
        self.fleet = fleet
        inputs, targets = fleet.batches.validation()
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0)).to(targets.device)
        first, second = order.tensor_split(2)
        self.first, self.second = Samples(inputs[first], targets[first]), Samples(inputs[second], targets[second])
        self.calibration = fleet.batches.calibration(fleet.task.calibration_size)

    def contributions(self) -> tuple[list[RowScore], dict[tuple[int, str], RowScore]]:
        """On the first half: main rows, and the rows with one acting seed silenced (or a TRAINING one acting)."""
        self.fleet.update_plan()
        rows, whose = eval_rows(self.fleet, range(len(self.fleet.host.weights)))
        scores = score_rows(self.fleet, rows, self.first, self.calibration)
        return scores[: self.fleet.n], {seed: scores[row] for row, seed in whose.items()}

    def networks(self) -> list[RowScore]:
        """On the second half: all hosts as they are."""
        rows = deployed_rows(self.fleet, range(self.fleet.n))
        return score_rows(self.fleet, rows, self.second, self.calibration)


def sow(fleet: HostFleet, dice: random.Random) -> list[dict[str, Sowing]]:
    """One to three seeds per host, in slots, blueprints and at steps by dice."""
    plans = []
    for _ in range(fleet.n):
        slots = dice.sample(list(fleet.slots), dice.randint(1, len(fleet.slots)))
        plans.append(
            {
                slot_id: Sowing(
                    slot_id,
                    dice.choice(fleet.slots[slot_id].blueprints).name,
                    dice.randint(0, LATEST_SOWING),
                    dice.randint(*SHADOW_STEPS),
                )
                for slot_id in slots
            }
        )
    return plans


def tend(fleet: HostFleet, env: int, sowing: Sowing) -> None:
    """Germinate a seed when its time has come, and advance it after its steps in the shadow; it is never committed."""
    state = fleet.states[env][sowing.slot_id]
    if state.stage is SeedStage.DORMANT and fleet.step_index == sowing.step:
        try:
            fleet.germinate(env, sowing.slot_id, sowing.blueprint)
        except EsperError:
            return  # the budget is spent by the seeds before it
    elif state.stage is SeedStage.TRAINING and state.steps_in_stage >= sowing.shadow_steps:
        fleet.advance(env, sowing.slot_id)


def grow(fleet: HostFleet, plans: list[dict[str, Sowing]], steps: int) -> None:
    """Train `steps` steps without a governor, which would undo what is measured here."""
    for _ in range(steps):
        for env, plan in enumerate(plans):
            for sowing in plan.values():
                tend(fleet, env, sowing)
        fleet.train_step()
        fleet.validate(deployed=False)
        fleet.tick()


def audit(job: Job) -> list[Audit]:
    """Grow a fleet, then audit one seed of every host that holds one."""
    torch.set_num_threads(1)
    task, dice = get_task(job.task), random.Random(derive_seed(job.rng_seed, "audit", job.number))
    if job.batches is not None:
        task = replace(task, batches_per_step=job.batches)
    hosts = range(job.number * job.hosts, (job.number + 1) * job.hosts)
    seeds = [host_seed("evaluation", job.rng_seed, host) for host in hosts]
    fleet = growth_fleet(task, job.hosts, job.device, seeds, data_dir=job.data_dir)
    halves, plans, moment = Halves(fleet), sow(fleet, dice), dice.randint(*AUDITED_AT)
    grow(fleet, plans, moment)
    chosen = choose(fleet, dice)
    acting = [sum(state.alpha > 0 for state in states.values()) for states in fleet.states]
    main, silenced = halves.contributions()
    fleet.snapshots.take()
    kept = twin(fleet, halves, moment, {})
    cut = twin(fleet, halves, moment, chosen)
    found = []
    for env, slot_id in chosen.items():
        without = silenced[env, slot_id]
        contribution, effect = paired_difference(main[env], without), paired_difference(kept[env], cut[env])
        found.append(
            Audit(
                hosts[env],
                slot_id,
                plans[env][slot_id].blueprint,
                moment,
                acting[env],
                contribution.points.value,
                contribution.loss.value,
                effect.points.value,
                effect.loss.value,
            )
        )
    return found


def audit_stored(keep: Path | None, job: Job) -> list[Audit]:
    """The same, unless an earlier call has stored it."""
    identity = checksum(encode(replace(job, data_dir=None)))[:20]
    return [Audit(**each) for each in stored(keep, identity, lambda: [asdict(one) for one in audit(job)])]


def choose(fleet: HostFleet, dice: random.Random) -> dict[int, str]:
    """By env, one of its HOLDING seeds whose contribution a controller would have seen."""
    holding = {
        env: [s for s, state in states.items() if state.stage is SeedStage.HOLDING and state.contribution is not None]
        for env, states in enumerate(fleet.states)
    }
    return {env: dice.choice(slots) for env, slots in holding.items() if slots}


def twin(fleet: HostFleet, halves: Halves, moment: int, cut: dict[int, str]) -> list[RowScore]:
    """From the snapshot, with these seeds cut: the hosts after five more steps."""
    for env in range(fleet.n):
        fleet.snapshots.restore(env)
    fleet.step_index = moment
    for env, slot_id in cut.items():
        fleet.prune(env, slot_id)
    for _ in range(AFTERWARDS):
        fleet.train_step()
        fleet.tick()
    return halves.networks()


# -- statistics -------------------------------------------------------------------------------------------------------

Array = NDArray[np.float64]


def spearman(first: Array, second: Array) -> float:
    """Rank correlation, ties at their mean rank; NaN where one side does not vary."""
    ranks = rankdata(first), rankdata(second)
    deviations = [rank - rank.mean() for rank in ranks]
    scale = math.sqrt(float((deviations[0] ** 2).sum() * (deviations[1] ** 2).sum()))
    return float((deviations[0] * deviations[1]).sum()) / scale if scale else math.nan


def within(first: Array, second: Array, slots: NDArray[np.str_]) -> float:
    """Mean over slots of the rank correlation within each, weighted by seeds; slots of fewer than three say nothing."""
    total, weight = 0.0, 0
    for slot in np.unique(slots):
        here = slots == slot
        if here.sum() >= 3 and not math.isnan(rho := spearman(first[here], second[here])):
            total, weight = total + int(here.sum()) * rho, weight + int(here.sum())
    return total / weight if weight else math.nan


def interval(statistic: Callable[[NDArray[np.int64]], float], size: int) -> tuple[float, float]:
    """95 % by the bootstrap over seeds."""
    draw = np.random.default_rng(0)
    found = [statistic(draw.integers(0, size, size)) for _ in range(BOOTSTRAPS)]
    low, high = np.nanquantile(found, [0.025, 0.975]) if not np.isnan(found).all() else (math.nan, math.nan)
    return float(low), float(high)


def correlations(audits: Sequence[Audit]) -> dict[str, dict[str, float | None]]:
    """Overall, within slots, and per slot; by accuracy and by loss."""
    slots = np.array([each.slot for each in audits])
    found: dict[str, dict[str, float | None]] = {}
    for name, (one, other) in {
        "accuracy": ("contribution", "effect"),
        "loss": ("contribution_loss", "effect_loss"),
    }.items():
        first, second = (np.array([getattr(each, field) for each in audits]) for field in (one, other))

        def overall(index: NDArray[np.int64], a: Array = first, b: Array = second) -> float:
            return spearman(a[index], b[index])

        def inside(index: NDArray[np.int64], a: Array = first, b: Array = second) -> float:
            return within(a[index], b[index], slots[index])

        everyone = np.arange(len(audits))
        found[f"{name}, all"] = _entry(overall(everyone), interval(overall, len(audits)), len(audits))
        found[f"{name}, within slots"] = _entry(inside(everyone), interval(inside, len(audits)), len(audits))
        for slot in np.unique(slots):
            here = np.flatnonzero(slots == slot)
            bounds = interval(lambda index, here=here, rho=overall: rho(here[index]), len(here))  # type: ignore[misc]
            found[f"{name}, {slot}"] = _entry(overall(here), bounds, len(here))
    return found


def _entry(rho: float, bounds: tuple[float, float], seeds: int) -> dict[str, float | None]:
    """JSON has no NaN."""
    values = {"rho": rho, "low": bounds[0], "high": bounds[1]}
    return {"seeds": seeds, **{name: None if math.isnan(value) else value for name, value in values.items()}}


# -- the whole --------------------------------------------------------------------------------------------------------


def gather(arguments: argparse.Namespace) -> list[Audit]:
    """The first `live` audits, in the order of the fleets, whatever the number of workers."""

    def job(number: int) -> Job:
        settings = (arguments.seeds, arguments.batches, arguments.device, arguments.data_dir)
        return Job(arguments.task, number, arguments.hosts, *settings)

    audits: list[Audit] = []
    numbers = count()
    if arguments.workers == 1:
        while len(audits) < arguments.live:
            audits += audit_stored(arguments.keep, job(next(numbers)))
            print(f"{len(audits)} seeds audited", flush=True)
    else:
        context = torch.multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
            while len(audits) < arguments.live:
                for found in pool.map(
                    partial(audit_stored, arguments.keep), [job(next(numbers)) for _ in range(arguments.workers)]
                ):
                    audits += found
                print(f"{len(audits)} seeds audited", flush=True)
    return audits[: arguments.live]


def main() -> None:
    """Audit, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--live", type=int, default=200, help="seeds to audit")
    parser.add_argument("--hosts", type=int, default=32, help="per fleet; at most one seed of each is audited")
    parser.add_argument("--seeds", type=int, default=0, help="the number that everything random follows from")
    parser.add_argument("--batches", type=int, default=None, help="fewer minibatches per step")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--keep", type=Path, default=None, help="folder from which a stopped call continues")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    audits = gather(arguments)
    found = correlations(audits)
    print_table(
        f"{arguments.task}: contribution on one half of the validation images against the effect of keeping the seed "
        f"for {AFTERWARDS} steps on the other; Spearman with 95 % bootstrap interval (bar {BAR})",
        ["by, over", "seeds", "rho", "low", "high"],
        [[name, *(_shown(value) for value in entry.values())] for name, entry in found.items()],
    )
    cells: dict[str, list[Audit]] = {}
    for each in audits:
        cells.setdefault(f"{each.slot} {each.blueprint}", []).append(each)
    written: dict[str, Json] = {
        "task": arguments.task,
        "rng_seed": arguments.seeds,
        "bar": BAR,
        "cells": {name: len(members) for name, members in sorted(cells.items())},
        "spearman": {name: dict(entry) for name, entry in found.items()},
        "audits": [asdict(each) for each in audits],
    }
    path = write_result(f"audited_credit_{arguments.task}", written, arguments.out)
    print(f"wrote {path.name}")


def _shown(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"


if __name__ == "__main__":
    main()
