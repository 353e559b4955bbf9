"""Teaching a controller before its first round: search fixed plans, then imitate the best ones of each host.

Every plan of the search runs on every host of its stage, so that the table tells which plan suits which host. A plan p
on host h is imitated with weight exp(objective / β), normalised over the plans of that host. Waiting is one of the
plans. It counts as much as all others together, and they must be better by β; so hosts that need nothing are left
alone. The policy sees only what a controller sees of a host, so it learns which plan to prefer where.

Hosts disagree by chance, too. So objectives may be pooled: moved towards the mean of their plan over all hosts. Where
hosts are alike, the same plan is then imitated on all of them. Afterwards the heads are sharpened, so that the policy
nearly always does what most similar hosts prefer. β, pooling and sharpness are those with the highest expected
objective on held-out hosts.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import BadValueError, HeadPreset, LifecycleOp, head_preset
from esper.leyline.progress import Advance, ignore, progress_bar
from esper.leyline.records import Json, encode
from esper.simic.agent import PPOAgent
from esper.simic.distributed import World
from esper.simic.evaluation.arena import Arena, envs_at_once
from esper.simic.evaluation.dealing import run_dealt
from esper.simic.evaluation.yardsticks import extensions
from esper.simic.offline.critic import fit_critic
from esper.simic.offline.imitation import ImitationConfig, accuracy, evaluate_steps, fit_actor, set_statistics
from esper.simic.offline.records import Records
from esper.simic.offline.selection import softmax_by_group
from esper.simic.offline.transitions import Transitions, from_episodes, join
from esper.simic.training.config import TeachConfig, TrainConfig
from esper.simic.training.policy_files import copy_knowledge
from esper.simic.training.together import Learner
from esper.simic.training.trainer import Begin
from esper.simic.tuning import Search, Trials
from esper.simic.tuning.dealt import try_on_ranks
from esper.storage.files import remove_leftovers, replace_file
from esper.tamiyo.policies import Plan
from esper.tolaria import Task, get_task

FOLDER, RECORDS, REPORT = "teaching", "records", "report.json"  # in the folder of a run
FIRST_SHARE, LONGER_SHARES = 0.5, {2: 1 / 6, 3: 1 / 12}  # of the episodes, for plans of one, two and three seeds
LEAST_HOSTS = 4  # hosts on which all one-seed plans are compared
CLOSE = 0.005  # share of the best expected objective by which a setting may be worse and still be chosen
LEAST_SPREAD = 1e-3  # points; where all plans are equal, nothing is to be preferred
MOST_COVER = 6  # plans that meet further hosts, waiting included


def first_plans(task: Task) -> list[Plan]:
    """Waiting, and all plans of one seed in the first step."""
    return [Plan(), *(plan for plan in extensions(Plan(), task) if plan.seeds[0].germinate_at == 0)]


def check_episodes(config: TrainConfig) -> None:
    """Raise if the episodes of teaching are too few for any of the tasks."""
    share = config.teach.episodes // len(config.tasks)
    for name in config.tasks:
        plans = len(first_plans(get_task(name)))
        if share < plans * LEAST_HOSTS:
            raise BadValueError(
                f"{share} episodes are too few to teach {name!r}: {plans} plans on {LEAST_HOSTS} hosts need "
                f"{plans * LEAST_HOSTS}; use --teach {plans * LEAST_HOSTS * len(config.tasks)} or more"
            )


def search_plans(search: Search[Plan], task: Task) -> None:
    """Run one-seed plans, then longer ones on the same hosts, then a few plans that suit most on further hosts."""
    first = first_plans(task)
    hosts = max(LEAST_HOSTS, int(FIRST_SHARE * search.budget) // len(first))
    search.play("one seed", [first] * hosts, range(hosts))
    for seeds, share in LONGER_SHARES.items():
        if plans := longer_plans(search, task, seeds)[: min(int(share * search.budget), search.left) // hosts]:
            search.play(f"{seeds} seeds", [plans] * hosts, range(hosts))
    cover = covering_plans(search, hosts)
    if more := search.left // len(cover):
        search.play("cover", [cover] * more, search.fresh(more))


def longer_plans(search: Search[Plan], task: Task, seeds: int) -> list[Plan]:
    """Plans of this number of seeds, best first by the sum of what their parts gained."""
    means = {plan: fmean(by_host.values()) for plan, by_host in search.objectives.items()}
    alone = {plan.seeds[0]: mean for plan, mean in means.items() if len(plan.seeds) == 1}
    predicted = {
        frozenset(plan.seeds): (mean + alone[plan.seeds[-1]], plan)
        for part, mean in means.items()
        if len(part.seeds) == seeds - 1
        for plan in extensions(part, task)
        if plan.seeds[-1] in alone
    }
    return [plan for _, plan in sorted(predicted.values(), key=lambda entry: -entry[0])]


def covering_plans(search: Search[Plan], hosts: int) -> list[Plan]:
    """Waiting, and the plans that add most to the mean over the first hosts of the best plan of each host."""
    plans = list(search.objectives)
    table = torch.tensor([[search.objectives[plan][host] for host in range(hosts)] for plan in plans])
    chosen = [plans.index(Plan())]
    while len(chosen) < min(MOST_COVER, len(plans)):
        totals = torch.maximum(table, table[chosen].max(0).values).mean(1)
        totals[chosen] = -torch.inf
        chosen.append(int(totals.argmax()))
    return [plans[index] for index in chosen]


class Lessons(NamedTuple):
    """The episodes of a search, and what they were worth."""

    data: Transitions
    objectives: Tensor  # (episodes,)
    hosts: Tensor  # (episodes,) long: number of the host, over all tasks
    plans: Tensor  # (episodes,) long: number of the plan, over all tasks
    tasks: Tensor  # (episodes,) long: number of the task

    def part(self, episodes: Tensor) -> "Lessons":
        """Some episodes, by number."""
        numbers = (self.objectives, self.hosts, self.plans, self.tasks)
        return Lessons(self.data.part(episodes), *(values[episodes] for values in numbers))

    def weighted(self, imitated: "Imitated") -> Transitions:
        """The transitions with the weights of their plans."""
        pooled = pool(self.objectives, self.plans, imitated.pooling)
        grows = (self.data.actions[..., 0] == LifecycleOp.GERMINATE).any(1)
        weights = plan_weights(pooled, self.hosts, grows, imitated.beta * self.spread())
        return self.data._replace(weights=self.data.weights * weights[:, None])  # padding keeps 0

    def spread(self) -> Tensor:
        """(episodes,): the standard deviation of objectives among the plans of a host, over all hosts of the task."""
        squares = (self.objectives - mean_by(self.objectives, self.hosts)).square()
        return mean_by(squares, self.tasks).sqrt().clamp(min=LEAST_SPREAD)


def read_lessons(config: TrainConfig, agent: PPOAgent, folder: Path) -> Lessons:
    """The recorded episodes of all tasks in the columns of the agent. Their order does not depend on the files."""
    parts, numbers = [], list[tuple[Tensor, ...]]()
    for number, name in enumerate(config.tasks):
        files = Records.open(folder / name)
        records = Records(files.shards, tuple(sorted(files.policies)))
        episodes, header = records.episodes(), records.header
        rows = each_pair_once(episodes.host_seed, episodes.policy)
        parts.append(from_episodes(episodes, header, reward=config.reward, layout=agent.layout).part(rows))
        hosts, plans = episodes.host_seed[rows].unique(return_inverse=True)[1], episodes.policy[rows].long()
        apart = (values * len(config.tasks) + number for values in (hosts, plans))  # no two tasks share a number
        task = torch.full_like(hosts, number)
        numbers.append((episodes.objective(config.reward.rho)[rows], *apart, task))
    return Lessons(join(parts), *map(torch.cat, zip(*numbers, strict=True)))


def each_pair_once(hosts: Tensor, plans: Tensor) -> Tensor:
    """Rows by host and plan, each pair once: a search that was killed and divided otherwise plays some again."""
    pairs = torch.stack([hosts.long(), plans.long()], 1)
    found, index = pairs.unique(dim=0, return_inverse=True)
    rows = torch.arange(len(pairs))
    return torch.full((len(found),), len(pairs)).scatter_reduce(0, index, rows, "amin")


def mean_by(values: Tensor, groups: Tensor) -> Tensor:
    """(n,): the mean of the values (n,) of the same group (n,)."""
    index = groups.unique(return_inverse=True)[1]
    count = int(index.max()) + 1
    sums, numbers = (torch.zeros(count).index_add(0, index, each) for each in (values, torch.ones_like(values)))
    return (sums / numbers)[index]


def pool(objectives: Tensor, plans: Tensor, share: float) -> Tensor:
    """Objectives (n,) moved by a share of the way to the mean of their plan (n,)."""
    return objectives.lerp(mean_by(objectives, plans), share)


def plan_weights(objectives: Tensor, hosts: Tensor, grows: Tensor, beta: float | Tensor) -> Tensor:
    """(episodes,): exp(objective / β), normalised over the episodes of each host. `grows` is False for waiting.

    Waiting counts as much as all plans of equal worth together, and those must be better by β.
    """
    plans = torch.zeros(int(hosts.max()) + 1).index_add(0, hosts, grows.float())[hosts]
    waiting = 1 + plans.clamp(min=1).log()
    return softmax_by_group(objectives / beta + waiting.where(~grows, 0.0), hosts)


@torch.no_grad()
def expected_objectives(agent: PPOAgent, lessons: Lessons) -> Tensor:
    """(hosts,): the objective expected of the agent if it follows one of the plans that were tried on a host.

    A plan's probability is that of its actions, step by step, on its own episode.
    """
    data = lessons.data
    steps = data.packed(data.sequences(), range(data.n_episodes))
    decision = evaluate_steps(agent, steps)
    log_probs = torch.zeros(data.actions.shape[:2]).flatten()
    log_probs[steps.cells] = decision.log_probs.where(decision.decided, 0.0).sum(-1)
    likelihood = log_probs.view(data.actions.shape[:2]).sum(1)
    hosts = lessons.hosts.unique(return_inverse=True)[1]
    return torch.zeros(int(hosts.max()) + 1).index_add(
        0, hosts, softmax_by_group(likelihood, hosts) * lessons.objectives
    )


class Imitated(NamedTuple):
    """How much each plan is imitated on each host."""

    beta: float
    pooling: float


@dataclass(frozen=True)
class Choice:
    """A setting of the imitation, and the objective expected of it on hosts that were held out."""

    beta: float
    pooling: float
    sharpness: float
    objective: float

    @property
    def imitated(self) -> Imitated:
        """Without the sharpness."""
        return Imitated(self.beta, self.pooling)


def choose(
    config: TeachConfig, agent: PPOAgent, lessons: Lessons, rng_seed: int, advance: Advance = ignore
) -> list[Choice]:
    """All settings by cross-validation over hosts, best first.

    Among those that are nearly as good as the best, the least sharp comes first: PPO needs something to choose from.
    """
    hosts = lessons.hosts.unique()
    fold_of = torch.randperm(len(hosts), generator=torch.Generator().manual_seed(rng_seed)) % config.folds
    folds = fold_of[torch.searchsorted(hosts, lessons.hosts)]
    settings = [Imitated(*pair) for pair in product(config.betas, config.pooling)]
    found: dict[tuple[Imitated, float], list[Tensor]] = {pair: [] for pair in product(settings, config.sharpness)}
    for imitated, fold in product(settings, range(config.folds)):
        seen, unseen = (lessons.part(chosen.nonzero().squeeze(1)) for chosen in (folds != fold, folds == fold))
        student = imitate_plans(agent, seen, imitated, config.epochs, rng_seed, advance)
        before = 1.0
        for sharpness in sorted(config.sharpness):
            student.network.sharpen(sharpness / before)
            before = sharpness
            found[imitated, sharpness].append(expected_objectives(student, unseen))
    choices = [
        Choice(*imitated, sharpness, float(torch.cat(values).mean())) for (imitated, sharpness), values in found.items()
    ]
    good = max(choice.objective for choice in choices)
    good -= CLOSE * abs(good)
    return sorted(choices, key=lambda choice: (choice.objective < good, choice.sharpness, -choice.objective))


def imitate_plans(
    like: PPOAgent, lessons: Lessons, imitated: Imitated, epochs: int, rng_seed: int, advance: Advance = ignore
) -> PPOAgent:
    """An agent like another that learned these lessons."""
    student = PPOAgent(like.table, like.layout, like.config, tasks=len(like.returns.statistics.mean), rng_seed=rng_seed)
    data = lessons.weighted(imitated)
    set_statistics(student, data)
    config = ImitationConfig(like.config.network, epochs)
    fit_actor(student, data, config, torch.Generator().manual_seed(rng_seed), advance)
    return student


OpenArena = Callable[[Task, HeadPreset], Arena]  # opens the arena of a search


def teach(
    config: TrainConfig,
    agent: PPOAgent,
    folder: Path,
    *,
    workers: int = 1,
    progress: bool = True,
    open_own: OpenArena | None = None,
    records: Path | None = None,
    world: World | None = None,
) -> None:
    """Search plans, write their records to the run's folder, and make the agent imitate the best ones.

    In a world of several ranks the others call `serve_trials` for the search, and rank 0 imitates alone. The agent gets
    the weights of the actor, a critic, and frozen statistics of observations. Its student is on the CPU, where the
    records are. `open_own`: opens the arenas of the search, if it shares their fleets with others. `records`: folder of
    the records instead of the run's. Episodes that an earlier process recorded are not played again.
    """
    teaching, settings = folder / FOLDER, config.teach
    records = records or teaching / RECORDS
    search_all(config, records, workers, progress=progress, open_own=open_own, world=world)
    lessons = read_lessons(config, agent, records)
    total = settings.epochs * (len(settings.betas) * len(settings.pooling) * settings.folds + 1)
    with progress_bar("imitating", total, shown=progress) as advance:
        choices = choose(settings, agent, lessons, config.seed, advance)
        best = choices[0]
        student = imitate_plans(agent, lessons, best.imitated, settings.epochs, config.seed, advance)
    student.network.sharpen(best.sharpness)
    if config.reward.family == "paired":  # records hold no other reward
        teach_critic(student, lessons.weighted(best.imitated), lessons, config)
    copy_knowledge(student, agent)
    report: dict[str, Json] = {
        "episodes": len(lessons.hosts),
        "hosts": len(lessons.hosts.unique()),
        "choices": encode(choices),
        "accuracy": encode(accuracy(student, lessons.weighted(best.imitated))),
    }
    teaching.mkdir(exist_ok=True)
    replace_file(teaching / REPORT, json.dumps(report, indent=1, allow_nan=False) + "\n")


def shared_arenas(learner: Learner, learners: int, device: str, data_dir: Path | None) -> OpenArena:
    """What opens the arenas of a learner that shares its fleets with others."""
    # On the CPU a search has fleets of the size that it has alone, so that its records are the same to the bit.
    at_once = envs_at_once(device) // (1 if torch.device(device).type == "cpu" else learners)

    def open_own(task: Task, preset: HeadPreset) -> Arena:
        settings = {"device": device, "data_dir": data_dir, "at_once": at_once}
        return Arena(task, preset, make_fleet=learner.search_fleet, **settings)  # type: ignore[arg-type]  # by name

    return open_own


def teach_shared(config: TrainConfig, learner: Learner, learners: int) -> Begin:
    """What teaches one of several learners, whose searches share their fleets."""

    def begin(agent: PPOAgent, folder: Path) -> None:
        open_own = shared_arenas(learner, learners, config.device, config.data_dir)
        teach(config, agent, folder, progress=False, open_own=open_own)
        learner.end_search()

    return begin


def teach_critic(agent: PPOAgent, weighted: Transitions, lessons: Lessons, config: TrainConfig) -> None:
    """Fit the critic to episodes that are drawn by their weights, so that they resemble the policy's own."""
    generator = torch.Generator().manual_seed(config.seed)
    drawn = torch.multinomial(weighted.weights[:, 0], len(lessons.hosts), True, generator=generator)
    fit_critic(agent, lessons.data.part(drawn), lessons.tasks[drawn], config.reward.gamma, generator)


def search_all(
    config: TrainConfig,
    records: Path,
    workers: int,
    *,
    progress: bool = True,
    open_own: OpenArena | None = None,
    world: World | None = None,
) -> None:
    """Search plans for every task of a run with equal shares of the episodes, and record all of them."""
    check_episodes(config)
    world, total, preset = world or World(), config.teach.episodes, head_preset(config.preset)
    with (
        progress_bar("searching plans", total, shown=progress) as advance,
        run_dealt(world, workers, records) as (run_all, _),
    ):
        for name in config.tasks:
            remove_leftovers(records / name)
            arena = None if open_own is None else open_own(get_task(name), preset)
            where = (world.device(config.device), config.data_dir, records / name)
            trials = Trials(name, "schedule", preset.name, config.seed, *where, arena=arena)
            evaluate = partial(try_on_ranks, world, trials, run_all, workers, advance)
            search_plans(Search(evaluate, total // len(config.tasks), config.seed), get_task(name))
