"""Accuracy for parameters: hosts of three sizes that a controller grows, against static and searched networks.

    python benchmarks/frontier.py --policy runs/seed0+runs/seed1 --sizes 8-16-32:11400 --device cuda --keep FOLDER
    python benchmarks/frontier.py --policy schedule:plan.json --device cuda --final --keep FOLDER

A size is the widths of the host and the most parameters that it may reach. Per size and host seed:

- `grown`: the controller grows the host in an episode of --epochs passes over the data, likeliest actions.
- `host`: its control, which never grows.
- `static`: a host widened to the mean size of the grown ones; it trains for as long as their whole work allows.
- `search`: architectures of the same space, drawn at random and trained from scratch. The best of k and of all are
  chosen on validation images; k is the work of growing over that of one such training. The best of k is the mean over
  all choices of k among those of one host seed.
- `retrained`: the grown architectures, trained from scratch.

Work is in trainings of the smallest task's host for as many epochs, all passes counted. The last column adds the
episodes that the controller learned from. --final scores on test images, else further validation images are used.
Stages are stored in --keep, and a second call continues; --stages and --sizes select some, so that a call stays short.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from harness import RESULTS, Json, print_table, stored, write_result

from esper.kasmina import CNNHost
from esper.leyline import derive_seed
from esper.leyline.records import checksum, encode
from esper.simic.evaluation.costs import CostMeter
from esper.simic.evaluation.final_log import sign_policies
from esper.simic.evaluation.policies import (
    Contender,
    EvaluationConfig,
    PolicySpec,
    check_specs,
    learned_runs,
    preset_of,
    unfinished,
)
from esper.simic.evaluation.results import Fossil, Result, overall_mean
from esper.simic.evaluation.statistics import compare
from esper.simic.evaluation.workers import host_seeds, run_contenders
from esper.simic.evaluation.yardsticks import install, static_hosts
from esper.simic.teaching import first_plans
from esper.simic.training.hosts import growth_fleet
from esper.simic.training.policy_files import is_run
from esper.simic.training.run_folder import read_config
from esper.tamiyo.policies.shipped import search_of
from esper.tolaria import Task, TaskRegistry, get_task
from esper.tolaria.data import ImageData

SIZES = ("8-16-32:11400", "12-24-48:33700", "16-32-64:62700")
STAGES = ("grow", "scratch", "static")
LEAST_SHARE = 0.7  # of the budget that a drawn architecture has at least


class Trained(NamedTuple):
    """Networks that were trained without decisions; lists over them."""

    validation: list[float]
    accuracy: list[float]  # on test images with --final
    work: list[float]


def task_of(arguments: argparse.Namespace, size: str) -> Task:
    """The task with a host of these widths, the budget of this size and episodes of so many epochs; registered."""
    widths, total = size.split(":")
    base, name = get_task(arguments.task), f"{arguments.task} {size} {arguments.epochs}"
    if name in TaskRegistry.names():
        return get_task(name)
    config: dict[str, Any] = dict(base.build_host().config() or {})  # Any: arguments of its constructor
    config["channels"] = [int(width) for width in widths.split("-")]
    data = base.load_data(arguments.data_dir)
    assert isinstance(data, ImageData)
    per_step = max(1, round(arguments.epochs * len(data.train.labels) / base.batch / base.steps))
    task = replace(base, name=name, build_host=partial(CNNHost, **config), batches_per_step=per_step)
    return TaskRegistry.register(replace(task, budget=int(total) - task.host_parameters))


def evaluation_of(arguments: argparse.Namespace, task: Task) -> EvaluationConfig:
    """The hosts, and how they are scored."""
    preset = preset_of([arguments.policy])
    return EvaluationConfig(
        task.name,
        arguments.hosts,
        arguments.seed,
        preset,
        arguments.final,
        "shadow",
        arguments.device,
        arguments.data_dir,
    )


def grow(arguments: argparse.Namespace, task: Task) -> Json:
    """The controllers grow the hosts side by side: one result per training seed."""
    spec, config = PolicySpec.parse(arguments.policy), evaluation_of(arguments, task)
    contenders = [Contender(config, member, greedy=member.learned) for member in spec.members]
    return [asdict(result) for result in run_contenders(contenders)]


def train(
    arguments: argparse.Namespace, task: Task, seeds: Sequence[int], fossils: Sequence[Sequence[Fossil]]
) -> dict[str, Json]:
    """Train hosts of these seeds with these fossils in place from the first minibatch."""
    batches = task.load_batches(arguments.data_dir, arguments.device)
    fleet = growth_fleet(task, len(seeds), arguments.device, seeds, batches=batches)
    for env, own in enumerate(fossils):
        install(fleet, env, own)
    meter = CostMeter(fleet, final=arguments.final, plain=get_task(arguments.task))
    meter.begin(range(fleet.n))
    structure = meter.structure()
    for _ in range(task.steps):
        fleet.train_step()
        meter.train(structure)
        fleet.tick()
    meter.harden(structure)
    work = torch.tensor(list(meter.cost().values())).sum(0)
    validation = fleet.points(fleet.validate_committed())
    accuracy = fleet.points(fleet.validate_committed(final=True)) if arguments.final else validation
    return Trained(validation.tolist(), accuracy.tolist(), work.tolist())._asdict()


def work_of(arguments: argparse.Namespace, task: Task) -> float:
    """The work of one training of a task's host without seeds; nothing is trained."""
    batches = task.load_batches(arguments.data_dir, arguments.device)
    meter = CostMeter(growth_fleet(task, 1, arguments.device, batches=batches), plain=get_task(arguments.task))
    meter.begin([0])
    for _ in range(task.steps):
        meter.train(meter.structure())
    return sum(values[0] for values in meter.cost().values())


def drawn_architectures(task: Task, count: int, rng_seed: int) -> list[list[Fossil]]:
    """Random seeds in random slots, within the budget and not far below it."""
    dice, found = random.Random(derive_seed(rng_seed, "frontier", task.name)), list[list[Fossil]]()
    while len(found) < count:
        left, own = task.parameter_budget, list[Fossil]()
        for slot in dice.sample(task.slot_config.slots, dice.randint(1, len(task.slot_config))):
            if offers := [offer for offer in slot.blueprints if offer.parameters <= left]:
                chosen = dice.choice(offers)
                left -= chosen.parameters
                own.append(Fossil(slot.slot_id, chosen.name))
        if left <= (1 - LEAST_SHARE) * task.parameter_budget:
            found.append(own)
    return found


def parameters_of(task: Task, fossils: Sequence[Fossil]) -> int:
    """Of a host with these fossils."""
    sizes = {
        (slot.slot_id, offer.name): offer.parameters for slot in task.slot_config.slots for offer in slot.blueprints
    }
    return task.host_parameters + sum(sizes[fossil.slot_id, fossil.blueprint] for fossil in fossils)


class Size:
    """Everything that is measured at one size; a stage runs when it is first asked for."""

    def __init__(self, arguments: argparse.Namespace, size: str) -> None:
        self.arguments, self.name, self.task = arguments, size, task_of(arguments, size)
        self.seeds = host_seeds(evaluation_of(arguments, self.task))
        self.drawn = drawn_architectures(self.task, arguments.architectures, arguments.seed)
        names = ("task", "policy", "epochs", "hosts", "architectures", "seed", "final")
        self._identity = checksum({"size": size, **{name: getattr(arguments, name) for name in names}})[:12]

    def _stored(self, stage: str, compute: Callable[[], Json]) -> Any:  # Any: JSON
        return stored(self.arguments.keep, f"{stage}-{self._identity}", compute)

    @cached_property
    def alone(self) -> float:
        """The work of a host without seeds."""
        return work_of(self.arguments, self.task)

    @cached_property
    def grown(self) -> list[Result]:
        """One result per training seed; work in units of the host alone."""
        found = self._stored("grow", partial(grow, self.arguments, self.task))
        return [Result(**{**one, "fossils": [[Fossil(*f) for f in own] for own in one["fossils"]]}) for one in found]

    @cached_property
    def scratch(self) -> tuple[Trained, Trained]:
        """The drawn architectures and the retrained ones, in one fleet."""
        retrained = [own for result in self.grown for own in result.fossils]
        seeds = [self.seeds[number % len(self.seeds)] for number in range(len(self.drawn))]
        seeds += self.seeds * len(self.grown)
        found = self._stored("scratch", partial(train, self.arguments, self.task, seeds, [*self.drawn, *retrained]))
        cut = len(self.drawn)
        drawn, again = (Trained(**{n: v[part] for n, v in found.items()}) for part in (slice(cut), slice(cut, None)))
        return drawn, again

    @cached_property
    def static(self) -> tuple[int, Trained]:
        """The size of a widened host, and its training for as long as the work of the grown ones allows."""
        added = overall_mean(self.grown, "added_params")
        wide = replace(self.task, build_host=static_hosts(self.task, [round(added)])[0])
        longer = overall_mean(self.grown, "cost") * self.alone / work_of(self.arguments, wide)
        wide = replace(wide, batches_per_step=max(1, round(longer * self.task.batches_per_step)))
        found = Trained(**self._stored("static", partial(train, self.arguments, wide, self.seeds, [])))
        longer = wide.batches_per_step / self.task.batches_per_step  # work counts in trainings of the given length
        return wide.host_parameters, found._replace(work=[work * longer for work in found.work])

    def run(self, stages: Sequence[str]) -> None:
        """Run some stages, for a call that is too short for all of them."""
        for stage in stages:
            getattr(self, {"grow": "grown"}.get(stage, stage))

    def report(self, controller: float) -> dict[str, Any]:  # Any: JSON
        """All figures; `controller` is the work that the controller learned from."""
        grown, (drawn, again), (static_size, static) = self.grown, self.scratch, self.static
        hosts, rows = len(self.seeds), [result.accuracy for result in self.grown]
        work = overall_mean(grown, "cost") * self.alone
        k = max(1, round(work / fmean(drawn.work)))
        best_of_k = [fmean_of_best(drawn, range(host, len(self.drawn), hosts), k) for host in range(hosts)]
        best = max(range(len(self.drawn)), key=lambda number: drawn.validation[number])
        retrained = [again.accuracy[start : start + hosts] for start in range(0, len(again.accuracy), hosts)]
        against = {"static": [static.accuracy], "best of k": [best_of_k], "retrained": retrained}
        paired = {"retrained"}
        return {
            "size": self.name,
            "host": {"parameters": self.task.host_parameters, "accuracy": grown[0].control_accuracy},
            "grown": {
                "parameters": [[self.task.host_parameters + n for n in result.added_params] for result in grown],
                "accuracy": rows,
                "fossils": [result.commits for result in grown],
            },
            "static": {"parameters": static_size, "accuracy": static.accuracy},
            "search": {
                "parameters": [parameters_of(self.task, own) for own in self.drawn],
                "accuracy": drawn.accuracy,
                "validation": drawn.validation,
                "k": k,
                "best_of_k": best_of_k,
                "best": {"parameters": parameters_of(self.task, self.drawn[best]), "accuracy": drawn.accuracy[best]},
            },
            "retrained": {"accuracy": retrained},
            "work": {
                "host": self.alone,
                "grown": work,
                "with_controller": work + controller,
                "static": fmean(static.work),
                "search": fmean(drawn.work),
            },
            "differences": {
                name: encode(compare(rows, theirs, paired=name in paired and len(rows) > 1))
                for name, theirs in against.items()
            },
        }


def fmean_of_best(drawn: Trained, numbers: Sequence[int], k: int) -> float:
    """Mean accuracy of the best of k by validation, over all choices of k among these numbers."""
    choices = combinations(numbers, min(k, len(numbers)))
    return fmean(drawn.accuracy[max(chosen, key=lambda number: drawn.validation[number])] for chosen in choices)


def controller_work(arguments: argparse.Namespace) -> float:
    """Episodes that the controllers learned from, controls included, as trainings of the task's host: mean over seeds.

    Episodes of the task have its own length, so they are scaled to --epochs. Rules have none; plans have their search.
    """
    base = get_task(arguments.task)
    scale = base.batches_per_step / task_of(arguments, arguments.sizes[0]).batches_per_step
    counts = [0.0]
    spec = PolicySpec.parse(arguments.policy)
    if spec.learned:
        counts = [float(trainings_of(Path(run))) for run in spec.runs]
    elif files := spec.tuned_files(base):
        counts = [float((search_of(file) or {}).get("budget", 0)) for file in files]
    return fmean(counts) * scale


def trainings_of(run: Path) -> float:
    """Hosts that a run trained: those of its rounds, and those of its search with their controls."""
    if not is_run(run):
        return 0.0  # a policy file does not tell
    config = read_config(run)
    plans = [len(first_plans(get_task(name))) for name in config.tasks]
    return config.rounds * config.hosts + config.teach.episodes * (1 + 1 / fmean(plans))


def main() -> None:
    """Run the stages; once all are there, print one table and write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar_growth")
    parser.add_argument("--policy", required=True, help="as `esper evaluate` names it; + joins training seeds")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="WIDTHS:PARAMETERS")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--hosts", type=int, default=4, help="host seeds per size")
    parser.add_argument("--architectures", type=int, default=20)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--seed", type=int, default=7, help="which unseen hosts")
    parser.add_argument("--final", action="store_true", help="hosts of the final range, scored on test images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--keep", type=Path, default=None, help="folder from which a stopped call continues")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [Size(arguments, size) for size in arguments.sizes]
    specs = [PolicySpec.parse(arguments.policy)]
    for size in sizes:
        check_specs(specs, evaluation_of(arguments, size.task))
    warnings = unfinished(learned_runs(specs))
    if arguments.final:
        warnings += sign_policies(specs, [arguments.task], arguments.hosts, arguments.seed, resumed=True)
    print(*(f"warning: {warning}\n" for warning in warnings), sep="", end="")
    for size in sizes:
        size.run(arguments.stages)
    if set(arguments.stages) != set(STAGES):
        print(f"stored {', '.join(arguments.stages)} of {len(sizes)} sizes")
        return
    controller = controller_work(arguments)
    found = [size.report(controller) for size in sizes]
    show(arguments, found)
    content: dict[str, Json] = {
        **{name: getattr(arguments, name) for name in ("task", "epochs", "hosts", "architectures", "seed", "final")},
        "controller_work": controller,
        "sizes": found,
        "warnings": warnings,
    }
    print(write_result(f"frontier_{arguments.task}", content, arguments.out))


def show(arguments: argparse.Namespace, found: Sequence[dict[str, Any]]) -> None:  # Any: JSON
    """The table, and the claims."""
    rows = []
    for one in found:
        grown, search, work = one["grown"], one["search"], one["work"]
        rows.append(
            [
                f"{one['host']['parameters']:,} → {mean_of(grown['parameters']):,.0f}",
                f"{fmean(one['host']['accuracy']):.1f}",
                f"{mean_of(grown['accuracy']):.1f}",
                f"{fmean(one['static']['accuracy']):.1f} ({one['static']['parameters']:,})",
                f"{fmean(search['best_of_k']):.1f} (k = {search['k']})",
                f"{search['best']['accuracy']:.1f} ({search['best']['parameters']:,})",
                f"{mean_of(one['retrained']['accuracy']):.1f}",
                f"{work['grown']:.1f}",
                f"{work['with_controller']:.0f}",
            ]
        )
    images = "test" if arguments.final else "validation"
    print_table(
        f"{arguments.task}, {arguments.epochs} epochs, {arguments.hosts} hosts per size, accuracy on {images} images",
        ["parameters", "host", "grown", "static", "best of k", "best drawn", "retrained", "work", "with controller"],
        rows,
    )
    for one in found:
        for name, d in one["differences"].items():
            print(f"{one['size']}: grown − {name} {d['mean']:+.2f} ({d['low']:+.2f} to {d['high']:+.2f})")


def mean_of(rows: Sequence[Sequence[float]]) -> float:
    """Mean over training seeds and hosts."""
    return fmean(value for row in rows for value in row)


if __name__ == "__main__":
    main()
