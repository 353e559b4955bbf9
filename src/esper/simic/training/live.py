"""What a step tells those who watch: an event of all hosts for the live file, and the first few hosts for the log."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.kasmina import SeedState
from esper.leyline import ACTIVE_STAGES, HEADS, LifecycleOp, Measurement, SeedStage, SlotConfig
from esper.nissa import LiveFile, StepTaken
from esper.nissa.events import ActionRow, ChangeRow, Choices, SeedMeasured, SeedRow
from esper.simic.training.episode import EpisodeRunner, StepResult, choices_of
from esper.tamiyo import ActionTable, Decision, ObservationLayout

FOLLOWED = 8
"""Hosts of a round whose probabilities are logged, all tasks together: a few kB each"""
LEAST = 0.0005
"""Probabilities below are not written"""


class Followed(NamedTuple):
    """One host that is followed closely, by step."""

    choices: list[Choices]
    measured: list[list[SeedMeasured]]


class StepWatch:
    """Describes the steps of one episode of a task's hosts. It only reads. Device sync: one per step."""

    def __init__(
        self,
        runner: EpisodeRunner,
        table: ActionTable,
        layout: ObservationLayout,
        *,
        follow: int = 0,
        live: LiveFile | None = None,
        round_index: int = 0,
        first_env: int = 0,
    ) -> None:
        """`table` and `layout` are the policy's; `follow` limits the number of hosts that are followed closely."""
        self.runner, self.table, self.live = runner, table, live
        self.round_index, self.first_env = round_index, first_env
        self.followed = tuple(Followed([], []) for _ in range(min(max(0, follow), runner.groups.grown)))
        self.names = choice_names(table, runner.slots, layout)

    def step(self, step: int, actions: Tensor, decision: Decision, result: StepResult) -> None:
        """Keep what is followed of a step, and write its event."""
        curves = [result.accuracy, result.control_accuracy, result.gain, result.loss, decision.log_probs.sum(-1).exp()]
        several = decision.decided[: len(self.followed)]
        numbers, alphas, chosen, open_heads, *probs = _lists(
            torch.stack(curves), result.slots.alpha, actions, several, *decision.probs
        )
        states = [self.runner.fleet.states[env] for env in self.runner.groups.envs]
        for env, host in enumerate(self.followed):
            heads = zip(self.table.names, probs, open_heads[env], strict=True)
            host.choices.append(
                {name: likeliest(self.names[name], head[env]) for name, head, is_open in heads if is_open}
            )
            host.measured.append(measured_seeds(states[env]))
        if self.live is not None:
            self.live.write(lambda: self._event(step, numbers, alphas, chosen, states, result))

    def _event(
        self,
        step: int,
        numbers: list[list[float]],
        alphas: list[list[float]],
        chosen: list[list[float]],
        states: Sequence[Mapping[str, SeedState]],
        result: StepResult,
    ) -> StepTaken:
        first, slots = self.first_env, self.runner.slots
        accuracies, controls, gains, losses, chances = numbers
        rows: list[SeedRow] = []
        for env, own in enumerate(states):
            rows += seed_rows(first + env, own, alphas[env])
        return StepTaken(
            time=round(time.time(), 3),
            round=self.round_index,
            task=self.runner.fleet.task.name,
            step=step,
            steps=self.runner.fleet.task.steps,
            first_env=first,
            slots=list(slots.slot_ids),
            accuracies=finite(accuracies),
            control_accuracies=finite(controls),
            gains=finite(gains),
            losses=finite(losses, 4),
            seeds=rows,
            actions=action_rows(chosen, self.runner.table, slots, first),
            probabilities=[round(chance, 4) for chance in chances],
            choices=[host.choices[-1] for host in self.followed],
            changes=[_change_row(first, *change) for change in result.changes],
            panics=[(first + env, list(symptoms)) for env, symptoms in result.symptoms.items()],
        )


def choice_names(table: ActionTable, slots: SlotConfig, layout: ObservationLayout) -> dict[str, list[str]]:
    """By head of a policy, what its choices stand for on hosts with these slots."""
    names = {}
    for head in HEADS:
        values = layout.vocabulary if head.choices == "blueprints" else choices_of(head, slots)
        names[head.name] = [value.name if isinstance(value, LifecycleOp) else str(value) for value in values]
    return {name: names[name] for name in table.names}


def likeliest(names: Sequence[str], probabilities: Sequence[float]) -> dict[str, float]:
    """Choices with their probabilities, the likeliest first. A policy may have more slots than the host."""
    pairs = sorted(zip(names, probabilities, strict=False), key=lambda pair: -pair[1])
    return {name: round(probability, 3) for name, probability in pairs if probability >= LEAST}


def considered(names: Mapping[str, Sequence[str]], decision: Decision) -> Choices:
    """What a policy considered for the first env: the heads that it used and that had several choices."""
    heads = zip(names.items(), decision.probs, decision.decided[0].tolist(), strict=True)
    return {name: likeliest(own, probs[0].tolist()) for (name, own), probs, is_open in heads if is_open}


def measured_seeds(states: Mapping[str, SeedState]) -> list[SeedMeasured]:
    """Auditions of a host's seeds while they have no effect, and contributions, where there are any."""
    pairs = [
        (slot_id, None if state.stage in ACTIVE_STAGES else state.audition, state.contribution)
        for slot_id, state in states.items()
    ]
    return [(slot_id, *_figures(a), *_figures(c)) for slot_id, a, c in pairs if a is not None or c is not None]


def seed_rows(env: int, states: Mapping[str, SeedState], alphas: Iterable[float]) -> list[SeedRow]:
    """The slots of a host that are not empty."""
    return [
        (env, slot_id, state.stage.name, state.blueprint, round(alpha, 3),
         *_figures(state.audition), *_figures(state.contribution))
        for (slot_id, state), alpha in zip(states.items(), alphas, strict=True)
        if state.stage is not SeedStage.DORMANT
    ]  # fmt: skip


def action_rows(
    chosen: Sequence[Sequence[float]], table: ActionTable, slots: SlotConfig, first_env: int
) -> list[ActionRow]:
    """The decisions of all hosts, without WAIT."""
    op_column, slot_column, blueprint_column = (table.index(name) for name in ("op", "slot", "blueprint"))
    rows: list[ActionRow] = []
    for env, action in enumerate(chosen):
        op = LifecycleOp(int(action[op_column]))
        if op is not LifecycleOp.WAIT:
            born = slots.blueprint_names[int(action[blueprint_column])] if op is LifecycleOp.GERMINATE else None
            rows.append((first_env + env, op.name, slots.slot_ids[int(action[slot_column])], born))
    return rows


def finite(values: Sequence[float], digits: int = 2) -> list[float | None]:
    """Rounded; None for what is not finite."""
    return [round(value, digits) if math.isfinite(value) else None for value in values]


def _change_row(first_env: int, env: int, change: Any, blueprint: str | None) -> ChangeRow:  # Any: a StageChange
    return first_env + env, change.slot_id, blueprint, change.source.name, change.target.name, change.cause


def _figures(measurement: Measurement | None) -> tuple[float | None, float | None]:
    if measurement is None:
        return None, None
    value, error = finite(measurement, 3)
    return value, error


def _lists(*tensors: Tensor) -> list[Any]:  # Any: nested lists of floats
    """Tensors as lists. Device sync: one for all of them."""
    numbers, lists = torch.cat([tensor.detach().flatten().float() for tensor in tensors]).cpu(), []
    for tensor in tensors:
        own, numbers = numbers[: tensor.numel()], numbers[tensor.numel() :]
        lists.append(own.view(tensor.shape).tolist())
    return lists
