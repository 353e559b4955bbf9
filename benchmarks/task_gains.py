"""What one seed, grown in mid-training, adds to each task's host at the task's defaults.

For every task, slot and blueprint: germinate after a fifth of the episode, six steps in the shadow, ramp of three,
commit. The gain is the accuracy of the grown host minus that of the host that never grew, same initial weights and data
order, on the validation images, statistics calibrated on both sides. Tasks whose hosts differ in their defect are
measured per defect. The file that `esper tasks` prints from is written with --publish.

    python benchmarks/task_gains.py --tasks digits_blind digits
    python benchmarks/task_gains.py --tasks cifar_baseline --device cuda --workers 12
"""

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from harness import RESULTS, Json, print_table, spread, write_result
from one_seed import Plan, grow, unlimited

from esper.leyline import gain_over, relative_gain
from esper.tolaria import Task, TaskRegistry, get_task
from esper.tolaria.gains import GAINS_FILE

GERMINATE_SHARE = 5


class Job(NamedTuple):
    """One episode."""

    task: str
    defect: str
    rng_seed: int
    slot_id: str | None
    blueprint: str | None
    device: str
    data_dir: Path | None


def run(job: Job) -> float:
    """Final validation accuracy of one episode, or by how many percent its loss is below that of guessing."""
    torch.set_num_threads(1)
    task = _with_defect(unlimited(get_task(job.task)), job.defect)
    batches = task.load_batches(job.data_dir, job.device)
    plan = None
    if job.slot_id is not None and job.blueprint is not None:
        plan = Plan(job.slot_id, job.blueprint, task.steps // GERMINATE_SHARE)
    main = grow(task, batches, job.rng_seed, plan).validate().main
    return relative_gain(task.random_guess_loss, main.loss) if task.by_loss else main.accuracy


def _with_defect(task: Task, defect: str) -> Task:
    return replace(task, defects=tuple(d for d in task.defects if d == defect))


def jobs_of(task: Task, arguments: argparse.Namespace) -> list[Job]:
    """The control and every cell, for every repeat and kind of host."""
    cells = [(slot.slot_id, offer.name) for slot in task.slot_config.slots for offer in slot.blueprints]
    return [
        Job(task.name, defect, rng_seed, slot_id, blueprint, arguments.device, arguments.data_dir)
        for defect, rng_seed in product(task.defects, range(arguments.repeats))
        for slot_id, blueprint in [(None, None), *cells]
    ]


def main() -> None:
    """Run all episodes, print a table per task, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=TaskRegistry.names(), help="none: measure nothing")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--publish", action="store_true", help="also update what `esper tasks` shows from that folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    for name in arguments.tasks:
        write_result(f"task_gains_{name}", {name: measure(get_task(name), arguments)}, arguments.out)
    if arguments.publish:
        publish(arguments.out)


def measure(task: Task, arguments: argparse.Namespace) -> dict[str, Json]:
    """All cells of one task."""
    jobs = jobs_of(task, arguments)
    task.load_batches(arguments.data_dir)  # decode and cache once, before the workers start
    if arguments.workers > 1:
        context = torch.multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
            accuracies = list(pool.map(run, jobs))
    else:
        accuracies = [run(job) for job in jobs]
    found = dict(zip(jobs, accuracies, strict=True))
    return {defect: report(task, defect, found) for defect in task.defects}


def report(task: Task, defect: str, found: dict[Job, float]) -> dict[str, Json]:
    """Table and figures of one kind of host."""
    controls = {job.rng_seed: value for job, value in found.items() if job.defect == defect and job.slot_id is None}
    gains: dict[tuple[str, str], list[float]] = {}
    for job, accuracy in found.items():
        if job.defect == defect and job.slot_id is not None and job.blueprint is not None:
            gain = gain_over(controls[job.rng_seed], accuracy, by_loss=task.by_loss)
            gains.setdefault((job.slot_id, job.blueprint), []).append(gain)
    title = f"{task.name}, hosts with defect {defect}: host alone {spread(list(controls.values()))} %"
    names = task.slot_config.blueprint_names
    print_table(
        f"{title}; gain in points over {len(controls)} repeats",
        ["slot", *names],
        [
            [slot, *(spread(gains[slot, name]) if (slot, name) in gains else "-" for name in names)]
            for slot in task.slot_ids
        ],
    )
    cells: list[Json] = []
    for (slot_id, blueprint), values in gains.items():
        (offer,) = (o for o in task.slot_config[slot_id].blueprints if o.name == blueprint)
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        cells.append(
            {
                "slot": slot_id,
                "blueprint": blueprint,
                "parameters": offer.parameters,
                "gain": statistics.fmean(values),
                "deviation": deviation,
                "by_repeat": values,
            }
        )
    return {"host_accuracy": statistics.fmean(controls.values()), "repeats": len(controls), "cells": cells}


def publish(folder: Path) -> None:
    """Put all figures of a results folder where `esper tasks` reads them, each with its machine."""
    published = {}
    for name in TaskRegistry.names():
        path = folder / f"task_gains_{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            published[name] = {"machine": found["machine"], "hosts": found[name]}
    GAINS_FILE.write_text(json.dumps(published, indent=1) + "\n")
    print(f"published {', '.join(published)}")


if __name__ == "__main__":
    main()
