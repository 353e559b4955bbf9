"""Speed of two checkouts of Esper, in alternated pairs on one machine.

    python benchmarks/speed_pairs.py OLD NEW --job loop --device cuda
    python benchmarks/speed_pairs.py OLD NEW --job update --device cpu

OLD and NEW are folders with `src` and `benchmarks`, for example two git worktrees. Each runs in a process of its own,
warms up, and then does one unit of work whenever it is asked. The two take turns, and the one that goes first changes
from pair to pair, so drift of the machine cancels. The units are

    loop        a round of growth with a learning controller
    update      a PPO update
    hosts       20 minibatches of hosts that never grew, on random images of CIFAR-10's size
    holding     the same where three quarters of the hosts have three HOLDING seeds
    validation  the main row and three ablation rows of every host on 2,000 images
    probe       a probe of all slots of all hosts
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Json, print_table, write_result

HOSTS, TASK = 64, "cifar_baseline"
READY, TOOK = "ready", "seconds "
"""Begin the lines that count; a round may print others."""


def loop_round(arguments: argparse.Namespace, folder: Path) -> Callable[[], object]:
    """A function that trains one round with a learning controller."""
    from esper.simic.training.config import TrainConfig
    from esper.simic.training.trainer import Trainer
    from esper.tolaria import TaskRegistry, get_task

    name = f"{arguments.task}_short"
    TaskRegistry.register(replace(get_task(arguments.task), name=name, steps=arguments.steps))
    rounds = arguments.warm + arguments.pairs
    config = TrainConfig(
        task=name, hosts=arguments.hosts, rounds=rounds, device=arguments.device, data_dir=arguments.data_dir,
        preset="core",
    )  # fmt: skip
    # The policy stays as it was born, so that both versions take nearly the same actions and grow as many seeds. What
    # versions may have other defaults for is set here.
    config = replace(config, ppo=replace(config.ppo, rate=1e-12, epochs=4))
    trainer = Trainer(config, folder / "run")
    trainer.folder.__enter__()  # released when this process ends
    return trainer.run_round


def ppo_update(arguments: argparse.Namespace, folder: Path) -> Callable[[], object]:
    """A function that makes one PPO update on a fresh synthetic round; collecting it is part of the unit."""
    script: Any = __import__("ppo_update")  # Any: the script of that checkout
    agent = script.make_agent(torch.device(arguments.device))
    return lambda: agent.update(script.collect(agent, arguments.hosts, arguments.steps))


def fleet_work(arguments: argparse.Namespace, _: Path) -> Callable[[], object]:
    """A function that trains, validates or probes a fleet of the task `cifar_baseline`'s shape."""
    from esper.tolaria.measurement import Prober

    script: Any = __import__("fleet_throughput")  # Any: the script of that checkout
    arguments.bf16 = arguments.device == "cuda"
    fleet = script.make_fleet(arguments, arguments.hosts, arguments.batch)
    held = {"hosts": 0, "holding": 3 * arguments.hosts // 4}.get(arguments.job, arguments.hosts)
    if held:
        script.hold_seeds(fleet, held)
    numbers = iter(range(10**9))

    def train() -> None:
        for _ in range(MINIBATCHES):
            fleet.train_minibatch(fleet.draw(next(numbers)), 0.01)

    units: dict[str, Callable[[], object]] = {"validation": fleet.validate, "probe": Prober(fleet)}
    return units.get(arguments.job, train)


MINIBATCHES = 20
JOBS = {"loop": loop_round, "update": ppo_update} | dict.fromkeys(
    ("hosts", "holding", "validation", "probe"), fleet_work
)


def work(arguments: argparse.Namespace) -> None:
    """The process of one checkout: prints the seconds of a unit of work for every line that it reads."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        unit = JOBS[arguments.job](arguments, Path(folder))
        for _ in range(arguments.warm):
            unit()
        print(READY, flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            unit()
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            print(f"{TOOK}{time.perf_counter() - start}", flush=True)


def importing(*folders: Path) -> dict[str, str]:
    """The environment of a process that imports from these folders first, and not from that of its script."""
    paths = [*(str(folder.resolve()) for folder in folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


class Checkout:
    """A process that works with one version of the source."""

    def __init__(self, root: Path) -> None:
        self.root, self.seconds = root, list[float]()
        command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=importing(root / "src", root / "benchmarks"),
        )

    def wait(self) -> None:
        """Wait until it is warm."""
        self._read(READY)

    def measure(self) -> None:
        """Time one unit of work."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.seconds.append(float(self._read(TOOK)))

    def _read(self, beginning: str) -> str:
        """The rest of the next line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()
        raise RuntimeError(f"{self.root}: the worker ended with exit code {self.process.wait()}; see above")


def main() -> None:
    """Measure, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--job", choices=JOBS, default="loop")
    parser.add_argument("--task", default=TASK)
    parser.add_argument("--hosts", type=int, default=HOSTS, help="hosts, or envs of an update")
    parser.add_argument("--batch", type=int, default=256, help="images of a minibatch, where no task sets it")
    parser.add_argument("--steps", type=int, default=6, help="steps of an episode")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2, help="units of work that are not timed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    old, new = checkouts = [Checkout(root.resolve()) for root in (arguments.old, arguments.new)]
    for checkout in checkouts:
        checkout.wait()
    for pair in range(arguments.pairs):
        for checkout in checkouts if pair % 2 == 0 else reversed(checkouts):
            checkout.measure()
    ratios = [a / b for a, b in zip(old.seconds, new.seconds, strict=True)]  # above 1: the new one is faster
    rows = [
        [i + 1, f"{a:.3f}", f"{b:.3f}", f"{a / b:.3f}"]
        for i, (a, b) in enumerate(zip(old.seconds, new.seconds, strict=True))
    ]
    print_table(f"{arguments.job} on {arguments.device}", ["pair", "old s", "new s", "speed of new / old"], rows)
    print(f"\nmedian {statistics.median(ratios):.3f}, range {min(ratios):.3f} to {max(ratios):.3f}")
    result: dict[str, Json] = {
        "job": arguments.job,
        "task": arguments.task,
        "device": arguments.device,
        "hosts": arguments.hosts,
        "steps": arguments.steps,
        "batch": arguments.batch,
        "old_seconds": old.seconds,
        "new_seconds": new.seconds,
        "median_speed_ratio": statistics.median(ratios),
    }
    task = "" if arguments.task == TASK else f"_{arguments.task}"
    hosts = "" if arguments.hosts == HOSTS else f"_{arguments.hosts}"
    write_result(f"speed_pairs_{arguments.job}{task}{hosts}_{arguments.device}", result, arguments.out)


if __name__ == "__main__":
    main()
