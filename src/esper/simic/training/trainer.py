"""The outer loop: collect a round, update the policy, write it down, keep a checkpoint.

Words: an *episode* is the life of one host, T *steps* of one decision each; a *round* is one episode of all hosts in
lockstep and one update of the policy; a *group* is hosts that begin alike, one of which, the *control*, never grows.
"""

import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import LifecycleOp, derive_seed, head_preset
from esper.leyline.progress import progress_bar
from esper.simic.agent import PPOAgent, PPOUpdateMetrics
from esper.simic.training.collect import Collector, RoundRecord
from esper.simic.training.config import TrainConfig
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.groups import Groups
from esper.simic.training.runs import RunFolder
from esper.tolaria import HostFleet, get_task


class Trainer:
    """A run in its folder. `run` goes on from wherever the folder is."""

    def __init__(self, config: TrainConfig, folder: Path, *, resume: bool = False) -> None:
        torch.set_num_threads(config.threads)
        self.config, task = config, get_task(config.task)
        self.groups = Groups.of(config.hosts, config.members)
        if not resume:
            RunFolder.check_free(folder)
        fleet = HostFleet(task, self.groups.hosts, config.device, data_dir=config.data_dir)
        self.runner = EpisodeRunner(fleet, self.groups, head_preset(config.preset), sensing=config.sensing)
        self.agent = PPOAgent(
            self.runner.table,
            self.runner.layout,
            config.agent_config(task),
            total_updates=config.rounds,
            rng_seed=derive_seed(config.seed, "agent") % 2**62,
            device=config.device,
        )
        # Last, so that a run that cannot start leaves nothing behind.
        self.folder = RunFolder.open(folder) if resume else RunFolder.create(folder, config)
        self.round = 0
        if resume:
            self.agent, self.round = self.folder.load(self.agent)
        self.collector = Collector(self.runner, self.agent, config.reward, config.seed)

    def run(self, *, progress: bool = True) -> None:
        """All rounds that are left. Ctrl-C ends after the last complete round, whose checkpoint is there."""
        with progress_bar("rounds", self.config.rounds - self.round, shown=progress) as advance, self.folder:
            try:
                while self.round < self.config.rounds:
                    record = self.run_round()
                    advance(1, f"objective {float(record.objective.mean()):+.2f}")
            except KeyboardInterrupt:
                print(f"stopped after round {self.round}; go on with --resume {self.folder.path}")

    def run_round(self) -> RoundRecord:
        """One round: collected, learnt from, written down."""
        start = time.perf_counter()
        record = self.collector.collect(self.round)
        collected = time.perf_counter()
        metrics = self.agent.update(self.collector.buffer)
        ended = time.perf_counter()
        self._write(record, metrics, {"collect_s": collected - start, "update_s": ended - collected})
        self.round += 1
        self.folder.keep(self.agent, self.round)
        return record

    def _write(self, record: RoundRecord, metrics: PPOUpdateMetrics, timing: dict[str, float]) -> None:
        events, slots = self.folder.events, self.runner.slots
        for step, (env, change, blueprint) in record.changes:
            events.write(
                kind="stage",
                round=self.round,
                step=step,
                env=env,
                slot=change.slot_id,
                blueprint=blueprint,
                source=change.source.name,
                target=change.target.name,
                cause=change.cause,
            )
        for step, env, why in record.symptoms:
            events.write(kind="panic", round=self.round, step=step, env=env, symptoms=why)
        for env in range(self.groups.grown):
            events.write(
                kind="episode",
                round=self.round,
                env=env,
                objective=round(float(record.objective[env]), 4),
                gain=round(float(record.gain[env]), 4),
                accuracy=round(float(record.accuracy[env]), 4),
                added_parameters=int(record.added_parameters[env]),
                accuracies=_rounded(record.accuracies[:, env]),
                control_accuracies=_rounded(record.control_accuracies[:, env]),
                alphas={
                    slot_id: _rounded(record.alphas[:, env, place])
                    for place, slot_id in enumerate(slots.slot_ids)
                    if bool(record.alphas[:, env, place].any())
                },
            )
        ops = Counter(LifecycleOp(op).name for op in record.actions[..., 0].flatten().tolist())
        germinated = record.actions[record.actions[..., 0] == int(LifecycleOp.GERMINATE)]
        chosen = Counter(
            f"{slots.slot_ids[slot]}/{slots.blueprint_names[blueprint]}"
            for _, slot, blueprint, *_ in germinated.tolist()
        )
        self.folder.metrics.write(
            round=self.round,
            objective=float(record.objective.mean()),
            objective_std=statistics.pstdev(record.objective.tolist()),
            gain=float(record.gain.mean()),
            accuracy=float(record.accuracy.mean()),
            added_parameters=float(record.added_parameters.mean()),
            committed=float((record.added_parameters > 0).float().mean()),
            panics=record.panics,
            reward={name: float(part.sum(0).mean()) for name, part in record.parts.items()},
            ops=dict(ops),
            germinated=dict(chosen),
            **metrics.flat(),
            timing=timing,
        )


def _rounded(curve: Tensor) -> list[float]:
    """As short as it is read: two digits."""
    return [round(value, 2) for value in curve.tolist()]
