"""What each seed of a host is worth, with its error.

Three answers from one function that scores coalitions of seeds (the others silenced): what is lost without it
(leave-one-out), its mean worth over all orders of arrival (Shapley), and the latter from sampled orders. All are
weighted sums of scores, so one function turns weights into values and paired errors.

Silencing a seed in a host that has grown used to it measures dependence too; only a control measures gain.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper.kasmina import MorphogeneticModel
from esper.kasmina.compare import RowScore, score_row
from esper.kasmina.slot import Role
from esper.leyline import ACTIVE_STAGES, BadValueError, Measurement
from esper.leyline.numbers import require_whole
from esper.tolaria import HostFleet
from esper.tolaria.batches import Samples
from esper.tolaria.memory import LEAST_PART, memory_guard
from esper.tolaria.passes import score_rows
from esper.tolaria.rows import Rows, deployed_rows

EXACT_UP_TO = 4
"""Seeds whose 2ⁿ coalitions are all scored."""

Coalition = frozenset[int]
Method = Literal["leave-one-out", "exact", "sampled"]
Weights = Mapping[Coalition, float]


class Score(NamedTuple):
    """A host with only some of its seeds acting."""

    accuracy: float
    """Points"""
    correct: Tensor | None = None
    """(images,) 0 or 1 for the same images in every coalition: errors are then paired"""
    error: float = 0.0
    """Standard error of the accuracy, used where `correct` is missing: errors then add up as if independent"""


ScoreCoalition = Callable[[Coalition], Score]


class Attribution(NamedTuple):
    """Points per seed."""

    seeds: tuple[Measurement, ...]
    together: Measurement
    """All seeds against none; for Shapley values their sum. Leave-one-out values need not sum to anything."""
    method: Method
    evaluations: int
    """Coalitions that were scored"""


def leave_one_out(score: ScoreCoalition, seeds: int) -> Attribution:
    """What the host loses without each seed, all others acting: n + 2 coalitions."""
    require_whole("seeds", seeds, 0)
    weights: list[Weights] = [{_all(seeds): 1.0, _all(seeds) - {seed}: -1.0} for seed in range(seeds)]
    return _attribute(_Scored(score), weights, seeds, "leave-one-out")


def shapley(score: ScoreCoalition, seeds: int, *, orders: int = 20, rng_seed: int = 0) -> Attribution:
    """Exact for up to four seeds; above, from so many random orders, each with its reverse."""
    require_whole("seeds", seeds, 0)
    if seeds <= EXACT_UP_TO:
        return _attribute(_Scored(score), [shapley_weights(seed, seeds) for seed in range(seeds)], seeds, "exact")
    return sampled_shapley(score, seeds, orders=orders, rng_seed=rng_seed)


def sampled_shapley(score: ScoreCoalition, seeds: int, *, orders: int = 20, rng_seed: int = 0) -> Attribution:
    """Mean over random orders, each with its reverse; errors include that not all orders were tried.

    Every order's marginals sum to all seeds against none, so the values do too.
    """
    require_whole("seeds", seeds, 1)
    if orders < 4 or orders % 2:
        raise BadValueError(f"orders {orders!r} is not an even number of 4 or more; each order comes with its reverse")
    scored, generator = _Scored(score), random.Random(rng_seed)
    weights: list[dict[Coalition, float]] = [defaultdict(float) for _ in range(seeds)]
    pairs: list[list[float]] = [[] for _ in range(seeds)]  # mean marginal of an order and its reverse
    for _ in range(orders // 2):
        order = generator.sample(range(seeds), seeds)
        found = [0.0] * seeds
        for direction in (order, order[::-1]):
            for position, seed in enumerate(direction):
                without = frozenset(direction[:position])
                weights[seed][without | {seed}] += 1 / orders
                weights[seed][without] -= 1 / orders
                found[seed] += (scored[without | {seed}].accuracy - scored[without].accuracy) / 2
        for seed, marginal in enumerate(found):
            pairs[seed].append(marginal)
    result = _attribute(scored, weights, seeds, "sampled")
    widened = [
        Measurement(measured.value, math.hypot(measured.error, _standard_error(found)))
        for measured, found in zip(result.seeds, pairs, strict=True)
    ]
    return result._replace(seeds=tuple(widened))


def shapley_weights(seed: int, seeds: int) -> Weights:
    """φ = Σ_S |S|! (n − |S| − 1)! / n! · (v(S + seed) − v(S)) over coalitions S without it."""
    others = [other for other in range(seeds) if other != seed]
    weights: dict[Coalition, float] = {}
    for size in range(seeds):
        weight = 1 / (seeds * math.comb(seeds - 1, size))
        for members in itertools.combinations(others, size):
            weights[frozenset(members) | {seed}] = weight
            weights[frozenset(members)] = -weight
    return weights


def weighted(weights: Weights, scores: Mapping[Coalition, Score]) -> Measurement:
    """A weighted sum of scores, with its standard error: paired where each score has its images."""
    value = sum(weight * scores[coalition].accuracy for coalition, weight in weights.items())
    images = [(weight, scores[coalition].correct) for coalition, weight in weights.items()]
    per_image: Tensor | None = None
    for weight, correct in images:
        if correct is None:
            independent = math.sqrt(sum((weight * scores[c].error) ** 2 for c, weight in weights.items()))
            return Measurement(value, independent)
        part = 100.0 * weight * correct.double()
        per_image = part if per_image is None else per_image + part
    if per_image is None or per_image.numel() < 2:
        return Measurement(value, 0.0)
    return Measurement(value, float(per_image.std()) / math.sqrt(per_image.numel()))


class _Scored(dict[Coalition, Score]):
    """Scores each coalition once, when it is first asked for."""

    def __init__(self, score: ScoreCoalition) -> None:
        super().__init__()
        self._score = score

    def __missing__(self, coalition: Coalition) -> Score:
        self[coalition] = self._score(coalition)
        return self[coalition]


def _all(seeds: int) -> Coalition:
    return frozenset(range(seeds))


def _attribute(scored: _Scored, weights: Sequence[Weights], seeds: int, method: Method) -> Attribution:
    values = tuple(weighted(each, scored) for each in weights)
    together = weighted({_all(seeds): 1.0, frozenset(): -1.0}, scored) if seeds else Measurement(0.0, 0.0)
    return Attribution(values, together, method, len(scored))


def _standard_error(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


class ActingSeeds(NamedTuple):
    """The seeds that act in one host; they are scored as the host is at that moment."""

    slots: tuple[str, ...]
    """Seed i of a coalition is the one in slot i, in the host's order"""
    score: ScoreCoalition


def attribute(seeds: ActingSeeds, *, orders: int = 20, rng_seed: int = 0) -> Attribution:
    """What each of them is worth, in the order of `seeds.slots`: Shapley values.

    Exact for up to four seeds, from all their coalitions; above, from so many random orders of arrival.
    """
    return shapley(seeds.score, len(seeds.slots), orders=orders, rng_seed=rng_seed)


def seeds_of_model(model: MorphogeneticModel, x: Tensor, targets: Tensor, calibration: Tensor) -> ActingSeeds:
    """The acting seeds of a model on these images; `calibration` are training inputs, as for `model.measure`."""
    slots = tuple(slot_id for slot_id, slot in model.seed_slots.items() if slot.state.stage in ACTIVE_STAGES)

    def score(acting: Collection[str]) -> RowScore:
        roles = {slot_id: Role.SILENT for slot_id in slots if slot_id not in acting}
        with torch.compiler.set_stance("force_eager"):  # rows that run once are not worth a graph each
            return score_row(model.body, x, targets, roles, calibration)

    return ActingSeeds(slots, _by_number(slots, score))


def seeds_of_host(fleet: HostFleet, env: int, samples: Samples | None = None) -> ActingSeeds:
    """The acting seeds of one host of a fleet, on these images (default: those that `fleet.validate` scores)."""
    fleet.check_env(env)
    slots = tuple(slot_id for slot_id, state in fleet.states[env].items() if state.stage in ACTIVE_STAGES)
    samples = fleet.batches.validation() if samples is None else samples
    calibration = fleet.batches.calibration(fleet.task.calibration_size)
    # Among neighbours, whose rows are thrown away: in passes of fewer rows some kernels round differently.
    everyone = range(len(fleet.host.weights))
    first = max(0, min(env, len(everyone) - LEAST_PART))
    envs = everyone[first : first + LEAST_PART]

    def score(acting: Collection[str]) -> RowScore:
        with memory_guard(fleet, "scoring coalitions"):
            return score_rows(fleet, _rows_with(fleet, envs, acting), samples, calibration)[envs.index(env)]

    return ActingSeeds(slots, _by_number(slots, score))


def _rows_with(fleet: HostFleet, envs: Sequence[int], acting: Collection[str]) -> Rows:
    """Main rows of these envs in which only these slots act."""
    fleet.update_plan()
    rows = deployed_rows(fleet, envs)
    acts = {place: [act for act in found if act.bank.slot.slot_id in acting] for place, found in rows.acts.items()}
    return replace(rows, acts=acts)


def _by_number(slots: Sequence[str], score: Callable[[Collection[str]], RowScore]) -> ScoreCoalition:
    """Slots by their number, and what pairs the errors."""

    def score_numbered(coalition: Coalition) -> Score:
        found = score([slots[seed] for seed in coalition])
        return Score(found.accuracy, found.correct)

    return score_numbered
