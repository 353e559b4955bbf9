"""From a step of the fleet to its reward."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import BadValueError, derive_seed, objective
from esper.simic.agent import PPOAgent, Step, TamiyoRolloutBuffer
from esper.simic.rewards import (
    Finding,
    RewardConfig,
    Rewarded,
    RewardInputs,
    Suspects,
    compute_reward,
    detect,
    findings,
    is_measured,
)
from esper.simic.telemetry import LstmHealth, Spans, compute_lstm_health
from esper.simic.training.episode import EpisodeRunner, SeedChange, StepResult
from esper.simic.training.hosts import Purpose, host_seed
from esper.tamiyo.features import fill_in_control_end
from esper.tamiyo.policy import PolicyView


def reward_step(
    config: RewardConfig, runner: EpisodeRunner, view: PolicyView, actions: Tensor, result: StepResult
) -> Rewarded:
    """Rewards of all grown envs for the step that led from `view` to `result`."""
    task, like = runner.fleet.task, result.accuracy
    names = runner.table.names
    terminal = torch.full_like(like, runner.done, dtype=torch.bool)
    nothing = torch.zeros_like(like)
    hardened = result.hardened_accuracy is not None
    gain = nothing
    if result.hardened_accuracy is not None and result.hardened_control is not None:
        gain = result.hardened_accuracy - result.hardened_control
    inputs = RewardInputs(
        potential=runner.potential,
        op=actions[:, names.index("op")],
        slot=actions[:, names.index("slot")],
        before=view.signals.slots,
        after=result.slots,
        seed_parameters=result.seed_parameters,
        gain=result.gain,
        control_accuracy=result.control_accuracy,
        chance_accuracy=torch.full_like(like, 100 / task.classes),
        loss=result.loss,
        acting_parameters=result.acting_parameters,
        fossil_parameters=result.fossil_parameters,
        host_parameters=torch.full_like(like, task.host_parameters),
        terminal=terminal,
        objective_gain=gain,
        objective_loss=result.hardened_loss if hardened and result.hardened_loss is not None else nothing,
        panic=result.panics,
    )
    return compute_reward(config, inputs)


class RoundRecord(NamedTuple):
    """What happened in a round on one task, for every grown env."""

    task: str
    first_env: int
    """The number of its first env among those of all tasks"""
    objective: Tensor
    """(n,): hardened gain minus rent of the fossils; points"""
    gain: Tensor
    """(n,): of the hardened hosts"""
    accuracy: Tensor
    """(n,): of the hardened hosts, percent"""
    added_parameters: Tensor
    """(n,): fossils"""
    panics: int
    features: Tensor
    """(steps, n, size): what was observed, not yet normalised; the critic's columns as they are in the end"""
    actions: Tensor
    """(steps, n, heads)"""
    heads: tuple[str, ...]
    """Their names"""
    rewards: Tensor
    """(steps, n)"""
    parts: dict[str, Tensor]
    """Reward by part, (steps, n) each"""
    accuracies: Tensor
    """(steps, n): of the growing hosts"""
    control_accuracies: Tensor
    alphas: Tensor
    """(steps, n, slots): with which each step was trained"""
    suspect_counts: Tensor
    """(3,): acting seeds with a measured contribution over all steps; of these, hacking; of these, ransomware"""
    suspects: tuple[Finding, ...]
    """Seeds that look better than they are"""
    lstm: LstmHealth | None
    """The memory in mid-episode"""
    changes: list[tuple[int, SeedChange]]
    """(step, change)"""
    symptoms: list[tuple[int, int, list[str]]]
    """(step, env, what the governor saw) of every panic"""


def action_draws(
    rng_seed: int,
    round_index: int,
    envs: int,
    steps: int,
    heads: int,
    purpose: Purpose = "training",
    first_env: int = 0,
) -> Tensor:
    """(steps, envs, heads) in [0, 1): each env's own stream, a pure function of (seed, purpose, round, env)."""
    numbers = range(first_env, first_env + envs)
    seeds = [derive_seed(rng_seed, "actions", purpose, round_index, env) for env in numbers]
    streams = [torch.rand((steps, heads), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(streams, 1)


class RoundCollector:
    """Fills a buffer with rounds: an episode of each task's hosts, one task after the other, all for one update."""

    def __init__(
        self,
        runners: Sequence[EpisodeRunner],
        agent: PPOAgent,
        reward: RewardConfig,
        rng_seed: int,
        spans: Spans | None = None,
    ) -> None:
        self.runners, self.agent, self.reward, self.rng_seed = tuple(runners), agent, reward, rng_seed
        self.spans = spans if spans is not None else Spans(enabled=False)
        for runner in runners:
            runner.spans = self.spans
        check_alike(self.runners)
        grown = [runner.groups.grown for runner in runners]
        self.rows = [range(sum(grown[:place]), sum(grown[: place + 1])) for place in range(len(grown))]
        """The rows of the buffer that belong to each task"""
        tasks = torch.cat([torch.full((count,), place) for place, count in enumerate(grown)])
        self.buffer = TamiyoRolloutBuffer(
            sum(grown),
            max(runner.fleet.task.steps for runner in runners),
            runners[0].layout.size,
            runners[0].table,
            agent.config.network.hidden,
            tasks=tasks,
            device=agent.device,
        )

    def collect(self, round_index: int) -> list[RoundRecord]:
        """One round with the agent's present policy; its observations enter the statistics when it is complete."""
        agent = self.agent
        self.buffer.begin(agent.network.initial_state(self.buffer.n_envs), agent.epsilon)
        records = [self._play(round_index, runner, rows) for runner, rows in zip(self.runners, self.rows, strict=True)]
        agent.recompute_values(self.buffer)
        if agent.progress >= agent.config.freeze_after:
            agent.observations.freeze()
        agent.observations.update(torch.cat([record.features.flatten(0, 1) for record in records]))
        return records

    def _play(self, round_index: int, runner: EpisodeRunner, rows: range) -> RoundRecord:
        """The episode of one task."""
        agent, buffer, groups, steps = self.agent, self.buffer, runner.groups, runner.fleet.task.steps
        first_group = rows.start // groups.members
        seeds = [
            host_seed("training", self.rng_seed, round_index, first_group + group) for group in range(groups.count)
        ]
        draws = action_draws(self.rng_seed, round_index, len(rows), steps, len(runner.table), first_env=rows.start)
        spans = self.spans
        with spans("begin"):
            runner.begin(seeds)
        hidden_state = agent.network.initial_state(len(rows))
        results: list[StepResult] = []
        parts: list[dict[str, Tensor]] = []
        features: list[Tensor] = []
        lstm = None
        for step in range(steps):
            with spans("observe"):
                view = runner.view()
            features.append(view.features)
            with spans("act"):
                seen = agent.normalise(view.features)
                decision, values, hidden_state = agent.act(
                    seen, view.masks, hidden_state, epsilon=buffer.epsilon, uniform=draws[step]
                )
            with spans("step"):
                result = runner.step(decision.actions)
            with spans("reward"):
                rewarded = reward_step(self.reward, runner, view, decision.actions, result)
            runner.potential = rewarded.potential
            if step == steps // 2:
                with spans("watch"):
                    lstm = compute_lstm_health(hidden_state)
            ends = result.panics | runner.done
            values = agent.values_of(values, buffer.tasks[rows.start : rows.stop])
            buffer.add(
                Step(
                    seen,
                    view.masks,
                    decision.actions,
                    decision.log_probs,
                    values,
                    rewarded.total.float(),
                    ends,
                    torch.zeros_like(values),  # an episode terminates: nothing follows
                ),
                None if len(self.runners) == 1 else rows,
            )
            hidden_state = (hidden_state[0].where(~ends[:, None], 0.0), hidden_state[1].where(~ends[:, None], 0.0))
            results.append(result)
            parts.append(dict(rewarded.parts))
        control_end = results[-1].hardened_control
        assert control_end is not None
        told = fill_in_control_end(torch.stack(features), runner.layout, control_end)
        buffer.observations[rows.start : rows.stop, :steps] = (
            agent.normalise(told.flatten(0, 1)).view_as(told).transpose(0, 1)
        )
        return self._record(runner, rows, told, results, parts, lstm)

    def _record(
        self,
        runner: EpisodeRunner,
        rows: range,
        features: Tensor,
        results: list[StepResult],
        parts: list[dict[str, Tensor]],
        lstm: LstmHealth | None,
    ) -> RoundRecord:
        with self.spans("watch"):
            suspect_counts, suspects = find_suspects(results, self.reward, runner.slots.slot_ids)
        last = results[-1]
        assert last.hardened_accuracy is not None
        assert last.hardened_control is not None
        gain = last.hardened_accuracy - last.hardened_control
        task, own = runner.fleet.task, slice(rows.start, rows.stop)
        return RoundRecord(
            task=task.name,
            first_env=rows.start,
            objective=objective(gain, last.fossil_parameters, task.host_parameters),
            gain=gain,
            accuracy=last.hardened_accuracy,
            added_parameters=last.fossil_parameters,
            panics=int(sum(int(result.panics.sum()) for result in results)),
            features=features,
            actions=self.buffer.actions[own, : task.steps].transpose(0, 1).clone(),
            heads=runner.table.names,
            rewards=self.buffer.rewards[own, : task.steps].T.clone(),
            parts={name: torch.stack([part[name] for part in parts]) for name in parts[0]},
            accuracies=torch.stack([result.accuracy for result in results]),
            control_accuracies=torch.stack([result.control_accuracy for result in results]),
            alphas=torch.stack([result.slots.alpha for result in results]),
            suspect_counts=suspect_counts,
            suspects=suspects,
            lstm=lstm,
            changes=[(step, change) for step, result in enumerate(results) for change in result.changes],
            symptoms=[(step, env, why) for step, r in enumerate(results) for env, why in r.symptoms.items()],
        )


def find_suspects(
    results: Sequence[StepResult], reward: RewardConfig, slot_ids: Sequence[str]
) -> tuple[Tensor, tuple[Finding, ...]]:
    """Over every step of an episode, (3,): acting seeds with a measured contribution, and how many of them look better
    than they are by either suspicion; and those by name."""
    suspects = Suspects.over([detect(result.slots, result.gain, reward.limits) for result in results])
    contribution = torch.stack([result.slots.contribution.value for result in results])
    gain = torch.stack([result.gain for result in results])
    measured = torch.stack([is_measured(result.slots.contribution, result.slots.alpha) for result in results])
    counts = torch.stack([flags.sum() for flags in (measured, *suspects)])
    germinations = torch.stack([result.slots.tried for result in results])
    return counts, findings(suspects, germinations, contribution, gain, slot_ids)


def check_alike(runners: Sequence[EpisodeRunner]) -> None:
    """Raise unless the hosts of all tasks can be seen and steered by the same heads and columns."""
    first, *others = runners
    for other in others:
        if other.table != first.table or other.layout != first.layout:
            shapes = [(len(each.slots), list(each.slots.blueprint_names)) for each in (first, other)]
            raise BadValueError(
                f"tasks {first.fleet.task.name!r} and {other.fleet.task.name!r} cannot share a run: their (slots, "
                f"blueprints) are {shapes[0]} and {shapes[1]}; train one policy for each, or tasks that are alike"
            )
        if other.groups.members != first.groups.members:
            raise BadValueError("groups of all tasks need the same number of members")
