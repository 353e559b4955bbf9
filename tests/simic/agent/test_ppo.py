"""What an update teaches, and to whom."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from rounds import (
    SMALL,
    Gradients,
    Masks,
    Narrow,
    collect,
    gap,
    make_agent,
    only,
    rows_alone,
    small,
    weights_of,
    withheld,
)
from torch import Tensor

from esper.leyline import LifecycleOp
from esper.simic.agent import PPOAgent, PPOConfig, Step, TamiyoRolloutBuffer, losses
from esper.simic.agent.minibatch import Reference, prepare_round
from esper.simic.control import ReturnNormalizer
from esper.simic.training.config import growth_ppo
from esper.tamiyo import discrete_table, vector_layout

WHOLE: dict[str, Any] = {"epochs": 1, "minibatches": 1, "clip_norm": 1e9, "target_kl": None}
"""One gradient of the whole round, as it is."""
GERMINATE, WAIT, PRUNE = (int(op) for op in (LifecycleOp.GERMINATE, LifecycleOp.WAIT, LifecycleOp.PRUNE))


def gradient_at(agent: PPOAgent, buffer: TamiyoRolloutBuffer, **changes: Any) -> Gradients:  # Any: fields of PPOConfig
    """The gradient of a round under another configuration."""
    agent.config = replace(agent.config, **changes)
    fresh = agent.returns.statistics.state_dict()
    with withheld(agent) as seen:
        agent.update(buffer)
    agent.returns.statistics.load_state_dict(fresh)
    agent.updates = 0
    return seen[0]


def entropy_gradient(agent: PPOAgent, buffer: TamiyoRolloutBuffer, part: str) -> Gradients:
    """What the entropy bonus alone adds to the gradients of the weights whose names begin so."""
    on, off = (gradient_at(agent, buffer, entropy=coefficient) for coefficient in (0.5, 0.0))
    return {name: on[name] - off[name] for name in on if name.startswith(part)}


def norm(gradients: Gradients) -> float:
    """Over all of them."""
    return float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())


# -- entropy ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(10, 46)
def test_steps_that_do_not_use_a_head_leave_its_entropy_alone() -> None:
    """Ten times as many steps without GERMINATE leave the blueprint head's bonus unchanged."""

    def narrow(masks: Masks, step: int) -> None:
        masks["op"][:] = False
        masks["op"][:4, GERMINATE] = True
        masks["op"][4:, [WAIT, PRUNE]] = True

    agent = make_agent("core", **WHOLE)
    both = collect(agent, n_envs=44, ragged=False, narrow=narrow)
    few, many = (
        entropy_gradient(agent, buffer, "heads.blueprint") for buffer in (rows_alone(both, [0, 1, 2, 3]), both)
    )
    assert norm(few) > 1e-3
    assert gap(few, many) <= 1e-6


@pytest.mark.requirement(10, 46)
def test_more_heads_do_not_make_the_entropy_bonus_larger() -> None:
    """Two equal heads pull the trunk exactly as much as one."""

    agents = [PPOAgent(discrete_table(sizes), vector_layout(3), small(steps=1, **WHOLE)) for sizes in ((4,), (4, 4))]
    first = agents[0].network
    agents[1].network.load_state_dict(first.state_dict(), strict=False)
    agents[1].network.heads["action1"].load_state_dict(first.heads["action0"].state_dict())
    for weight in agents[1].network.choice_embeddings.parameters():
        weight.data.zero_()

    def everything(masks: Masks, step: int) -> None:
        for mask in masks.values():
            mask[:] = True

    one, two = (
        entropy_gradient(agent, collect(agent, n_envs=32, ragged=False, narrow=everything), "trunk") for agent in agents
    )
    assert norm(one) > 1e-3
    assert gap(one, two) <= 1e-6


@pytest.mark.requirement(90)
def test_the_entropy_bonus_raises_the_entropy() -> None:
    """The loss contains −c·H with H the mean entropy of the heads. Its gradient is g = −c·∇H, so a small step of η
    against g raises H by η·|g|²/c."""
    agent, step = make_agent("core", **WHOLE), 0.3
    buffer = collect(agent)
    gradients = entropy_gradient(agent, buffer, "")
    with withheld(agent):
        before = agent.update(buffer).entropy
        for name, weight in agent.network.named_parameters():
            weight.data -= step * gradients[name]
        after = agent.update(buffer).entropy
    expected = step * norm(gradients) ** 2 / 0.5
    assert expected > 1e-5
    assert after - before == pytest.approx(expected, rel=0.05)


# -- KL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(12)
@pytest.mark.parametrize(("narrow", "moved"), [(only("op", WAIT, PRUNE), False), (only("op", GERMINATE), True)])
def test_kl_counts_only_heads_that_were_used(narrow: Narrow, moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shifted blueprint logits add no KL to a policy that never germinates."""
    agent = make_agent("core", epochs=2, minibatches=1, target_kl=None)
    weights = list(agent.network.heads["blueprint"].parameters())
    monkeypatch.setattr(
        agent.optimizer, "step", lambda: [weight.data.add_(torch.randn_like(weight)) for weight in weights]
    )
    metrics = agent.update(collect(agent, narrow=narrow))
    if moved:
        assert metrics.approx_kl > 0.01
        assert metrics.heads["blueprint"].kl == pytest.approx(metrics.approx_kl / 2)  # a mean over two minibatches
    else:
        assert abs(metrics.approx_kl) <= 1e-6
        assert metrics.heads["blueprint"].kl is None
    assert abs(metrics.heads["slot"].kl or 0.0) <= 1e-6


# -- value ------------------------------------------------------------------------------------------------------------


def value_to_policy(scale: float) -> float:
    """Ratio of the gradient norms in the first update."""
    agent = make_agent("core", entropy=0.0, logit_penalty=0.0, **WHOLE)
    buffer = collect(agent, scale=scale)
    both, policy = (gradient_at(agent, buffer, value_coefficient=weight) for weight in (0.5, 0.0))
    return norm({name: both[name] - policy[name] for name in both}) / norm(policy)


@pytest.mark.requirement(62)
def test_large_returns_do_not_drown_the_policy() -> None:
    """From the first update on, the critic learns in units of the returns' deviation."""
    plain, large = value_to_policy(1.0), value_to_policy(100.0)
    print(f"value / policy gradient: {plain:.2f}, returns × 100: {large:.2f}")
    assert large < 5
    assert 0.3 < large / plain < 3


@pytest.mark.requirement(4)
def test_values_are_clipped_about_those_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping uses the values before the update. If the statistics of returns rest, it takes effect only after the
    first step."""
    monkeypatch.setattr(ReturnNormalizer, "update", lambda *_: None)
    held, free = (make_agent("core", value_clip=clip, rate=0.02, target_kl=None) for clip in (0.01, None))
    with withheld(held) as first, withheld(free) as second:
        for agent in (held, free):
            agent.update(collect(agent, seed=1))
    assert gap(first[0], second[0]) <= 1e-6  # at the old value both errors are equal
    for agent in (held, free):
        metrics = agent.update(collect(agent, seed=1))
        assert metrics.epochs_run == 4
    assert gap(weights_of(held), weights_of(free)) > 1e-4


@pytest.mark.requirement(4)
def test_old_values_are_in_the_units_of_the_critic() -> None:
    """Returns lie 50 deviations from 0, and the round moves their statistics. A clip of 5 deviations about the old
    values still holds no value back before the first step."""
    agent = make_agent("core", **WHOLE)
    agent.returns.update(200 + 4 * torch.randn(1000), torch.zeros(1000, dtype=torch.long))
    buffer = collect(agent)
    before = agent.returns.statistics.mean
    held, free = (gradient_at(agent, buffer, value_clip=clip) for clip in (5.0, None))
    with withheld(agent):
        agent.update(buffer)
    assert float((agent.returns.statistics.mean - before).abs()) > 1
    assert max(float(free[name].abs().max()) for name in free if name.startswith("critic")) > 1e-2
    assert gap(held, free) <= 1e-5


@pytest.mark.requirement(4)
def test_values_are_clipped_in_the_units_of_their_targets() -> None:
    """Outputs of 0 and 1 meant 10 and 12 points. Returns are 4 and 3 points, so the mean moves from 10 to
    10 − 0.1 · 6.5 = 9.35 and the variance from 4 to 0.9 · 4 + 0.1 · 0.25 + 0.09 · 6.5² = 7.4275."""
    agent = make_agent("vector", gamma=1.0, lam=1.0, value_clip=0.1)
    statistics = {"mean": torch.tensor([10.0]), "var": torch.tensor([4.0]), "count": torch.tensor([1.0])}
    agent.returns.statistics.load_state_dict(statistics)
    buffer = TamiyoRolloutBuffer(1, 2, agent.layout.size, agent.table, agent.config.network.hidden)
    buffer.begin(agent.network.initial_state(1))
    for value, reward, end in ((10.0, 1.0, False), (12.0, 3.0, True)):
        action = (torch.zeros(1, agent.layout.size), agent.table.open_masks(1), torch.zeros(1, 2, dtype=torch.long))
        numbers = (torch.tensor([value]), torch.tensor([reward]), torch.tensor([end]), torch.zeros(1))
        buffer.add(Step(*action, torch.zeros(1, 2), *numbers))
    decided = torch.ones(2, 2, dtype=torch.bool)
    reference = Reference(torch.zeros(2, 2), decided, torch.tensor([0.0, 1.0]), torch.tensor(0.0))
    prepared = prepare_round(buffer, reference, agent.returns, agent.config, 1)
    piece = prepared.minibatch(buffer.batch(buffer.sequences(), [0]))
    std = 7.4275**0.5
    assert piece.targets.tolist() == pytest.approx([(4 - 9.35) / std, (3 - 9.35) / std])
    assert piece.values.tolist() == pytest.approx([(10 - 9.35) / std, (12 - 9.35) / std])
    # A value that goes from 12 points to its target counts as if it had moved by 0.1 deviations only.
    errors = losses.value_errors(piece.targets, piece.targets, piece.values, clip=0.1)
    assert errors.tolist() == pytest.approx([0.5 * (6 / std - 0.1) ** 2, 0.5 * (9 / std - 0.1) ** 2])


# -- rare heads -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(77)
def test_a_head_that_no_step_used_is_not_learnable() -> None:
    """The metrics report the head as not learnable, and it gets no gradient."""
    agent = make_agent("core")
    heads = agent.update(collect(agent, narrow=only("op", WAIT, PRUNE))).heads
    assert heads["blueprint"].learnable_fraction == 0
    assert (heads["blueprint"].learnable_fraction, heads["blueprint"].grad_norm) == (0, 0)
    assert heads["op"].learnable_fraction > heads["slot"].learnable_fraction > 0
    assert heads["op"].grad_norm > 0
    heads = agent.update(collect(agent, narrow=only("op", GERMINATE))).heads
    assert heads["blueprint"].learnable_fraction > 0
    assert heads["blueprint"].grad_norm > 0
    assert heads["op"].learnable_fraction == 0  # a single op leaves it no choice


@pytest.mark.requirement(77, 91)
def test_only_the_critic_decays() -> None:
    """Neither the actors nor the layers they share with the critic decay."""
    agent = make_agent("full", critic_decay=0.25)
    names = {weight: name for name, weight in agent.network.named_parameters()}
    decay = {names[w]: group["weight_decay"] for group in agent.optimizer.param_groups for w in group["params"]}
    assert set(decay) == set(names.values())
    assert {name for name, value in decay.items() if value == 0.25} == {
        *(f"critic.0.{kind}" for kind in ("weight", "bias")),
        *(f"critic_out.{kind}" for kind in ("weight", "bias")),
    }
    assert {value for name, value in decay.items() if not name.startswith("critic")} == {0.0}


def test_a_round_without_any_choice_teaches_the_critic_alone() -> None:
    """Forced steps enter no actor's loss; with weight 0 in the value loss nothing is left, and nothing breaks."""
    agent = make_agent("core")
    metrics = agent.update(collect(agent, narrow=only("op", WAIT)))
    assert metrics.forced_fraction == 1
    assert (metrics.policy_loss, metrics.entropy) == (0, 0)
    assert metrics.value_loss > 0
    agent = make_agent("core", forced_value_weight=0.0)
    metrics = agent.update(collect(agent, narrow=only("op", WAIT)))
    assert (metrics.value_loss, metrics.pre_clip_grad_norm, metrics.minibatches_taken) == (0, 0, 16)


# -- collapse ---------------------------------------------------------------------------------------------------------


def bandit(logit_penalty: float, updates: int = 200) -> list[float]:
    """Probability of the arm that pays, after each update, for a policy that began with logits (8, 0, 0, 0).

    One gradient step per update: Adam scales even a vanishing gradient up, so with 16 of them the entropy alone brings
    the policy back too, only later.
    """
    arms, n = discrete_table((4,)), 128
    network = replace(SMALL, head_gain=0.01, first_bias=(8.0, 0.0, 0.0, 0.0))
    config = PPOConfig(
        network=network, steps=1, epochs=1, minibatches=1, explore=0.0, logit_penalty=logit_penalty
    )  # fmt: skip
    agent = PPOAgent(arms, vector_layout(2), config, total_updates=updates)
    buffer = TamiyoRolloutBuffer(n, 1, 2, arms, network.hidden)
    seen, masks, hidden_state = torch.ones(n, 2), arms.open_masks(n), agent.network.initial_state(n)
    ends, nothing = torch.ones(n, dtype=torch.bool), torch.zeros(n)
    curve: list[float] = []
    while len(curve) < updates and (not curve or curve[-1] <= 0.5):
        buffer.begin(hidden_state)
        decision, values, _ = agent.act(seen, masks, hidden_state)
        rewards = (decision.actions[:, 0] == 2).float()
        values = agent.values_of(values, buffer.tasks)
        buffer.add(Step(seen, masks, decision.actions, decision.log_probs, values, rewards, ends, nothing))
        agent.update(buffer)
        curve.append(float(probabilities(agent, seen[:1])[2]))
    return curve


@torch.no_grad()
def probabilities(agent: PPOAgent, seen: Tensor) -> Tensor:
    """Of the first head's choices, with an empty memory."""
    network = agent.network
    core, _ = network.step(network.encode(seen).trunk, network.initial_state(1))
    return torch.softmax(network.heads["action0"](network.actor(core)), -1)[0]


def test_a_collapsed_head_comes_back() -> None:
    """The penalty on logits with which controllers learn brings it back within 200 updates; without it the entropy's
    gradient is too small."""
    penalised, free = bandit(growth_ppo().logit_penalty), bandit(0.0)
    print("with penalty:", [round(value, 4) for value in penalised[19::20]], len(penalised))
    print("without:", [round(value, 4) for value in free[19::20]])
    assert penalised[-1] > 0.5
    assert max(free) < 0.05


@pytest.mark.requirement(86)
def test_the_memory_sees_columns_of_one_scale() -> None:
    """Observations are normalised by per-column statistics before the recurrent core."""
    agent = PPOAgent(discrete_table([2]), vector_layout(7))
    scales = torch.logspace(-3, 3, 7)
    raw = 5 * scales + scales * torch.randn(4096, 7)
    agent.observations.update(raw)
    seen = agent.normalise(raw)
    assert seen.mean(0).abs().max() < 1e-3
    assert (seen.std(0) - 1).abs().max() < 1e-2
    assert agent.normalise(1e6 * raw).abs().max() <= 10
