"""A frozen pretrained ResNet-20 adapted to shifted images: `esper.Grower` against the usual ways, at equal budgets.

    python benchmarks/adaptation.py --device cuda --workers 8 --minutes 9

Methods, each with its head trained:

- `head`: nothing else, with the original and with recalibrated norm statistics.
- `norms`: also the affine parameters of all norms.
- `lora …`: also low-rank updates of a rank on all convolutions, or on those of one stage.
- `ours`: the Grower with its default policy, at each budget.
- `full`: everything, beside the comparison.

Methods other than `ours` and `full` get the statistics with which the better head validated. Rate and method are chosen
by accuracy on validation images; the sweeps are of equal size. A budget limits what is added to the head. Runs (case,
seed, method, rate) are stored in `--keep` and skipped next time, so the script can be stopped and started again.
"""

import argparse
import contextlib
import io
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from adaptation_cases import SHIFTS, Parts, data_folder, parts_of, pretrained
from harness import RESULTS, Json, describe_machine, print_table, write_result
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower import Grower
from esper.kasmina.blueprints import BlueprintRegistry
from esper.leyline import BadValueError
from esper.leyline.numbers import t_quantile

RATES = (3e-3, 1e-2, 1e-3)  # a smaller sweep takes the first ones
FULL_RATES = (1e-3, 3e-3, 3e-4)
LORA = {
    "lora 1 all": (1, ""),
    "lora 4 all": (4, ""),
    "lora 4 stage 1": (4, "layer1."),
    "lora 4 stage 2": (4, "layer2."),
    "lora 4 stage 3": (4, "layer3."),
}
BUDGETS = (1, 3, 10)
"""Percent of the model's parameters"""
CHUNK = 500  # images per forward pass without gradients


@dataclass(frozen=True)
class Settings:
    """What a run depends on, besides its case, seed, method and rate."""

    train: int
    validation: int
    test: int
    epochs: int
    batch: int
    device: str
    data_dir: str


@dataclass(frozen=True)
class Run:
    """One training."""

    case: str
    seed: int
    method: str
    rate: float
    statistics: str = ""
    """original or recalibrated; empty where the method decides"""

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.case}_{self.seed}_{self.method}_{self.rate:g}_{self.statistics}.json".replace(" ", "-")


# -- methods ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def recalibrate(model: nn.Module, images: Tensor) -> None:
    """Replace the statistics of all norms by the mean of those of these images' batches."""
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for batch in images.split(CHUNK):
        model(batch)
    model.eval()


def add_lora(model: nn.Module, rank: int, prefix: str) -> list[nn.Parameter]:
    """Low-rank updates of the convolutions under a prefix, the same modules as in the Grower."""
    added: list[nn.Parameter] = []
    for index, (name, layer) in enumerate(list(model.named_modules())):
        if isinstance(layer, nn.Conv2d) and name.startswith(prefix):
            seed = BlueprintRegistry.build(
                "image", f"lora_conv_{rank}", layer.out_channels, rng_seed=index, base=layer
            ).to(layer.weight.device)
            layer.register_forward_hook(partial(_add_update, seed))
            added += seed.parameters()
    return added


def _add_update(seed: nn.Module, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    updated: Tensor = output + seed(args[0])
    return updated


def train(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    run: Run,
    parts: Parts,
    settings: Settings,
    mode: bool,
    grow: Callable[[nn.Module, torch.optim.Optimizer], Callable[[], object]] | None = None,
) -> None:
    """Train these parameters with AdamW and a cosine; `mode` is that of the model, so of its norms."""
    optimizer = torch.optim.AdamW(parameters, lr=run.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs)
    after_epoch = None if grow is None else grow(model, optimizer)
    images, labels = parts.train
    generator = torch.Generator().manual_seed(run.seed)
    for _ in range(settings.epochs):
        model.train(mode)
        for batch in torch.randperm(len(images), generator=generator).to(images.device).split(settings.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
        if after_epoch is not None:
            after_epoch()


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Accuracy in percent, in eval mode."""
    model.eval()
    pairs = zip(data[0].split(CHUNK), data[1].split(CHUNK), strict=True)
    return 100.0 * float(torch.cat([model(x).argmax(1) == y for x, y in pairs]).float().mean())


def run_one(run: Run, settings: Settings) -> dict[str, Json]:
    """One run, from the pretrained weights to its accuracies."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    start = time.perf_counter()
    folder = Path(settings.data_dir)
    sizes = (settings.train, settings.validation, settings.test)
    parts = parts_of(run.case, run.seed, sizes, folder, settings.device)
    model = pretrained(folder).to(settings.device)
    story: list[str] = []
    if run.method == "full":
        train(model, list(model.parameters()), run, parts, settings, True)
        added = sum(p.numel() for p in model.parameters())
    elif run.method.startswith("ours"):
        added = run_ours(model, run, parts, settings, story)
    else:
        model.requires_grad_(False)
        if run.statistics == "recalibrated":
            recalibrate(model, parts.train[0])
        more: list[nn.Parameter] = []
        if run.method == "norms":
            more = [p for part in model.modules() if isinstance(part, nn.BatchNorm2d) for p in part.parameters()]
        elif run.method in LORA:
            more = add_lora(model, *LORA[run.method])
        learning = [*model.linear.parameters(), *more]
        for parameter in learning:
            parameter.requires_grad_(True)
        train(model, learning, run, parts, settings, False)
        added = sum(p.numel() for p in more)
    return {
        **asdict(run),
        "settings": described(settings),
        "added": added,
        "validation": accuracy(model, parts.validation),
        "test_accuracy": accuracy(model, parts.test),
        "seconds": time.perf_counter() - start,
        "story": story,
        "machine": describe_machine(),
    }


def run_ours(model: nn.Module, run: Run, parts: Parts, settings: Settings, story: list[str]) -> int:
    """The Grower at a budget. Its budget holds at every step, and merging changes no output. Returns what it added."""
    host = sum(p.numel() for p in model.parameters())
    budget = host * int(run.method.split()[1]) // 100
    model.requires_grad_(False)
    head = model.get_submodule("linear").requires_grad_(True)
    validation = list(zip(parts.validation[0].split(CHUNK), parts.validation[1].split(CHUNK), strict=True))
    growers: list[Grower] = []

    def grow(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        grower = Grower(net, optimizer, budget=budget, steps=settings.epochs, rng_seed=run.seed)
        growers.append(grower)

        def step() -> None:
            record = grower.step(validation)
            assert record.grown <= budget
            story.append(str(record))

        return step

    with contextlib.redirect_stdout(io.StringIO()):
        train(model, list(head.parameters()), run, parts, settings, True, grow)
        grown = sum(p.numel() for p in model.parameters()) - host
        growers[0].merge(validation)
    return grown


# -- runs -------------------------------------------------------------------------------------------------------------


def described(settings: Settings) -> dict[str, Json]:
    """The settings that change a result; folders and devices do not."""
    return {name: value for name, value in asdict(settings).items() if name not in ("device", "data_dir")}


def first_runs(cases: Sequence[str], seeds: Sequence[int], rates: Sequence[float]) -> list[Run]:
    """Runs that depend on no other."""
    runs = []
    for case in cases:
        for seed in seeds:
            runs += [Run(case, seed, "head", rate, kind) for rate in rates for kind in ("original", "recalibrated")]
            runs += [Run(case, seed, f"ours {budget} %", rate) for budget in BUDGETS for rate in rates]
            runs += [Run(case, seed, "full", rate) for rate in FULL_RATES[: len(rates)]]
    return runs


def later_runs(done: Mapping[Run, Mapping[str, Json]], rates: Sequence[float]) -> list[Run]:
    """Runs with the statistics with which the better head validated, where all heads are trained."""
    runs = []
    for case, seed in dict.fromkeys((run.case, run.seed) for run in done):
        heads = [run for run in done if (run.case, run.seed, run.method) == (case, seed, "head")]
        if len(heads) == 2 * len(rates):
            kind = max(heads, key=lambda run: number(done[run], "validation")).statistics
            runs += [Run(case, seed, method, rate, kind) for method in ("norms", *LORA) for rate in rates]
    return runs


def number(content: Mapping[str, Json], name: str) -> float:
    """A number of a stored run."""
    value = content[name]
    assert isinstance(value, int | float)
    return float(value)


class Store:
    """Finished runs in a folder."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, runs: Sequence[Run]) -> dict[Run, dict[str, Json]]:
        """Those of these runs that are finished."""
        found = {run: self.folder / run.file for run in runs if (self.folder / run.file).exists()}
        contents = {run: json.loads(path.read_text()) for run, path in found.items()}
        for run, content in contents.items():
            if content["settings"] != described(self.settings):
                raise BadValueError(f"{found[run]} was made with other settings: {content['settings']}")
        return contents

    def compute(self, run: Run) -> None:
        """Run it and store it as a whole."""
        draft = (self.folder / run.file).with_suffix(".draft")
        draft.write_text(json.dumps(run_one(run, self.settings), indent=1) + "\n")
        draft.rename(self.folder / run.file)


def run_all(runs: Sequence[Run], store: Store, workers: int, deadline: float) -> None:
    """Run what is missing, until the deadline. Runs that have begun by then are finished."""
    done = store.read(runs)
    missing = [run for run in runs if run not in done]
    if workers == 1:
        for index, run in enumerate(missing):
            if time.monotonic() > deadline:
                return
            store.compute(run)
            print(f"{index + 1} of {len(missing)}: {run.file}", flush=True)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for position in range(0, len(missing), 2 * workers):
            if time.monotonic() > deadline:
                return
            list(pool.map(store.compute, missing[position : position + 2 * workers]))
            print(f"{min(position + 2 * workers, len(missing))} of {len(missing)} runs", flush=True)


# -- the table --------------------------------------------------------------------------------------------------------


def best(runs: Mapping[Run, Mapping[str, Json]], wanted: Callable[[Run], bool]) -> Mapping[str, Json] | None:
    """The run that validated best among those wanted."""
    candidates = [content for run, content in runs.items() if wanted(run)]
    return max(candidates, key=lambda content: number(content, "validation"), default=None)


def summarise(runs: Mapping[Run, Mapping[str, Json]], host: int) -> dict[str, Json]:
    """Per budget: ours and the best other method on each case and seed, and their difference."""
    cells = list(dict.fromkeys((run.case, run.seed) for run in runs))
    budgets: dict[str, Json] = {}
    rows: list[list[object]] = []
    for budget in BUDGETS:
        pairs: list[dict[str, Json]] = []
        for cell in cells:
            own = {run: content for run, content in runs.items() if (run.case, run.seed) == cell}
            ours = best(own, lambda run: run.method == f"ours {budget} %")  # noqa: B023
            other = best(
                own,
                lambda run: run.method in ("head", "norms", *LORA) and number(own[run], "added") <= host * budget / 100,  # noqa: B023
            )
            full = best(own, lambda run: run.method == "full")
            if ours is not None and other is not None:
                pair = {"case": cell[0], "seed": cell[1], "ours": ours["test_accuracy"], "ours_added": ours["added"]}
                pair |= {"other": other["test_accuracy"], "method": other["method"], "other_added": other["added"]}
                pairs.append(pair | {"full": None if full is None else full["test_accuracy"]})
        if not pairs:
            continue
        differences = [number(pair, "ours") - number(pair, "other") for pair in pairs]
        full_scores = [number(pair, "full") for pair in pairs if pair["full"] is not None]
        interval = by_case(pairs, differences)
        budgets[str(budget)] = {"pairs": pairs, "difference": statistics.fmean(differences), "half_width": interval}
        rows.append(
            [
                f"{budget} %",
                statistics.fmean(number(pair, "ours") for pair in pairs),
                statistics.fmean(number(pair, "other") for pair in pairs),
                f"{statistics.fmean(differences):+.2f} ± {interval:.2f}" if interval is not None else "one case",
                statistics.fmean(full_scores) if full_scores else "-",
                len(pairs),
            ]
        )
    header = ["budget", "ours", "best other", "difference", "full tuning", "cells"]
    print_table("test accuracy in percent; method and rate chosen on validation images", header, rows)
    return budgets


def by_case(pairs: Sequence[Mapping[str, Json]], differences: Sequence[float]) -> float | None:
    """Half the 95 % t-interval of the mean difference, over cases: seeds of one case are averaged first."""
    means: dict[str, list[float]] = {}
    for pair, difference in zip(pairs, differences, strict=True):
        means.setdefault(str(pair["case"]), []).append(difference)
    values = [statistics.fmean(each) for each in means.values()]
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def by_method(runs: Mapping[Run, Mapping[str, Json]]) -> dict[str, Json]:
    """Mean test accuracy of every method over the cells, each at its best rate by validation."""
    result: dict[str, Json] = {}
    rows: list[list[object]] = []
    for method in dict.fromkeys(run.method for run in runs):
        cells = dict.fromkeys((run.case, run.seed) for run in runs if run.method == method)
        chosen = [best(runs, lambda run: (run.case, run.seed, run.method) == (*cell, method)) for cell in cells]  # noqa: B023
        scores = [number(each, "test_accuracy") for each in chosen if each is not None]
        added = [number(each, "added") for each in chosen if each is not None]
        result[method] = {"test_accuracy": scores, "added": added}
        rows.append([method, f"{statistics.fmean(added):,.0f}", statistics.fmean(scores), len(scores)])
    print_table("every method", ["method", "parameters", "test accuracy", "cells"], rows)
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
    parser.add_argument("--keep", type=Path, default=Path("runs/adaptation"), help="folder of finished runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    sizes = arguments.train, arguments.validation, arguments.test
    folder = data_folder(arguments.data_dir)
    settings = Settings(*sizes, arguments.epochs, arguments.batch, arguments.device, str(folder))
    rates, store = RATES[: arguments.rates], Store(arguments.keep, settings)
    first = first_runs(arguments.cases, range(arguments.seeds), rates)
    run_all(first, store, arguments.workers, deadline)
    done = store.read(first)
    later = later_runs(done, rates)
    run_all(later, store, arguments.workers, deadline)
    runs = done | store.read(later)
    missing = len(first) + len(arguments.cases) * arguments.seeds * (1 + len(LORA)) * len(rates) - len(runs)
    if missing:
        print(f"{missing} runs are missing: start the script again to continue")
    if not runs:
        return
    host = sum(p.numel() for p in pretrained(folder).parameters())
    result: dict[str, Json] = {"settings": described(settings), "rates": list(rates), "missing": missing}
    write_result("adaptation", result | {"budgets": summarise(runs, host), "methods": by_method(runs)}, arguments.out)


if __name__ == "__main__":
    main()
