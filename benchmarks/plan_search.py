"""Does the search of plans by a model need half the episodes of successive halving?

    python benchmarks/plan_search.py --task digits_blind --episodes 480

Runs several independent searches by halving with all episodes, and as many by the model with half of them. All chosen
plans grow the same hosts of the evaluation range, scored on validation images. The interval of the difference holds for
new searches and new hosts. Searches that are stored in --plans are not repeated.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import RESULTS, print_table, write_result

from esper.leyline.records import encode
from esper.simic.evaluation.comparison import TaskComparison, run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig
from esper.simic.evaluation.statistics import MARGIN
from esper.simic.tuning import SearchMethod, tune, write_tuned
from esper.simic.tuning.search import LEAST_EPISODES
from esper.tamiyo.policies import Plan
from esper.tamiyo.policies.shipped import read_plan

FIRST_SEED: dict[SearchMethod, int] = {"model": 100, "halving": 0}  # no search has the hosts of another


def search(arguments: argparse.Namespace, method: SearchMethod, rng_seed: int, folder: Path) -> Path:
    """The file of one search, which is run unless the folder has it."""
    episodes = arguments.episodes // 2 if method == "model" else arguments.episodes
    path = folder / f"{arguments.task}-{method}-{episodes}-{rng_seed}.json"
    if not path.exists():
        hosts = {"data_dir": arguments.data_dir, "device": arguments.device, "workers": arguments.workers}
        tuned = tune(arguments.task, "schedule", episodes, rng_seed, arguments.preset, **hosts, search=method)
        write_tuned(path, tuned)
    return path


def evaluate(arguments: argparse.Namespace, files: dict[SearchMethod, list[Path]]) -> TaskComparison:
    """All plans on the same hosts: the model's first, so that it is compared with halving."""
    specs = ["schedule:" + "+".join(map(str, paths)) for paths in files.values()]
    config = EvaluationConfig(
        arguments.task,
        arguments.hosts,
        arguments.seed,
        arguments.preset,
        device=arguments.device,
        data_dir=arguments.data_dir,
    )
    report = run_comparisons([arguments.task], specs, config, margin=arguments.margin, workers=arguments.workers)
    return report.tasks[arguments.task]


def describe(plan: Plan) -> str:
    """A plan in few words."""
    return " + ".join(f"{seed.slot}/{seed.blueprint}@{seed.germinate_at}" for seed in plan.seeds) or "wait"


def main() -> None:
    """Search, evaluate, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--episodes", type=int, default=480, help="of a search by halving; the model has half of them")
    parser.add_argument("--searches", type=int, default=5, help="search seeds of each method")
    parser.add_argument("--hosts", type=int, default=128, help="on which the chosen plans are compared")
    parser.add_argument("--seed", type=int, default=7, help="selects these hosts")
    parser.add_argument("--margin", type=float, default=MARGIN, help="points for `not worse`")
    parser.add_argument("--preset", default="core")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--plans", type=Path, help="folder that stores the searches; omitted: they are not stored")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    if arguments.episodes < 2 * LEAST_EPISODES or arguments.searches < 2:
        parser.error(f"--episodes must be at least {2 * LEAST_EPISODES}, --searches at least 2")
    torch.set_num_threads(1)
    with TemporaryDirectory() as temporary:
        folder = arguments.plans or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[SearchMethod, list[Path]] = {
            method: [search(arguments, method, first + number, folder) for number in range(arguments.searches)]
            for method, first in FIRST_SEED.items()
        }
        comparison = evaluate(arguments, files)
        plans = {method: [read_plan(path) for path in paths] for method, paths in files.items()}
    objectives = {
        method: [result.objective for result in results]
        for method, results in zip(files, comparison.policies.values(), strict=True)
    }
    report(arguments, plans, objectives, comparison)


def report(
    arguments: argparse.Namespace,
    plans: dict[SearchMethod, list[Plan]],
    objectives: dict[SearchMethod, list[list[float]]],
    comparison: TaskComparison,
) -> None:
    """Print the table, write the JSON."""
    episodes = {"model": arguments.episodes // 2, "halving": arguments.episodes}
    print_table(
        comparison.title,
        ["search", "episodes", "seed", "objective", "plan"],
        [
            [method, episodes[method], FIRST_SEED[method] + number, f"{fmean(row):+.2f}", describe(plan)]
            for method, rows in objectives.items()
            for number, (row, plan) in enumerate(zip(rows, plans[method], strict=True))
        ],
    )
    claim = comparison.claims[0]
    found = claim.difference
    verdict = "not worse" if claim.not_worse else "no verdict"
    print(
        f"\nmodel − halving: {found.mean:+.2f} (95 % {found.low:+.2f} to {found.high:+.2f}), {verdict} by "
        f"{claim.margin:g}"
    )
    names = ("task", "episodes", "searches", "hosts", "seed", "margin", "preset")
    searches: dict[str, Any] = {
        method: {
            "episodes": episodes[method],
            "seeds": [FIRST_SEED[method] + number for number in range(len(rows))],
            "plans": [encode(plan) for plan in plans[method]],
            "objective": rows,
        }
        for method, rows in objectives.items()
    }
    verdicts = {name: getattr(claim, name) for name in ("enough_seeds", "superior", "not_worse", "margin")}
    content = {
        **{name: getattr(arguments, name) for name in names},
        "searches_by_method": searches,
        "difference": asdict(found) | verdicts,
    }
    print(write_result(f"plan_search_{arguments.task}", content, arguments.out))


if __name__ == "__main__":
    main()
