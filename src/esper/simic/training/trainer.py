"""The outer loop: collect a round, update the policy, write it down, keep a checkpoint.

Words: an *episode* is the life of one host, T *steps* of one decision each; a *round* is one episode of all hosts in
lockstep and one update of the policy; a *group* is hosts that begin alike, one of which, the *control*, never grows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from esper.leyline import BadValueError, EsperError, derive_seed, head_preset
from esper.leyline.progress import progress_bar
from esper.simic.agent import PPOAgent, PPOUpdateMetrics
from esper.simic.telemetry import Alarm, AnomalyDetector, Examination, Spans, check_trace, operator_trace
from esper.simic.training.collect import Collector, RoundRecord, check_alike
from esper.simic.training.config import TrainConfig
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.fleets import growth_fleet
from esper.simic.training.groups import Groups
from esper.simic.training.journal import (
    round_facts,
    summary,
    timing_of,
    write_alarms,
    write_detail,
    write_events,
    write_metrics,
)
from esper.simic.training.runs import RunFolder, Watching
from esper.tolaria import get_task


class Trainer:
    """A run in its folder. `run` goes on from wherever the folder is."""

    def __init__(self, config: TrainConfig, folder: Path, *, resume: bool = False, profile: Path | None = None) -> None:
        """`profile`: a folder for a trace of every operator of one round."""
        torch.set_num_threads(config.threads)
        self.config = config
        if not resume:
            RunFolder.check_free(folder)
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
        # Last, so that a run that cannot start leaves nothing behind.
        self.folder = RunFolder.open(folder) if resume else RunFolder.create(folder, config)
        self.round, watching = 0, Watching()
        if resume:
            self.agent, self.round, watching = self.folder.load(self.agent)
        self.detector = AnomalyDetector(state=watching.detector, ppo=self.agent.config)
        self.detail = watching.detail
        self.alarms: tuple[Alarm, ...] = ()
        """Of the last round"""
        self.spans = Spans()
        self.collector = Collector(self.runners, self.agent, config.reward, config.seed, self.spans)
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
        """All rounds that are left. Ctrl-C ends after the last complete round, whose checkpoint is there."""
        with progress_bar("rounds", self.config.rounds - self.round, shown=progress) as advance, self.folder:
            if self._profile is not None and self.round >= self.config.rounds:
                raise BadValueError(f"{self.folder.path} has no round left to trace; leave --profile away")
            try:
                while self.round < self.config.rounds:
                    advance(1, summary(self.run_round()))
                    for alarm in self.alarms:
                        if alarm.severity != "info":
                            print(f"{alarm.severity}: {alarm}", flush=True)
            except EsperError as error:
                self.folder.events.write(kind="error", round=self.round, error=type(error).__name__, message=str(error))
                raise
            except KeyboardInterrupt:
                print(f"stopped after round {self.round}; go on with --resume {self.folder.path}")

    def run_round(self) -> list[RoundRecord]:
        """One round: collected, learnt from, written down. A record per task."""
        with self._tracing():
            with self.spans("collect"):
                records = self.collector.collect(self.round)
            examination = Examination(self.collector.buffer, self.agent.layout) if self.detail.level else None
            with self.spans("update"):
                metrics = self.agent.update(self.collector.buffer, examination)
            with self.spans("watch"):
                alarms = self._watch(records, metrics, examination)
        timing = timing_of(self.spans.drain())
        write_metrics(self.folder.metrics, self.round, records, self.runners[0].slots, metrics, timing)
        self.round += 1
        self.folder.keep(self.agent, self.round, Watching(self.detector.state, self.detail))
        self.alarms = alarms
        return records

    def _watch(
        self, records: list[RoundRecord], metrics: PPOUpdateMetrics, examination: Examination | None
    ) -> tuple[Alarm, ...]:
        """The round's events, what is wrong with it, and how closely the next ones are looked at."""
        events = self.folder.events
        for record, runner in zip(records, self.runners, strict=True):
            write_events(events, self.round, record, runner.slots)
        report = None
        if examination is not None:
            report = examination.report({record.task: record.lstm for record in records})
            write_detail(events, self.round, report)
        alarms = self.detector.look(self.round, metrics, round_facts(records, report))
        write_alarms(events, alarms)
        self.detail = self.detail.after(alarms)
        return alarms

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
