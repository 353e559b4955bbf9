"""What telemetry costs: rounds with it and without, in pairs, from the same state.

Two runs of one configuration go through the same rounds. A pair is a round of each: one is watched as every run is, of
the other nothing is measured or written that learning does not need. The order alternates, and every two pairs they
change roles, for where its tensors happen to lie makes a run faster or slower; both must end alike to the last bit.
Few hosts and short episodes overstate the share: what is watched grows less with them than what is trained.

    python benchmarks/telemetry_cost.py                          # 30 pairs of short rounds: minutes on one core
    python benchmarks/telemetry_cost.py --hosts 32 --steps 20    # the default round
    python benchmarks/telemetry_cost.py --part steps --pairs 60  # only what tells every step to those who watch
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from harness import RESULTS, Json, print_table, write_result

from esper.nissa import LiveFile
from esper.simic.agent import PPOAgent, PPOUpdateMetrics, ppo
from esper.simic.agent.metrics import MinibatchRecord
from esper.simic.agent.minibatch import PreparedRound
from esper.simic.telemetry import Spans
from esper.simic.training import collect, recorder, rollouts
from esper.simic.training.config import TrainConfig
from esper.simic.training.live import StepWatch
from esper.simic.training.trainer import Trainer
from esper.tolaria import TaskRegistry, get_task

BARS = {"all": 1.02, "steps": 1.01}
"""What the upper end of the median ratio has to stay below, by the part of telemetry that is measured."""
TAIL = 0.025
"""Of the distribution, beyond each end of an interval."""


def needed(prepared: PreparedRound, records: list[MinibatchRecord], epochs: int, agent: PPOAgent) -> PPOUpdateMetrics:
    """What an agent has to know of its own update, and nothing for people."""
    rows = [torch.stack([row.figures["norm"], row.figures["halted"].to(row.figures["norm"])]) for row in records]
    gap, *numbers = torch.cat([prepared.reference.gap.view(1), *rows]).tolist()
    norms, halted = numbers[::2], numbers[1::2]
    figures: dict[str, Any] = {each.name: 0 for each in fields(PPOUpdateMetrics)}  # Any: of the field's type
    figures |= {"heads": {}, "behaviour_gap": gap}
    figures["minibatches_not_finite"] = sum(not math.isfinite(norm) for norm in norms)
    figures["minibatches_taken"] = sum(
        math.isfinite(norm) and not stopped for norm, stopped in zip(norms, halted, strict=True)
    )
    return PPOUpdateMetrics(**figures)


@contextmanager
def untold() -> Iterator[None]:
    """Inside, no step is told."""
    with patch.object(StepWatch, "step", lambda *_: None), patch.object(LiveFile, "begin", lambda *_: None):
        yield


@contextmanager
def unwatched(trainer: Trainer) -> Iterator[None]:
    """Inside, its rounds are collected, learnt from and kept, and that is all."""
    nothing = torch.zeros(3, dtype=torch.long, device=trainer.agent.device)
    with ExitStack() as stack:
        for owner, name, instead in (
            (trainer.spans, "enabled", False),
            (collect, "find_suspects", lambda *_: (nothing, ())),
            (rollouts, "compute_lstm_health", lambda _: None),
            (ppo, "summarise", needed),
            (trainer.recorder, "write_events", lambda *_: None),
            (trainer.recorder, "write_metrics", lambda *_: None),
        ):
            stack.enter_context(patch.object(owner, name, instead))
        stack.enter_context(untold())
        yield


class Stopwatch:
    """Seconds inside telemetry, of a watched round."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False
        spans = Spans()
        start = time.perf_counter()
        for _ in range(10_000):
            with spans("a"):
                pass
        self.per_span = (time.perf_counter() - start) / 10_000

    def around(self, inner: Callable[..., Any]) -> Callable[..., Any]:  # Any: whatever it takes and returns
        """The same function, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            if self._inside:  # within a call that is timed
                return inner(*arguments, **options)
            self._inside, start = True, time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - start

        return timed

    @contextmanager
    def timing_steps(self) -> Iterator[None]:
        """Inside, all that tells the steps is timed, and what the log gets of it."""
        with ExitStack() as stack:
            for owner, name in ((StepWatch, "step"), (LiveFile, "begin"), (recorder, "write_followed")):
                stack.enter_context(patch.object(owner, name, self.around(getattr(owner, name))))
            yield

    @contextmanager
    def timing(self, trainer: Trainer) -> Iterator[None]:
        """Inside, everything that `unwatched` leaves away is timed."""
        honest = self.around(trainer.recorder.write_metrics)

        def with_spans(*arguments: Any) -> Any:
            self.seconds += self.per_span * sum(total.visits for total in arguments[-1].values())
            return honest(*arguments)

        with ExitStack() as stack:
            for owner, name in (
                (collect, "find_suspects"),
                (rollouts, "compute_lstm_health"),
                (ppo, "summarise"),
                (trainer.recorder, "write_events"),
                (trainer.folder.events, "flush"),
                (trainer.folder.metrics, "flush"),
            ):
                stack.enter_context(patch.object(owner, name, self.around(getattr(owner, name))))
            stack.enter_context(patch.object(trainer.recorder, "write_metrics", with_spans))
            stack.enter_context(self.timing_steps())
            yield


@dataclass(frozen=True)
class Times:
    """What the rounds in one of the two roles took, seconds."""

    watched: bool
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    telemetry: list[float] = field(default_factory=list)


class Run:
    """One of the two runs."""

    def __init__(self, config: TrainConfig, folder: Path, part: str = "all") -> None:
        self.trainer, self.part = Trainer(config, folder), part
        self.rewards: list[torch.Tensor] = []
        self._stopwatch = Stopwatch()

    def round(self, times: Times) -> None:
        """One round in this role, timed."""
        self._stopwatch.seconds = 0.0
        with self._role(times.watched):
            cpu, wall = time.process_time(), self._now()
            records = self.trainer.run_round()
            times.wall.append(self._now() - wall)
            times.cpu.append(time.process_time() - cpu)
        times.telemetry.append(self._stopwatch.seconds)
        self.rewards.append(torch.cat([record.rewards for record in records], 1))

    def _role(self, watched: bool) -> AbstractContextManager[None]:
        if self.part == "steps":
            return self._stopwatch.timing_steps() if watched else untold()
        return self._stopwatch.timing(self.trainer) if watched else unwatched(self.trainer)

    def _now(self) -> float:
        if self.trainer.agent.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def equals(self, other: "Run") -> bool:
        """Every reward and every weight, to the last bit."""
        mine, theirs = ([*run.rewards, *run.trainer.agent.network.parameters()] for run in (self, other))
        return all(torch.equal(one, two) for one, two in zip(mine, theirs, strict=True))


def interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Median and the ends of its interval, by order statistics: that r of n values lie below the median has a binomial
    probability, whatever their distribution. None with so few values that no end is safe."""
    ordered, n = sorted(values), len(values)
    beyond = [sum(math.comb(n, k) for k in range(rank, n + 1)) / 2**n for rank in range(n + 1)]
    rank = next((rank for rank in range(n + 1) if beyond[rank] <= TAIL), None)
    ends = (None, None) if rank is None else (ordered[n - rank], ordered[rank - 1])
    return statistics.median(ordered), *ends


def main() -> None:
    """Run the pairs, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--warm", type=int, default=1, help="pairs that are not counted")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="of an episode")
    parser.add_argument("--part", choices=BARS, default="all", help="steps: only what tells every step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    total, short = arguments.warm + arguments.pairs, f"{arguments.task}@{arguments.steps}"
    TaskRegistry.register(replace(get_task(arguments.task), name=short, steps=arguments.steps))
    config = TrainConfig(
        task=short, hosts=arguments.hosts, rounds=total, device=arguments.device, data_dir=arguments.data_dir
    )
    with tempfile.TemporaryDirectory() as folder:
        watched, bare = Times(watched=True), Times(watched=False)
        one, other = (Run(config, Path(folder) / name, arguments.part) for name in ("one", "other"))
        with one.trainer.folder, other.trainer.folder:
            for pair in range(total):
                roles = [(one, watched), (other, bare)] if pair // 2 % 2 else [(one, bare), (other, watched)]
                for run, times in roles if pair % 2 else reversed(roles):
                    run.round(times)
                print(f"pair {pair}: {watched.wall[-1]:.2f} s and {bare.wall[-1]:.2f} s without", flush=True)
    report(arguments, watched, bare, alike=one.equals(other))


def report(arguments: argparse.Namespace, watched: Times, bare: Times, *, alike: bool) -> None:
    """Ratios of wall and CPU time, the share that was timed directly, and whether anything depends on it."""
    warm = slice(arguments.warm, None)
    figures = {
        "wall time, with / without": [a / b for a, b in zip(watched.wall[warm], bare.wall[warm], strict=True)],
        "CPU time, with / without": [a / b for a, b in zip(watched.cpu[warm], bare.cpu[warm], strict=True)],
        "timed directly, 1 + share": [
            wall / (wall - part) for wall, part in zip(watched.wall[warm], watched.telemetry[warm], strict=True)
        ],
    }
    found = {name: interval(values) for name, values in figures.items()}
    print_table(
        f"{arguments.task}, {arguments.hosts} hosts, {arguments.steps} steps, {arguments.pairs} pairs of rounds of "
        f"{statistics.median(bare.wall[warm]):.2f} s; bar {BARS[arguments.part]}",
        ["figure", "median", "lower 95 % end", "upper 95 % end"],
        [[name, *("-" if end is None else f"{end:.4f}" for end in ends)] for name, ends in found.items()],
    )
    print(f"\nresults are {'bit-identical' if alike else 'NOT THE SAME'}")
    result: dict[str, Json] = {
        "task": arguments.task,
        "hosts": arguments.hosts,
        "steps": arguments.steps,
        "pairs": arguments.pairs,
        "bar": BARS[arguments.part],
        "bit_identical": alike,
        "figures": {name: dict(zip(("median", "low", "high"), ends, strict=True)) for name, ends in found.items()},
        "seconds": {
            "with": list(watched.wall[warm]),
            "without": list(bare.wall[warm]),
            "telemetry": list(watched.telemetry[warm]),
        },
    }
    name = "telemetry_cost" if arguments.part == "all" else "watching_cost"
    write_result(f"{name}_{arguments.task}", result, arguments.out)


if __name__ == "__main__":
    main()
