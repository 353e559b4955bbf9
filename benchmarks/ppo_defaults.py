"""Which defaults of PPO learn most from few episodes, without teaching: one table of settings.

    python benchmarks/ppo_defaults.py --episodes 392 --workers 16 --keep FOLDER

Every setting trains several seeds on every task with about the same number of episodes. All runs of a task are compared
on the same unseen hosts, scored on validation images. Runs are stored in FOLDER, and a second call continues.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from harness import RESULTS, Json, print_table, spread, write_result

from esper.simic.evaluation.comparison import run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig
from esper.simic.training.config import TrainConfig
from esper.simic.training.trainer import Trainer

SMALL_STEPS: dict[str, Any] = {"rate": 1e-3, "rate_end": 1.0, "epochs": 4, "target_kl": 0.03}
LARGER_STEPS: dict[str, Any] = {"rate": 3e-3, "rate_end": 0.1, "epochs": 8, "target_kl": 0.1}


class Setting(NamedTuple):
    """A row of the table."""

    preset: str
    hosts: int  # per round, controls included
    members: int  # per group, without its control
    ppo: dict[str, Any]  # changes of PPO's settings

    def config(self, task: str, episodes: int, seed: int) -> TrainConfig:
        """The run of one training seed."""
        per_round = self.hosts * self.members // (self.members + 1)
        names: dict[str, Any] = {"preset": self.preset, "hosts": self.hosts, "members": self.members}
        base = TrainConfig(task, rounds=max(1, round(episodes / per_round)), seed=seed)
        return replace(base, **names, ppo=replace(base.ppo, **self.ppo))


SETTINGS = {
    "core": Setting("core", 32, 3, SMALL_STEPS),
    "commit": Setting("commit", 32, 3, SMALL_STEPS),
    "commit, larger steps": Setting("commit", 32, 3, LARGER_STEPS),
    "commit, small rounds": Setting("commit", 16, 3, SMALL_STEPS),
    "commit, small rounds, larger steps": Setting("commit", 16, 3, LARGER_STEPS),
    "commit, small rounds, larger steps, 7 + 1": Setting("commit", 16, 7, LARGER_STEPS),
    "commit, small rounds, larger steps, 7 + 1, leave one out": Setting(
        "commit", 16, 7, LARGER_STEPS | {"leave_one_out": True}
    ),
    "core, small rounds, larger steps, 7 + 1, leave one out": Setting(
        "core", 16, 7, LARGER_STEPS | {"leave_one_out": True}
    ),
}


def folder_of(arguments: argparse.Namespace, name: str, task: str, seed: int) -> Path:
    """The folder of a run."""
    return Path(arguments.keep) / f"{task}-{list(SETTINGS).index(name)}-{seed}"


def train(arguments: argparse.Namespace, job: tuple[int, str, str]) -> None:
    """Train one seed of one setting, or continue it."""
    torch.set_num_threads(1)
    seed, task, name = job
    folder = folder_of(arguments, name, task, seed)
    config = SETTINGS[name].config(task, arguments.episodes, seed)
    Trainer(config, folder, resume=(folder / "config.json").is_file()).run(progress=False)


def evaluate(arguments: argparse.Namespace, task: str) -> dict[str, list[float]]:
    """Objectives by setting, a mean over the hosts per training seed."""
    found: dict[str, list[float]] = {}
    for preset in dict.fromkeys(setting.preset for setting in SETTINGS.values()):
        names = [name for name in arguments.settings if SETTINGS[name].preset == preset]
        specs = {
            "+".join(str(folder_of(arguments, name, task, seed)) for seed in arguments.seeds): name for name in names
        }
        config = EvaluationConfig(task, arguments.eval_hosts, arguments.eval_seed, preset)
        kept: dict[str, Any] = {"workers": arguments.workers, "progress": False, "keep": arguments.keep / "results"}
        report = run_comparisons([task], list(specs), config, **kept) if specs else None
        for spec, results in report.tasks[task].policies.items() if report else ():
            found[specs[spec]] = [fmean(result.objective) for result in results]
    return found


def main() -> None:
    """Train, evaluate, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["digits_blind", "digits_varied"])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--episodes", type=int, default=392, help="of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--eval-hosts", type=int, default=32)
    parser.add_argument("--eval-seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--train-only", action="store_true", help="evaluate in a later call")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    jobs = list(product(arguments.seeds, arguments.tasks, arguments.settings))
    if arguments.workers == 1:
        for job in jobs:
            train(arguments, job)
    else:
        with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(partial(train, arguments), jobs))
    if arguments.train_only:
        return
    found = {task: evaluate(arguments, task) for task in arguments.tasks}
    rows = [[name, *(spread(found[task][name]) for task in arguments.tasks)] for name in arguments.settings]
    print_table(f"objective after about {arguments.episodes} episodes", ["setting", *arguments.tasks], rows)
    objectives: dict[str, Json] = {task: dict(by_setting) for task, by_setting in found.items()}
    settings: dict[str, Json] = {name: json.loads(json.dumps(SETTINGS[name]._asdict())) for name in arguments.settings}
    names = ("episodes", "seeds", "eval_hosts", "eval_seed")
    content = {**{name: getattr(arguments, name) for name in names}, "settings": settings, "objectives": objectives}
    print(write_result("ppo_defaults", content, arguments.out))


if __name__ == "__main__":
    main()
