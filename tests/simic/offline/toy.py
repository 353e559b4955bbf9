"""A toy with a known optimum: factored, masked, and worth nothing to those who forget.

Each step shows one of four lights. PRESS chooses a light, and pays 1 if it is the one that was shown two steps ago,
else it costs 1. CHARGE costs 0.2 and makes the next press pay and cost three times as much. WAIT is free. PRESS is
closed in the first two steps and in every fifth step or so; CHARGE is closed while charged. Some wrong lights cannot be
chosen. Episodes are plain tensors, thousands a second.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from esper.simic.agent import PPOAgent
from esper.simic.offline.transitions import Transitions
from esper.tamiyo import ActionTable, vector_layout
from esper.tamiyo.heads import ActionHead
from esper.tamiyo.memory import HiddenState

LIGHTS, STEPS, DELAY, OPEN = 4, 8, 2, 0.8
WAIT, PRESS, CHARGE = range(3)
COST, FACTOR = 0.2, 3.0

TABLE = ActionTable((ActionHead("op", 3), ActionHead("light", LIGHTS, matters=(False, True, False), given="op")))
LAYOUT = vector_layout(LIGHTS + 3)  # the light, charged, open, time left


class View(NamedTuple):
    """What n players see in a step, and what they ought to remember."""

    step: int
    observations: Tensor  # (n, columns)
    masks: dict[str, Tensor]
    due: Tensor  # (n,): the light of two steps ago
    charged: Tensor  # (n,) bool
    open: Tensor  # (n,) bool
    uniform: Tensor  # (n, heads): for whoever draws


Player = Callable[[View], Tensor]  # actions (n, heads)
Label = Callable[[View, Tensor], Tensor]  # what is recorded in place of the actions


def play(player: Player, n: int, seed: int = 0, label: Label | None = None) -> Transitions:
    """n episodes of a player. `label` says what should have been done; by default that is what was done."""
    generator = torch.Generator().manual_seed(seed)
    lights = torch.randint(LIGHTS, (n, STEPS), generator=generator)
    opened = torch.rand((n, STEPS), generator=generator) < OPEN
    opened[:, :DELAY] = False
    choosable = torch.rand((n, STEPS, LIGHTS), generator=generator) < 0.7
    uniform = torch.rand((n, STEPS, 2), generator=generator)
    due = lights.roll(DELAY, 1)
    choosable = choosable.scatter(2, due[..., None], True)
    charged = torch.zeros(n, dtype=torch.bool)
    rows = []
    for step in range(STEPS):
        time = torch.full((n, 1), 1 - step / STEPS)
        light = torch.nn.functional.one_hot(lights[:, step], LIGHTS)
        seen = torch.cat([light, charged[:, None], opened[:, step, None], time], 1).float()
        op = torch.stack([torch.ones(n, dtype=torch.bool), opened[:, step], ~charged], 1)
        target = torch.zeros((n, 3, LIGHTS), dtype=torch.bool)
        target[:, PRESS] = choosable[:, step]
        masks = {"op": op, "light": target}
        view = View(step, seen, masks, due[:, step], charged, opened[:, step], uniform[:, step])
        actions = player(view)
        pressed, wound = actions[:, 0] == PRESS, actions[:, 0] == CHARGE
        right = torch.where(actions[:, 1] == due[:, step], 1.0, -1.0)
        reward = pressed * right * torch.where(charged, FACTOR, 1.0) - COST * wound
        rows.append((seen, masks, actions if label is None else label(view, actions), reward))
        charged = (charged | wound) & ~pressed
    observations, masks_by_step, actions_by_step, rewards = zip(*rows, strict=True)
    ends = torch.zeros((n, STEPS), dtype=torch.bool)
    ends[:, -1] = True
    return Transitions(
        observations=torch.stack(observations, 1),
        masks={name: torch.stack([masks[name] for masks in masks_by_step], 1) for name in TABLE.names},
        actions=torch.stack(actions_by_step, 1),
        rewards=torch.stack(rewards, 1),
        terminated=ends,
        truncated=torch.zeros_like(ends),
        weights=torch.ones((n, STEPS)),
        groups=torch.arange(n),
    )


@cache
def worth() -> tuple[list[list[float]], list[list[list[float]]]]:
    """By backward induction: the value of (step, charged) before it is known whether PRESS is open, and of each op."""
    values = [[0.0, 0.0] for _ in range(STEPS + 1)]
    ops: list[list[list[float]]] = [[[], []] for _ in range(STEPS)]
    for step in reversed(range(STEPS)):
        later = values[step + 1]
        ops[step][0] = [later[0], 1 + later[0], later[1] - COST]
        ops[step][1] = [later[1], FACTOR + later[0], float("-inf")]
        for charged in (0, 1):
            wait, press, charge = ops[step][charged]
            closed = max(wait, charge)
            share = OPEN if step >= DELAY else 0.0
            values[step][charged] = share * max(closed, press) + (1 - share) * closed
    return values, ops


def optimum() -> float:
    """The mean return of the best player."""
    return worth()[0][0][0]


def best(view: View) -> Tensor:
    """The best player: of the legal ops the one that is worth most, and the light that is due."""
    ops = torch.tensor(worth()[1][view.step])[view.charged.long()]
    op = ops.masked_fill(~view.masks["op"], float("-inf")).argmax(1)
    return _action(op, view.due)


def hasty(view: View) -> Tensor:
    """Presses the light that is due whenever it can, and never charges."""
    return _action(torch.where(view.open, PRESS, WAIT), view.due)


def dice(view: View) -> Tensor:
    """Any legal action."""
    op = _draw(view.masks["op"], view.uniform[:, 0])
    return _action(op, _draw(view.masks["light"][:, PRESS], view.uniform[:, 1]))


def half_random(view: View) -> Tensor:
    """In half of the steps any legal action, in the others that of the hasty player."""
    chance = (view.uniform.sum(1) * 1000) % 1 < 0.5
    return torch.where(chance[:, None], dice(view), hasty(view))


def _action(op: Tensor, light: Tensor) -> Tensor:
    return torch.stack([op, light.where(op == PRESS, 0)], 1)


def _draw(mask: Tensor, uniform: Tensor) -> Tensor:
    """A legal choice (n,) of a mask (n, choices)."""
    rank = (uniform * mask.sum(1)).long()
    return ((mask.cumsum(1) - 1 == rank[:, None]) & mask).to(torch.uint8).argmax(1)


def learned(agent: PPOAgent, *, greedy: bool = False) -> Player:
    """An agent as a player, for one call of `play`."""
    states: list[HiddenState] = []  # none before the first step

    def act(view: View) -> Tensor:
        state = states.pop() if states else agent.network.initial_state(len(view.due))
        observations = agent.normalise(view.observations)
        decision, _, state = agent.act(observations, view.masks, state, uniform=view.uniform, greedy=greedy)
        states.append(state)
        return decision.actions

    return act


def mean_return(player: Player, n: int = 2000, seed: int = 1000) -> float:
    """The mean return of a player in fresh episodes."""
    return float(play(player, n, seed).rewards.sum(1).mean())
