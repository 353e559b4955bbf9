"""Small agents, and synthetic rounds that they collect: random observations and conditional masks, ends in mid-row,
rows of unequal length, forced steps."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline import head_preset
from esper.simic.agent import PPOAgent, PPOConfig, Step, TamiyoRolloutBuffer
from esper.tamiyo import ActionTable, NetworkConfig, ObservationLayout, discrete_table, growth_table, vector_layout
from esper.tolaria import get_task

SMALL = NetworkConfig(encoder=16, hidden=16, head=16, head_gain=1.0)
"""With heads that have opinions: what they choose depends on everything, the memory included."""
SLOTS = get_task("digits_blind").slot_config
LAYOUT = ObservationLayout(
    host=("loss", "accuracy", "progress"),
    slot=("stage", "alpha"),
    offer=("parameters",),
    critic=("control",),
    slots=len(SLOTS),
    blueprints=len(SLOTS.blueprint_names),
)
TABLES: dict[str, tuple[ActionTable, ObservationLayout]] = {
    "vector": (discrete_table((4, 3)), vector_layout(5)),
    "core": (growth_table(head_preset("core"), SLOTS), LAYOUT),
    "full": (growth_table(head_preset("full"), SLOTS), LAYOUT),
}

Masks = dict[str, Tensor]
Narrow = Callable[[Masks, int], None]
"""Changes the masks of a step in place."""
Gradients = dict[str, Tensor]


def small(**changes: Any) -> PPOConfig:  # Any: of the field's type
    """Settings for tests: a narrow network, short rounds and few epochs, otherwise the defaults."""
    return replace(PPOConfig(network=SMALL, steps=12, epochs=4), **changes)


def make_agent(
    kind: str = "core", *, seed: int = 0, tasks: int = 1, total_updates: int = 10, **changes: Any
) -> PPOAgent:  # Any: of the field's type
    """An agent of one of the tables; `changes` are fields of its configuration."""
    table, layout = TABLES[kind]
    return PPOAgent(table, layout, small(**changes), total_updates=total_updates, tasks=tasks, rng_seed=seed)


def random_masks(table: ActionTable, n: int, generator: torch.Generator) -> Masks:
    """Three in five choices are legal, and always one; for every third env or so a single joint action is."""
    forced = torch.rand(n, generator=generator) < 0.3
    masks = {}
    for head in table.heads:
        shape = (n, *table.mask_shape(head))
        scores = torch.rand(shape, generator=generator)
        best = scores.amax(-1, keepdim=True)
        one = torch.zeros(head.size, dtype=torch.bool)
        one[0] = True
        masks[head.name] = torch.where(forced.view(n, *[1] * (len(shape) - 1)), one, (scores > 0.4) | (scores == best))
    return masks


def collect(
    agent: PPOAgent,
    *,
    n_envs: int = 8,
    seed: int = 0,
    scale: float = 1.0,
    ragged: bool = True,
    narrow: Narrow | None = None,
    tasks: Tensor | None = None,
) -> TamiyoRolloutBuffer:
    """A round of the agent in a world of noise. Everything but the actions follows from the seed."""
    generator = torch.Generator().manual_seed(seed)
    steps, table, hidden = agent.config.steps, agent.table, agent.config.network.hidden
    buffer = TamiyoRolloutBuffer(
        n_envs, steps, agent.layout.size, table, hidden, tasks=tasks, device=agent.device
    )  # fmt: skip
    lengths = torch.randint(steps // 3, steps + 1, (n_envs,), generator=generator).tolist() if ragged else []
    carried = (torch.randn(2, n_envs, hidden, generator=generator) * 0.5).to(agent.device)
    hidden_state = (carried[0], carried[1])
    buffer.begin(hidden_state, agent.epsilon)
    for step in range(steps):
        observations = torch.randn(n_envs, agent.layout.size, generator=generator).to(agent.device)
        masks = random_masks(table, n_envs, generator)
        if narrow is not None:
            narrow(masks, step)
        masks = {name: mask.to(agent.device) for name, mask in masks.items()}
        decision, values, hidden_state = agent.act(observations, masks, hidden_state, epsilon=buffer.epsilon)
        ends = (torch.rand(n_envs, generator=generator) < 0.2).to(agent.device)
        truncated = ends & (torch.rand(n_envs, generator=generator) < 0.5).to(agent.device)
        rewards, following = (torch.randn(2, n_envs, generator=generator) * scale).to(agent.device)
        whole = Step(
            observations,
            masks,
            decision.actions,
            decision.log_probs,
            agent.values_of(values, buffer.tasks),
            rewards,
            ends,
            following.where(truncated, 0.0),
        )
        envs = [env for env in range(n_envs) if not ragged or step < lengths[env]]
        buffer.add(rows_of(whole, envs), envs)
        hidden_state = (hidden_state[0].where(~ends.unsqueeze(1), 0.0), hidden_state[1].where(~ends.unsqueeze(1), 0.0))
    buffer.cut(torch.zeros(n_envs, device=agent.device))
    return buffer


def rows_of(step: Step, envs: list[int]) -> Step:
    """The step of these envs alone."""
    masks = {name: mask[envs] for name, mask in step.masks.items()}
    return Step(step.observations[envs], masks, *(part[envs] for part in step[2:]))


def only(head: str, *choices: int) -> Narrow:
    """Allow all envs just these choices of a head whose mask depends on nothing."""

    def narrow(masks: Masks, step: int) -> None:
        masks[head][:] = False
        masks[head][:, list(choices)] = True

    return narrow


def weights_of(agent: PPOAgent) -> Gradients:
    """A copy of all weights."""
    return {name: weight.detach().clone() for name, weight in agent.network.named_parameters()}


def gradients_of(agent: PPOAgent) -> Gradients:
    """A copy of all gradients."""
    found = {name: weight.grad for name, weight in agent.network.named_parameters()}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


@contextmanager
def withheld(agent: PPOAgent) -> Iterator[list[Gradients]]:
    """Inside, the optimiser takes no step: the gradients that it would have taken are listed instead."""
    seen: list[Gradients] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent.optimizer, "step", lambda: seen.append(gradients_of(agent)))
        yield seen


def mean_of(gradients: list[Gradients]) -> Gradients:
    """Of several minibatches."""
    return {name: torch.stack([each[name] for each in gradients]).mean(0) for name in gradients[0]}


def gap(first: Gradients, second: Gradients) -> float:
    """The largest difference between two sets of tensors."""
    assert set(first) == set(second)
    return max((float((first[name] - second[name]).abs().max()) for name in first), default=math.inf)


def rows_alone(buffer: TamiyoRolloutBuffer, envs: list[int]) -> TamiyoRolloutBuffer:
    """Some rows of a round that is not ragged, as a round of their own."""
    size, hidden = buffer.observations.shape[-1], buffer.hidden_state[0].shape[-1]
    part = TamiyoRolloutBuffer(len(envs), buffer.capacity, size, buffer.table, hidden, tasks=buffer.tasks[envs])
    part.begin((buffer.hidden_state[0][envs], buffer.hidden_state[1][envs]), buffer.epsilon)
    for step in range(buffer.capacity):
        masks = {name: mask[:, step] for name, mask in buffer.masks.items()}
        tensors = (buffer.actions, buffer.log_probs, buffer.values, buffer.rewards, buffer.ends, buffer.bootstraps)
        part.add(rows_of(Step(buffer.observations[:, step], masks, *(each[:, step] for each in tensors)), envs))
    return part


class Operations(TorchDispatchMode):
    """Lists what torch is asked to do."""

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
    """What takes a number from the device to the host: bool, float, item, and masks as indices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seen: list[object] = []

    def __torch_dispatch__(  # type: ignore[no-untyped-def]  # as torch calls it
        self, func, types, args=(), kwargs=None
    ):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        """How often the host waited for a number."""
        return sum(func in self.READS for func in self.seen)
