"""What the shipped controller does on hosts it never saw: other widths, other slots, other images.

    python benchmarks/transfer.py --workers 2
    python benchmarks/transfer.py --tasks fashion_small --device cuda

The controller was taught on digits, on hosts of 4, 8 and 16 channels with three slots. It is one controller, so the
intervals are over hosts, and hold for this controller. Scored on validation images.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness import RESULTS, Json, print_table, write_result

from esper.kasmina import CNNHost
from esper.leyline.records import encode
from esper.simic.evaluation.comparison import run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig
from esper.simic.evaluation.results import overall_mean
from esper.simic.training.policy_files import PRETRAINED, policy_preset
from esper.tolaria import Task, get_task
from esper.tolaria.tasks import TaskRegistry

AGAINST = ("random", "wait", "heuristic")


def variants() -> list[Task]:
    """The tasks of digits with other hosts."""

    def host(channels: tuple[int, ...], kernel_size: int) -> Callable[[], CNNHost]:
        return partial(CNNHost, channels, kernel_size, 3, 10, in_channels=1, resolution=8)

    blind, varied = get_task("digits_blind"), get_task("digits_varied")
    five = ("r0c0", "r1c0", "r0c1", "r1c1", "r1c2")
    return [
        replace(blind, name="digits_blind_wide", build_host=host((8, 16, 32), 1)),
        replace(blind, name="digits_blind_narrow", build_host=host((3, 6, 12), 1)),
        replace(blind, name="digits_blind_two_slots", slot_ids=("r1c0", "r1c1")),
        replace(blind, name="digits_blind_five_slots", slot_ids=five),
        replace(varied, name="digits_varied_five_slots", slot_ids=five),
        replace(get_task("digits"), name="digits_wide", build_host=host((8, 16, 32), 3)),
    ]


for _task in variants():  # at import, so that worker processes know them
    TaskRegistry.register(_task)


def measure(arguments: argparse.Namespace, task: str) -> tuple[list[list[object]], Json]:
    """Rows of one task, and its figures."""
    preset = policy_preset(Path(PRETRAINED))
    config = EvaluationConfig(task, arguments.hosts, arguments.seed, preset, device=arguments.device)
    policies = [PRETRAINED, *AGAINST]
    report = run_comparisons([task], policies, config, margin=arguments.margin, workers=arguments.workers)
    comparison = report.tasks[task]
    claims = {claim.against: claim for claim in comparison.claims if claim.policy == PRETRAINED}
    rows: list[list[object]] = []
    for name, results in comparison.policies.items():
        shown = ""
        if name in claims:
            gap = claims[name].difference
            shown = f"{gap.mean:+.2f} ({gap.low:+.2f} to {gap.high:+.2f})"
        added = overall_mean(results, "added_params")
        rows.append([task, name, f"{overall_mean(results, 'objective'):+.2f}", f"{added:.0f}", shown])
    figures: dict[str, Json] = {
        "objective": {name: list(results[0].objective) for name, results in comparison.policies.items()},
        "differences": {name: encode(claim.difference) for name, claim in claims.items()},
    }
    return rows, figures


def main() -> None:
    """Print one table, write one JSON."""
    names = [*(task.name for task in variants()), "fashion_small"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=names, default=names)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--seed", type=int, default=12, help="selects these hosts")
    parser.add_argument("--margin", type=float, default=0.2, help="points for `not worse`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    tasks: dict[str, Json] = {}
    for task in arguments.tasks:
        found, tasks[task] = measure(arguments, task)
        rows += found
    print_table(
        f"the shipped controller on {arguments.hosts} hosts of each task",
        ["task", "policy", "objective", "parameters", f"{PRETRAINED} − policy"],
        rows,
    )
    content: dict[str, Json] = {name: getattr(arguments, name) for name in ("hosts", "seed", "margin")}
    name = "transfer" if len(tasks) > 1 else f"transfer_{arguments.tasks[0]}"
    print(write_result(name, {**content, "tasks": tasks}, arguments.out))


if __name__ == "__main__":
    main()
