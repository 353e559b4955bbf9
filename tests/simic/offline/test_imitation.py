"""Imitation: its loss by hand, whom its gradients reach, and a teacher that it has to remember for."""

from math import log

import pytest
import torch
from simic.offline.toy import LAYOUT, PRESS, TABLE, WAIT, best, dice, learned, mean_return, optimum, play
from torch import Tensor

from esper.leyline import BadValueError
from esper.simic.agent import NotFiniteError
from esper.simic.offline.imitation import (
    ActorTrainer,
    ImitationConfig,
    accuracy,
    evaluate_steps,
    imitate,
    imitation_loss,
    new_agent,
)
from esper.simic.offline.transitions import Transitions, join
from esper.tamiyo import NetworkConfig
from esper.tamiyo.memory import MemoryKind

SMALL = NetworkConfig(memory="window", encoder=16, hidden=16, head=16)


def by_hand(actions: list[list[int]], ops: list[list[int]], lights: list[int], weights: list[float]) -> Transitions:
    """One episode of such steps, with these legal ops and, for PRESS, these legal lights."""
    data, steps = play(dice, 1), len(actions)
    masks = {"op": torch.zeros(1, steps, 3, dtype=torch.bool), "light": torch.zeros(1, steps, 3, 4, dtype=torch.bool)}
    for step, legal in enumerate(ops):
        masks["op"][0, step, legal] = True
    masks["light"][0, :, PRESS, lights] = True
    ends = torch.zeros(1, steps, dtype=torch.bool)
    return Transitions(
        data.observations[:, :steps],
        masks,
        torch.tensor([actions]),
        torch.zeros(1, steps),
        ends,
        ends,
        torch.tensor([weights]),
        torch.zeros(1, dtype=torch.long),
    )


def test_loss_by_hand() -> None:
    """Odds of the ops 1 : 2 : 3, of the lights 1 : 1 : 1 : 1.

    PRESS where WAIT and PRESS are legal, with 2 of 4 lights:  −ln(2/3) − ln(1/2), weight 2
    WAIT where all are legal; it uses no light:                −ln(1/6), weight 1
    WAIT where nothing else is legal: decides nothing,          0, whatever its weight
    """
    data = by_hand([[PRESS, 2], [WAIT, 0], [WAIT, 0]], [[0, 1], [0, 1, 2], [0]], [2, 3], [2.0, 1.0, 5.0])
    agent = new_agent(TABLE, LAYOUT, SMALL, data, 0)
    with torch.no_grad():
        for weight in agent.network.parameters():
            weight.zero_()
        agent.network.get_parameter("heads.op.bias").copy_(torch.tensor([1.0, 2.0, 3.0]).log())
    steps = data.packed(data.sequences(), [0])
    loss = imitation_loss(evaluate_steps(agent, steps), steps.weights)
    assert float(loss.detach()) == pytest.approx(2 * (log(3 / 2) + log(2)) + log(6))


def gradients(data: Transitions) -> dict[str, Tensor]:
    """Of the imitation loss, by weight."""
    agent = new_agent(TABLE, LAYOUT, SMALL, data, 0)
    steps = data.packed(data.sequences(), range(data.n_episodes))
    imitation_loss(evaluate_steps(agent, steps), steps.weights).backward()
    weights = agent.network.named_parameters()
    return {name: torch.zeros(()) if weight.grad is None else weight.grad for name, weight in weights}


def test_gradients_reach_causal_heads_only() -> None:
    """WAIT uses no light; a PRESS with one legal light leaves nothing to choose; the critic imitates nobody."""
    waiting = gradients(by_hand([[WAIT, 0]], [[0, 1, 2]], [1, 2], [1.0]))
    assert waiting["heads.op.bias"].any()
    assert not any(value.any() for name, value in waiting.items() if name.startswith("heads.light"))
    forced = gradients(by_hand([[PRESS, 1]], [[0, 1, 2]], [1], [1.0]))
    assert not any(value.any() for name, value in forced.items() if name.startswith("heads.light"))
    pressing = gradients(by_hand([[PRESS, 1]], [[1]], [1, 2], [1.0]))
    assert pressing["heads.light.bias"].any()
    assert not any(value.any() for name, value in pressing.items() if name.startswith("heads.op"))
    for found in (waiting, forced, pressing):
        assert not any(value.any() for name, value in found.items() if name.startswith("critic"))


def test_steps_of_weight_0_teach_nothing() -> None:
    """Neither the weights nor the statistics of the observations."""
    data = play(best, 20)
    strange = play(dice, 20, 1)
    strange = strange._replace(weights=torch.zeros_like(strange.weights), observations=strange.observations + 7)
    config = ImitationConfig(SMALL, epochs=2, batch=100)
    alone, beside = (imitate(part, TABLE, LAYOUT, config).agent for part in (data, join([data, strange])))
    for one, other in zip(alone.network.parameters(), beside.network.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(alone.observations.statistics.mean, beside.observations.statistics.mean)
    with pytest.raises(BadValueError, match="all steps have weight 0, so there is nothing to imitate"):
        imitate(strange, TABLE, LAYOUT, config)


def test_accuracy_by_hand() -> None:
    """A policy that always presses light 2, if it may. Of five decisions:

    PRESS 2                                   right, with weight 3
    PRESS 3                                   op right, light wrong
    WAIT where PRESS is legal                 wrong
    WAIT where PRESS is not                   right
    CHARGE where the policy presses           wrong

    op: (3 + 1 + 1) / 7, light: 3 / 4, joint: (3 + 1) / 7. A forced step is no decision.
    """
    actions = [[PRESS, 2], [PRESS, 3], [WAIT, 0], [WAIT, 0], [2, 0], [WAIT, 0]]
    data = by_hand(actions, [[0, 1]] * 3 + [[0, 2], [1, 2], [0]], [0, 2, 3], [3.0, 1, 1, 1, 1, 9])
    agent = new_agent(TABLE, LAYOUT, SMALL, data, 0)
    with torch.no_grad():
        for weight in agent.network.parameters():
            weight.zero_()
        agent.network.get_parameter("heads.op.bias")[PRESS] = 2
        agent.network.get_parameter("heads.op.bias")[WAIT] = 1
        agent.network.get_parameter("heads.light.bias")[2] = 1
    assert accuracy(agent, data) == pytest.approx({"joint": 4 / 7, "op": 5 / 7, "light": 3 / 4})


def test_a_head_agrees_only_with_those_before_it() -> None:
    """The policy waits, and its placeholder happens to be the light that the record pressed."""
    data = by_hand([[PRESS, 0]], [[0, 1]], [0, 1], [1.0])
    agent = new_agent(TABLE, LAYOUT, SMALL, data, 0)
    with torch.no_grad():
        agent.network.get_parameter("heads.op.bias")[WAIT] = 100
    assert accuracy(agent, data) == {"joint": 0, "op": 0, "light": 0}


@pytest.mark.parametrize("memory", ["window", "lstm"])
def test_agrees_with_its_teacher(memory: MemoryKind) -> None:
    """In at least 99 % of the decisions, on episodes that it did not learn from, and it earns what the teacher earns.
    The teacher presses what was shown two steps ago, which the policy has to remember."""
    network = NetworkConfig(memory=memory, encoder=32, hidden=32, head=32)
    config = ImitationConfig(network, epochs=25, batch=32, rate=1e-2, held_out=0.2)
    found = imitate(play(best, 700), TABLE, LAYOUT, config)
    assert found.held_out is not None
    for shares in (found.accuracy, found.held_out):
        assert set(shares) == {"joint", "op", "light"}
        assert min(shares.values()) >= 0.99
    assert mean_return(learned(found.agent, greedy=True)) > 0.98 * optimum()


def test_weights_decide_whom_it_imitates() -> None:
    """Of two teachers in the same states, the one that weighs nine times as much."""
    one, other = play(best, 200), play(dice, 200, label=lambda view, _: best(view))
    wrong = one._replace(actions=one.actions.clone(), weights=one.weights * 0.1)
    wrong.actions[..., 0] = WAIT
    wrong.actions[..., 1] = 0
    config = ImitationConfig(NetworkConfig(memory="window", encoder=32, hidden=32, head=32), epochs=25, rate=1e-2)
    agent = imitate(join([one, wrong]), TABLE, LAYOUT, config).agent
    assert accuracy(agent, one)["op"] > 0.9
    assert accuracy(agent, other)["op"] > 0.5


def test_a_loss_that_is_not_finite() -> None:
    """Stops before it reaches the weights."""
    data = play(best, 4)
    agent = new_agent(TABLE, LAYOUT, SMALL, data, 0)
    steps = data.packed(data.sequences(), range(4))
    before = [weight.clone() for weight in agent.network.parameters()]
    with pytest.raises(NotFiniteError, match=r"the imitation loss is nan; check the weights of the steps"):
        ActorTrainer(agent, ImitationConfig(SMALL)).step(steps, steps.weights * torch.nan)
    assert all(torch.equal(*pair) for pair in zip(before, agent.network.parameters(), strict=True))
