"""The whole loop of growth: how many images a second are trained while a controller learns, and where the time goes.

Everything is included: training with shadow rows, validation, ablations, probing, acting, rewards, the update. Images
of main rows alone are counted. The first rounds, in which graphs are captured, are shown but not averaged.

    python benchmarks/loop_throughput.py --device cuda
    python benchmarks/loop_throughput.py --device cuda --cold --rounds 3   # no kernel is compiled yet
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Json, print_table, write_result

from esper.simic.training import collect
from esper.simic.training.config import TrainConfig
from esper.simic.training.trainer import Trainer

USUAL = 64
"""Hosts, where the name of the JSON does not say how many."""


class Clock:
    """Seconds by phase; the device is waited for at both ends of each."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = torch.device(device), defaultdict[str, float](float)

    def now(self) -> float:
        """After everything that was asked of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def wrap(self, owner: Any, name: str, phase: str) -> None:  # Any: whatever has a method of that name
        """Count the time of a method or function."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = self.now()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds[phase] += self.now() - start

        setattr(owner, name, timed)


def time_phases(trainer: Trainer, clock: Clock) -> None:
    """Wrap what a step and a round consist of."""
    for runner in trainer.runners:
        clock.wrap(runner.fleet, "train_step", "train, shadows included")
        clock.wrap(runner.fleet, "validate", "validate and ablate")
        clock.wrap(runner.fleet, "validate_committed", "validate and ablate")
        clock.wrap(runner.fleet, "govern", "governor and snapshots")
        clock.wrap(runner, "prober", "probe")
        clock.wrap(runner, "view", "observe")
        clock.wrap(runner, "_apply", "apply actions")
        clock.wrap(runner, "begin", "fresh hosts")
    clock.wrap(trainer.agent, "act", "act")
    clock.wrap(trainer.agent, "update", "update")
    clock.wrap(collect, "reward_step", "reward")
    clock.wrap(trainer.folder, "save", "checkpoint")


def main() -> None:
    """Run rounds, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar_baseline")
    parser.add_argument("--hosts", type=int, default=USUAL)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm", type=int, default=2, help="rounds that are not averaged")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cold", action="store_true", help="begin with an empty cache of compiled kernels")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    config = TrainConfig(
        task=arguments.task, hosts=arguments.hosts, rounds=arguments.rounds, device=arguments.device,
        data_dir=arguments.data_dir,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if arguments.cold:
            os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "kernels")
        trainer = Trainer(config, Path(folder) / "run")
        clock = Clock(arguments.device)
        time_phases(trainer, clock)
        rounds, phases = [], list[dict[str, float]]()
        with trainer.folder:
            for _ in range(arguments.rounds):
                clock.seconds.clear()
                start = clock.now()
                trainer.run_round()
                rounds.append(clock.now() - start)
                phases.append(dict(clock.seconds))
                print(f"round {len(rounds)}: {rounds[-1]:.1f} s{_graphs(trainer)}", flush=True)
    report(arguments, trainer, rounds, phases)


def _graphs(trainer: Trainer) -> str:
    """How minibatches were run so far, where graphs are used."""
    graphs = trainer.runners[0].fleet.graphs
    if graphs is None:
        return ""
    return f"; so far {graphs.captures} captures, {graphs.replays} replays, {graphs.eager_runs} eager minibatches"


def report(
    arguments: argparse.Namespace, trainer: Trainer, rounds: list[float], phases: list[dict[str, float]]
) -> None:
    """Images a second, episodes an hour, and the share of each phase."""
    fleet = trainer.runners[0].fleet
    task, hosts = fleet.task, trainer.runners[0].groups.hosts
    images = hosts * task.steps * task.batches_per_step * task.batch
    warm = slice(min(arguments.warm, len(rounds) - 1), None)
    seconds = statistics.fmean(rounds[warm])
    mean = {name: statistics.fmean(found.get(name, 0.0) for found in phases[warm]) for name in phases[-1]}
    mean["all else"] = seconds - sum(mean.values())
    print_table(
        f"{task.name}, {hosts} hosts, {images / 1e6:.2f} M images a round",
        ["phase", "seconds a round", "share %"],
        [[name, f"{value:.2f}", 100 * value / seconds] for name, value in sorted(mean.items(), key=lambda i: -i[1])],
    )
    print(f"\n{images / seconds / 1e6:.3f} M trained images/s, {3600 / seconds * hosts:,.0f} episodes/hour")
    result: dict[str, Json] = {
        "task": task.name,
        "hosts": hosts,
        "warm": arguments.warm,
        "images_per_second": images / seconds,
        "episodes_per_hour": 3600 / seconds * hosts,
        "seconds_per_round": list(rounds),
        "phases": mean,
    }
    kind = "loop_cold" if arguments.cold else "loop_throughput"
    write_result(f"{kind}_{task.name}{f'_{hosts}' if hosts != USUAL else ''}", result, arguments.out)


if __name__ == "__main__":
    main()
