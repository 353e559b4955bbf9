"""`esper demo`."""

import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from json import dumps
from pathlib import Path

from rich.console import Console

from esper.cli.evaluate import short_table, tell_difference
from esper.karn import read_run, write_report
from esper.karn.report import what_was_learned
from esper.simic.evaluation.comparison import TaskComparison
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.statistics import compare_all
from esper.simic.evaluation.workers import (
    Contender,
    EvaluationConfig,
    collect,
    job_runner,
    make_jobs,
    run_in_worker,
    worker_pool,
)
from esper.simic.training.config import TrainConfig
from esper.simic.training.trainer import Trainer
from esper.tolaria import get_task

TASK = "digits_blind"
RULES = ("schedule", "heuristic", "random", "wait")
EVALUATION_SEED = 7


@dataclass(frozen=True)
class DemoCommand:
    """Train a controller on hosts that cannot see shapes, compare it with rules on hosts that it has never seen, tell
    what it learned, and write a report. Two cores, about four minutes."""

    rounds: int = 7
    """Rounds of training."""
    hosts: int = 24
    """Hosts per round, controls included."""
    members: int = 5
    """Hosts per group beside its control."""
    unseen: int = 16
    """Hosts on which the policies are compared."""
    seed: int = 0
    """Everything random follows from it."""
    out: Path = Path("runs/demo")
    """Folder of the run; where there is one already, a number is added."""

    def run(self, console: Console) -> None:
        """Train here while the rules are measured in a second process."""
        start, task, folder = time.perf_counter(), get_task(TASK), free_folder(self.out)
        console.print(
            f"Hosts of {TASK} classify handwritten digits with 1×1 kernels: they see pixels, never shapes. A "
            f"controller may grow small modules in {len(task.slot_ids)} slots of each, {task.parameter_budget:,} "
            "parameters in all; it is paid for the accuracy gained over a twin that never grows, less rent for every "
            "parameter.\n"
            f"Training it for {self.rounds} rounds of {self.hosts} hosts:",
            highlight=False,
        )
        config = TrainConfig(task=TASK, rounds=self.rounds, hosts=self.hosts, members=self.members, seed=self.seed)
        unseen = EvaluationConfig(TASK, self.unseen, EVALUATION_SEED)
        with worker_pool(1) as pool:
            rules = [Contender(unseen, name) for name in RULES]
            measured = [pool.submit(run_in_worker, job) for job in make_jobs(rules)]
            trainer = Trainer(config, folder)
            trainer.run()
            if trainer.round < self.rounds:  # stopped by hand: `run` has said how to go on
                raise SystemExit(128 + signal.SIGINT)
            console.print(f"Comparing it with rules on {self.unseen} hosts that none of them has seen …")
            with job_runner(1) as run:
                results = {"learned": run([Contender(unseen, str(folder))])}
            done = collect(rules, (future.result() for future in measured))
            results |= {name: [result] for name, result in zip(RULES, done, strict=True)}
        found = TaskComparison(TASK, self.unseen, EVALUATION_SEED, False, results, compare_all(results))
        (folder / "evaluation.json").write_text(dumps(found.to_json(), indent=1, allow_nan=False) + "\n")
        _tell(console, found, folder)
        console.print(f"{(time.perf_counter() - start) / 60:.1f} minutes in all", highlight=False)


def free_folder(wanted: Path) -> Path:
    """This folder, or the first with a number behind it that is not there yet."""
    if not wanted.exists():
        return wanted
    return next(path for n in count(2) if not (path := wanted.with_name(f"{wanted.name}-{n}")).exists())


def _tell(console: Console, found: TaskComparison, folder: Path) -> None:
    console.print(short_table(found))
    for compared in found.compared:
        console.print(tell_difference(compared), highlight=False, markup=False)
    console.print("One training seed: a report, not a claim.\n", highlight=False)
    for sentence in [*what_was_learned(read_run(folder)), _on_unseen(found.policies["learned"])]:
        console.print(sentence, highlight=False)
    console.print(f"\nThe whole story, with pictures: {write_report(folder)}", highlight=False, soft_wrap=True)


def _on_unseen(results: Sequence[Result]) -> str:
    """What grew on hosts that it had never seen."""
    hosts = [commits for result in results for commits in result.commits]
    kept = Counter(name for commits in hosts for name in commits)
    if not kept:
        return "On unseen hosts it committed nothing."
    listed = ", ".join(f"{name.replace('/', ' ')} {number}" for name, number in kept.most_common(4))
    return f"On {len(hosts)} unseen hosts it kept {sum(kept.values())} seeds: {listed}."
