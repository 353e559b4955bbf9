"""A growth problem small enough to solve exactly: does the reward ask for the policy that the objective asks for?"""

import itertools
import random

import pytest
import torch
from simic.rewards.trajectories import Move, play
from torch import Tensor

from esper.leyline import objective
from esper.simic.rewards import RewardConfig, RewardInputs, compute_reward
from esper.simic.rewards.potentials import shaping

STATES = ("empty", "modest trains", "modest holds", "modest fossil", "flashy trains", "flashy holds", "flashy fossil")
ACTIONS = ("wait", "modest", "flashy", "commit", "prune")
LIVE = torch.tensor([0.0, 0.0, 2.0, 2.0, 0.0, 5.0, 5.0], dtype=torch.float64)
"""Live gain: the flashy seed looks better …"""
HARDENED = torch.tensor([0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.5], dtype=torch.float64)
"""… until it is hardened."""
ACTING = torch.tensor([0, 0, 200, 200, 0, 200, 200])
FOSSILS = torch.tensor([0, 0, 0, 200, 0, 0, 200])
STEPS = 5

EACH_GAMMA = pytest.mark.parametrize("gamma", [1.0, 0.9])
Policy = list[list[frozenset[int]]]
"""The best actions by step and state."""


def dynamics() -> Tensor:
    """(S, A, S) where each action leads: what is not possible is a wait."""
    chances = torch.zeros(len(STATES), len(ACTIONS), len(STATES), dtype=torch.float64)
    for state, action in itertools.product(range(len(STATES)), range(len(ACTIONS))):
        name, act = STATES[state], ACTIONS[action]
        kind = name.split()[0]
        if name == "empty" and act in ("modest", "flashy"):
            chances[state, action, STATES.index(f"{act} trains")] = 1
        elif name.endswith("holds") and act == "commit":
            chances[state, action, STATES.index(f"{kind} fossil")] = 1
        elif act == "prune" and not name.endswith(("fossil", "empty")):
            chances[state, action, 0] = 1
        elif name.endswith("trains"):
            chances[state, action, STATES.index(f"{kind} holds")] = 0.8
            chances[state, action, state] = 0.2
        else:
            chances[state, action, state] = 1
    return chances


def rewards(config: RewardConfig, terminal: bool) -> Tensor:
    """(S, S') by the real function; Φ is that of the state, as it would be stored."""
    first, second = (grid.flatten() for grid in torch.meshgrid(*[torch.arange(len(STATES))] * 2, indexing="ij"))
    n = len(first)
    host = torch.full((n,), 1000)
    template = play(lambda host: Move(), 1)[0]
    inputs: RewardInputs = template._replace(
        potential=objective(LIVE, ACTING.double(), host[: len(STATES)].double(), config.rho)[first],
        gain=LIVE[second],
        acting_parameters=ACTING[second],
        fossil_parameters=FOSSILS[second],
        host_parameters=host,
        objective_gain=HARDENED[second],
        control_accuracy=torch.full((n,), 60.0),
        chance_accuracy=torch.full((n,), 10.0),
        terminal=torch.full((n,), terminal),
        panic=torch.zeros(n, dtype=torch.bool),
    )
    return compute_reward(config, inputs).total.view(len(STATES), len(STATES))


def solve(gamma: float, step: Tensor, last: Tensor, final: Tensor | None = None) -> tuple[Policy, Tensor]:
    """Backward induction with rewards (S, S'); `final` is a bootstrap, (S,). Best actions and values at the start."""
    chances = dynamics()
    values = torch.zeros(len(step), dtype=torch.float64) if final is None else final
    policy: Policy = []
    for t in reversed(range(STEPS)):
        paid = last if t == STEPS - 1 else step
        worth = (chances * (paid.unsqueeze(1) + gamma * values)).sum(-1)
        values = worth.max(-1).values
        best = worth >= values.unsqueeze(-1) - 1e-9
        policy.insert(0, [frozenset(row.nonzero().flatten().tolist()) for row in best])
    return policy, values


def unshaped(gamma: float) -> Policy:
    """The objective alone."""
    bare = RewardConfig(gamma=gamma, shaping=0.0)
    return solve(gamma, rewards(bare, False), rewards(bare, True))[0]


@EACH_GAMMA
@pytest.mark.parametrize("weight", [1.0, 0.4])
def test_same_best_policy_with_and_without_shaping(gamma: float, weight: float) -> None:
    """Every best action in every state at every step, and it is the one that a reader would choose."""
    config = RewardConfig(gamma=gamma, shaping=weight)
    policy, values = solve(gamma, rewards(config, False), rewards(config, True))
    assert policy == unshaped(gamma)
    assert policy[0][0] == {ACTIONS.index("modest")}
    assert policy[2][STATES.index("modest holds")] >= {ACTIONS.index("commit")}
    assert policy[-1][STATES.index("modest holds")] == {ACTIONS.index("commit")}
    # Not committed: 0. Committed: 2 − 2 log2(1.2), if it holds in time, which fails with 0.2³.
    worth = (1 - 0.2**3) * (2 - 2 * torch.log2(torch.tensor(1.2, dtype=torch.float64)))
    assert float(values[0]) == pytest.approx(gamma ** (STEPS - 1) * float(worth))


@EACH_GAMMA
def test_a_potential_at_the_end_would_change_it(gamma: float) -> None:
    """Φ(s_T) ≠ 0 pays for what is live but never committed."""
    config = RewardConfig(gamma=gamma)
    host = torch.full((len(STATES),), 1000)
    leak = gamma * objective(LIVE, ACTING.double(), host.double(), config.rho).unsqueeze(0)
    policy, _ = solve(gamma, rewards(config, False), rewards(config, True) + leak)
    assert policy[0][0] == {ACTIONS.index("flashy")}
    assert policy != unshaped(gamma)


@EACH_GAMMA
def test_a_bootstrap_at_the_end_would_change_it(gamma: float) -> None:
    """An end that is treated as an interruption: a critic that knows no time says what the state would be worth."""
    config = RewardConfig(gamma=gamma)
    step, last = rewards(config, False), rewards(config, True)
    true_policy, critic = solve(gamma, step, last)
    policy, _ = solve(gamma, step, last, final=critic)
    assert policy != true_policy
    holds = STATES.index("flashy holds")
    assert policy[-1][holds] != true_policy[-1][holds]


@pytest.mark.requirement(1)
def test_another_gamma_would_change_it() -> None:
    """Shaping with gamma 1 under a trainer with 0.9 pays for gains that come and go."""
    mismatched = RewardConfig(gamma=1.0)
    policy, _ = solve(0.9, rewards(mismatched, False), rewards(mismatched, True))
    assert policy != unshaped(0.9)


@EACH_GAMMA
def test_any_potential_keeps_any_problem(gamma: float) -> None:
    """Random dynamics, rewards and potentials: the best actions stay."""
    rng = torch.Generator().manual_seed(random.Random(0).randrange(10**6))
    for _ in range(20):
        chances = torch.rand(6, 3, 6, generator=rng, dtype=torch.float64)
        chances /= chances.sum(-1, keepdim=True)
        own, phi = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((6, 3), (6,)))
        policies = []
        for level in (phi, 0 * phi):
            values = torch.zeros(6, dtype=torch.float64)
            best = []
            for t in reversed(range(4)):
                ends = torch.full((6, 6), t == 3)
                paid = shaping(level.unsqueeze(1).expand(6, 6), level.expand(6, 6), ends, gamma)
                worth = own + (chances * (paid.unsqueeze(1) + gamma * values)).sum(-1)
                values = worth.max(-1).values
                best.append(worth.argmax(-1))
            policies.append(torch.stack(best))
        assert policies[0].equal(policies[1])
