"""`esper demo`."""

import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path

from rich.console import Console

from esper.cli.evaluate import print_report
from esper.karn import read_run, write_report
from esper.karn.report import what_was_learned
from esper.simic.evaluation.comparison import EvaluationReport, TaskComparison
from esper.simic.evaluation.policies import Contender, EvaluationConfig, PolicySpec
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.statistics import compare_all
from esper.simic.evaluation.workers import run_contenders, worker_pool
from esper.simic.training.config import TrainConfig
from esper.simic.training.trainer import Trainer
from esper.storage.files import free_path
from esper.tolaria import get_task

TASK = "digits_blind"
RULES = ("schedule", "heuristic", "random", "wait")
EVALUATION_SEED = 7


@dataclass(frozen=True)
class DemoCommand:
    """Train a controller on hosts that cannot see shapes, compare it with rules on unseen hosts, and write a report.
    Takes about four minutes on two cores."""

    rounds: int = 7
    """Rounds of training."""
    hosts: int = 24
    """Hosts per round, including controls."""
    members: int = 5
    """Hosts per group, not counting its control."""
    unseen: int = 16
    """Hosts on which the policies are compared."""
    seed: int = 0
    """Random seed of the training."""
    out: Path = Path("runs/demo")
    """Output folder. If it exists, a number is added."""

    def run(self, console: Console) -> None:
        """Train here while a second process evaluates the rules."""
        start, task, folder = time.perf_counter(), get_task(TASK), free_path(self.out, "-", 2)
        console.print(
            f"Hosts of {TASK} classify handwritten digits with 1×1 kernels: they see pixels, never shapes. A "
            f"controller may grow small modules in {len(task.slot_ids)} slots of each, with up to "
            f"{task.parameter_budget:,} parameters in all. Its reward is the accuracy gained over a twin that never "
            "grows, minus a rent for every parameter.\n"
            f"Training it for {self.rounds} rounds of {self.hosts} hosts:"
        )
        config = TrainConfig(task=TASK, rounds=self.rounds, hosts=self.hosts, members=self.members, seed=self.seed)
        unseen = EvaluationConfig(TASK, self.unseen, EVALUATION_SEED)
        with worker_pool(1) as pool:
            rules = pool.submit(run_contenders, [Contender(unseen, PolicySpec.parse(name)) for name in RULES])
            trainer = Trainer(config, folder)
            trainer.run()
            if trainer.round < self.rounds:  # interrupted: `run` has printed how to resume
                raise SystemExit(128 + signal.SIGINT)
            console.print(f"Comparing it with rules on {self.unseen} unseen hosts …")
            results = {"learned": run_contenders([Contender(unseen, PolicySpec.parse(str(folder)))])}
            results |= {name: [result] for name, result in zip(RULES, rules.result(), strict=True)}
        comparison = TaskComparison(unseen, results, compare_all(results))
        (folder / "evaluation.json").write_text(dumps(comparison.to_json(), indent=1, allow_nan=False) + "\n")
        print_report(console, EvaluationReport({TASK: comparison}, [], []))
        for sentence in ["", *what_was_learned(read_run(folder)), _on_unseen(results["learned"])]:
            console.print(sentence)
        console.print(f"\nThe whole story, with pictures: {write_report(folder)}", soft_wrap=True)
        console.print(f"{(time.perf_counter() - start) / 60:.1f} minutes in all")


def _on_unseen(results: Sequence[Result]) -> str:
    hosts = [commits for result in results for commits in result.commits]
    commits = Counter(name for names in hosts for name in names)
    if not commits:
        return "On unseen hosts it committed nothing."
    most = ", ".join(f"{name.replace('/', ' ')} {number}" for name, number in commits.most_common(4))
    return f"On {len(hosts)} unseen hosts it committed {commits.total()} seeds: {most}."
