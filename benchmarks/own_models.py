"""`esper.Grower` in four loops of a user's own, against controls that train as long on the same minibatches.

    python benchmarks/own_models.py --device cuda --workers 10

Arms, per model and seed:

- `ungrown`: the model without a grower.
- `grown`: with a grower and its heuristic.
- `static`: the same architecture, widened to the size that `grown` ended with, from the first minibatch.
- `retrained`: the very architecture that `grown` ended with, from scratch.

Seeds are judged on validation data that no arm trains on. Test data is used once per arm, at its end. Differences are
paired by seed, with 95 % t-intervals. Finished cells (model and seed) are stored in `--keep` and skipped next time.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from harness import RESULTS, Json, describe_machine, print_table, write_result
from own_model_cases import CASES, Batches, Case, Data, longest_epoch, shuffled
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.grower import Grower
from esper.grower.records import GrowthReport
from esper.leyline import BadValueError
from esper.leyline.numbers import t_quantile

ARMS = ("ungrown", "grown", "static", "retrained")
WIDEST = 4.0  # factor on the width up to which a static model is searched


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a cell depends on, besides its model and seed."""

    epochs: int | None
    samples: int | None
    device: str
    data_dir: str | None


class Trained(NamedTuple):
    """A finished arm."""

    parameters: int
    score: float
    seconds: float


@lru_cache(maxsize=1)
def load_data(name: str, settings: Settings) -> Data:
    """The data of a case, once per process."""
    folder = None if settings.data_dir is None else Path(settings.data_dir)
    return CASES[name].load(folder, settings.samples, settings.device)


class Loop:
    """The training loop of one case and seed. Every arm sees the same minibatches."""

    def __init__(self, name: str, seed: int, settings: Settings) -> None:
        self.case, self.seed, self.device = CASES[name], seed, settings.device
        self.data = load_data(name, settings)
        self.epochs = settings.epochs or self.case.epochs
        self.minibatches = longest_epoch(self.data.train, self.case.batch)

    def build(self, width: float) -> nn.Module:
        """A fresh model."""
        torch.manual_seed(self.seed)
        return self.case.build(width).to(self.device)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """A fresh optimizer."""
        return self.case.optimizer(model, self.device != "cpu")

    def train(
        self, model: nn.Module, optimizer: Optimizer, after_epoch: Callable[[], object] = lambda: None
    ) -> nn.Module:
        """Train as a user would, with a call after every epoch."""
        schedule = self.case.schedule(optimizer, self.epochs * self.minibatches)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for _ in range(self.epochs):
            model.train()
            for batch in shuffled(self.data.train, self.case.batch, generator):
                optimizer.zero_grad()
                self.case.losses(model(batch[0]), batch).mean().backward()
                optimizer.step()
                schedule.step()
            after_epoch()
        return model

    def grower(self, model: nn.Module, optimizer: Optimizer, **options: object) -> Grower:
        """A grower for this case; what it prints is no part of the table."""
        loss = self.case.losses if self.case.by_loss else None
        settings = {"budget": self.case.budget, "steps": self.epochs, "rng_seed": self.seed, "loss": loss, **options}
        return Grower(model, optimizer, **settings)  # type: ignore[arg-type]  # passed on by name

    def result(self, model: nn.Module, start: float) -> Trained:
        """Score a finished model on the test data."""
        score = evaluate(model, self.data.test, self.case)
        return Trained(count(model), score, time.perf_counter() - start)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, case: Case) -> float:
    """Mean loss, or accuracy in percent."""
    model.eval()
    values = [
        case.losses(model(batch[0]), batch) if case.by_loss else 100.0 * (model(batch[0]).argmax(-1) == batch[1])
        for batch in batches
    ]
    return float(torch.cat(values).mean())


def count(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def static_width(case: Case, parameters: int) -> float:
    """The width whose model comes nearest to a number of parameters."""
    widths = [case.width + step / 4 for step in range(int(4 * case.width * (WIDEST - 1)) + 1)]
    with torch.device("meta"):
        return min(widths, key=lambda width: abs(count(case.build(width)) - parameters))


# -- arms -------------------------------------------------------------------------------------------------------------


class Grown(NamedTuple):
    """The grown arm, what grew, and how."""

    trained: Trained
    plan: dict[str, str]
    """Blueprints of the seeds that stayed, by slot"""
    story: list[str]
    """A line per step in which something happened"""


def train_ungrown(loop: Loop, width: float) -> Trained:
    """A model of that width, without a grower."""
    start = time.perf_counter()
    model = loop.build(width)
    return loop.result(loop.train(model, loop.optimizer(model)), start)


def train_grown(loop: Loop, policy: str = "heuristic") -> Grown:
    """The model with a grower. The budget holds at every step, and finishing changes no output."""
    start = time.perf_counter()
    model = loop.build(loop.case.width)
    host = count(model)
    optimizer = loop.optimizer(model)
    grower = loop.grower(model, optimizer, policy=policy)
    story: list[str] = []

    def step() -> None:
        record = grower.step(loop.data.validation)
        grown = count(model) - host
        assert record.grown == grown <= loop.case.budget, f"{grown} of {loop.case.budget} parameters grown"
        if record.actions:
            story.append(str(record))

    loop.train(model, optimizer, step)
    seeds = {slot: report.blueprint for slot, report in grower.report().slots.items() if report.blueprint is not None}
    before = outputs(model, loop)
    finished = grower.finish()
    # A seed that stays is called `grown`. Where some are dropped, the outputs change, and finish() itself compares.
    plan = {slot: name for slot, name in seeds.items() if hasattr(finished.get_submodule(slot), "grown")}
    if plan == seeds:
        torch.testing.assert_close(outputs(finished, loop), before, rtol=1e-4, atol=1e-4)
    return Grown(loop.result(finished, start), plan, story)


@torch.no_grad()
def outputs(model: nn.Module, loop: Loop) -> Tensor:
    """Outputs for some validation data."""
    model.eval()
    output: Tensor = model(loop.data.validation[0][0])
    return output


def train_retrained(loop: Loop, plan: dict[str, str]) -> Trained:
    """The architecture that `grown` ended with, from scratch: its seeds are born before the first minibatch."""
    start = time.perf_counter()
    model = loop.build(loop.case.width)
    optimizer = loop.optimizer(model)
    if plan:

        def policy(report: GrowthReport) -> list[tuple[str, str, str]]:
            return [("germinate", slot, blueprint) for slot, blueprint in plan.items()]

        grower = loop.grower(model, optimizer, policy=policy)
        outputs(model, loop)  # the slots are found in a forward pass
        grower.step(1.0)
        model = grower.finish(keep=list(plan))
    return loop.result(loop.train(model, optimizer), start)


def run_cell(name: str, seed: int, settings: Settings) -> dict[str, Json]:
    """All arms of one model and seed."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # so that outputs before and after finish() can be compared closely
    loop = Loop(name, seed, settings)
    with contextlib.redirect_stdout(io.StringIO()):  # the grower's introduction
        grown = train_grown(loop)
        arms = {
            "ungrown": train_ungrown(loop, loop.case.width),
            "grown": grown.trained,
            "static": train_ungrown(loop, static_width(loop.case, grown.trained.parameters)),
            "retrained": train_retrained(loop, grown.plan),
        }
    assert arms["retrained"].parameters == arms["grown"].parameters
    return {
        "model": name,
        "seed": seed,
        "settings": describe(settings),
        "arms": {arm: trained._asdict() for arm, trained in arms.items()},
        "plan": grown.plan,
        "story": grown.story,
        "machine": describe_machine(),
    }


def describe(settings: Settings) -> dict[str, Json]:
    """The settings that change a result; folders do not."""
    return {"epochs": settings.epochs, "samples": settings.samples}


# -- cells ------------------------------------------------------------------------------------------------------------


def run_cells(
    wanted: Sequence[tuple[str, int]], settings: Settings, workers: int, keep: Path
) -> dict[tuple[str, int], dict[str, Json]]:
    """Run the cells that are not stored yet. Each is stored at once."""
    keep.mkdir(parents=True, exist_ok=True)
    paths = {cell: keep / f"{cell[0]}_{cell[1]}.json" for cell in wanted}
    cells = {cell: json.loads(path.read_text()) for cell, path in paths.items() if path.exists()}
    for cell, content in cells.items():
        if content["settings"] != describe(settings):
            raise BadValueError(f"{paths[cell]} was made with other settings: {content['settings']}")
    missing = [cell for cell in wanted if cell not in cells]
    for cell, content in _computed(missing, settings, workers):
        draft = paths[cell].with_suffix(".draft")  # a run that is killed while writing leaves no broken cell
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.rename(paths[cell])
        cells[cell] = content
        print(f"{cell[0]} {cell[1]}: {content['plan']}", flush=True)
    return {cell: cells[cell] for cell in wanted}


def _computed(
    missing: Sequence[tuple[str, int]], settings: Settings, workers: int
) -> Iterable[tuple[tuple[str, int], dict[str, Json]]]:
    if workers == 1:
        for cell in missing:
            yield cell, run_cell(*cell, settings)
        return
    # CUDA does not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(run_cell, *cell, settings): cell for cell in missing}
        failed = {}
        for future in as_completed(futures):
            if (error := future.exception()) is None:
                yield futures[future], future.result()
            else:
                failed[futures[future]] = error
        for cell, error in failed.items():  # only now, so that no finished cell is lost
            raise RuntimeError(f"{cell[0]} {cell[1]} failed, one of {len(failed)}") from error


# -- tables -----------------------------------------------------------------------------------------------------------


def compare(grown: Sequence[float], control: Sequence[float], by_loss: bool) -> tuple[float, float]:
    """Mean paired difference and half its 95 % interval: points, or percent of the control's loss. Positive is better.

    With one seed the interval is unknown (NaN).
    """
    pairs = list(zip(grown, control, strict=True))
    gains = [100 * (other - mine) / other if by_loss else mine - other for mine, other in pairs]
    if len(gains) < 2:
        return gains[0], math.nan
    half = t_quantile(len(gains) - 1) * statistics.stdev(gains) / math.sqrt(len(gains))
    return statistics.fmean(gains), half


def summarise(name: str, cells: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """Print the table of one model; returns the same for the JSON."""
    case = CASES[name]
    arms: dict[str, list[Trained]] = {arm: [_read(cell, arm) for cell in cells] for arm in ARMS}
    scores = {arm: [trained.score for trained in arms[arm]] for arm in ARMS}
    digits, unit = (4, "%") if case.by_loss else (2, "points")
    rows: list[list[object]] = []
    result: dict[str, dict[str, Json]] = {}
    for arm in ARMS:
        sizes = [trained.parameters for trained in arms[arm]]
        gain, half = compare(scores["grown"], scores[arm], case.by_loss)
        interval = "" if arm == "grown" else f"{gain:+.2f} ± {half:.2f} {unit}"
        mean, spread = statistics.fmean(scores[arm]), statistics.stdev(scores[arm]) if len(cells) > 1 else 0.0
        score = f"{mean:.{digits}f} ± {spread:.{digits}f}"
        seconds = statistics.fmean(trained.seconds for trained in arms[arm])
        rows.append([arm, f"{round(statistics.fmean(sizes)):,}", score, interval, seconds])
        result[arm] = {"parameters": sizes, "scores": scores[arm]}
        if arm != "grown":
            result[arm] |= {"grown_minus_this": gain, "half_interval": None if math.isnan(half) else half}
    metric = "test loss" if case.by_loss else "test accuracy %"
    header = ["arm", "parameters", f"{metric} (mean ± deviation)", "grown − arm (95 % interval)", "seconds"]
    print_table(f"{name}, {len(cells)} seeds", header, rows)
    machines: list[Json] = []
    for cell in cells:
        machine = cell["machine"]
        assert isinstance(machine, dict)
        machines.append(machine["gpu"] or machine["cpu"])
    return {"unit": unit, "arms": result, "plans": [cell["plan"] for cell in cells], "machines": machines}


def _read(cell: dict[str, Json], arm: str) -> Trained:
    arms = cell["arms"]
    assert isinstance(arms, dict)
    return Trained(**arms[arm])


def main() -> None:
    """Run what is missing, print a table per model, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=None, help="by default as many as each model's recipe has")
    parser.add_argument("--samples", type=int, default=None, help="training images or characters; by default all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--workers", type=int, default=1, help="cells that run side by side, in processes")
    parser.add_argument("--keep", type=Path, default=Path("runs/own_models"), help="folder of finished cells")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    folder = None if arguments.data_dir is None else str(arguments.data_dir)
    settings = Settings(arguments.epochs, arguments.samples, arguments.device, folder)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    wanted = [(name, seed) for name in arguments.models for seed in seeds]
    cells = run_cells(wanted, settings, arguments.workers, arguments.keep)
    models = {name: summarise(name, [cells[name, seed] for seed in seeds]) for name in arguments.models}
    result: dict[str, Json] = {"settings": describe(settings), "seeds": list(seeds), "models": models}
    write_result("own_models", result, arguments.out)


if __name__ == "__main__":
    main()
