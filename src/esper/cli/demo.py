"""`esper demo`."""

import signal
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path

from rich.console import Console

from esper.cli.evaluate import print_report
from esper.karn import read_run, write_film, write_report
from esper.karn.sections import what_was_learned
from esper.simic.agent import PPOAgent
from esper.simic.evaluation.comparison import EvaluationReport, TaskComparison, kinds_of_hosts
from esper.simic.evaluation.policies import Contender, EvaluationConfig, PolicySpec
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.statistics import compare_all
from esper.simic.evaluation.workers import run_contenders, worker_pool
from esper.simic.teaching import teach
from esper.simic.training.config import taught_config
from esper.simic.training.trainer import Trainer
from esper.storage.files import free_path
from esper.tolaria import get_task

TASK = "digits_varied"
RULES = ("schedule", "heuristic:shipped", "random", "wait")
EVALUATION_SEED = 7
FILM = "growth.gif"
MEMBERS = 3  # hosts per group, without its control; small groups show hosts of more kinds


@dataclass(frozen=True)
class DemoCommand:
    """Teach a controller on hosts with different defects, compare it with rules on unseen hosts, and write a report.
    Takes about four minutes on two cores."""

    teach: int = 252
    """Episodes of the search for plans that the controller imitates."""
    rounds: int = 2
    """Rounds of PPO afterwards."""
    hosts: int = 16
    """Hosts per round, including controls."""
    unseen: int = 24
    """Hosts on which the policies are compared."""
    workers: int = 2
    """Processes of the search."""
    seed: int = 0
    """Random seed of the training."""
    out: Path = Path("runs/demo")
    """Output folder. If it exists, a number is added."""

    def run(self, console: Console) -> None:
        """Teach, then train here while a second process evaluates the rules."""
        start, task, folder = time.perf_counter(), get_task(TASK), free_path(self.out, "-", 2)
        console.print(
            f"Hosts of {TASK} classify handwritten digits, and each has its own defect: some see pixels but no "
            "shapes, some of those pass nothing on that grows in their first slot, and some are sound. Nobody tells "
            f"the controller which. It may grow small modules in {len(task.slot_ids)} slots of each host, with "
            f"{task.parameter_budget} parameters in all; that pays for one good module, so no plan suits all hosts.\n"
            f"Searching plans on some hosts with {self.teach} episodes; the controller imitates what was best on each:"
        )
        config = taught_config(self.teach)
        config = replace(config, task=TASK, rounds=self.rounds, hosts=self.hosts, members=MEMBERS, seed=self.seed)
        unseen = EvaluationConfig(TASK, self.unseen, EVALUATION_SEED, config.preset)
        with worker_pool(1) as pool:
            rules: list[Future[list[Result]]] = []

            def begin(agent: PPOAgent, path: Path) -> None:
                teach(config, agent, path, workers=self.workers)
                rules.append(pool.submit(run_contenders, [Contender(unseen, PolicySpec.parse(rule)) for rule in RULES]))
                console.print(f"Improving it by PPO for {self.rounds} rounds of {self.hosts} hosts:")

            trainer = Trainer(config, folder, begin=begin)
            trainer.run()
            if trainer.round < self.rounds:  # interrupted: `run` has printed how to resume
                raise SystemExit(128 + signal.SIGINT)
            console.print(f"Comparing it with rules on {self.unseen} unseen hosts …")
            results = {"learned": run_contenders([Contender(unseen, PolicySpec.parse(str(folder)))])}
            results |= {name: [result] for name, result in zip(RULES, rules[0].result(), strict=True)}
        kinds = kinds_of_hosts(unseen, results)
        comparison = TaskComparison(unseen, results, compare_all(results), kinds=kinds)
        (folder / "evaluation.json").write_text(dumps(comparison.to_json(), indent=1, allow_nan=False) + "\n")
        print_report(console, EvaluationReport({TASK: comparison}, [], []))
        for sentence in ["", *what_was_learned(read_run(folder)), _on_unseen(results["learned"])]:
            console.print(sentence)
        console.print(f"\nThe whole story, with pictures: {write_report(folder)}", soft_wrap=True)
        console.print(f"The best host of the last round, growing: {write_film(folder, folder / FILM)}", soft_wrap=True)
        console.print(f"{(time.perf_counter() - start) / 60:.1f} minutes in all")


def _on_unseen(results: Sequence[Result]) -> str:
    hosts = [commits for result in results for commits in result.commits]
    commits = Counter(name for names in hosts for name in names)
    if not commits:
        return "On unseen hosts it committed nothing."
    most = ", ".join(f"{name.replace('/', ' ')} {number}" for name, number in commits.most_common(4))
    return f"On {len(hosts)} unseen hosts it committed {commits.total()} seeds: {most}."
