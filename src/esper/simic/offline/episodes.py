"""Recorded episodes in memory: what was seen, done and earned, step by step.

Tensors are (episodes, steps, …). Episodes of one set belong to one task, so they have the same columns and heads and
are equally long. A panic ends a sequence inside an episode; the next step starts another.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import rent
from esper.simic.rewards import RewardConfig
from esper.tamiyo import ActionTable, ObservationLayout


@dataclass(frozen=True)
class RecordHeader:
    """What all episodes of a file have in common."""

    task: str
    preset: str
    table: ActionTable
    layout: ObservationLayout
    steps: int
    chance_accuracy: float
    by_loss: bool
    policies: tuple[str, ...]  # who acted, by number: `learned`, `random`, `schedule: …`


class Episodes(NamedTuple):
    """Some episodes of one task. Gains and accuracies are in points, measured after each step."""

    observations: Tensor  # (E, T, size): before normalisation; the critic's columns with their final values
    masks: dict[str, Tensor]  # by head, (E, T, …) bool
    actions: Tensor  # (E, T, heads) long
    log_probs: Tensor  # (E, T, heads): of the behaviour, ε included; 0 for rules and for unused heads
    forced: Tensor  # (E, T) bool: there was one legal action
    terminated: Tensor  # (E, T) bool: the last step of a sequence, by the end of the episode or a panic
    truncated: Tensor  # (E, T) bool: the record was cut here
    panics: Tensor  # (E, T) bool
    gain: Tensor  # (E, T): of the growing host over its control
    accuracy: Tensor  # (E, T)
    control_accuracy: Tensor  # (E, T)
    acting_parameters: Tensor  # (E, T): of all seeds that act
    fossil_parameters: Tensor  # (E, T)
    host_parameters: Tensor  # (E,): of the host without seeds
    final_gain: Tensor  # (E,): of the hardened host, at the end
    epsilon: Tensor  # (E,): share of uniform choices of the behaviour
    policy: Tensor  # (E,) long: index into `RecordHeader.policies`
    host_seed: Tensor  # (E,) long
    round: Tensor  # (E,) long; −1 outside of training

    def part(self, rows: Tensor) -> "Episodes":
        """Some episodes, by number."""
        masks = {name: mask[rows] for name, mask in self.masks.items()}
        return Episodes(masks=masks, **{name: value[rows] for name, value in self._asdict().items() if name != "masks"})

    def objective(self, rho: float) -> Tensor:
        """(E,): gain of the hardened host minus the rent of its fossils."""
        return self.final_gain - rent(self.fossil_parameters[:, -1], self.host_parameters, rho)

    def potentials(self, rho: float) -> Tensor:
        """(E, T + 1) float64: Φ before each step and after the last, which is gain − rent of the acting seeds.

        It is 0 before the first step and at the end. A panic leaves it as it was.
        """
        levels = self.gain.double() - rent(self.acting_parameters.double(), self.host_parameters.double()[:, None], rho)
        potentials = [torch.zeros_like(levels[:, 0])]
        for level, panic in zip(levels[:, :-1].unbind(1), self.panics.unbind(1), strict=False):
            potentials.append(level.where(~panic, potentials[-1]))
        return torch.stack([*potentials, torch.zeros_like(potentials[0])], 1)

    def rewards(self, header: RecordHeader, reward: RewardConfig) -> Tensor:
        """(E, T): the `paired` reward without the price of commits, at any ρ and γ.

        That is γ·Φ' − Φ, and the objective in the last step. A panic is worth ending at chance less a margin.
        """
        acting, fossils = (
            rent(part.double(), self.host_parameters.double()[:, None], reward.rho)
            for part in (torch.maximum(self.acting_parameters, self.fossil_parameters), self.fossil_parameters)
        )
        at_chance = header.chance_accuracy - self.control_accuracy.double() - acting - reward.crash_margin
        worth = torch.zeros_like(at_chance)
        worth[:, -1] = self.final_gain.double() - fossils[:, -1]
        before, after = (potentials := self.potentials(reward.rho))[:, :-1], potentials[:, 1:]
        shaping = reward.gamma * after.where(~self.panics, 0.0) - before
        return (at_chance.where(self.panics, worth) + reward.shaping * shaping).float()
