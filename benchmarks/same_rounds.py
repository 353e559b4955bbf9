"""Do two checkouts of Esper learn the same? Rounds of training with the same seeds and hosts, compared.

    python benchmarks/same_rounds.py OLD NEW --task cifar_baseline --device cuda --minutes 8

OLD and NEW are folders with `src`. Every checkout trains every seed in its own process, all at once. Sums that are
added in another order round differently, so actions soon differ and only means can agree. Compared are means over
seeds and rounds: what hosts gained, the accuracy of their controls, and the parameters that were added. The spread of
the differences is the noise. Both get the default settings of the esper that this script finds.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from harness import RESULTS, Json, print_table, write_result
from speed_pairs import importing

FIGURES = ("objective", "gain", "added_parameters")
"""Of every grown host at the end of an episode."""
LINE = "round: "


def work(arguments: argparse.Namespace) -> None:
    """Train one seed; print a line of figures per round."""
    from esper.simic.training.config import TrainConfig
    from esper.simic.training.trainer import Trainer
    from esper.tolaria import TaskRegistry, get_task

    torch.set_num_threads(1)
    task = get_task(arguments.task)
    # Older versions set no images aside for the end of an episode; without them both train and score on the same ones.
    extra: dict[str, Any] = {"extra_size": 0} if hasattr(task, "extra_size") else {}
    TaskRegistry.register(replace(task, name="same", **extra))
    config = TrainConfig(
        task="same", hosts=arguments.hosts, rounds=arguments.rounds, device=arguments.device,
        data_dir=arguments.data_dir, seed=arguments.worker,
    )  # fmt: skip
    settings = json.loads(arguments.settings)
    known = {name: value for name, value in settings["ppo"].items() if hasattr(config.ppo, name)}
    config = replace(config, preset=settings["preset"], ppo=replace(config.ppo, **known))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, Path(folder) / "run")
        with trainer.folder:
            for _ in range(arguments.rounds):
                (record,) = trainer.run_round()
                values = {name: getattr(record, name) for name in FIGURES}
                values["control_accuracy"] = record.control_accuracies[-1]
                means = {name: float(value.double().mean()) for name, value in values.items()}
                print(LINE + json.dumps(means), flush=True)


def default_settings() -> str:
    """What versions may have other defaults for."""
    from esper.simic.training.config import TrainConfig

    config = TrainConfig()
    flat = {name: value for name, value in asdict(config.ppo).items() if not isinstance(value, dict)}
    return json.dumps({"preset": config.preset, "ppo": flat})


def start(root: Path, seed: int) -> tuple[subprocess.Popen[str], list[dict[str, float]]]:
    """A process that trains one seed with one checkout, and the list that its rounds are added to."""
    process = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--worker", str(seed), "--settings", default_settings()],
        stdout=subprocess.PIPE,
        text=True,
        env=importing(root / "src", Path(__file__).parent),
    )
    rounds: list[dict[str, float]] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(LINE):
                rounds.append(json.loads(line.removeprefix(LINE)))
                print(f"{root}, seed {seed}, {line}", end="", flush=True)

    Thread(target=read, daemon=True).start()
    return process, rounds


def train_all(arguments: argparse.Namespace) -> dict[str, list[list[dict[str, float]]]]:
    """By checkout, seed and round; only the rounds that all have finished."""
    roots = {"old": arguments.old, "new": arguments.new}
    runs = {name: [start(root, seed) for seed in arguments.seeds] for name, root in roots.items()}
    processes = [process for own in runs.values() for process, _ in own]
    end = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(1)
    for process in processes:
        process.kill()
    if any(process.wait() not in (0, -signal.SIGKILL) for process in processes):
        raise RuntimeError("a worker failed, see above")
    common = min(len(rounds) for own in runs.values() for _, rounds in own)
    return {name: [rounds[:common] for _, rounds in own] for name, own in runs.items()}


def main() -> None:
    """Train, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--task", default="cifar_baseline")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=9, help="stop then, and compare the rounds that all have")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--settings", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    found = train_all(arguments)
    rows, differences = [], dict[str, Json]()
    for figure in found["old"][0][0]:
        by_name = {name: [one[figure] for rounds in own for one in rounds] for name, own in found.items()}
        apart = [new - old for old, new in zip(by_name["old"], by_name["new"], strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5
        differences[figure] = {"mean": statistics.fmean(apart), "standard_error": error}
        means = (f"{statistics.fmean(by_name[name]):.3f}" for name in ("old", "new"))
        rows.append([figure, *means, f"{statistics.fmean(apart):+.3f} ± {error:.3f}"])
    rounds = len(found["old"][0])
    title = f"{arguments.task}: means of {len(arguments.seeds)} seeds × {rounds} rounds of {arguments.hosts} hosts"
    print_table(title, ["figure", "old", "new", "new − old, standard error"], rows)
    content: dict[str, Json] = {
        **{name: getattr(arguments, name) for name in ("task", "hosts", "seeds", "device")},
        "rounds": {**found},
        "differences": differences,
    }
    write_result(f"same_rounds_{arguments.task}", content, arguments.out)


if __name__ == "__main__":
    main()
