"""A round of episodes under the agent's policy: rewards, the rollout buffer, and a record for the logs."""

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from esper.leyline import derive_seed, objective
from esper.nissa import LiveFile
from esper.simic.agent import PPOAgent, Step, TamiyoRolloutBuffer
from esper.simic.agent.policy import forget
from esper.simic.distributed import RoundTiming, Share, World
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
from esper.simic.telemetry import Spans
from esper.simic.training.acting import BlockActing
from esper.simic.training.episode import EpisodeRunner, StepResult, play_episode
from esper.simic.training.hosts import Purpose, host_seed
from esper.simic.training.live import FOLLOWED, StepWatch
from esper.simic.training.rollouts import RoundRecord, from_message, join_records, to_message
from esper.simic.training.tape import EpisodeTape
from esper.tamiyo.features import fill_in_control_end
from esper.tamiyo.memory import HiddenState
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


def action_draws(
    rng_seed: int, purpose: Purpose, positions: Iterable[tuple[int, int]], steps: int, heads: int
) -> Tensor:
    """(steps, envs, heads) in [0, 1): a stream per env, a pure function of (seed, purpose, round, env)."""
    seeds = [derive_seed(rng_seed, "actions", purpose, *position) for position in positions]
    streams = [torch.rand((steps, heads), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(streams, 1)


class RoundCollector:
    """Fills a buffer with rounds: an episode of each task's hosts, one task after the other.

    In a world of several ranks each plays its share of the groups, and rank 0 gets the whole round. Seeds of hosts and
    draws of actions are functions of numbers that count over all ranks.
    """

    def __init__(
        self,
        runners: Sequence[EpisodeRunner],
        agent: PPOAgent,
        reward: RewardConfig,
        rng_seed: int,
        spans: Spans | None = None,
        *,
        taped: bool = False,
        world: World | None = None,
        shares: Sequence[Share] | None = None,
    ) -> None:
        """`taped`: whether rounds come with their episodes, for records. `shares`: the groups of every rank."""
        self.runners, self.agent, self.reward, self.rng_seed = tuple(runners), agent, reward, rng_seed
        self.spans, self.taped = spans if spans is not None else Spans(enabled=False), taped
        self.live: LiveFile | None = None  # gets an event per step
        for runner in runners:
            runner.spans = self.spans
        self.translations = [Translation(runner.slots, agent.layout) for runner in runners]
        groups, self.members = runners[0].groups.count, runners[0].groups.members
        self.world = world or World()
        self.shares = [Share(range(groups), groups)] if shares is None else list(shares)
        self.share = self.shares[self.world.rank]
        self.own = self._make_buffer(groups)
        whole = len(self.shares) == 1 or self.world.rank
        self.buffer = self.own if whole else self._make_buffer(self.share.of)  # of all ranks, on rank 0
        self.timing: RoundTiming | None = None  # of the last round, on rank 0 of several
        self.stopped = False  # whether a rank was asked to stop

    def _make_buffer(self, groups: int) -> TamiyoRolloutBuffer:
        """For this number of groups of each task."""
        agent, tasks, grown = self.agent, len(self.runners), groups * self.members
        return TamiyoRolloutBuffer(
            tasks * grown,
            max(runner.fleet.task.steps for runner in self.runners),
            agent.layout.size,
            agent.table,
            agent.config.network.state_size,
            tasks=torch.arange(tasks).repeat_interleave(grown),
            groups=torch.arange(tasks * grown) // self.members,
            device=agent.device,
        )

    def collect(self, round_index: int) -> list[RoundRecord]:
        """Play one round with the current policy. Afterwards, update the normaliser of observations with it.

        Ranks other than 0 send theirs there, and get no records."""
        agent, start = self.agent, time.perf_counter()
        if self.live is not None:
            self.live.begin(round_index)
        self.own.begin(agent.network.initial_state(self.own.n_envs), agent.epsilon)
        own = [self._play(round_index, task) for task in range(len(self.runners))]
        seconds = time.perf_counter() - start
        parts = self._gather(own, seconds)
        if self.world.rank:
            return []
        records = [
            join_records(part, task * self.share.of * self.members)
            for task, part in enumerate(zip(*parts, strict=True))
        ]
        agent.recompute_values(self.buffer)  # `_play` has filled in the control's final accuracy, for the critic
        if agent.progress >= agent.config.freeze_after:
            agent.observations.freeze()
        features = torch.cat([record.features.flatten(0, 1) for record in records])
        padded = any(translation.missing for translation in self.translations)
        agent.observations.update(features, agent.layout.counted(features) if padded else None)
        return records

    def _gather(self, own: list[RoundRecord], seconds: float) -> list[list[RoundRecord]]:
        """The records of every rank, on rank 0, whose buffer gets their steps."""
        world = self.world
        if world.size == 1:
            return [own]
        with self.spans("gather"):
            content = {"seconds": seconds, "stopped": world.stopped}
            messages = world.gather(to_message(own, self.own, content))
        if world.rank:
            return []
        self.buffer.begin(self.agent.network.initial_state(self.buffer.n_envs), self.own.epsilon)
        self.timing = RoundTiming([message.content["seconds"] for message in messages])
        self.stopped = any(message.content["stopped"] for message in messages)
        rows = [[self._rows(share, task) for task in range(len(own))] for share in self.shares]
        return [from_message(message, own, self.buffer, some) for message, some in zip(messages, rows, strict=True)]

    def _rows(self, share: Share, task: int) -> range:
        """The grown envs of a share among those of all ranks and tasks."""
        first = (task * share.of + share.groups.start) * self.members
        return range(first, first + len(share.groups) * self.members)

    def _play(self, round_index: int, task: int) -> RoundRecord:
        runner, envs = self.runners[task], self._rows(self.share, task)
        first_group = task * self.share.of + self.share.groups.start
        groups = range(first_group, first_group + runner.groups.count)
        seeds = [host_seed("training", self.rng_seed, round_index, group) for group in groups]
        with self.spans("begin"):
            runner.begin(seeds)
        steps, heads = runner.fleet.task.steps, len(runner.table)
        positions = [(round_index, env) for env in envs]
        draws = action_draws(self.rng_seed, "training", positions, steps, heads)
        rollout = _Rollout(self, task, draws, round_index)
        play_episode(runner, rollout.act, rollout.on_step)
        record = rollout.record()
        if rollout.tape is None:
            return record
        hosts = [seed for seed in seeds for _ in range(runner.groups.members)]
        numbers, epsilon = range(len(envs)), self.own.epsilon
        taped = rollout.tape.episodes(numbers, [0] * len(envs), hosts, epsilon=epsilon, round_index=round_index)
        return record._replace(episodes=taped)


class _Rollout:
    """One task's episode: decides with the agent's policy and stores every step in rows of the buffer."""

    def __init__(self, collector: RoundCollector, task: int, draws: Tensor, round_index: int) -> None:
        self.collector, self.runner, self.translation = collector, collector.runners[task], collector.translations[task]
        self.agent, self.buffer, self.spans = collector.agent, collector.own, collector.spans
        count, share = self.runner.groups.grown, collector.share
        self.rows, self.draws = range(task * count, (task + 1) * count), draws  # rows of this rank's buffer
        first = share.groups.start * collector.members
        self.blocks = BlockActing(self.agent, range(first, first + count), share.of * collector.members)
        self.hidden_state = self.agent.network.initial_state(count)
        self.features: list[Tensor] = []
        self.actions: list[Tensor] = []
        self.parts: list[dict[str, Tensor]] = []
        self.results: list[StepResult] = []
        self.halfway: HiddenState | None = None
        self.tape = EpisodeTape(self.runner) if collector.taped else None
        self.watch = StepWatch(
            self.runner,
            self.agent.table,
            self.agent.layout,
            follow=max(1, FOLLOWED // len(collector.runners)) - first,  # the first of all ranks
            live=collector.live,
            round_index=round_index,
            first_env=task * share.of * collector.members + first,
        )

    def act(self, view: PolicyView) -> Tensor:
        """Sample actions (n, heads). Keeps what `on_step` needs to store the decision."""
        self.features.append(self.translation.features(view.signals))
        self.observations, self.masks = self.agent.normalise(self.features[-1]), self.translation.masks(view.masks)
        self.decision, self.values, self.hidden_state = self.blocks.act(
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
            self.halfway = self.hidden_state
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
            lstm=None,  # `join_records` computes it over all ranks
            changes=[(step, change) for step, result in enumerate(results) for change in result.changes],
            symptoms=[(step, env, why) for step, r in enumerate(results) for env, why in r.symptoms.items()],
            hidden=self.halfway,
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
