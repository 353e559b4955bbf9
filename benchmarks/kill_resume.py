"""Kill and resume: runs that are killed (SIGKILL) at random moments and resumed end like one that was never killed.

python benchmarks/kill_resume.py --runs 50 --workers 2

Half of the kills come at a random time. The others come when the process is about to touch a file of the run for the
n-th time, or a little later, so they meet half-written checkpoints, half-cut logs and half-removed folders. About half
of the runs are killed again after resuming. Metrics (without timing), events and the last checkpoint (weights,
optimiser, normalisers, random state, detector) must equal those of the uninterrupted run, bit for bit.
"""

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness import RESULTS, Json, print_table, write_result
from kills import FileKill

from esper.simic.agent.checkpoint import AGENT
from esper.simic.training.config import TrainConfig
from esper.simic.training.run_folder import CHECKPOINTS, CONFIG, EVENTS, METRICS, checkpoints_of, read_config
from esper.simic.training.trainer import Trainer
from esper.storage.files import is_leftover
from esper.storage.logs import read_lines
from esper.storage.stored import read_stored
from esper.tolaria import TaskRegistry, get_task

STATES = ("as it began", "in a checkpoint", "in a round")
DELAY = 0.002
"""Seconds after a file operation within which a kill comes: a checkpoint takes some milliseconds."""
LONGEST = 3600.0
"""Seconds that a run may take before something is wrong with it."""


class Kill(NamedTuple):
    """When a process is killed."""

    kind: Literal["clock", "file"]
    at: float
    """Seconds since its start, or the number of the file operation"""
    delay: float = 0.0
    """Of a file operation: seconds after it"""


class Whole(NamedTuple):
    """The run that is never killed."""

    folder: Path
    seconds: float
    operations: int
    """On files of the run"""


@dataclass
class Outcome:
    """What became of one run."""

    kills: list[tuple[Kill, str]] = field(default_factory=list)
    """Each with what it met"""
    missed: int = 0
    """Kills that would have come after the end"""
    differences: list[str] = field(default_factory=list)


# -- in the process that trains ---------------------------------------------------------------------------------------


def tiny_task(name: str) -> str:
    """Register a task with steps so small that starting takes longer than training."""
    tiny = f"{name}@kills"
    if tiny not in TaskRegistry.names():
        small = replace(get_task(name), name=tiny, steps=8, batches_per_step=1, batch=16, calibration_size=32)
        TaskRegistry.register(small)
    return tiny


def train(folder: Path, task: str, settings: dict[str, int], kill: Kill | None) -> None:
    """Begin or resume a run in a separate process. If it is not killed, it writes its number of file operations next
    to the folder."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    counted = FileKill(folder, int(kill.at), kill.delay) if kill and kill.kind == "file" else FileKill(folder)
    config = TrainConfig(task=tiny_task(task), **settings)  # type: ignore[arg-type]  # whole numbers, by name
    resume = (folder / CONFIG).exists()
    if resume and read_config(folder) != config:
        raise RuntimeError(f"{folder} came back as another run")
    Trainer(config, folder, resume=resume).run(progress=False)
    folder.with_suffix(".operations").write_text(str(counted.count))


# -- in the process that kills ----------------------------------------------------------------------------------------


class Bench:
    """Starts processes that train, from one that has everything imported: an import of torch takes seconds."""

    def __init__(self, task: str, settings: dict[str, int]) -> None:
        self.task, self.settings = task, settings
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload(["__main__", "esper.simic.training.trainer", "sklearn.datasets"])

    def start(self, folder: Path, kill: Kill | None = None) -> bool:
        """Train in a folder; whether it was killed."""
        process = self.context.Process(target=train, args=(folder, self.task, self.settings, kill))
        process.start()
        process.join(kill.at if kill and kill.kind == "clock" else LONGEST)
        process.kill()
        process.join()
        if process.exitcode not in (0, -9) or (kill is None and process.exitcode):
            raise RuntimeError(f"training in {folder} ended with {process.exitcode} under {kill}")
        return process.exitcode != 0

    def run(self, folder: Path, dice: random.Random, whole: Whole) -> Outcome:
        """One run: killed once or more often, gone on with until its end, compared with the whole one."""
        outcome = Outcome()
        while not outcome.kills or dice.random() < 0.5:
            kill = draw_kill(dice, whole)
            if self.start(folder, kill):
                outcome.kills.append((kill, state_of(folder)))
                continue
            outcome.missed += 1
            if outcome.kills:
                break
            shutil.rmtree(folder)  # it ended unhurt: once more
        self.start(folder)
        outcome.differences = differences(whole.folder, folder)
        return outcome


def state_of(folder: Path) -> str:
    """What a kill has met."""
    places = [folder, folder / CHECKPOINTS]
    if any(is_leftover(path) for place in places if place.is_dir() for path in place.iterdir()):
        return "in a checkpoint" if (folder / CONFIG).exists() else "as it began"
    return "as it began" if checkpoints_of(folder).newest() is None else "in a round"


def draw_kill(dice: random.Random, whole: Whole) -> Kill:
    """At any moment of the clock, or at any file operation."""
    if dice.random() < 0.5:
        return Kill("clock", dice.uniform(0.0, whole.seconds))
    return Kill("file", dice.randint(1, whole.operations), dice.choice([0.0, dice.uniform(0.0, DELAY)]))


def differences(whole: Path, other: Path) -> list[str]:
    """What is not as in the whole run."""
    found = []
    if _names(whole) != _names(other):
        found.append("which checkpoints there are")
    if _metrics(whole) != _metrics(other):
        found.append(METRICS)
    if (whole / EVENTS).read_bytes() != (other / EVENTS).read_bytes():
        found.append(EVENTS)
    (mine, tensors), (content, others) = _checkpoint(whole), _checkpoint(other)
    if mine != content:
        found.append("the state of the last checkpoint")
    if set(tensors) != set(others):
        return [*found, "the names of tensors"]
    return found + [name for name in tensors if tensors[name] != others[name]]


def _names(folder: Path) -> list[str]:
    """Checkpoints that are kept, and whatever else was left beside them."""
    return sorted(path.name for path in (folder / CHECKPOINTS).iterdir())


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """Without what depends on the clock."""
    return [{name: value for name, value in line.items() if name != "timing"} for line in read_lines(folder / METRICS)]


def _checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """State and raw tensors of the last one; the size of the metrics depends on the clock's digits."""
    last = checkpoints_of(folder).newest()
    assert last is not None
    content, tensors = read_stored(last, AGENT)
    del content["progress"]["metrics"]
    return content, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Json]:
    """The whole run, then all others."""
    settings = {"rounds": arguments.rounds, "hosts": 4, "members": 1, "seed": arguments.seed}
    bench, place = Bench(arguments.task, settings), folder / "whole"
    bench.start(folder / "again")
    start = time.perf_counter()
    bench.start(place)
    seconds = time.perf_counter() - start
    if found := differences(place, folder / "again"):
        raise RuntimeError(f"two runs that nothing happened to differ: {found}")
    whole = Whole(place, seconds, int(place.with_suffix(".operations").read_text()))
    dice = [random.Random(f"{arguments.seed} {number}") for number in range(arguments.runs)]
    start = time.perf_counter()
    with ThreadPoolExecutor(arguments.workers) as pool:
        places = [folder / f"run-{number}" for number in range(arguments.runs)]
        outcomes = list(pool.map(bench.run, places, dice, [whole] * arguments.runs))
    return {
        **{"task": arguments.task, "runs": arguments.runs, **settings},
        "seconds_of_a_whole_run": whole.seconds,
        "file_operations_of_a_whole_run": whole.operations,
        "seconds_in_all": time.perf_counter() - start,
        "kills": {state: sum(met == state for each in outcomes for _, met in each.kills) for state in STATES},
        "kills_by_kind": dict(Counter(kill.kind for each in outcomes for kill, _ in each.kills)),
        "kills_per_run": statistics.fmean(len(each.kills) for each in outcomes),
        "missed": sum(each.missed for each in outcomes),
        "runs_equal": sum(not each.differences for each in outcomes),
        "outcomes": [
            {
                "kills": [{**kill._asdict(), "met": met} for kill, met in each.kills],
                "differences": list(each.differences),
            }
            for each in outcomes
        ],
    }


def main() -> None:
    """Kill and resume all runs, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    kills = result["kills"]
    assert isinstance(kills, dict)
    print_table(
        f"{arguments.task}: {arguments.runs} runs of {arguments.rounds} rounds",
        ["killed", "times"],
        [*kills.items(), ("in all", sum(kills.values()))],
    )
    equal = result["runs_equal"]
    print(f"{equal} of {arguments.runs} runs end bit for bit as the one that was never killed")
    write_result("kill_resume", result, arguments.out)
    if equal != arguments.runs:
        sys.exit(1)


if __name__ == "__main__":
    main()
