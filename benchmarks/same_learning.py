"""Does learning depend on how small convolutions are computed on the CPU? As matrix products, or by torch.

    python benchmarks/same_learning.py --keep FOLDER

Rounding differs between the two, so hosts differ after some minibatches. What controllers learn should not. For every
seed one controller is taught and trained with each arithmetic; all of them are evaluated on the same unseen hosts.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from harness import RESULTS, print_table, write_result

from esper.kasmina import row_layout
from esper.simic.evaluation.comparison import run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig
from esper.simic.evaluation.provenance import made_with
from esper.simic.evaluation.results import overall_mean
from esper.simic.evaluation.statistics import compare
from esper.simic.teaching import teach
from esper.simic.training.config import taught_config
from esper.simic.training.trainer import Trainer

SIZES = {"products": (row_layout.SMALL, row_layout.LONE), "torch": (0, 0)}
"""By arithmetic, the largest images that are computed as products: of rows, and of a single network."""


def train(arguments: argparse.Namespace, arithmetic: str, seed: int) -> Path:
    """Teach and train one controller, or continue; returns its run folder."""
    folder: Path = arguments.keep / f"{arithmetic}{seed}"
    config = replace(taught_config(arguments.teach), task=arguments.task, rounds=arguments.rounds, seed=seed)
    row_layout.SMALL, row_layout.LONE = SIZES[arithmetic]
    trainer = Trainer(
        config,
        folder,
        resume=(folder / "config.json").is_file(),
        begin=partial(teach, config, workers=1, progress=False),
    )
    trainer.run(progress=False)
    return folder


def main() -> None:
    """Train, evaluate, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_varied")
    parser.add_argument("--teach", type=int, default=300, help="episodes of the search that teaches a controller")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of PPO after it")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--eval-hosts", type=int, default=128)
    parser.add_argument("--eval-seed", type=int, default=12)
    parser.add_argument("--keep", type=Path, required=True, help="folder of the runs; a second call continues")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = {name: [train(arguments, name, seed) for seed in arguments.seeds] for name in SIZES}
    row_layout.SMALL, row_layout.LONE = SIZES["products"]
    preset = taught_config(arguments.teach).preset
    hosts = EvaluationConfig(arguments.task, arguments.eval_hosts, arguments.eval_seed, preset, final=False)
    specs = {name: "+".join(map(str, folders)) for name, folders in runs.items()}
    keep = arguments.keep / "results"
    report = run_comparisons([arguments.task], list(specs.values()), hosts, greedy=False, progress=False, keep=keep)
    results = {name: report.tasks[arguments.task].policies[spec] for name, spec in specs.items()}
    rows = {name: [one.objective for one in by_seed] for name, by_seed in results.items()}
    difference = compare(rows["products"], rows["torch"], paired=True)
    table = [[name, f"{overall_mean(one, 'objective'):+.2f}"] for name, one in results.items()]
    print_table(f"{arguments.task}: controllers after {arguments.rounds} rounds", ["arithmetic", "objective"], table)
    print(f"products − torch: {difference.mean:+.2f} ({difference.low:+.2f} to {difference.high:+.2f})")
    settings = {name: getattr(arguments, name) for name in ("task", "teach", "rounds", "eval_hosts", "eval_seed")}
    content = settings | {
        "objective": {name: [list(map(float, hosts)) for hosts in values] for name, values in rows.items()},
        "difference": {name: getattr(difference, name) for name in ("mean", "low", "high")},
        "provenance": made_with("python benchmarks/same_learning.py --keep FOLDER"),
    }
    print(write_result(f"same_learning_{arguments.task}", content, arguments.out))


if __name__ == "__main__":
    main()
