"""A round of episodes under the agent's policy: rewards, the rollout buffer, and a record for the logs."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import SlotConfig, derive_seed, objective
from esper.nissa import LiveFile
from esper.simic.agent import PPOAgent, Step, TamiyoRolloutBuffer
from esper.simic.agent.policy import forget
from esper.simic.offline.episodes import Episodes
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
from esper.simic.training.episode import EpisodeRunner, SeedChange, StepResult, play_episode
from esper.simic.training.hosts import Purpose, host_seed
from esper.simic.training.live import FOLLOWED, Followed, StepWatch
from esper.simic.training.tape import EpisodeTape
from esper.tamiyo.features import fill_in_control_end
from esper.tamiyo.policy import PolicyView
from esper.tamiyo.translation import Translation


def reward_step(
    config: RewardConfig, runner: EpisodeRunner, view: PolicyView, actions: Tensor, result: StepResult
) -> Rewarded:
    """Rewards of all grown envs for the step from `view` to `result`."""
    task, accuracy, names = runner.fleet.task, result.accuracy, runner.table.names
    zeros = torch.zeros_like(accuracy)
    inputs = RewardInputs(
        potential=runner.potential,
        op=actions[:, names.index("op")],
        slot=actions[:, names.index("slot")],
        before=view.signals.slots,
        after=result.slots,
        seed_parameters=result.seed_parameters,
        gain=result.gain,
        control_accuracy=result.control_accuracy,
        chance_accuracy=torch.full_like(accuracy, task.chance_accuracy),
        loss=result.loss,
        acting_parameters=result.acting_parameters,
        fossil_parameters=result.fossil_parameters,
        host_parameters=runner.host_sizes,
        terminal=torch.full_like(accuracy, runner.done, dtype=torch.bool),
        objective_gain=result.hardened_gain if runner.done else zeros,
        objective_loss=zeros if result.hardened_loss is None else result.hardened_loss,
        panic=result.panics,
    )
    return compute_reward(config, inputs)


class RoundRecord(NamedTuple):
    """What happened in a round on one task, for every grown env (n,)."""

    task: str
    slots: SlotConfig
    heads: tuple[str, ...]  # names of the action heads
    first_env: int  # number of the first env among the grown envs of all tasks
    objective: Tensor  # (n,): hardened gain minus rent of the fossils, points
    gain: Tensor  # (n,): of the hardened hosts
    accuracy: Tensor  # (n,): of the hardened hosts, percent
    added_parameters: Tensor  # (n,): of the fossils
    features: Tensor  # (steps, n, size): not normalised; the critic's columns with their final values
    actions: Tensor  # (steps, n, heads)
    rewards: Tensor  # (steps, n)
    parts: dict[str, Tensor]  # of the reward, (steps, n) each
    accuracies: Tensor  # (steps, n): of the growing hosts
    control_accuracies: Tensor  # (steps, n)
    alphas: Tensor  # (steps, n, slots): during each step's training
    suspect_counts: Tensor  # (3,): acting seeds with a measured contribution; those under each suspicion (`Suspects`)
    suspects: tuple[Finding, ...]
    lstm: LstmHealth | None  # halfway through the episode
    changes: list[tuple[int, SeedChange]]  # (step, change)
    symptoms: list[tuple[int, int, list[str]]]  # (step, env, symptoms) of every panic
    episodes: Episodes | None = None  # every transition, if the run records them
    followed: tuple[Followed, ...] = ()  # the first envs, closely


def action_draws(
    rng_seed: int, purpose: Purpose, positions: Iterable[tuple[int, int]], steps: int, heads: int
) -> Tensor:
    """(steps, envs, heads) in [0, 1): a stream per env, a pure function of (seed, purpose, round, env)."""
    seeds = [derive_seed(rng_seed, "actions", purpose, *position) for position in positions]
    streams = [torch.rand((steps, heads), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(streams, 1)


class RoundCollector:
    """Fills a buffer with rounds: an episode of each task's hosts, one task after the other."""

    def __init__(
        self,
        runners: Sequence[EpisodeRunner],
        agent: PPOAgent,
        reward: RewardConfig,
        rng_seed: int,
        spans: Spans | None = None,
        *,
        taped: bool = False,
    ) -> None:
        """`taped`: whether rounds come with their episodes, for records."""
        self.runners, self.agent, self.reward, self.rng_seed = tuple(runners), agent, reward, rng_seed
        self.spans, self.taped = spans if spans is not None else Spans(enabled=False), taped
        self.live: LiveFile | None = None  # gets an event per step
        for runner in runners:
            runner.spans = self.spans
        self.translations = [Translation(runner.slots, agent.layout) for runner in runners]
        grown = [runner.groups.grown for runner in runners]
        # The rows of the buffer that belong to each task.
        self.rows = [range(end - count, end) for count, end in zip(grown, accumulate(grown), strict=True)]
        self.buffer = TamiyoRolloutBuffer(
            sum(grown),
            max(runner.fleet.task.steps for runner in runners),
            agent.layout.size,
            agent.table,
            agent.config.network.state_size,
            tasks=torch.arange(len(grown)).repeat_interleave(torch.tensor(grown)),
            groups=torch.arange(sum(grown)) // runners[0].groups.members,
            device=agent.device,
        )

    def collect(self, round_index: int) -> list[RoundRecord]:
        """Play one round with the current policy. Afterwards, update the normaliser of observations with it."""
        agent = self.agent
        if self.live is not None:
            self.live.begin(round_index)
        self.buffer.begin(agent.network.initial_state(self.buffer.n_envs), agent.epsilon)
        everyone = zip(self.runners, self.translations, self.rows, strict=True)
        records = [self._play(round_index, runner, translation, rows) for runner, translation, rows in everyone]
        agent.recompute_values(self.buffer)  # `_play` has filled in the control's final accuracy, for the critic
        if agent.progress >= agent.config.freeze_after:
            agent.observations.freeze()
        features = torch.cat([record.features.flatten(0, 1) for record in records])
        padded = any(translation.missing for translation in self.translations)
        agent.observations.update(features, agent.layout.counted(features) if padded else None)
        return records

    def _play(self, round_index: int, runner: EpisodeRunner, translation: Translation, rows: range) -> RoundRecord:
        first_group = rows.start // runner.groups.members
        groups = range(first_group, first_group + runner.groups.count)
        seeds = [host_seed("training", self.rng_seed, round_index, group) for group in groups]
        with self.spans("begin"):
            runner.begin(seeds)
        steps, heads = runner.fleet.task.steps, len(runner.table)
        positions = [(round_index, env) for env in rows]
        draws = action_draws(self.rng_seed, "training", positions, steps, heads)
        rollout = _Rollout(self, round_index, runner, translation, rows, draws)
        play_episode(runner, rollout.act, rollout.on_step)
        record = rollout.record()
        if rollout.tape is None:
            return record
        hosts = [seed for seed in seeds for _ in range(runner.groups.members)]
        numbers, epsilon = range(len(rows)), self.buffer.epsilon
        taped = rollout.tape.episodes(numbers, [0] * len(rows), hosts, epsilon=epsilon, round_index=round_index)
        return record._replace(episodes=taped)


class _Rollout:
    """One task's episode: decides with the agent's policy and stores every step in rows of the buffer."""

    def __init__(
        self,
        collector: RoundCollector,
        round_index: int,
        runner: EpisodeRunner,
        translation: Translation,
        rows: range,
        draws: Tensor,
    ) -> None:
        self.collector, self.runner, self.translation = collector, runner, translation
        self.rows, self.draws = rows, draws
        self.agent, self.buffer, self.spans = collector.agent, collector.buffer, collector.spans
        self.hidden_state = self.agent.network.initial_state(len(rows))
        self.features: list[Tensor] = []
        self.actions: list[Tensor] = []
        self.parts: list[dict[str, Tensor]] = []
        self.results: list[StepResult] = []
        self.lstm: LstmHealth | None = None
        self.tape = EpisodeTape(runner) if collector.taped else None
        self.watch = StepWatch(
            runner,
            self.agent.table,
            self.agent.layout,
            follow=max(1, FOLLOWED // len(collector.runners)),
            live=collector.live,
            round_index=round_index,
            first_env=rows.start,
        )

    def act(self, view: PolicyView) -> Tensor:
        """Sample actions (n, heads). Keeps what `on_step` needs to store the decision."""
        self.features.append(self.translation.features(view.signals))
        self.observations, self.masks = self.agent.normalise(self.features[-1]), self.translation.masks(view.masks)
        self.decision, self.values, self.hidden_state = self.agent.act(
            self.observations,
            self.masks,
            self.hidden_state,
            epsilon=self.buffer.epsilon,
            uniform=self.draws[view.step],
            followed=len(self.watch.followed),
        )
        return self.translation.actions(self.decision.actions, self.agent.table)

    def on_step(self, step: int, view: PolicyView, actions: Tensor, result: StepResult) -> None:
        """Reward the step and store it; reset the hidden state of envs that end."""
        runner, rows = self.runner, self.rows
        with self.spans("reward"):
            rewarded = reward_step(self.collector.reward, runner, view, actions, result)
        runner.potential = rewarded.potential  # the critic sees it in the next view
        if step == runner.fleet.task.steps // 2 and self.agent.config.network.memory == "lstm":
            with self.spans("watch"):
                self.lstm = compute_lstm_health(self.hidden_state)
        ends = result.panics | runner.done
        values = self.agent.values_of(self.values, self.buffer.tasks[rows.start : rows.stop])
        decided = (self.observations, self.masks, self.decision.actions, self.decision.log_probs, values)
        bootstraps = torch.zeros_like(values)  # an end or a panic is final: no value follows
        transition = Step(*decided, rewarded.total.float(), ends, bootstraps)
        self.buffer.add(transition, None if len(self.collector.runners) == 1 else rows)
        self.hidden_state = forget(self.hidden_state, ends)
        self.actions.append(actions)
        self.parts.append(dict(rewarded.parts))
        self.results.append(result)
        with self.spans("watch"):
            self.watch.step(step, actions, self.decision, result)
        if self.tape is not None:
            self.tape.add(view, actions, result, self.decision.log_probs)

    def record(self) -> RoundRecord:
        """The finished episode. Fills the control's final accuracy into the observations."""
        runner, buffer, results, last = self.runner, self.buffer, self.results, self.results[-1]
        assert last.hardened_accuracy is not None and last.hardened_control is not None
        task, rows = runner.fleet.task, slice(self.rows.start, self.rows.stop)
        features = fill_in_control_end(torch.stack(self.features), self.agent.layout, last.hardened_control)
        normalised = self.agent.normalise(features.flatten(0, 1)).view_as(features)
        buffer.observations[rows, : task.steps] = normalised.transpose(0, 1)
        with self.spans("watch"):
            suspect_counts, suspects = find_suspects(results, self.collector.reward, runner.slots.slot_ids)
        return RoundRecord(
            task=task.name,
            slots=runner.slots,
            heads=runner.table.names,
            first_env=self.rows.start,
            objective=objective(last.hardened_gain, last.fossil_parameters, runner.host_sizes),
            gain=last.hardened_gain,
            accuracy=last.hardened_accuracy,
            added_parameters=last.fossil_parameters,
            features=features,
            actions=torch.stack(self.actions),
            rewards=buffer.rewards[rows, : task.steps].T.clone(),
            parts={name: torch.stack([parts[name] for parts in self.parts]) for name in self.parts[0]},
            accuracies=torch.stack([result.accuracy for result in results]),
            control_accuracies=torch.stack([result.control_accuracy for result in results]),
            alphas=torch.stack([result.slots.alpha for result in results]),
            suspect_counts=suspect_counts,
            suspects=suspects,
            lstm=self.lstm,
            changes=[(step, change) for step, result in enumerate(results) for change in result.changes],
            symptoms=[(step, env, why) for step, r in enumerate(results) for env, why in r.symptoms.items()],
            followed=self.watch.followed,
        )


def find_suspects(
    results: Sequence[StepResult], reward: RewardConfig, slot_ids: Sequence[str]
) -> tuple[Tensor, tuple[Finding, ...]]:
    """Counts (3,) of acting seeds with a measured contribution and of those under each suspicion; and the suspects."""
    suspects = Suspects.over([detect(result.slots, result.gain, reward.limits) for result in results])
    contribution = torch.stack([result.slots.contribution.value for result in results])
    gain = torch.stack([result.gain for result in results])
    measured = torch.stack([is_measured(result.slots.contribution, result.slots.alpha) for result in results])
    counts = torch.stack([flags.sum() for flags in (measured, *suspects)])
    germinations = torch.stack([result.slots.tried for result in results])
    return counts, findings(suspects, germinations, contribution, gain, slot_ids)
