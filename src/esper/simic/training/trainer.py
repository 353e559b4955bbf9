"""The outer loop: collect a round, update the policy, write it down, keep a checkpoint.

Words: an *episode* is the life of one host, T *steps* of one decision each; a *round* is one episode of all hosts in
lockstep and one update of the policy; a *group* is hosts that begin alike, one of which, the *control*, never grows.
"""

import time
from pathlib import Path

import torch

from esper.leyline import StorageError, derive_seed, head_preset
from esper.leyline.interrupts import termination_interrupts
from esper.leyline.progress import progress_bar
from esper.leyline.series import KEEP
from esper.simic.agent import PPOAgent
from esper.simic.telemetry import Alarm, AnomalyDetector
from esper.simic.training.collect import Collector, RoundRecord, check_alike
from esper.simic.training.config import TrainConfig
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.fleets import growth_fleet
from esper.simic.training.groups import Groups
from esper.simic.training.journal import round_facts, summary, write_alarms, write_events, write_metrics
from esper.simic.training.runs import RunFolder, Watching
from esper.tolaria import get_task


class Trainer:
    """A run in its folder. `run` goes on from wherever the folder is."""

    def __init__(
        self, config: TrainConfig, folder: Path, *, resume: bool = False, keep_checkpoints: int = KEEP
    ) -> None:
        """A new run, or one to go on with (as it was configured: it keeps as many checkpoints as it was begun with)."""
        torch.set_num_threads(config.threads)
        self.config = config
        if not resume:
            RunFolder.check_free(folder)
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
        self.round, watching = 0, Watching()
        if resume:
            self.folder, (self.agent, self.round, watching) = RunFolder.open(folder, self.agent)
        else:
            self.folder = RunFolder.create(folder, config, keep_checkpoints)
        self.detector, self.detail = AnomalyDetector(state=watching.detector), watching.detail
        self.alarms: tuple[Alarm, ...] = ()
        """Of the last round"""
        self.collector = Collector(self.runners, self.agent, config.reward, config.seed)

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
        bar = progress_bar("rounds", self.config.rounds - self.round, shown=progress)
        with bar as advance, self.folder, termination_interrupts():
            try:
                while self.round < self.config.rounds:
                    advance(1, summary(self.run_round()))
                    for alarm in self.alarms:
                        if alarm.severity != "info":
                            print(f"{alarm.severity}: {alarm}", flush=True)
            except KeyboardInterrupt:
                print(f"stopped after round {self.round}; go on with --resume {self.folder.path}")
            except StorageError as error:
                whole = "the run is whole up to its last checkpoint"
                raise StorageError(f"{error}; {whole}, go on with --resume {self.folder.path}") from error

    def run_round(self) -> list[RoundRecord]:
        """One round: collected, learnt from, written down. A record per task."""
        start = time.perf_counter()
        records = self.collector.collect(self.round)
        collected = time.perf_counter()
        metrics = self.agent.update(self.collector.buffer)
        ended = time.perf_counter()
        timing = {"collect_s": collected - start, "update_s": ended - collected}
        for record, runner in zip(records, self.runners, strict=True):
            write_events(self.folder.events, self.round, record, runner.slots)
        alarms = self.detector.look(self.round, metrics, round_facts(records))
        write_alarms(self.folder.events, alarms)
        self.detail = self.detail.after(alarms)
        write_metrics(self.folder.metrics, self.round, records, self.runners[0].slots, metrics, timing)
        self.round += 1
        self.folder.keep(self.agent, self.round, Watching(self.detector.state, self.detail))
        self.alarms = alarms
        return records
