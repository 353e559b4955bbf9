"""What every seed, and the best pairs of seeds, are worth on a task's hosts, grown from the first step.

    python benchmarks/plan_table.py --task cifar_baseline --epochs 20 --slots r0c0 r1c0 r0c1 r1c1 r1c2 --device cuda
    python benchmarks/plan_table.py --task digits_varied --hosts 8
    python benchmarks/plan_table.py --task cifar_baseline --kinds 3w-3w-3w 3n-3w-3w 3w-1n-3w --hosts 4 --device cuda

A task is laid out by this: the length of its episodes, its slots, its budget, and the kinds of its hosts. Objectives
are in points, on validation images of hosts of the tuning range. With several kinds the last line says what knowing
the kind is worth: the best plan of each kind, minus the best plan for all. Plans are chosen on every other host and
scored on the rest, so that luck does not count.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, count, islice
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Json, print_table, write_result
from torch import Tensor

from esper.kasmina import CNNHost
from esper.leyline import gain_over, head_preset, objective
from esper.simic.evaluation.arena import Arena, hardened
from esper.simic.evaluation.yardsticks import extensions, plan_policy
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.simic.training.hosts import host_seed
from esper.tamiyo.policies import Plan
from esper.tolaria import Task, get_task
from esper.tolaria.data import ImageData


def variant(arguments: argparse.Namespace) -> Task:
    """The task with the given changes."""
    task = get_task(arguments.task)
    changes: dict[str, Any] = {"budget": sys.maxsize if arguments.budget is None else arguments.budget}  # Any: fields
    if arguments.slots:
        changes["slot_ids"] = tuple(arguments.slots)
    if arguments.rate is not None:
        changes["optimiser"] = replace(task.optimiser, rate=arguments.rate)
    if arguments.steps is not None:
        changes["steps"] = arguments.steps
    if arguments.kinds:
        host = task.build_host()
        config: dict[str, Any] = {**(host.config() or {}), "masked": True}  # Any: arguments of its constructor
        changes |= {"build_host": partial(CNNHost, **config), "defects": tuple(arguments.kinds)}
    task = replace(task, **changes)
    if arguments.epochs is None:
        return task
    data = task.load_data(arguments.data_dir)
    assert isinstance(data, ImageData)
    return replace(task, batches_per_step=max(1, arguments.epochs * len(data.train.labels) // task.batch // task.steps))


def seeds_of(task: Task, kind: str, rng_seed: int, hosts: int) -> list[int]:
    """The first hosts of this kind in the tuning range."""
    numbered = (host_seed("tuning", rng_seed, number) for number in count())
    return list(islice((seed for seed in numbered if task.defect_of(seed) == kind), hosts))


def _figures(runner: EpisodeRunner, result: StepResult) -> Tensor:
    """(n, 3): objective, gain, accuracy."""
    accuracy, control, added = (column.double() for column in hardened(result))
    gain = gain_over(control, accuracy, by_loss=result.by_loss)
    return torch.stack([objective(gain, added, runner.host_sizes.double()), gain, accuracy], -1)


def play(arena: Arena, plans: Sequence[Plan], seeds: Sequence[int]) -> Tensor:
    """(plans, hosts, 3)."""
    return arena.run(plan_policy, [list(plans)] * len(seeds), seeds, _figures).transpose(0, 1)


def describe(plan: Plan) -> str:
    """A plan in few words."""
    return " + ".join(f"{seed.slot} {seed.blueprint}" for seed in plan.seeds) or "wait"


def pairs(task: Task, singles: Sequence[Plan], means: Tensor, most: int) -> list[Plan]:
    """The pairs of single plans in two slots with the highest sums, within the budget."""
    sizes = {
        (slot.slot_id, offer.name): offer.parameters for slot in task.slot_config.slots for offer in slot.blueprints
    }
    value = dict(zip(singles, means.tolist(), strict=True))
    found = [
        Plan((*one.seeds, *two.seeds))
        for one, two in combinations(singles, 2)
        if one.seeds[0].slot != two.seeds[0].slot
        and sum(sizes[seed.slot, seed.blueprint] for seed in (*one.seeds, *two.seeds)) <= task.parameter_budget
    ]
    return sorted(found, key=lambda plan: -sum(value[Plan((seed,))] for seed in plan.seeds))[:most]


def report_kind(kind: str, plans: Sequence[Plan], figures: Tensor, most: int) -> None:
    """The best plans of a kind; mean and standard error over hosts."""
    means = figures.mean(1)
    error = figures[..., 0].std(1) / figures.shape[1] ** 0.5 if figures.shape[1] > 1 else torch.zeros(len(plans))
    best = means[:, 0].argsort(descending=True)[:most].tolist()
    rows = [
        [describe(plans[index]), f"{means[index, 0]:+.2f} ± {error[index]:.2f}", f"{means[index, 1]:+.2f}"]
        for index in best
    ]
    accuracy = figures[plans.index(Plan()), :, 2].mean()
    print_table(f"hosts of kind {kind}: alone {accuracy:.1f} %", ["plan", "objective", "gain"], rows)


def worth_of_knowing(by_kind: dict[str, Tensor]) -> tuple[float, float]:
    """Means over kinds of the best plan of each kind, and of the best plan for all: chosen on even hosts, scored on odd
    ones."""
    chosen_on, scored_on = (
        torch.stack([figures[:, part::2, 0].mean(1) for figures in by_kind.values()]) for part in (0, 1)
    )
    told = scored_on.gather(1, chosen_on.argmax(1, keepdim=True)).mean()
    return float(told), float(scored_on.mean(0)[chosen_on.mean(0).argmax()])


def main() -> None:
    """Play all plans, print the tables, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar_baseline")
    parser.add_argument("--slots", nargs="*", default=[], help="instead of the task's")
    parser.add_argument("--kinds", nargs="*", default=[], help="of hosts, instead of the task's")
    parser.add_argument("--epochs", type=int, default=None, help="passes over the data in an episode")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--rate", type=float, default=None, help="learning rate")
    parser.add_argument("--budget", type=int, default=None, help="default: unlimited")
    parser.add_argument("--hosts", type=int, default=4, help="of each kind")
    parser.add_argument("--pairs", type=int, default=0, help="also play this many pairs of the best seeds")
    parser.add_argument("--show", type=int, default=12, help="plans per table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--name", default="", help="added to the name of the JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = variant(arguments)
    arena = Arena(task, head_preset("core"), device=arguments.device, data_dir=arguments.data_dir)
    singles = [plan for plan in extensions(Plan(), task) if plan.seeds[0].germinate_at == 0]
    plans = [*singles, Plan()]
    seeds = {kind: seeds_of(task, kind, arguments.seed, arguments.hosts) for kind in task.defects}
    every = [seed for own in seeds.values() for seed in own]
    figures = play(arena, plans, every)
    if longer := pairs(task, singles, figures[:-1, :, 0].mean(1), arguments.pairs):
        plans, figures = [*plans, *longer], torch.cat([figures, play(arena, longer, every)])
    by_kind = dict(zip(seeds, figures.split(arguments.hosts, 1), strict=True))
    for kind, own in by_kind.items():
        report_kind(kind, plans, own, arguments.show)
    content: dict[str, Json] = {
        **{name: getattr(arguments, name) for name in ("task", "slots", "epochs", "steps", "rate", "hosts", "seed")},
        "batches_per_step": task.batches_per_step,
        "plans": [describe(plan) for plan in plans],
        "kinds": {
            kind: {"objective": own[..., 0].tolist(), "gain": own[..., 1].tolist()} for kind, own in by_kind.items()
        },
        "alone": {kind: statistics.fmean(own[plans.index(Plan()), :, 2].tolist()) for kind, own in by_kind.items()},
    }
    if len(by_kind) > 1 and arguments.hosts > 1:
        told, common = worth_of_knowing(by_kind)
        content |= {"told": told, "best_plan": common}
        print(f"\nthe best plan of each kind {told:+.2f}, the best plan for all {common:+.2f}: {told - common:+.2f}")
    print(write_result(f"plan_table_{task.name}{arguments.name and '_'}{arguments.name}", content, arguments.out))


if __name__ == "__main__":
    main()
