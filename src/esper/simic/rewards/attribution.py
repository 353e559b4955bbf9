"""What each seed is worth, with its error, and which seeds look better than they are.

Values come from one function that scores coalitions of seeds, with the others silenced. *Leave-one-out* is the loss
without a seed. *Shapley* is its mean marginal over all orders of arrival, or over sampled ones. All are weighted sums
of scores. Silencing also measures how far a host depends on a seed; only a control measures gain.

The detectors judge every step with an acting seed. *Hacking*: the host depends on a seed far more than it has gained.
*Ransomware*: the host would lose much without the seed, and has gained nothing over its control.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper.kasmina import MorphogeneticModel
from esper.kasmina.compare import score_row
from esper.kasmina.slot import Role
from esper.leyline import ACTIVE_STAGES, BadValueError, Measurement
from esper.leyline.numbers import require_whole
from esper.simic.rewards.config import DetectorLimits
from esper.simic.rewards.families import is_measured
from esper.tamiyo.signals import SlotView
from esper.tolaria import HostFleet
from esper.tolaria.batches import Samples
from esper.tolaria.memory import LEAST_PART, memory_guard
from esper.tolaria.passes import score_rows
from esper.tolaria.rows import deployed_rows

EXACT_UP_TO = 4  # number of seeds up to which all 2ⁿ coalitions are scored

Coalition = frozenset[int]
Weights = Mapping[Coalition, float]


class Score(NamedTuple):
    """A host in which only some seeds act."""

    accuracy: float  # points
    correct: Tensor | None = None
    """(images,) 0 or 1, on the same images for every coalition; without it, the score has no error"""


ScoreCoalition = Callable[[Coalition], Score]
Method = Literal["leave-one-out", "exact", "sampled"]


class Attribution(NamedTuple):
    """Points per seed."""

    seeds: tuple[Measurement, ...]
    together: Measurement
    """All seeds against none. Shapley values add up to it; leave-one-out values need not."""
    method: Method
    evaluations: int  # coalitions that were scored


def leave_one_out(score: ScoreCoalition, seeds: int) -> Attribution:
    """What the host loses without each seed, all others acting: n + 2 coalitions."""
    require_whole("seeds", seeds, 0)
    everyone = frozenset(range(seeds))
    weights: list[Weights] = [{everyone: 1.0, everyone - {seed}: -1.0} for seed in range(seeds)]
    return _attribute(score, weights, "leave-one-out")


def sampled_shapley(score: ScoreCoalition, seeds: int, *, orders: int = 20, rng_seed: int = 0) -> Attribution:
    """Means over random orders, each with its reverse. Errors include that of sampling.

    The marginals of every order add up to all seeds against none, and so do the values.
    """
    require_whole("seeds", seeds, 1)
    if orders < 4 or orders % 2:
        raise BadValueError(f"orders {orders!r} is not an even number of 4 or more; each order comes with its reverse")
    score, generator = cache(score), random.Random(rng_seed)
    weights: list[dict[Coalition, float]] = [defaultdict(float) for _ in range(seeds)]
    pairs: list[list[float]] = [[] for _ in range(seeds)]  # mean marginal of an order and its reverse
    for _ in range(orders // 2):
        order = generator.sample(range(seeds), seeds)
        marginals = [0.0] * seeds
        for direction in (order, order[::-1]):
            for position, seed in enumerate(direction):
                without = frozenset(direction[:position])
                weights[seed][without | {seed}] += 1 / orders
                weights[seed][without] -= 1 / orders
                marginals[seed] += (score(without | {seed}).accuracy - score(without).accuracy) / 2
        for seed, marginal in enumerate(marginals):
            pairs[seed].append(marginal)
    result = _attribute(score, weights, "sampled")
    errors = [math.hypot(seed.error, _standard_error(pair)) for seed, pair in zip(result.seeds, pairs, strict=True)]
    return result._replace(seeds=tuple(map(Measurement, (seed.value for seed in result.seeds), errors)))


def shapley_weights(seed: int, seeds: int) -> Weights:
    """φ = Σ_S |S|! (n − |S| − 1)! / n! · (v(S + seed) − v(S)) over coalitions S without the seed."""
    others = [other for other in range(seeds) if other != seed]
    weights: dict[Coalition, float] = {}
    for size in range(seeds):
        weight = 1 / (seeds * math.comb(seeds - 1, size))
        for members in itertools.combinations(others, size):
            weights[frozenset(members) | {seed}] = weight
            weights[frozenset(members)] = -weight
    return weights


def _standard_error(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _attribute(score: ScoreCoalition, weights: Sequence[Weights], method: Method) -> Attribution:
    cached = cache(score)
    values = tuple(_weighted_sum(each, cached) for each in weights)
    whole: Weights = {frozenset(range(len(weights))): 1.0, frozenset(): -1.0}
    together = _weighted_sum(whole, cached) if weights else Measurement(0.0, 0.0)
    return Attribution(values, together, method, cached.cache_info().currsize)


def _weighted_sum(weights: Weights, score: ScoreCoalition) -> Measurement:
    """A weighted sum of scores with its standard error, paired over the images."""
    value = sum(weight * score(coalition).accuracy for coalition, weight in weights.items())
    correct = [(weight, score(coalition).correct) for coalition, weight in weights.items()]
    parts = [100.0 * weight * images.double() for weight, images in correct if images is not None]
    if len(parts) < len(weights) or parts[0].numel() < 2:
        return Measurement(value, 0.0)
    return Measurement(value, float(reduce(torch.add, parts).std()) / math.sqrt(parts[0].numel()))


class ActingSeeds(NamedTuple):
    """The acting seeds of one host in its current state."""

    slots: tuple[str, ...]  # seed i of a coalition is in slot i, in the host's order
    score: ScoreCoalition


def attribute(seeds: ActingSeeds, *, orders: int = 20, rng_seed: int = 0) -> Attribution:
    """Shapley values in the order of `seeds.slots`: exact for up to four seeds, otherwise from random orders."""
    count = len(seeds.slots)
    if count > EXACT_UP_TO:
        return sampled_shapley(seeds.score, count, orders=orders, rng_seed=rng_seed)
    return _attribute(seeds.score, [shapley_weights(seed, count) for seed in range(count)], "exact")


def seeds_of_model(model: MorphogeneticModel, x: Tensor, targets: Tensor, calibration: Tensor) -> ActingSeeds:
    """The acting seeds of a model on these images; `calibration` are training inputs, as for `model.measure`."""
    slots = tuple(slot_id for slot_id, slot in model.seed_slots.items() if slot.state.stage in ACTIVE_STAGES)

    def score(coalition: Coalition) -> Score:
        roles = {slot_id: Role.SILENT for seed, slot_id in enumerate(slots) if seed not in coalition}
        with torch.compiler.set_stance("force_eager"):  # a row that runs once is not worth a graph
            row = score_row(model.body, x, targets, roles, calibration)
        return Score(row.accuracy, row.correct)

    return ActingSeeds(slots, score)


def seeds_of_host(fleet: HostFleet, env: int, samples: Samples | None = None) -> ActingSeeds:
    """The acting seeds of one host of a fleet; by default, on the images of `fleet.validate`."""
    fleet.check_env(env)
    slots = tuple(slot_id for slot_id, state in fleet.states[env].items() if state.stage in ACTIVE_STAGES)
    samples = fleet.batches.validation() if samples is None else samples
    calibration = fleet.batches.calibration(fleet.task.calibration_size)
    # Scored among neighbours, whose rows are discarded: in passes of fewer rows some kernels round differently.
    everyone = range(len(fleet.host.weights))
    first = max(0, min(env, len(everyone) - LEAST_PART))
    envs = everyone[first : first + LEAST_PART]

    def score(coalition: Coalition) -> Score:
        acting = {slots[seed] for seed in coalition}
        with memory_guard(fleet, "scoring coalitions"):
            fleet.update_plan()
            rows = deployed_rows(fleet, envs)
            acts = {slot: [act for act in acts if act.bank.slot.slot_id in acting] for slot, acts in rows.acts.items()}
            row = score_rows(fleet, replace(rows, acts=acts), samples, calibration)[envs.index(env)]
        return Score(row.accuracy, row.correct)

    return ActingSeeds(slots, score)


Suspicion = Literal["hacking", "ransomware"]
Severity = Literal["warning", "critical"]
SEVERITY: dict[Suspicion, Severity] = {"hacking": "warning", "ransomware": "critical"}


class Suspects(NamedTuple):
    """Which seeds are suspicious, bool (N, S), or (T, N, S) over an episode; never both in one step."""

    hacking: Tensor
    ransomware: Tensor

    @staticmethod
    def over(steps: "Sequence[Suspects]") -> "Suspects":
        """The suspects of an episode, (T, N, S)."""
        return Suspects(*(torch.stack(flags) for flags in zip(*steps, strict=True)))


@dataclass(frozen=True)
class Finding:
    """A seed that became suspicious."""

    step: int
    env: int
    slot: str
    suspicion: Suspicion
    severity: Severity
    contribution: float  # points that the host would lose without the seed
    gain: float  # points that the host has over its control


def detect(slots: SlotView, gain: Tensor, limits: DetectorLimits) -> Suspects:
    """Judge the measured seeds of hosts with this gain (N,). A contribution within its own error proves nothing."""
    contribution, gain = slots.contribution, gain.unsqueeze(-1)
    large = (contribution.value >= limits.contribution) & (contribution.value > contribution.error)
    large &= is_measured(contribution, slots.alpha)
    return Suspects(large & (gain > 0) & (contribution.value >= limits.ratio * gain), large & (gain <= 0))


def findings(
    suspects: Suspects, germinations: Tensor, contribution: Tensor, gain: Tensor, slot_ids: Sequence[str]
) -> tuple[Finding, ...]:
    """The first suspicious step of every seed and suspicion, by step, env and slot. Device sync: a few in all.

    `germinations` (T, N, S) counts the seeds that a slot has had; `contribution` (T, N, S); `gain` (T, N).
    """
    result = []
    for (name, severity), flags in zip(SEVERITY.items(), suspects, strict=True):
        first = flags & (_count_by_seed(flags, germinations) == 1)
        positions = first.nonzero()
        contributions, gains = contribution[first].tolist(), gain[positions[:, 0], positions[:, 1]].tolist()
        for (step, env, slot), *points in zip(positions.tolist(), contributions, gains, strict=True):
            result.append(Finding(step, env, slot_ids[slot], name, severity, *points))
    return tuple(sorted(result, key=lambda finding: (finding.step, finding.env, finding.slot)))


def _count_by_seed(flags: Tensor, germinations: Tensor) -> Tensor:
    """(T, N, S): flags so far of the seed that is in the slot.

    Ages would not tell seeds apart: a host that a panic restored has the same age twice.
    """
    count = flags.cumsum(0)
    another = torch.ones_like(flags)
    another[1:] = germinations[1:] != germinations[:-1]
    # Counts never fall, so the largest count before a change is that of the last change.
    before = torch.where(another, count - flags.long(), 0).cummax(0).values
    return count - before
