"""The training loop: collect a round, update the policy, record it.

An *episode* is the life of one host, T *steps* of one decision each. A host with its episode is an *env*. A *round* is
one episode of all hosts in lockstep and one update of the policy. A *group* is hosts that begin alike; one of them, the
*control*, never grows. The others, the *grown* envs, belong to the policy.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from esper.leyline import derive_seed, head_preset
from esper.leyline.records import Json
from esper.nissa import SinkSettings
from esper.simic.agent import PPOAgent, PPOConfig, load_agent
from esper.simic.distributed import Stragglers, World
from esper.simic.offline.shards import check_unused
from esper.simic.telemetry import Spans, check_trace
from esper.simic.training.collect import RoundCollector
from esper.simic.training.config import TrainConfig
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.follower import agreed_content, settings_message, state_message
from esper.simic.training.hosts import MakeFleet, check_device, growth_fleet
from esper.simic.training.policy_files import begin_with, open_policy
from esper.simic.training.recorder import Recorder
from esper.simic.training.rollouts import RoundRecord
from esper.simic.training.run_folder import (
    Restored,
    RunFolder,
    check_settings,
    checkpoints_of,
    is_own,
    ranks_of,
    read_checksum,
)
from esper.simic.training.runners import divide_groups, make_runner
from esper.simic.training.tape import RoundRecords
from esper.storage.interrupts import interrupts_held
from esper.storage.series import KEEP
from esper.tamiyo import ActionTable, NetworkConfig, ObservationLayout, growth_layout, growth_table

Begin = Callable[[PPOAgent, Path], None]  # changes a new agent; the path is the run's folder


class Trainer:
    """A run in its folder, new or resumed. In a world of several ranks it is on rank 0, and a `Follower` on the others.

    `runners` play episodes, one runner per task; `collector` fills the rollout buffer from them; `agent` holds the
    policy and updates it; `recorder` writes logs and checkpoints.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        resume: bool = False,
        keep_checkpoints: int = KEEP,
        sinks: SinkSettings | None = None,
        profile: Path | None = None,
        record: Path | None = None,
        begin: Begin | None = None,
        make_fleet: MakeFleet = growth_fleet,
        world: World | None = None,
        hosts_by_rank: Sequence[int] | None = None,
    ) -> None:
        """`sinks`: receivers of events beside the log. `profile`: folder for a trace of every operator of one round.

        `record`: folder for records of every transition. `begin`: teaches the new agent before the first round.
        `make_fleet`: makes the hosts of each task. `hosts_by_rank`: hosts of every rank, controls included; by default
        they are divided evenly.
        """
        sinks, self.world = sinks or SinkSettings(), world or World()
        torch.set_num_threads(config.threads)
        # Started again by torchrun, the same command continues the folder that it made.
        resume = resume or is_own(folder, self.world.launchers)
        check_start(config, folder, resume, sinks, profile, record)
        self.config, device = config, self.world.device(config.device)
        self.world.share(settings_message(config))
        shares = divide_groups(config, self.world, hosts_by_rank)
        local = replace(config, device=device)
        self.runners = [make_runner(local, name, shares[0], make_fleet) for name in config.tasks]
        newest = checkpoints_of(folder).newest() if resume else None
        agent = make_agent(config, self.runners, newest, device)
        if self.world.size > 1:
            self.world.agree(agreed_content(config, hosts_by_rank))
        # Last, so that a run that cannot start leaves nothing behind.
        if resume:
            self.folder, restored = RunFolder.open(folder, config, agent)
            restored = with_other_ranks(restored, ranks_of(folder), self.world.size)
        else:
            self.folder, restored = (
                RunFolder.create(folder, config, keep_checkpoints, self.world.launchers),
                Restored(agent),
            )
        self.agent, self.round = restored.agent, restored.rounds
        self.recorder = Recorder(self.folder, restored, sinks, profile, self.world.size)
        if config.start is not None and not resume:
            self.recorder.save(self.agent, 0)
        self._begin = begin if newest is None else None
        self.records: RoundRecords | None = None
        if record is not None:
            self.records = RoundRecords(record, self.runners, read_checksum(folder), self.round)
        self.spans = Spans()
        self.collector = RoundCollector(
            self.runners,
            self.agent,
            config.reward,
            config.seed,
            self.spans,
            taped=record is not None,
            world=self.world,
            shares=shares,
        )
        self.collector.live = self.folder.live
        self._stragglers = Stragglers()

    def run(self, *, progress: bool = True) -> None:
        """Train the remaining rounds. Ctrl-C and SIGTERM end it after the last complete round."""
        self.teach()
        with self.recorder.session(lambda: self.round, progress=progress), self.world.stops_deferred():
            self._share_state(self.round)
            while self.round < self.config.rounds:
                self.run_round()
                if self.collector.stopped:  # on any rank
                    raise KeyboardInterrupt

    def _share_state(self, round_index: int) -> None:
        """Tell all ranks the agent's state before this round."""
        if self.world.size > 1:
            taped, stop = self.records is not None, self.collector.stopped
            self.world.share(state_message(self.agent, round_index, taped=taped, stop=stop))

    def teach(self) -> None:
        """Let the agent be taught, if it is new, and store it as the checkpoint of round 0."""
        if self._begin is None:
            return
        try:
            self._begin(self.agent, self.folder.path)
            if self.agent.config.leash > 0:
                self.agent.hold_to_start()
            self.recorder.save(self.agent, 0)
        except BaseException:
            self.folder.__exit__(*sys.exc_info())  # a session would have closed it
            raise
        self._begin = None

    def run_round(self) -> list[RoundRecord]:
        """Collect a round, learn from it, record it; returns a record per task."""
        recorder, buffer = self.recorder, self.collector.buffer
        self.collector.reward = self.config.reward.at(self.round / self.config.rounds)  # the commit price comes late
        with recorder.tracing(self.round, self.spans):
            with self.spans("collect"):
                records = self.collector.collect(self.round)
            examination = recorder.examination(self.agent, buffer)  # None, unless an alarm asked for details
            with self.spans("update"):
                update = self.agent.update(buffer, examination)
            with self.spans("share") if self.world.size > 1 else nullcontext():
                self._share_state(self.round + 1)
            recorder.note_failed_compile(self.agent, self.round)
            with self.spans("watch"):
                recorder.write_events(self.round, records, update, examination)
        measured = recorder.write_metrics(self.round, records, update, self.spans.drain(), self._timing())
        if self.records is not None:  # before the checkpoint: each round that counts is recorded
            self.records.write(self.round, [record.episodes for record in records if record.episodes is not None])
        with interrupts_held():  # the checkpoint completes the round; Ctrl-C must not come between it and the count
            recorder.save(self.agent, self.round + 1)
            self.round += 1
            recorder.show(measured, records)
        return records

    def _timing(self) -> dict[str, Json]:
        """What each rank took for the round, if there are several. Reports those that all others wait for."""
        timing = self.collector.timing
        if timing is None:
            return {}
        for rank, why in self._stragglers.look(timing.collect_s):
            self.recorder.note_straggler(self.round, rank, why)
        exchanged, self.world.exchanged = self.world.exchanged, 0
        return timing.to_json(exchanged)


def check_start(
    config: TrainConfig,
    folder: Path,
    resume: bool,
    sinks: SinkSettings,
    profile: Path | None,
    record: Path | None,
) -> None:
    """Raise if a run could not start, before anything is made."""
    sinks.check()
    if resume:
        check_settings(folder, config)
    else:
        RunFolder.check_free(folder)
    if record is not None and resume:
        RoundRecords.check(record, read_checksum(folder))
    elif record is not None:
        check_unused(record)
    check_device(config.device)
    if profile is not None:
        check_trace(profile / "trace.json.gz", config.device)


def make_agent(config: TrainConfig, runners: Sequence[EpisodeRunner], newest: Path | None, device: str) -> PPOAgent:
    """An agent for these runners; a new one begins with the policy of `config.start`.

    A run that has a checkpoint, its newest, must not read `config.start` again: that may have changed.
    """
    source = None if config.start is None else open_policy(config.start)[0] if newest is None else load_agent(newest)[0]
    table, layout = common_view(runners, config, source)
    agent = PPOAgent(
        table,
        layout,
        agent_config(config, runners, source),
        total_updates=max(1, config.rounds),
        tasks=len(runners),
        rng_seed=derive_seed(config.seed, "agent") % 2**62,
        device=device,
    )
    if config.start is not None and newest is None:
        begin_with(agent, config.start, config.preset)
    return agent


def with_other_ranks(restored: Restored, before: int | None, now: int) -> Restored:
    """With a remark if a run continues on another number of ranks."""
    if before in (None, now):
        return restored
    remark = f"the run continues on {now} rank{'s' if now > 1 else ''}, it had {before}"
    print(remark, flush=True)
    return restored._replace(remarks=(*(restored.remarks or ()), remark))


def common_view(
    runners: Sequence[EpisodeRunner], config: TrainConfig, start: PPOAgent | None
) -> tuple[ActionTable, ObservationLayout]:
    """Heads and columns of one policy for the hosts of all tasks: their most slots, and all their blueprints.

    A run that starts from another policy knows the blueprints of that one.
    """
    own = tuple(dict.fromkeys(name for runner in runners for name in runner.slots.blueprint_names))
    names = own if start is None else start.layout.vocabulary
    widest = max((runner.slots for runner in runners), key=len)
    layout = growth_layout(widest, sensing=config.sensing, vocabulary=names)
    return growth_table(head_preset(config.preset), widest, names), layout


def agent_config(config: TrainConfig, runners: Sequence[EpisodeRunner], start: PPOAgent | None) -> PPOConfig:
    """PPO's settings for these hosts. A run that starts from another policy has its network, unless one is set."""
    own = config.agent_config(*(runner.fleet.task for runner in runners))
    if start is None or config.ppo.network != NetworkConfig():
        return own
    return replace(own, network=start.config.network)
