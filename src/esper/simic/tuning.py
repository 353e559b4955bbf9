"""`esper tune`: search a schedule or the heuristic's thresholds with a stated number of episodes, and store the best.

An episode is one grown host; controls are not counted, as in training. Hosts are of the tuning range, which neither
training nor evaluation uses. Searches are successive halving, then a final on fresh hosts. All comparisons are on the
same hosts, numbered from 0, and episodes are counted before they run.
"""

import json
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from esper.leyline import BadValueError, UnknownNameError, derive_seed, gain_over, head_preset, objective
from esper.leyline.numbers import require_whole
from esper.leyline.progress import Advance, ignore, progress_bar
from esper.leyline.records import Json, checksum, encode
from esper.simic.evaluation.arena import MakePolicy, SideBySide, divide, hardened, open_arena
from esper.simic.evaluation.workers import RunAll, run_with
from esper.simic.evaluation.yardsticks import extensions, plan_policy
from esper.simic.offline.records import RecordWriter
from esper.simic.offline.shards import check_unused
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.simic.training.hosts import check_device, host_seed
from esper.simic.training.tape import record_header
from esper.storage.files import check_writable, replace_file
from esper.tamiyo.policies import HeuristicConfig, HeuristicTamiyo, Plan
from esper.tamiyo.policies.heuristic import OFFER_CHOICES
from esper.tamiyo.policies.open_loop import MAX_SEEDS
from esper.tamiyo.policies.shipped import CONTENT, FORMAT, TUNED_KINDS, TunedKind
from esper.tolaria import Task, get_task

EPISODES = 480  # the learner's default: 20 rounds × 24 grown hosts
Candidate = TypeVar("Candidate", bound=Hashable)
Evaluate = Callable[[Sequence[Candidate], Sequence[int]], list[list[float]]]  # objectives [candidate][host]
LEAST_EPISODES = 16  # with fewer, shares of the budget round to nothing
FIRST_HOSTS = 4  # most hosts in the first rung of a halving; one host alone could be of a rare kind
FIRST_SHARE = 2 / 3  # largest share of a halving's episodes for its first rung
FINALISTS = 2  # halving ends when the next half would be no more than this


@dataclass(frozen=True)
class Trial:
    """One candidate on some hosts. The hosts of all trials add up to the episodes used."""

    stage: str
    candidate: Json
    hosts: tuple[int, ...]
    objective: float  # mean over these hosts, points


class Search(Generic[Candidate]):
    """A budget of episodes, its log, and the objectives measured."""

    def __init__(self, evaluate: Evaluate[Candidate], budget: int, rng_seed: int) -> None:
        require_whole("episodes", budget, LEAST_EPISODES, remark="; fewer compare nothing")
        self.evaluate, self.budget, self.rng_seed = evaluate, budget, rng_seed
        self.used = 0
        self.log: list[Trial] = []
        self.objectives: dict[Candidate, dict[int, float]] = {}  # objective by candidate and host

    @property
    def left(self) -> int:
        """Episodes left."""
        return self.budget - self.used

    def rng(self, *names: str) -> random.Random:
        """The random stream of this name."""
        return random.Random(derive_seed("tuning", self.rng_seed, *names))

    def halve(self, stage: str, candidates: Sequence[Candidate], episodes: int) -> list[Candidate]:
        """Run all candidates on few hosts, the better half on more, and so on. Returns the survivors, best first.

        The first rung draws at random those that it can pay for. Later rungs get equal shares of the rest."""
        episodes = min(episodes, self.left)
        first_rung = max(1, int(FIRST_SHARE * episodes))
        alive = list(candidates)
        if len(alive) > first_rung:
            alive = self.rng(stage, "draw").sample(alive, first_rung)
        seen = min(FIRST_HOSTS, first_rung // len(alive))
        self._try(stage, alive, range(seen))
        episodes -= len(alive) * seen
        sizes = _halves(len(alive))
        for rung, size in enumerate(sizes):
            more = episodes // (len(sizes) - rung) // size
            if more:
                alive = self.ranked(alive)[:size]
                self._try(stage, alive, range(seen, seen + more))
                seen, episodes = seen + more, episodes - size * more
        return self.ranked(alive)

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Sort by the mean over the hosts that all of them share, best first; ties in the order given."""
        shared = set[int].intersection(*(set(self.objectives[candidate]) for candidate in candidates))
        assert shared, "candidates without a common host cannot be compared"
        return sorted(candidates, key=lambda candidate: -fmean(self.objectives[candidate][host] for host in shared))

    def decide(self, finalists: Sequence[Candidate]) -> tuple[Candidate, float]:
        """The best on as many fresh hosts as the budget allows, and its mean. Luck on earlier hosts does not count."""
        hosts = self.left // len(finalists)
        if not hosts:
            raise BadValueError(f"{self.left} of {self.budget} episodes are left for {len(finalists)} finalists")
        first = 1 + max((host for hosts in self.objectives.values() for host in hosts), default=-1)
        self._try("final", finalists, fresh := range(first, first + hosts))
        means = {one: fmean(self.objectives[one][host] for host in fresh) for one in finalists}
        best = max(finalists, key=lambda one: means[one])
        return best, means[best]

    def _try(self, stage: str, candidates: Sequence[Candidate], hosts: range) -> None:
        cost = len(candidates) * len(hosts)
        assert cost <= self.left, f"{cost} episodes with {self.left} of {self.budget} left"
        self.used += cost
        for candidate, objectives in zip(candidates, self.evaluate(candidates, hosts), strict=True):
            self.objectives.setdefault(candidate, {}).update(zip(hosts, objectives, strict=True))
            self.log.append(Trial(stage, encode(candidate), tuple(hosts), fmean(objectives)))


def _halves(count: int) -> list[int]:
    """57 → 29, 15, 8, 4: rounded up, and larger than FINALISTS."""
    sizes = []
    while (count := -(-count // 2)) > FINALISTS:
        sizes.append(count)
    return sizes


SHARES = (0.5, 0.2, 0.1)  # shares of the episodes for plans of one, two and three seeds; the rest is for the final


def search_schedule(search: Search[Plan], task: Task) -> tuple[Plan, float]:
    """The best plan and its mean objective; waiting, at 0 points, if no plan gains."""
    if not (plans := extensions(Plan(), task)):
        raise BadValueError(f"task {task.name!r}: its budget of {task.parameter_budget} parameters allows no seed")
    finalists = search.halve("one seed", plans, int(SHARES[0] * search.budget))[:2]
    best = finalists[0]
    for seeds, share in zip(range(2, MAX_SEEDS + 1), SHARES[1:], strict=True):
        if not (longer := extensions(best, task)):
            break
        longest = search.halve(f"{seeds} seeds", longer, int(share * search.budget))[0]
        if search.ranked([best, longest])[0] is best:
            break
        best = longest
        finalists.append(best)
    chosen, mean = search.decide(finalists)
    return (chosen, mean) if mean > 0 else (Plan(), 0.0)


RANDOM_SHARE, NEAR_SHARE = 0.5, 0.25  # shares for random configurations and neighbours of the best; the rest: final
MOST_CHANGES = 3  # most fields in which a neighbour differs

Draws = dict[str, Callable[[random.Random], int | float | str]]


def search_heuristic(search: Search[HeuristicConfig], task: Task) -> tuple[HeuristicConfig, float]:
    """The best configuration and its mean objective. The default one is among the first and in the final."""
    default, draws, rng = HeuristicConfig(), ranges(task), search.rng("configurations")
    share = int(RANDOM_SHARE * search.budget)
    first = _collect(lambda: _build({name: draw(rng) for name, draw in draws.items()}), {default}, share)
    drawn = search.halve("random", [default, *first], share)
    share = int(NEAR_SHARE * search.budget)
    near = _collect(lambda: vary(drawn[0], draws, rng), set(search.objectives), share)
    varied = search.halve("near the best", near, share)
    return search.decide(list(dict.fromkeys((default, *drawn[:2], varied[0]))))


def ranges(task: Task) -> Draws:
    """How each threshold is drawn. Rent is part of the objective, not a threshold."""
    return {
        "patience": lambda rng: rng.randint(0, 5),
        "plateau": lambda rng: rng.uniform(0, 4),
        "at_once": lambda rng: rng.randint(1, len(task.slot_ids)),
        "germinate_left": lambda rng: rng.randint(8, max(8, task.steps - 1)),
        "choice": lambda rng: rng.choice(OFFER_CHOICES),
        "cost_weight": lambda rng: 10 ** rng.uniform(-2, 0.5),
        "training_steps": lambda rng: rng.randint(1, 6),
        "least_audition": lambda rng: rng.uniform(-4, 8),
        "trial": lambda rng: rng.randint(2, 10),
        "advance_left": lambda rng: rng.randint(5, 8),
        "least_contribution": lambda rng: rng.uniform(-2, 4),
        "prune_below": lambda rng: rng.uniform(-4, 2),
        "ending": lambda rng: rng.randint(1, 5),
        "errors": lambda rng: rng.uniform(0, 2),
    }


def vary(config: HeuristicConfig, draws: Draws, rng: random.Random) -> HeuristicConfig:
    """A neighbour: a few fields moved halfway towards a fresh draw."""
    values = asdict(config)
    for name in rng.sample(list(draws), rng.randint(1, MOST_CHANGES)):
        old, new = values[name], draws[name](rng)
        values[name] = new if isinstance(new, str) else type(new)((old + new) / 2)
    return _build(values)


def _build(values: dict[str, Any]) -> HeuristicConfig:  # Any: fields by name
    return HeuristicConfig(**{**values, "trial": max(values["trial"], values["training_steps"])})


def _collect(make: Callable[[], HeuristicConfig], known: set[HeuristicConfig], episodes: int) -> list[HeuristicConfig]:
    """As many new configurations as a first rung with these episodes can run on all its hosts."""
    configs: list[HeuristicConfig] = []
    while len(configs) < max(1, int(FIRST_SHARE * episodes) // FIRST_HOSTS):
        if (config := make()) not in known and config not in configs:
            configs.append(config)
    return configs


@dataclass(frozen=True)
class Tuned:
    """The best candidate of a search, and all trials."""

    kind: TunedKind
    task: str
    best: Plan | HeuristicConfig
    objective: float  # mean on the hosts of the final, points
    budget: int  # episodes allowed
    used: int  # episodes run
    rng_seed: int
    log: tuple[Trial, ...]

    def to_json(self) -> dict[str, Json]:
        """The content of a tuned file."""
        search = {name: encode(getattr(self, name)) for name in ("budget", "used", "rng_seed", "objective", "log")}
        best = {CONTENT[self.kind]: encode(self.best)}
        return {"format": FORMAT, "kind": self.kind, "task": self.task, **best, "search": search}


def tune(
    task_name: str,
    kind: TunedKind,
    episodes: int = EPISODES,
    rng_seed: int = 0,
    preset: str = "core",
    data_dir: Path | None = None,
    device: str = "cpu",
    workers: int = 1,
    *,
    progress: bool = True,
    record: Path | None = None,
) -> Tuned:
    """Search with at most this number of episodes. `rng_seed` determines everything random.

    `record`: folder for records of all episodes; the JSON of a candidate is the name of its policy.
    """
    if kind not in TUNED_KINDS:
        raise UnknownNameError("kind of search", kind, TUNED_KINDS)
    check_device(device)
    if record is not None:
        check_unused(record)
    task = get_task(task_name)
    trials = Trials(task_name, kind, head_preset(preset).name, rng_seed, device, data_dir, record)
    with progress_bar(f"tuning the {kind}", episodes, shown=progress) as advance, run_with(workers) as run_all:
        search: Search[Any] = Search(partial(trials, run_all, workers, advance), episodes, rng_seed)
        best, mean = (search_schedule if kind == "schedule" else search_heuristic)(search, task)
    return Tuned(kind, task_name, best, mean, search.budget, search.used, search.rng_seed, tuple(search.log))


def heuristic_policy(runner: EpisodeRunner, configs: Sequence[HeuristicConfig]) -> SideBySide:
    """A policy for groups whose members have one configuration each."""
    return SideBySide([HeuristicTamiyo(runner.table, runner.slots, config) for config in configs])


@dataclass(frozen=True)
class Trials:
    """Tries candidates on hosts of the tuning range. Plain values, because it is sent to workers."""

    task: str
    kind: TunedKind
    preset: str
    rng_seed: int
    device: str = "cpu"
    data_dir: Path | None = None
    record: Path | None = None

    def __call__(
        self, run_all: RunAll, workers: int, advance: Advance, candidates: Sequence[Any], hosts: Sequence[int]
    ) -> list[list[float]]:
        """Objectives [candidate][host], on validation images."""
        table = torch.zeros((len(hosts), len(candidates)), dtype=torch.float64)
        run_share = partial(self.run_share, candidates, hosts, advance if workers == 1 else ignore)
        for (some, these), objectives in run_all(run_share, shares(len(candidates), len(hosts), workers)):
            table[these.start : these.stop, some.start : some.stop] = objectives
            if workers > 1:
                advance(objectives.numel())
        return [[float(value) for value in row] for row in table.T]

    def run_share(
        self, candidates: Sequence[Any], hosts: Sequence[int], advance: Advance, share: tuple[range, range]
    ) -> Tensor:
        """Objectives (hosts, candidates) of one share, both given by index."""
        arena = open_arena(get_task(self.task), head_preset(self.preset), device=self.device, data_dir=self.data_dir)
        make_policy: MakePolicy[Any] = plan_policy if self.kind == "schedule" else heuristic_policy
        seeds = [host_seed("tuning", self.rng_seed, hosts[index]) for index in share[1]]
        some = [candidates[index] for index in share[0]]
        if self.record is None:
            return arena.run(make_policy, some, seeds, _objectives, advance)
        names = [json.dumps(encode(candidate)) for candidate in some]
        # No search plays a candidate on a host twice, so no two shares have one name.
        share_name = checksum({"policies": names, "hosts": seeds})[:16]
        with RecordWriter(self.record, record_header(arena.task, arena.preset, names), f"{share_name}-") as writer:
            return arena.run(make_policy, some, seeds, _objectives, advance, writer)


def _objectives(runner: EpisodeRunner, result: StepResult) -> Tensor:
    accuracy, control, added = (column.double() for column in hardened(result))
    gain = gain_over(control, accuracy, by_loss=result.by_loss)
    return objective(gain, added, runner.fleet.task.host_parameters)


def shares(candidates: int, hosts: int, workers: int) -> list[tuple[range, range]]:
    """Divide candidates × hosts so that the slowest process finishes soonest; every host of a part needs a control."""

    def longest(cut: tuple[int, int]) -> tuple[int, int]:
        by_candidates, by_hosts = cut
        rounds = ceil(by_candidates * by_hosts / workers)
        return rounds * ceil(hosts / by_hosts) * (ceil(candidates / by_candidates) + 1), by_candidates * by_hosts

    cuts = [(a, b) for a in range(1, min(candidates, workers) + 1) for b in range(1, min(hosts, workers) + 1)]
    by_candidates, by_hosts = min(cuts, key=longest)
    return [
        (some, these)
        for some in divide(candidates, ceil(candidates / by_candidates))
        for these in divide(hosts, ceil(hosts / by_hosts))
    ]


def check_free(path: Path) -> None:
    """Raise unless a tuned file can be written here; checked before the search, which may take an hour."""
    if path.exists():
        raise BadValueError(f"{path} exists, and an evaluation may have used it; choose another --out")
    check_writable(path)


def write_tuned(path: Path, tuned: Tuned) -> None:
    """Write the file atomically; an existing file is not overwritten."""
    check_free(path)
    replace_file(path, json.dumps(tuned.to_json(), indent=1, allow_nan=False) + "\n")
