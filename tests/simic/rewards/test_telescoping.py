"""Shaping sums to nothing but where it began."""

import math
import random

import pytest
import torch
from simic.rewards.trajectories import ADVANCE, FOSSILIZE, GERMINATE, Move, pay, play, random_script, stack, steady
from torch import Tensor

from esper.leyline import SeedStage
from esper.simic.rewards import Family, RewardConfig, RewardInputs
from esper.simic.rewards.potentials import SHAPING

STEPS, ENVS = 30, 24
EACH_GAMMA = pytest.mark.parametrize("gamma", [1.0, 0.9, 0.99])
EACH_FAMILY = pytest.mark.parametrize("family", ["paired", "shaped", "simplified", "sparse", "minimal", "loss"])


@pytest.fixture(scope="module")
def lifecycles() -> list[RewardInputs]:
    """Random episodes in lockstep."""
    episodes = [play(random_script(random.Random(seed)), STEPS) for seed in range(ENVS)]
    return [stack(step) for step in zip(*episodes, strict=True)]


def stages_seen(steps: list[RewardInputs]) -> set[int]:
    """In any slot."""
    return {stage for inputs in steps for stage in inputs.before.stage.unique().tolist()}


def test_lifecycles_have_everything(lifecycles: list[RewardInputs]) -> None:
    """The property below would hold of hosts that never grow."""
    passing = {SeedStage.GERMINATED, SeedStage.PRUNED}  # between an action and the end of its step
    assert stages_seen(lifecycles) == {int(stage) for stage in set(SeedStage) - passing}
    ops = torch.stack([inputs.op for inputs in lifecycles])
    assert ops.unique().tolist() == [0, 1, 2, 3, 4, 5]
    panics = torch.stack([inputs.panic for inputs in lifecycles])
    assert panics.sum() > 10
    busy = torch.stack([(inputs.before.alpha > 0).sum(-1) for inputs in lifecycles])
    assert (busy == 3).any()  # all slots at once
    assert torch.stack([inputs.gain.isnan() for inputs in lifecycles]).equal(panics)


@pytest.mark.requirement(14)
@EACH_GAMMA
@EACH_FAMILY
def test_shaping_telescopes(lifecycles: list[RewardInputs], family: Family, gamma: float) -> None:
    """Σ γ^k · shaping = γ^n Φ(s_n) − Φ(s_0) for every prefix of every segment, Φ(terminal) := 0."""
    config = RewardConfig(family=family, gamma=gamma)
    running, discount = torch.zeros(ENVS, dtype=torch.float64), torch.ones(ENVS, dtype=torch.float64)
    start = torch.zeros(ENVS, dtype=torch.float64)
    for inputs, rewarded in zip(lifecycles, pay(config, lifecycles), strict=True):
        running += discount * rewarded.parts[SHAPING]
        discount = discount * gamma
        ends = inputs.panic | inputs.terminal
        left = torch.where(ends, 0.0, rewarded.potential)
        assert (running - (discount * left - start)).abs().max() < 1e-9
        running = torch.where(ends, 0.0, running)
        discount = torch.where(ends, 1.0, discount)
        start = torch.where(ends, rewarded.potential, start)
        assert rewarded.total.isfinite().all()  # nothing of a panic's NaNs came through
    assert not start.any()  # a new episode starts from 0


@pytest.mark.requirement(14)
@EACH_GAMMA
def test_weighted_shaping_telescopes(lifecycles: list[RewardInputs], gamma: float) -> None:
    """With weight w the same holds for wΦ, and weight 0 gives no shaping."""
    whole, half, none = (
        [r.parts[SHAPING] for r in pay(RewardConfig(gamma=gamma, shaping=w), lifecycles)] for w in (1, 0.5, 0)
    )
    assert all(torch.equal(0.5 * full, part) for full, part in zip(whole, half, strict=True))
    assert not torch.stack(none).any()


def objectives(steps: list[RewardInputs]) -> Tensor:
    """Hardened gain − 2 log2(1 + fossils / host)."""
    last = steps[-1]
    return last.objective_gain - 2 * torch.log2(1 + last.fossil_parameters / last.host_parameters.double())


@pytest.mark.parametrize("shaping", [1.0, 0.3, 0.0])
def test_paired_rewards_sum_to_the_objective(shaping: float) -> None:
    """With γ = 1 the sum of an episode is its objective, whatever was done on the way."""
    episodes = [play(random_script(random.Random(seed), crashes=0.0), STEPS) for seed in range(100, 100 + ENVS)]
    steps = [stack(step) for step in zip(*episodes, strict=True)]
    total = torch.stack([r.total for r in pay(RewardConfig(shaping=shaping), steps)]).sum(0)
    assert (total - objectives(steps)).abs().max() < 1e-9
    assert (objectives(steps).abs() > 1).any()  # there was something to sum to


def test_a_price_is_paid_once_per_commit() -> None:
    """The k-th of a host costs k prices, so an episode sums to the objective − price · n (n + 1) / 2; a commit that a
    panic undid costs nothing."""
    episodes = [play(random_script(random.Random(seed), crashes=0.0), STEPS) for seed in range(100, 100 + ENVS)]
    steps = [stack(step) for step in zip(*episodes, strict=True)]
    commits = torch.stack([inputs.op == FOSSILIZE for inputs in steps]).sum(0)
    assert len(commits.unique()) > 2
    config = RewardConfig(commit_price=1.5)
    total = torch.stack([r.total for r in pay(config, steps)]).sum(0)
    assert (total - (objectives(steps) - 1.5 * commits * (commits + 1) / 2)).abs().max() < 1e-9
    step, env = torch.stack([inputs.op == FOSSILIZE for inputs in steps]).nonzero()[0].tolist()
    undone = steps[step].panic.clone()
    undone[env] = True
    paid = pay(config, [*steps[:step], steps[step]._replace(panic=undone)])
    assert float(paid[-1].parts["price"][env]) == 0.0


def test_a_host_that_waits_earns_nothing() -> None:
    """Exactly."""
    rewards = [float(r.total) for r in pay(RewardConfig(), play(lambda host: Move()))]
    assert rewards == [0.0] * 24


def test_a_panic_leads_back() -> None:
    """The snapshot's stored Φ is where the next segment starts."""
    moves = {0: Move(GERMINATE, 0, steady(4.0)), 3: Move(ADVANCE), 8: Move(crash=True)}
    paid = pay(RewardConfig(), play(lambda host: moves.get(host.step, Move()), 12))
    assert float(paid[7].potential) == pytest.approx(4 - 2 * math.log2(1.1))
    assert paid[8].potential.equal(paid[7].potential)
    assert float(paid[9].total) == 0.0  # nothing happened there
    assert float(paid[-1].potential) == 0.0


def test_a_panic_at_the_end() -> None:
    """It is a panic: no objective, and a fresh Φ for the next episode."""
    script = random_script(random.Random(3), crashes=0.0)
    steps = play(script, 12)
    paid = pay(RewardConfig(), [*steps[:-1], steps[-1]._replace(panic=torch.tensor([True]))])
    parts = paid[-1].parts
    assert (float(parts["gain"]), float(parts["rent"])) == (0, 0)
    assert float(parts["penalty"]) < -5
    assert float(paid[-1].potential) == 0.0
