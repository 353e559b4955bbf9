"""What every seed, and the best pairs of seeds, are worth on a task's hosts, grown from the first step.

    python benchmarks/plan_table.py --task cifar_growth --epochs 8 12 20 --pairs 24 --device cuda --keep FOLDER
    python benchmarks/plan_table.py --task cifar_growth --rates 0.05 0.1 0.2 --shifts 2 4 --device cuda --keep FOLDER
    python benchmarks/plan_table.py --task cifar_varied --kinds all --hosts 2 --device cuda --keep FOLDER
    python benchmarks/plan_table.py --task shakespeare_char --shapes 2-32 3-32 --epochs 16 --device cuda --keep FOLDER
    python benchmarks/plan_table.py --task digits_varied --hosts 8 --told told.json --plan plan.json

A task is laid out by this: the length of its episodes, its slots, its budget, its rate and augmentation, and the kinds
of its hosts. Every combination of --epochs, --rates, --shifts and --shapes is a setting; with --keep a stopped call
continues.
Objectives are in points, on validation images of hosts of the tuning range.

Plans are chosen on every other host and scored on the rest, so that luck does not count. With several kinds, knowing
the kind is worth the best plan of each kind minus the best plan for all; `--kinds all` measures all designs, and then
every mix of designs whose blocks are drawn from two or more of 3w, 1w, 3n and 1n.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, count, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import RESULTS, Json, print_table, stored, write_result
from torch import Tensor

from esper.kasmina import CNNHost
from esper.leyline import gain_over, head_preset, objective
from esper.leyline.records import checksum, encode
from esper.simic.evaluation.arena import Arena, envs_at_once, hardened
from esper.simic.evaluation.yardsticks import extensions, plan_policy
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.simic.training.hosts import host_seed
from esper.storage.files import replace_file
from esper.tamiyo.policies import Plan
from esper.tolaria import Task, get_task
from esper.tolaria.data import ImageData

BLOCKS = ("3w", "1w", "3n", "1n")


class Setting(NamedTuple):
    """What is tried; None: as the task has it."""

    epochs: int | None
    rate: float | None
    shift: int | None
    shape: str | None

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name, value in self._asdict().items() if value is not None]
        return ", ".join(parts) or "as it is"


def variant(arguments: argparse.Namespace, setting: Setting) -> Task:
    """The task with the given changes."""
    task = get_task(arguments.task)
    budgets = {"task": task.parameter_budget, "none": sys.maxsize}
    changes: dict[str, Any] = {"budget": budgets.get(arguments.budget) or int(arguments.budget)}  # Any: fields
    if arguments.slots:
        changes["slot_ids"] = tuple(arguments.slots)
    if setting.rate is not None:
        changes["optimiser"] = replace(task.optimiser, rate=setting.rate)
    if setting.shift is not None:
        changes["shift"] = setting.shift
    if arguments.steps is not None:
        changes["steps"] = arguments.steps
    host = task.build_host()
    config: dict[str, Any] = dict(host.config() or {})  # Any: arguments of its constructor
    if arguments.kinds:
        kinds = designs(BLOCKS, len(config["channels"])) if arguments.kinds == ["all"] else arguments.kinds
        config["masked"], changes["defects"] = True, tuple(kinds)
    if setting.shape is not None:
        numbers = [int(number) for number in setting.shape.split("-")]
        if isinstance(host, CNNHost):
            config["channels"] = numbers
        else:
            config["layers"] = config["groups"] = numbers[0]
            config["width"] = numbers[1]
            changes["slot_ids"] = tuple(f"r0c{column}" for column in range(numbers[0] - 1))
    task = replace(task, build_host=partial(type(host), **config), **changes)
    if setting.epochs is None:
        return task
    minibatches = setting.epochs * samples_of(task, arguments.data_dir) / task.batch
    return replace(task, batches_per_step=max(1, round(minibatches / task.steps)))


def samples_of(task: Task, data_dir: Path | None) -> int:
    """Training images, or windows of text side by side."""
    data = task.load_data(data_dir)
    if isinstance(data, ImageData):
        return len(data.train.labels)
    return len(data.train) // int(task.slot_config.slots[0].resolution or 1)


def designs(blocks: Sequence[str], depth: int) -> list[str]:
    """All designs of these blocks."""
    return ["-".join(chosen) for chosen in product(blocks, repeat=depth)]


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


class Table:
    """The figures of one setting, block of hosts by block of hosts."""

    def __init__(self, arguments: argparse.Namespace, setting: Setting) -> None:
        self.task, self.arguments, self.setting = variant(arguments, setting), arguments, setting
        self.arena = Arena(self.task, head_preset("core"), device=arguments.device, data_dir=arguments.data_dir)
        kinds, hosts = self.task.defects, arguments.hosts
        self.seeds = {kind: seeds_of(self.task, kind, arguments.seed, hosts) for kind in kinds}
        self.speeds: list[float] = []  # of what was played now: trained images per second

    def play(self, plans: Sequence[Plan]) -> Tensor:
        """(plans, hosts of all kinds, 3)."""
        every = [seed for own in self.seeds.values() for seed in own]
        width = max(1, envs_at_once(self.arguments.device) // (len(plans) + 1))
        blocks = [every[start : start + width] for start in range(0, len(every), width)]
        return torch.cat([self._block(plans, block) for block in blocks], 1)

    def _block(self, plans: Sequence[Plan], seeds: Sequence[int]) -> Tensor:
        task = self.task
        identity: dict[str, Json] = {
            **{name: getattr(self.arguments, name) for name in ("task", "slots", "budget", "steps", "seed")},
            "setting": list(self.setting),
            "kinds": list(task.defects),
            "plans": [describe(plan) for plan in plans],
            "hosts": list(seeds),
        }

        def compute() -> Json:
            began = time.perf_counter()
            figures: Json = play(self.arena, plans, seeds).tolist()
            images = (len(plans) + 1) * len(seeds) * task.steps * task.batches_per_step * task.batch
            self.speeds.append(images / (time.perf_counter() - began))
            return figures

        return torch.tensor(stored(self.arguments.keep, checksum(identity)[:20], compute), dtype=torch.float64)


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


def pairs_of_kinds(table: Table, singles: Sequence[Plan], objectives: Tensor, most: int) -> list[Plan]:
    """The best pairs for all hosts and, if there are several kinds, for each of them; objectives (singles, hosts)."""
    own = objectives.split(table.arguments.hosts, 1) if len(table.seeds) > 1 else ()
    found = [pairs(table.task, singles, some.mean(1), most) for some in (objectives, *own)]
    return list(dict.fromkeys(plan for some in found for plan in some))


def report_kind(title: str, plans: Sequence[Plan], figures: Tensor, most: int) -> None:
    """The best plans of a kind; mean and standard error over hosts."""
    means = figures.mean(1)
    error = figures[..., 0].std(1) / figures.shape[1] ** 0.5 if figures.shape[1] > 1 else torch.zeros(len(plans))
    best = means[:, 0].argsort(descending=True)[:most].tolist()
    rows = [
        [describe(plans[index]), f"{means[index, 0]:+.2f} ± {error[index]:.2f}", f"{means[index, 1]:+.2f}"]
        for index in best
    ]
    accuracy = figures[plans.index(Plan()), :, 2].mean()
    print_table(f"{title}: alone {accuracy:.1f} %", ["plan", "objective", "gain"], rows)


def worth_of_knowing(by_kind: Mapping[str, Tensor]) -> tuple[float, float]:
    """Means over kinds of the best plan of each kind, and of the best plan for all: chosen on even hosts, scored on odd
    ones."""
    chosen_on, scored_on = (
        torch.stack([figures[:, part::2, 0].mean(1) for figures in by_kind.values()]) for part in (0, 1)
    )
    told = scored_on.gather(1, chosen_on.argmax(1, keepdim=True)).mean()
    return float(told), float(scored_on.mean(0)[chosen_on.mean(0).argmax()])


def mixes(kinds: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The designs that were measured, by what their blocks are drawn from."""
    for width in range(2, len(BLOCKS) + 1):
        for blocks in combinations(BLOCKS, width):
            chosen = {kind: own for kind, own in kinds.items() if set(kind.split("-")) <= set(blocks)}
            if chosen.keys() == set(designs(blocks, len(next(iter(kinds)).split("-")))):
                yield " ".join(blocks), chosen


def report_setting(arguments: argparse.Namespace, setting: Setting) -> dict[str, Any]:  # Any: JSON
    """Play one setting; print its tables; return its figures."""
    table = Table(arguments, setting)
    singles = [plan for plan in extensions(Plan(), table.task) if plan.seeds[0].germinate_at == 0]
    plans = [*singles, Plan()]
    figures = table.play(plans)
    if longer := pairs_of_kinds(table, singles, figures[:-1, :, 0], arguments.pairs):
        plans, figures = [*plans, *longer], torch.cat([figures, table.play(longer)])
    by_kind = dict(zip(table.seeds, figures.split(arguments.hosts, 1), strict=True))
    for kind, own in list(by_kind.items())[: arguments.show_kinds]:
        report_kind(f"{setting}; hosts of kind {kind}", plans, own, arguments.show)
    content: dict[str, Any] = {
        **setting._asdict(),
        "batches_per_step": table.task.batches_per_step,
        "images_per_second": max(table.speeds, default=None),
        "plans": [describe(plan) for plan in plans],
        "kinds": {
            kind: {"objective": own[..., 0].tolist(), "gain": own[..., 1].tolist()} for kind, own in by_kind.items()
        },
        "alone": {kind: statistics.fmean(own[plans.index(Plan()), :, 2].tolist()) for kind, own in by_kind.items()},
    }
    if arguments.told is not None:
        best = {kind: plans[int(own[..., 0].mean(1).argmax())] for kind, own in by_kind.items()}
        replace_file(arguments.told, json.dumps(encode(best), indent=1) + "\n")
    if arguments.plan is not None:
        replace_file(arguments.plan, json.dumps(encode(plans[int(figures[..., 0].mean(1).argmax())]), indent=1) + "\n")
    if arguments.hosts > 1:
        told, common = worth_of_knowing(by_kind)
        content |= {"told": told, "best_plan": common}
        content["mixes"] = {name: list(worth_of_knowing(chosen)) for name, chosen in mixes(by_kind)}
    return content


def main() -> None:
    """Play all plans in all settings, print the tables, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar_growth")
    parser.add_argument("--slots", nargs="*", default=[], help="instead of the task's")
    parser.add_argument("--kinds", nargs="*", default=[], help="of hosts, instead of the task's; all: every design")
    parser.add_argument("--epochs", type=int, nargs="*", default=[None], help="passes over the data in an episode")
    parser.add_argument("--rates", type=float, nargs="*", default=[None], help="learning rates")
    parser.add_argument("--shifts", type=int, nargs="*", default=[None], help="pixels by which images may move")
    parser.add_argument("--shapes", nargs="*", default=[None], help="widths of blocks, e.g. 8-16-32; layers-width")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--budget", default="task", help="parameters, `task` for the task's, or `none`")
    parser.add_argument("--hosts", type=int, default=4, help="of each kind")
    parser.add_argument("--pairs", type=int, default=0, help="also play this many pairs of the best seeds, per kind")
    parser.add_argument("--show", type=int, default=12, help="plans per table")
    parser.add_argument("--show-kinds", type=int, default=9, help="tables per setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--keep", type=Path, default=None, help="folder from which a stopped call continues")
    parser.add_argument("--told", type=Path, default=None, help="write the best plan of each kind, for `told:FILE`")
    parser.add_argument("--plan", type=Path, default=None, help="write the best plan for all, for `schedule:FILE`")
    parser.add_argument("--name", default="", help="added to the name of the JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = [
        Setting(*each) for each in product(arguments.epochs, arguments.rates, arguments.shifts, arguments.shapes)
    ]
    found = {setting: report_setting(arguments, setting) for setting in settings}
    rows = [
        [
            str(setting),
            f"{statistics.fmean(one['alone'].values()):.1f}",
            *(f"{one[name]:+.2f}" if name in one else "" for name in ("best_plan", "told")),
            "" if one["images_per_second"] is None else f"{one['images_per_second'] / 1e6:.2f} M",
        ]
        for setting, one in found.items()
    ]
    title = f"{arguments.task}: accuracy of hosts alone; objective of the best plan for all, and of each kind's best"
    print_table(title, ["setting", "alone", "best plan", "told", "images/s"], rows)
    for setting, one in found.items():
        if one.get("mixes"):
            mix_rows = [[name, f"{a:+.2f}", f"{b:+.2f}", f"{a - b:+.2f}"] for name, (a, b) in one["mixes"].items()]
            print_table(f"{setting}: blocks drawn from", ["blocks", "told", "best plan", "difference"], mix_rows)
    content: dict[str, Json] = {
        **{name: getattr(arguments, name) for name in ("task", "slots", "steps", "budget", "hosts", "seed")},
        "settings": list(found.values()),
    }
    print(write_result(f"plan_table_{arguments.task}{arguments.name and '_'}{arguments.name}", content, arguments.out))


if __name__ == "__main__":
    main()
