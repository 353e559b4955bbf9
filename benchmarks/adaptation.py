"""A frozen pretrained ResNet-20 adapted to shifted images: `esper.Grower` against the usual ways, at equal budgets.

    python benchmarks/adaptation.py --device cuda --workers 14 --minutes 8

Methods, each with its head trained:

- `head`: nothing else, with the original and with recalibrated norm statistics.
- `norms`: also the affine parameters of all norms.
- `lora …`: also low-rank updates of a rank on all convolutions, or on those of one stage.
- `ours`: the Grower with its default policy, at each budget.
- `full`: everything, beside the comparison.

The usual methods get the statistics with which the better head validated. Rate and method are chosen by accuracy on
validation images; every method tries as many rates. A budget limits what is added to the head. A cell is a case (a kind
of shift) with a seed (images and order). Intervals count cases and seeds as crossed random effects.

Finished runs are stored in `--keep`, a single file. Started again, the script makes those that it lacks, cell by cell.
Tables count complete cells alone, of cases with all their seeds.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch
from adaptation_cases import SHIFTS, data_folder, pretrained, read_images
from adaptation_methods import BUDGETS, FULL, LORA, OURS, USUAL, Run, Settings, run_one
from harness import RESULTS, Json, print_table, write_result
from kept import Content, Kept, number

from esper.simic.evaluation.statistics import compare

RATES = (3e-3, 1e-2, 1e-3)  # a smaller sweep takes the first ones
FULL_RATES = (1e-3, 3e-3, 3e-4)
STATISTICS = ("original", "recalibrated")

Cell = tuple[str, int]
"""A case and a seed"""


# -- runs -------------------------------------------------------------------------------------------------------------


def runs_of(cell: Cell, rates: int, kept: Kept) -> list[Run]:
    """The runs of a cell that can be made by now, heads first: low-rank updates need the better head's statistics."""
    heads = [Run(*cell, "head", rate, kind) for kind in STATISTICS for rate in RATES[:rates]]
    runs = [*heads, *(Run(*cell, method, rate) for method in OURS for rate in RATES[:rates])]
    runs += [Run(*cell, FULL, rate) for rate in FULL_RATES[:rates]]
    if all(head.name in kept.runs for head in heads):
        kind = max(heads, key=lambda head: number(kept.runs[head.name], "validation")).statistics
        runs += [Run(*cell, method, rate, kind) for method in ("norms", *LORA) for rate in RATES[:rates]]
    return runs


def is_complete(cell: Cell, rates: int, kept: Kept) -> bool:
    """Whether all runs of a cell are finished."""
    runs = runs_of(cell, rates, kept)
    return len(runs) == rates * (2 + len(OURS) + 1 + 1 + len(LORA)) and all(run.name in kept.runs for run in runs)


def run_all(
    cells: Sequence[Cell],
    rates: int,
    kept: Kept,
    make: Callable[[Run], Future[dict[str, Json]]],
    limit: int,
    end: float,
) -> None:
    """Make what is missing, at most `limit` at a time. After `end` none begins; those that have begun are finished."""
    pending: dict[Future[dict[str, Json]], Run] = {}
    start = time.monotonic()
    while True:
        busy = set(pending.values())
        missing = [
            run for cell in cells for run in runs_of(cell, rates, kept) if run.name not in kept.runs and run not in busy
        ]
        if time.monotonic() < end:
            pending |= {make(run): run for run in missing[: limit - len(pending)]}
        if not pending:
            return
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            run = pending.pop(future)
            kept.add(run.name, future.result())
            print(f"{time.monotonic() - start:5.0f} s, {len(kept.runs)} runs: {run.name}", flush=True)


# -- tables -----------------------------------------------------------------------------------------------------------


def best(runs: Sequence[Content], wanted: Callable[[Content], bool]) -> Content:
    """The run that validated best among those wanted."""
    return max(filter(wanted, runs), key=lambda run: number(run, "validation"))


def compare_cell(runs: Sequence[Content], budget: int, host: int) -> dict[str, Json]:
    """Ours and the best other method of a cell within a budget, and full tuning."""
    ours = best(runs, lambda run: run["method"] == f"ours {budget} %")
    other = best(runs, lambda run: run["method"] in USUAL and number(run, "added") <= host * budget / 100)
    return {
        "ours": ours["test_accuracy"],
        "ours_added": ours["added"],
        "ours_rate": ours["rate"],
        "other": other["test_accuracy"],
        "other_added": other["added"],
        "other_rate": other["rate"],
        "method": other["method"],
        FULL: best(runs, lambda run: run["method"] == FULL)["test_accuracy"],
    }


def summarise(cells: Mapping[Cell, Sequence[Content]], host: int) -> dict[str, Json]:
    """Per budget: ours and the best other method on each cell, and their mean difference with its interval."""
    budgets: dict[str, Json] = {}
    rows: list[list[object]] = []
    for budget in BUDGETS:
        found = {cell: compare_cell(runs, budget, host) for cell, runs in cells.items()}
        cases, seeds = dict.fromkeys(case for case, _ in cells), dict.fromkeys(seed for _, seed in cells)
        ours, other = (
            [[number(found[case, seed], name) for case in cases] for seed in seeds] for name in ("ours", "other")
        )
        difference = compare(ours, other, paired=True)
        ends = [difference.low, difference.high] if len(cases) > 1 else [None, None]
        budgets[str(budget)] = {
            "cells": [{"case": case, "seed": seed, **content} for (case, seed), content in found.items()],
            "difference": difference.mean,
            "low": ends[0],
            "high": ends[1],
        }
        means = [statistics.fmean(number(each, name) for each in found.values()) for name in ("ours", "other", FULL)]
        interval = f"{difference.low:+.2f} to {difference.high:+.2f}" if len(cases) > 1 else "one case"
        rows.append([f"{budget} %", *means[:2], f"{difference.mean:+.2f}", interval, means[2], len(cells)])
    header = ["budget", "ours", "best other", "difference", "95 %", "full tuning", "cells"]
    print_table("test accuracy in percent; method and rate chosen on validation images", header, rows)
    return budgets


def by_method(cells: Mapping[Cell, Sequence[Content]]) -> dict[str, Json]:
    """Test accuracy of every method on the cells, each at its best rate by validation, and the time of a run."""
    result: dict[str, Json] = {}
    rows: list[list[object]] = []
    for method in (*USUAL, *OURS, FULL):
        chosen = [best(runs, lambda run: run["method"] == method) for runs in cells.values()]  # noqa: B023
        scores, added = ([number(run, name) for run in chosen] for name in ("test_accuracy", "added"))
        seconds = statistics.median(
            number(run, "seconds") for runs in cells.values() for run in runs if run["method"] == method
        )
        result[method] = {"test_accuracy": scores, "added": added, "seconds": seconds}
        rows.append([method, f"{statistics.fmean(added):,.0f}", statistics.fmean(scores), seconds])
    print_table("every method", ["method", "parameters", "test accuracy", "seconds"], rows)
    return result


def main() -> None:
    """Run what is missing, print the tables, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=SHIFTS, default=list(SHIFTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=int, default=3, help="size of every sweep")
    parser.add_argument("--train", type=int, default=1000, help="labelled training images")
    parser.add_argument("--validation", type=int, default=500)
    parser.add_argument("--test", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-dir", type=Path, default=None, help="by default ESPER_DATA")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side, in processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after this time")
    parser.add_argument("--keep", type=Path, default=Path("runs/adaptation.jsonl"), help="file of finished runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    end, rates = time.monotonic() + 60 * arguments.minutes, arguments.rates
    sizes = arguments.train, arguments.validation, arguments.test
    folder, settings = data_folder(arguments.data_dir), Settings(*sizes, arguments.epochs, arguments.batch)
    cells = [(case, seed) for case in arguments.cases for seed in range(arguments.seeds)]
    kept = Kept(arguments.keep, asdict(settings))
    if not all(is_complete(cell, rates, kept) for cell in cells):
        read_images(folder)  # decodes them once, before every worker would
        with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
            make = lambda run: pool.submit(run_one, run, settings, folder, arguments.device)  # noqa: E731
            run_all(cells, rates, kept, make, arguments.workers, end)
    done = {cell for cell in cells if is_complete(cell, rates, kept)}
    whole = [cell for cell in cells if all((cell[0], seed) in done for seed in range(arguments.seeds))]
    if len(whole) < len(cells):
        print(f"{len(done)} of {len(cells)} cells are complete: start the script again to continue")
    if not whole:
        return
    contents = {cell: [kept.runs[run.name] for run in runs_of(cell, rates, kept)] for cell in whole}
    host = sum(p.numel() for p in pretrained(folder).parameters())
    write_result(
        "adaptation",
        {
            "settings": asdict(settings),
            "rates": list(RATES[:rates]),
            "trained_on": contents[whole[0]][0]["machine"],
            "budgets": summarise(contents, host),
            "methods": by_method(contents),
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
