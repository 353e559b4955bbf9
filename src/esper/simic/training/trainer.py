"""The outer loop: collect a round, update the policy, write it down, keep a checkpoint.

Words: an *episode* is the life of one host, T *steps* of one decision each; a *round* is one episode of all hosts in
lockstep and one update of the policy; a *group* is hosts that begin alike, one of which, the *control*, never grows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from esper.leyline import BadValueError, StorageError, derive_seed, head_preset
from esper.leyline.progress import progress_bar
from esper.leyline.records import encode
from esper.nissa import AlarmRaised, SinkSettings
from esper.simic.agent import PPOAgent, PPOUpdateMetrics
from esper.simic.telemetry import Alarm, AnomalyDetector, Examination, Spans, check_trace, operator_trace
from esper.simic.training.collect import RoundCollector, RoundRecord, check_alike
from esper.simic.training.config import TrainConfig
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.hosts import Groups, check_device, growth_fleet
from esper.simic.training.learned import begin_with
from esper.simic.training.recorder import (
    round_facts,
    session,
    summary,
    timing_of,
    write_alarms,
    write_detail,
    write_events,
    write_metrics,
)
from esper.simic.training.run_folder import RunFolder, TelemetryState, check_settings
from esper.storage.interrupts import interrupts_held, termination_interrupts
from esper.storage.series import KEEP
from esper.tolaria import get_task


class Trainer:
    """A run in its folder. `run` goes on from wherever the folder is."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        resume: bool = False,
        keep_checkpoints: int = KEEP,
        sinks: SinkSettings | None = None,
        profile: Path | None = None,
    ) -> None:
        """A new run, or one to go on with (as it was configured: it keeps as many checkpoints as it was begun with).

        `sinks`: who else is shown what happens. `profile`: a folder for a trace of every operator of one round.
        """
        self.sinks = SinkSettings() if sinks is None else sinks
        self.sinks.check()
        torch.set_num_threads(config.threads)
        self.config = config
        if resume:
            check_settings(folder, config)
        else:
            RunFolder.check_free(folder)
        check_device(config.device)
        if profile is not None:
            check_trace(profile / "trace.json.gz", config.device)
        self.runners = [self._runner(name) for name in config.tasks]
        check_alike(self.runners)
        self.agent = PPOAgent(
            self.runners[0].table,
            self.runners[0].layout,
            config.agent_config(*(runner.fleet.task for runner in self.runners)),
            total_updates=config.rounds,
            tasks=len(self.runners),
            rng_seed=derive_seed(config.seed, "agent") % 2**62,
            device=config.device,
        )
        if config.start is not None and (not resume or RunFolder.last_checkpoint(folder) is None):
            begin_with(self.agent, config.start)
        # Last, so that a run that cannot start leaves nothing behind.
        self.round, watching = 0, TelemetryState()
        self._remarks: tuple[str, ...] | None = None
        if resume:
            self.folder, (self.agent, self.round, watching, self._remarks) = RunFolder.open(folder, config, self.agent)
        else:
            self.folder = RunFolder.create(folder, config, keep_checkpoints)
            if config.start is not None:  # that run may go on, and this one be killed in its first round
                self.folder.keep(self.agent, 0, watching)
        self.detector = AnomalyDetector(config.alarms, watching.detector, self.agent.config)
        self.detail = watching.detail
        self.alarms: tuple[Alarm, ...] = ()
        """Of the last round"""
        self.spans = Spans()
        self.collector = RoundCollector(self.runners, self.agent, config.reward, config.seed, self.spans)
        self.hub = self.sinks.open(self.folder.path, encode(config), self.round)
        self._profile = profile
        # The first round in a process does things that no other does; where it is the only one, it is that or nothing.
        self._traced = min(self.round + 1, config.rounds - 1)

    def _runner(self, name: str) -> EpisodeRunner:
        """The hosts of one task; all tasks have equally many."""
        config = self.config
        groups = Groups.of(config.hosts // len(config.tasks), config.members)
        fleet = growth_fleet(
            get_task(name), groups.hosts, config.device, data_dir=config.data_dir, isolation=config.isolation
        )
        return EpisodeRunner(fleet, groups, head_preset(config.preset), sensing=config.sensing)

    def run(self, *, progress: bool = True) -> None:
        """All rounds that are left. Ctrl-C and SIGTERM end after the last complete round, whose checkpoint is there."""
        left = self.config.rounds - self.round
        bar = progress_bar("rounds", left, shown=progress)
        with bar as advance, self.folder, self.hub, termination_interrupts():
            if self._profile is not None and not left:
                raise BadValueError(f"{self.folder.path} has no round left to trace; leave --profile away")
            try:
                with session(self.folder.path, self.hub, self.config.rounds, lambda: self.round, self._remarks):
                    while self.round < self.config.rounds:
                        words = summary(self.run_round())
                        advance(1, "" if self.sinks.console else words)
            except KeyboardInterrupt:
                print(f"stopped after round {self.round}; go on with --resume {self.folder.path}")
            except StorageError as error:
                whole = "the run is whole up to its last checkpoint"
                raise StorageError(f"{error}; {whole}, go on with --resume {self.folder.path}") from error
        if losses := self.hub.losses():
            print(f"{losses}; the log in {self.folder.path} has everything")

    def _print_alarms(self) -> None:
        """The serious ones, where no sink does it."""
        for alarm in self.alarms:
            if alarm.severity != "info" and not self.sinks.console:
                print(f"{alarm.severity}: {alarm}", flush=True)

    def run_round(self) -> list[RoundRecord]:
        """One round: collected, learnt from, written down. A record per task."""
        self.collector.reward = self.config.reward.at(self.round / self.config.rounds)
        with self._tracing():
            with self.spans("collect"):
                records = self.collector.collect(self.round)
            examination = Examination(self.collector.buffer, self.agent.layout) if self.detail.left else None
            with self.spans("update"):
                metrics = self.agent.update(self.collector.buffer, examination)
            with self.spans("watch"):
                alarms, raised = self._record(records, metrics, examination)
        timing, slots = timing_of(self.spans.drain(), self.hub.metrics()), self.runners[0].slots
        measured = write_metrics(self.folder.metrics, self.round, records, slots, metrics, timing)
        with interrupts_held():  # a round counts once its checkpoint is there; then it is told of, too
            self.folder.keep(self.agent, self.round + 1, TelemetryState(self.detector.state, self.detail))
            self.round += 1
            self.alarms = alarms
            self.hub.publish(measured)
            for event in raised:
                self.hub.publish(event)
            self._print_alarms()
        return records

    def _record(
        self, records: list[RoundRecord], metrics: PPOUpdateMetrics, examination: Examination | None
    ) -> tuple[tuple[Alarm, ...], list[AlarmRaised]]:
        """The round's events, what is wrong with it, and how closely the next ones are looked at."""
        events = self.folder.events
        for record, runner in zip(records, self.runners, strict=True):
            write_events(events, self.round, record, runner.slots)
        report = None
        if examination is not None:
            report = examination.report({record.task: record.lstm for record in records})
            write_detail(events, self.round, report)
        alarms = self.detector.look(self.round, metrics, round_facts(records, report))
        self.detail = self.detail.after(alarms)
        return alarms, write_alarms(events, alarms)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Where a trace was asked for, one round is traced, with the spans as ranges in it."""
        self.spans.marked = self._profile is not None and self.round == self._traced
        if self._profile is None or not self.spans.marked:
            yield
            return
        with operator_trace(self._profile / f"round-{self.round:05d}.json.gz", self.agent.device) as path:
            yield
        print(f"round {self.round} was traced: {path}", flush=True)
