"""Teaching: which plans are searched, how they are weighted, and what a policy makes of them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from simic.training.tiny import quick_config

from esper.leyline import BadValueError, LifecycleOp
from esper.simic import teaching
from esper.simic.agent import PPOAgent, PPOConfig, load_agent
from esper.simic.offline.imitation import evaluate_steps
from esper.simic.offline.transitions import Transitions
from esper.simic.teaching import (
    Imitated,
    Lessons,
    check_episodes,
    choose,
    expected_objectives,
    imitate_plans,
    plan_weights,
    pool,
    search_plans,
    teach,
)
from esper.simic.training.config import TeachConfig, TrainConfig, taught_config
from esper.simic.training.run_folder import checkpoints_of
from esper.simic.training.trainer import Trainer
from esper.simic.tuning import Search
from esper.tamiyo import ActionHead, ActionTable, NetworkConfig, ObservationLayout
from esper.tamiyo.policies import Plan
from esper.tolaria import get_task

# -- the search ------------------------------------------------------------------------------------------------------


class HostsOfTwoKinds:
    """In place of hosts: even ones want a depthwise seed in the first slot, odd ones in the second."""

    def __init__(self) -> None:
        self.pairs = set[tuple[Plan, int]]()

    def __call__(self, lineups: Sequence[Sequence[Plan]], hosts: Sequence[int]) -> list[list[float]]:
        pairs = {(plan, host) for lineup, host in zip(lineups, hosts, strict=True) for plan in lineup}
        assert not self.pairs & pairs, "no plan meets a host twice"
        self.pairs |= pairs
        return [[self.worth(plan, host) for plan in lineup] for lineup, host in zip(lineups, hosts, strict=True)]

    @staticmethod
    def worth(plan: Plan, host: int) -> float:
        """10 points for the right seed, −1 for every other."""
        right = ("r1c0", "depthwise") if host % 2 == 0 else ("r1c1", "depthwise")
        return sum(10.0 if (seed.slot, seed.blueprint) == right else -1.0 for seed in plan.seeds)


@pytest.mark.parametrize("episodes", [48, 52, 60, 300, 1_000])
def test_the_search_runs_all_first_plans_on_the_same_hosts_and_those_that_suit_some_on_others(episodes: int) -> None:
    hosts = HostsOfTwoKinds()
    search = Search(hosts, episodes, rng_seed=0)
    search_plans(search, get_task("digits_varied"))
    assert episodes - teaching.MOST_COVER < len(hosts.pairs) == search.used <= episodes
    first = [plan for plan in search.objectives if len(plan.seeds) <= 1]
    shared = set.intersection(*(set(search.objectives[plan]) for plan in first))
    assert len(first) == 12 and len(shared) >= teaching.LEAST_HOSTS
    furthest = max(host for _, host in hosts.pairs)
    cover = {plan for plan, host in hosts.pairs if host == furthest}
    wanted = {("r1c0", "depthwise"), ("r1c1", "depthwise")}
    assert Plan() in cover
    assert wanted <= {(seed.slot, seed.blueprint) for plan in cover for seed in plan.seeds}


def test_too_few_episodes_to_compare_anything() -> None:
    """Two tasks share the episodes; the message names the smallest number that is enough."""
    config = replace(taught_config(90), task="digits_varied,digits_blind")
    with pytest.raises(BadValueError, match="45 episodes are too few to teach 'digits_varied': 12 plans on 4 hosts"):
        check_episodes(config)
    with pytest.raises(BadValueError, match="use --teach 96"):
        check_episodes(config)
    check_episodes(replace(taught_config(48), task="digits_varied"))


# -- the weights -----------------------------------------------------------------------------------------------------


def test_weights_by_hand() -> None:
    """One host with waiting at 0 and two plans at 2 and −1 points, β = 2.

    Waiting counts twice (for two plans), times e: 2e · exp(0) = 5.4366; the plans exp(1) = 2.7183 and
    exp(−½) = 0.6065. Sum 8.7614: 0.6205, 0.3103, 0.0692. Another host, alone with its only plan, has weight 1.
    """
    objectives, hosts = torch.tensor([0.0, 2.0, -1.0, 7.0]), torch.tensor([0, 0, 0, 1])
    grows = torch.tensor([False, True, True, True])
    weights = plan_weights(objectives, hosts, grows, 2.0)
    assert weights.tolist() == pytest.approx([0.6205, 0.3103, 0.0692, 1.0], abs=1e-4)


def test_large_objectives_do_not_overflow() -> None:
    weights = plan_weights(torch.tensor([0.0, 4e4]), torch.tensor([0, 0]), torch.tensor([False, True]), 0.1)
    assert weights.tolist() == [0.0, 1.0]


def test_pooling_moves_objectives_to_the_mean_of_their_plan() -> None:
    """Plan 0 has 1 and 5 points, mean 3; plan 1 has 4 on its only host. Halfway: 2 and 4, and 4."""
    objectives, plans = torch.tensor([1.0, 5.0, 4.0]), torch.tensor([0, 0, 1])
    assert pool(objectives, plans, 0.0).tolist() == [1.0, 5.0, 4.0]
    assert pool(objectives, plans, 0.5).tolist() == [2.0, 4.0, 4.0]
    assert pool(objectives, plans, 1.0).tolist() == [3.0, 3.0, 4.0]


def test_the_spread_is_that_of_each_task() -> None:
    """Task 0: hosts with 0 and 2, and with 5 and 7: deviation 1. Task 1: 0 and 20: deviation 10."""
    objectives, hosts = torch.tensor([0.0, 2.0, 5.0, 7.0, 0.0, 20.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    tasks = torch.tensor([0, 0, 0, 0, 1, 1])
    given = lessons(2)._replace(objectives=objectives, hosts=hosts, tasks=tasks)
    assert given.spread().tolist() == pytest.approx([1.0] * 4 + [10.0] * 2)
    same = given._replace(objectives=torch.ones(6))
    assert same.spread().tolist() == pytest.approx([teaching.LEAST_SPREAD] * 6)


def test_where_hosts_are_alike_the_best_plan_by_its_mean_is_learned() -> None:
    """Every host wants slot 0, by 1 point on average; a single host shows it through noise of 2 points.

    What hosts look like means nothing here. Without pooling, the policy believes what it saw of each host.
    """
    alike = lessons(24, noise=2.0, seed=3)
    worth = torch.tensor([0.0, 1.0, 0.2])[alike.plans]
    alike = alike._replace(objectives=alike.objectives - lessons(24).objectives + worth)
    expected = {}
    for pooling in (0.0, 1.0):
        taught = imitate_plans(student(), alike, Imitated(0.1, pooling), 60, 0)
        expected[pooling] = float(expected_objectives(taught, alike._replace(objectives=worth)).mean())
    assert expected[1.0] > 0.9 and expected[1.0] > expected[0.0] + 0.2


# -- imitation of the best -------------------------------------------------------------------------------------------

OPS = ActionTable((ActionHead("op", 2), ActionHead("slot", 2, matters=(False, True), given="op")))
SEEN = ObservationLayout(("kind", "time_left"))
STEPS = 3
PLANS = (None, 0, 1)  # waiting, and a seed in one of two slots in the first step


def lessons(hosts: int, noise: float = 0.0, seed: int = 0) -> Lessons:
    """Hosts of three kinds, which they show: one needs nothing, the others a seed in their slot, worth 10 points."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [(host, plan) for host in range(hosts) for plan in PLANS]
    n = len(pairs)
    kind = torch.tensor([host % 3 for host, _ in pairs])
    observations = torch.stack([kind[:, None].expand(n, STEPS), torch.arange(STEPS).expand(n, STEPS)], -1).float()
    actions = torch.zeros(n, STEPS, 2, dtype=torch.long)
    for row, (_, plan) in enumerate(pairs):
        if plan is not None:
            actions[row, 0] = torch.tensor([1, plan])
    ends = torch.zeros(n, STEPS, dtype=torch.bool)
    ends[:, -1] = True
    masks = {"op": torch.ones(n, STEPS, 2, dtype=torch.bool), "slot": torch.ones(n, STEPS, 2, 2, dtype=torch.bool)}
    masks["op"][:, 1:, 1] = False  # a seed may germinate in the first step only
    data = Transitions(
        observations, masks, actions, torch.zeros(n, STEPS), ends, ends & False, torch.ones(n, STEPS), kind
    )
    worth = torch.tensor([0.0 if plan is None else 10.0 if plan == host % 3 else -0.5 for host, plan in pairs])
    grown = torch.tensor([plan is not None for _, plan in pairs])
    worth += noise * grown * torch.randn(n, generator=generator)
    numbers = torch.tensor([(host, PLANS.index(plan), 0) for host, plan in pairs]).T.contiguous()
    return Lessons(data, worth, *numbers)


def student() -> PPOAgent:
    """An untrained agent for these hosts."""
    return PPOAgent(OPS, SEEN, PPOConfig(network=NetworkConfig(memory="window")))


def test_the_expected_objective_of_a_policy_that_chooses_evenly() -> None:
    """With logits of 0, waiting has probability ½ and each slot ¼: ¼·10 − ¼·½ = 2.375, and −¼ where nothing helps."""
    agent = student()
    agent.network.sharpen(0.0)
    expected = expected_objectives(agent, lessons(3))
    assert expected.tolist() == pytest.approx([2.375, 2.375, -0.25], abs=1e-6)


def test_a_policy_learns_which_plan_suits_which_host() -> None:
    """Objectives scatter by 4 points between hosts, and one kind of host needs nothing."""
    noisy, agent = lessons(30, noise=4.0), student()
    best = choose(TeachConfig(1, epochs=30), agent, noisy, 0)[0]
    taught = imitate_plans(agent, noisy, best.imitated, 30, 0)
    taught.network.sharpen(best.sharpness)
    clean = lessons(3)
    expected = expected_objectives(taught, clean)
    assert expected[:2].min() > 9 and expected[2] > -0.2
    steps = clean.data.packed(clean.data.sequences(), range(9))
    first = evaluate_steps(taught, steps, likeliest=True).actions[steps.cells % STEPS == 0]
    wanted = {0: [LifecycleOp.GERMINATE, 0], 1: [LifecycleOp.GERMINATE, 1], 2: [LifecycleOp.WAIT, 0]}
    kinds = steps.observations[steps.cells % STEPS == 0, 0].long().tolist()
    assert first.tolist() == [wanted[kind] for kind in kinds]


def test_among_equals_the_least_sharp_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected objectives 9.96 and 10 are closer than 0.5 %; 9.9 is not."""
    worth = {1.0: 9.9, 3.0: 9.96, 10.0: 10.0}
    sharpness = iter([1.0, 3.0, 10.0] * 3)
    monkeypatch.setattr(teaching, "expected_objectives", lambda *_: torch.tensor([worth[next(sharpness)]]))
    choices = choose(TeachConfig(1, betas=(0.1,), pooling=(0.0,), epochs=1), student(), lessons(6), 0)
    assert [choice.sharpness for choice in choices] == [3.0, 10.0, 1.0]


def test_sharpening_multiplies_log_odds() -> None:
    agent, data = student(), lessons(3).data
    steps = data.packed(data.sequences(), range(9))
    agent.network.sharpen(20.0)  # newborn heads are nearly uniform
    before = evaluate_steps(agent, steps).log_probs[:, 0]
    odds = before - torch.log1p(-before.exp())
    agent.network.sharpen(2.0)
    after = evaluate_steps(agent, steps).log_probs[:, 0]
    chosen = steps.masks["op"].all(-1)
    assert torch.allclose((after - torch.log1p(-after.exp()))[chosen], 2 * odds[chosen], atol=1e-4)


# -- a run -----------------------------------------------------------------------------------------------------------


def tiny_taught(rounds: int) -> TrainConfig:
    """A quick run that begins with teaching."""
    quick, taught = quick_config(rounds), taught_config(90)
    settings = replace(taught.teach, betas=(0.1,), pooling=(0.5,), sharpness=(3.0,), folds=2, epochs=2)
    ppo = replace(taught.ppo, critic_first=1, leash=0.5)
    return replace(quick, preset="commit", teach=settings, ppo=ppo)


def run(config: TrainConfig, folder: Path, *, resume: bool = False) -> Trainer:
    trainer = Trainer(config, folder, resume=resume, begin=partial(teach, config, progress=False))
    trainer.run(progress=False)
    return trainer


@pytest.mark.slow
def test_a_taught_run_begins_with_what_it_was_taught_and_resumes(tmp_path: Path) -> None:
    """It has a checkpoint before its first round, the records of its search, and a report; a run that was killed while
    it was taught is taught again and ends alike."""
    config = tiny_taught(2)
    whole = run(config, tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())[0] == "round-00000"
    report = json.loads((tmp_path / "whole" / teaching.FOLDER / teaching.REPORT).read_text())
    assert report["episodes"] <= 90 and report["choices"][0]["beta"] == 0.1
    assert whole.agent.start is not None, "the leash holds to what was taught"

    def killed(agent: PPOAgent, folder: Path) -> None:
        (folder / teaching.FOLDER / teaching.RECORDS).mkdir(parents=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(config, tmp_path / "killed", begin=killed).run(progress=False)
    with pytest.warns(RuntimeWarning, match="begins again"):
        resumed = run(config, tmp_path / "killed", resume=True)
    for name, weight in whole.agent.network.state_dict().items():
        assert torch.equal(weight, resumed.agent.network.state_dict()[name]), name


@pytest.mark.gpu
@pytest.mark.slow
def test_a_run_on_cuda_is_taught(tmp_path: Path) -> None:
    """Records and student are on the CPU; the agent gets weights and scales on its own device."""
    trainer = run(replace(tiny_taught(1), device="cuda"), tmp_path / "run")
    agent, _ = load_agent(checkpoints_of(tmp_path / "run").path_of(0))
    assert trainer.agent.returns.statistics.mean.is_cuda
    assert float(agent.returns.statistics.count.sum()) > 0, "the critic was taught"


def test_settings_that_teaching_cannot_follow() -> None:
    with pytest.raises(BadValueError, match="omit --start"):
        replace(taught_config(300), start=Path("runs/other"))
    with pytest.raises(BadValueError, match="rounds"):
        TrainConfig(rounds=0)
    assert replace(taught_config(300), rounds=0).rounds == 0
    with pytest.raises(BadValueError, match="betas is empty"):
        TeachConfig(300, betas=())
