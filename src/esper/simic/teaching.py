"""Teaching a controller before its first round: search fixed plans, then imitate the best ones of each host.

Every plan of the search runs on every host of its stage, so that the table tells which plan suits which host. A plan p
on host h is imitated with weight exp(objective / β), normalised over the plans of that host. Waiting is one of the
plans; it counts as much as all others together, and they have to be better by β, so that hosts that need nothing are
left alone. The policy sees what its inputs show of the host, so it learns which plan to prefer where. Hosts disagree by
chance, too. So the heads are sharpened afterwards: what most similar hosts prefer is then nearly always chosen. β and
the sharpness are those with the highest expected objective on hosts that the policy did not learn from.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import BadValueError, LifecycleOp, head_preset
from esper.leyline.progress import Advance, progress_bar
from esper.leyline.records import Json, encode
from esper.simic.agent import PPOAgent
from esper.simic.evaluation.workers import run_with
from esper.simic.evaluation.yardsticks import extensions
from esper.simic.offline.imitation import ImitationConfig, accuracy, evaluate_steps, fit_actor, set_statistics
from esper.simic.offline.records import Records
from esper.simic.offline.transitions import Transitions, from_episodes, join
from esper.simic.training.config import TeachConfig, TrainConfig
from esper.simic.tuning import Trials
from esper.storage.files import replace_file
from esper.tamiyo.policies import Plan
from esper.tolaria import Task, get_task

FOLDER, RECORDS, REPORT = "teaching", "records", "report.json"  # in the folder of a run
FIRST_SHARE, LONGER_SHARE = 0.5, 0.25  # shares of the episodes for one-seed plans and for longer ones
LEAST_HOSTS = 4  # hosts on which all one-seed plans are compared
CLOSE = 0.02  # share of the best expected objective by which a setting may be worse and still be chosen
MOST_COVER = 6  # plans that meet further hosts, waiting included

Evaluate = Callable[[Sequence[Plan], range], Tensor]  # objectives (plans, hosts) of plans on hosts, by number


class PlanSearch:
    """A table of plans × hosts that grows until the episodes are spent."""

    def __init__(self, evaluate: Evaluate, task: Task, episodes: int) -> None:
        self.evaluate, self.task, self.left = evaluate, task, episodes
        self.objectives: dict[Plan, dict[int, float]] = {}

    def run(self) -> None:
        """Run one-seed plans, then longer ones on the same hosts, then a few plans that suit most on further hosts."""
        first = [Plan(), *(plan for plan in extensions(Plan(), self.task) if plan.seeds[0].germinate_at == 0)]
        hosts = max(LEAST_HOSTS, int(FIRST_SHARE * self.left) // len(first))
        if len(first) * hosts > self.left:
            raise BadValueError(
                f"{self.left} episodes are too few to teach {self.task.name!r}: {len(first)} plans on {LEAST_HOSTS} "
                f"hosts are {len(first) * LEAST_HOSTS}; raise --teach"
            )
        longer = int(LONGER_SHARE * self.left)
        self._try(first, range(hosts))
        for seeds in (2, 3):
            share = longer * 2 // 3 if seeds == 2 else longer // 3
            if plans := self._longer(seeds)[: share // hosts]:
                self._try(plans, range(hosts))
        cover = self._cover(hosts)
        self._try(cover, range(hosts, hosts + self.left // len(cover)))

    def _longer(self, seeds: int) -> list[Plan]:
        """Plans of this number of seeds, best first by the sum of what their parts gained."""
        parts = [plan for plan in self.objectives if len(plan.seeds) == seeds - 1]
        alone = {plan.seeds[0]: self._mean(plan) for plan in self.objectives if len(plan.seeds) == 1}
        predicted = {
            frozenset(plan.seeds): (self._mean(part) + alone[plan.seeds[-1]], plan)
            for part in parts
            for plan in extensions(part, self.task)
            if plan.seeds[-1] in alone
        }
        return [plan for _, plan in sorted(predicted.values(), key=lambda entry: -entry[0])]

    def _mean(self, plan: Plan) -> float:
        values = self.objectives[plan].values()
        return sum(values) / len(values)

    def _cover(self, hosts: int) -> list[Plan]:
        """Waiting, and the plans that add most to the mean over hosts of the best plan of each host."""
        table = torch.tensor([[row[host] for host in range(hosts)] for row in self.objectives.values()])
        plans, chosen = list(self.objectives), [0]  # waiting was tried first
        while len(chosen) < min(MOST_COVER, len(plans)):
            best = table[chosen].max(0).values
            totals = torch.maximum(table, best).mean(1)
            totals[chosen] = -torch.inf
            chosen.append(int(totals.argmax()))
        return [plans[index] for index in chosen]

    def _try(self, plans: Sequence[Plan], hosts: range) -> None:
        if not plans or not len(hosts):
            return
        self.left -= len(plans) * len(hosts)
        for plan, row in zip(plans, self.evaluate(plans, hosts), strict=True):
            self.objectives.setdefault(plan, {}).update(zip(hosts, row.tolist(), strict=True))


class Lessons(NamedTuple):
    """The episodes of a search, and what they were worth."""

    data: Transitions
    objectives: Tensor  # (episodes,)
    hosts: Tensor  # (episodes,) long: number of the host, over all tasks

    def part(self, episodes: Tensor) -> "Lessons":
        """Some episodes, by number."""
        return Lessons(self.data.part(episodes), self.objectives[episodes], self.hosts[episodes])

    def weighted(self, beta: float) -> Transitions:
        """The transitions with the weights of their plans."""
        grows = (self.data.actions[..., 0] == LifecycleOp.GERMINATE).any(1)
        return self.data._replace(
            weights=plan_weights(self.objectives, self.hosts, grows, beta)[:, None].expand_as(self.data.weights)
        )


def read_lessons(config: TrainConfig, agent: PPOAgent, folder: Path) -> Lessons:
    """The recorded episodes of all tasks in the columns of the agent."""
    parts, objectives, hosts = [], [], []
    for number, (_, records) in enumerate(Records.open(folder, several_tasks=True).by_task().items()):
        episodes, header = records.episodes(), records.header
        parts.append(from_episodes(episodes, header, reward=config.reward, layout=agent.layout))
        objectives.append(episodes.objective(header, config.reward.rho))
        hosts.append(episodes.host_seed.unique(return_inverse=True)[1] * len(config.tasks) + number)
    return Lessons(join(parts), torch.cat(objectives), torch.cat(hosts))


def plan_weights(objectives: Tensor, hosts: Tensor, grows: Tensor, beta: float) -> Tensor:
    """(episodes,): exp(objective / β), normalised over the episodes of each host. `grows` is False for waiting.

    Waiting counts as much as all plans of equal worth together, and those must be better by β.
    """
    plans = torch.zeros(int(hosts.max()) + 1).index_add(0, hosts, grows.float())[hosts]
    waiting = 1 + plans.clamp(min=1).log()
    return _shares(objectives / beta + waiting.where(~grows, 0.0), hosts)


def _shares(values: Tensor, hosts: Tensor) -> Tensor:
    """(episodes,): exp(value), normalised over the episodes of each host."""
    highest = torch.full((int(hosts.max()) + 1,), -torch.inf).scatter_reduce(0, hosts, values, "amax")
    raw = (values - highest[hosts]).exp()
    return raw / torch.zeros_like(highest).index_add(0, hosts, raw)[hosts]


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
    return torch.zeros(int(hosts.max()) + 1).index_add(0, hosts, _shares(likelihood, hosts) * lessons.objectives)


@dataclass(frozen=True)
class Choice:
    """A setting of the imitation, and the objective expected of it on hosts that were held out."""

    beta: float
    sharpness: float
    objective: float


def choose(config: TeachConfig, agent: PPOAgent, lessons: Lessons, rng_seed: int, advance: Advance) -> list[Choice]:
    """All settings by cross-validation over hosts, best first.

    Among those that are nearly as good as the best, the least sharp comes first: PPO needs something to choose from.
    """
    hosts = lessons.hosts.unique()
    fold_of = torch.randperm(len(hosts), generator=torch.Generator().manual_seed(rng_seed)) % config.folds
    folds = fold_of[torch.searchsorted(hosts, lessons.hosts)]
    found: dict[tuple[float, float], list[Tensor]] = {pair: [] for pair in product(config.betas, config.sharpness)}
    for beta, fold in product(config.betas, range(config.folds)):
        seen, unseen = (lessons.part(chosen.nonzero().squeeze(1)) for chosen in (folds != fold, folds == fold))
        student = _imitate(config.imitation, agent, seen, beta, rng_seed, advance)
        before = 1.0
        for sharpness in sorted(config.sharpness):
            student.network.sharpen(sharpness / before)
            before = sharpness
            found[beta, sharpness].append(expected_objectives(student, unseen))
    choices = [Choice(*pair, float(torch.cat(values).mean())) for pair, values in found.items()]
    good = max(choice.objective for choice in choices)
    good -= CLOSE * abs(good)
    return sorted(choices, key=lambda choice: (choice.objective < good, choice.sharpness, -choice.objective))


def _imitate(
    config: ImitationConfig,
    like: PPOAgent,
    lessons: Lessons,
    beta: float,
    rng_seed: int,
    advance: Advance,
) -> PPOAgent:
    """An agent like another that learned these lessons."""
    student = PPOAgent(like.table, like.layout, like.config, tasks=len(like.returns.statistics.mean), rng_seed=rng_seed)
    data = lessons.weighted(beta)
    set_statistics(student, data)
    fit_actor(student, data, config, torch.Generator().manual_seed(rng_seed), advance)
    return student


def teach(config: TrainConfig, agent: PPOAgent, folder: Path, *, workers: int = 1, progress: bool = True) -> None:
    """Search plans, write their records to the run's folder, and make the agent imitate the best ones.

    The agent gets the weights of the actor, and frozen statistics of observations; its critic stays untrained.
    """
    teaching, settings = folder / FOLDER, config.teach
    shutil.rmtree(teaching, ignore_errors=True)  # of a run that was killed here
    search_all(config, teaching / RECORDS, workers, progress=progress)
    lessons = read_lessons(config, agent, teaching / RECORDS)
    epochs = settings.imitation.epochs
    total = epochs * (len(settings.betas) * settings.folds + 1)
    with progress_bar("imitating", total, shown=progress) as advance:
        choices = choose(settings, agent, lessons, config.seed, advance)
        best = choices[0]
        student = _imitate(settings.imitation, agent, lessons, best.beta, config.seed, advance)
    student.network.sharpen(best.sharpness)
    agent.network.load_state_dict(student.network.state_dict())
    agent.observations.statistics.load_state_dict(student.observations.statistics.state_dict())
    agent.observations.freeze()
    report: dict[str, Json] = {
        "episodes": len(lessons.hosts),
        "hosts": len(lessons.hosts.unique()),
        "choices": encode(choices),
        "accuracy": encode(accuracy(agent, lessons.weighted(best.beta))),
    }
    replace_file(teaching / REPORT, json.dumps(report, indent=1, allow_nan=False) + "\n")


def search_all(config: TrainConfig, records: Path, workers: int, *, progress: bool = True) -> None:
    """Search plans for every task of a run with equal shares of the episodes, and record all of them."""
    episodes = config.teach.episodes // len(config.tasks)
    with (
        progress_bar("searching plans", config.teach.episodes, shown=progress) as advance,
        run_with(workers) as run_all,
    ):
        for name in config.tasks:
            preset = head_preset(config.preset).name
            trials = Trials(name, "schedule", preset, config.seed, config.device, config.data_dir, records)

            def evaluate(plans: Sequence[Plan], hosts: range, trials: Trials = trials) -> Tensor:
                return torch.tensor(trials(run_all, workers, advance, plans, hosts))

            PlanSearch(evaluate, get_task(name), episodes).run()
