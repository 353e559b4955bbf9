"""How much of the best seed's gain does the first choice of `Grower.suggest` reach?

    python benchmarks/suggest.py                  # about 15 minutes on one core

Three small models of a user's own train for one epoch. Then every blueprint within the budget grows in every slot, each
in a run of its own with the same minibatches to the end, so the best cell is known. A choice is made from what is known
after that first epoch. Its *share* is the mean gain of the chosen cell over seeds, divided by that of the best cell.
Gains are on test data, over the model without a seed.

- `first-order`: the largest first-order worth of `suggest(trial=0)`.
- `trial`: the largest loss saved in the trials of `suggest`.
- `Auto-RGN`: the slot whose submodule has the largest norm of the gradient relative to the norm of its weights, and
  there the blueprint by first-order worth, or by trial.
- `largest`: the seed with most parameters.
- `random`: the mean over all cells.

Finished seeds are stored in `--keep`. Started again, the script makes those that it lacks; all of them count.
"""

import argparse
import contextlib
import io
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import RESULTS, Json, print_table, write_result
from kept import Kept
from own_model_cases import GPT, Batches, Data, load_images, load_text, shuffled
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from esper import Grower
from esper.grower.suggestion_table import Suggestions
from esper.kasmina.slot import fork_rng

Cell = tuple[str, str]


def _stage(inputs: int, outputs: int, kernel: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.BatchNorm2d(outputs), nn.ReLU())


class SmallCNN(nn.Module):
    """Stages with a pool behind each but the last, a global mean, and a head."""

    def __init__(self, widths: Sequence[int], kernel: int) -> None:
        super().__init__()
        pairs = zip((1, *widths[:-1]), widths, strict=True)
        self.stages = nn.ModuleList(_stage(inputs, outputs, kernel) for inputs, outputs in pairs)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for number, stage in enumerate(self.stages):
            x = stage(F.max_pool2d(x, 2) if number else x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def digits_data(folder: Path | None, samples: int | None) -> Data:
    """Images of 8×8: 1,000 to train on, and 797 to test on."""
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float().view(-1, 1, 8, 8) / 16, labels[order]
    count = 1000 if samples is None else samples
    return Data((images[:count], labels[:count]), [], [(images[1000:], labels[1000:])])


def fashion_data(folder: Path | None, samples: int | None) -> Data:
    """Fashion-MNIST at 14×14: 3,000 images to train on, all 10,000 to test on."""
    data = load_images("fashion_mnist", folder, 3_000 if samples is None else samples, "cpu")
    train, test = (F.avg_pool2d(data.train[0], 2), data.train[1]), [(F.avg_pool2d(x, 2), y) for x, y in data.test]
    return Data(train, [], test)


def text_data(folder: Path | None, samples: int | None) -> Data:
    """Tiny Shakespeare: 80,000 characters to train on, 64,000 to test on."""
    data = load_text("tinyshakespeare", folder, 80_000 if samples is None else samples, "cpu")
    return Data(data.train, [], data.test[:1])


class Case(NamedTuple):
    """A model, its data and its recipe."""

    build: Callable[[], nn.Module]
    load: Callable[[Path | None, int | None], Data]
    slots: tuple[str, ...]
    budget: int
    rate: float
    epochs: int
    batch: int
    by_loss: bool
    """Whether gains are percent of the loss instead of points of accuracy"""


CASES = {
    "digits": Case(
        lambda: SmallCNN((8, 16), 1), digits_data, ("stages.0", "stages.1"), 1_000, 0.02, 15, 32, by_loss=False
    ),
    "fashion": Case(
        lambda: SmallCNN((8, 16, 32), 3),
        fashion_data,
        ("stages.0", "stages.1", "stages.2"),
        *(3_000, 5e-3, 8, 64),
        by_loss=False,
    ),
    "gpt": Case(lambda: GPT(32, 65), text_data, ("blocks.0", "blocks.1", "blocks.2"), 5_000, 3e-3, 8, 32, by_loss=True),
}


class Run:
    """One training of a case, with a seed in one cell or in none."""

    def __init__(self, case: Case, data: Data, seed: int, cell: Cell | None) -> None:
        torch.manual_seed(seed)
        self.case, self.data, self.cell = case, data, cell
        self.model = case.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=case.rate)
        self.schedule = CosineAnnealingLR(self.optimizer, case.epochs)
        self.order = torch.Generator().manual_seed(seed)
        births = [] if cell is None else [("germinate", *cell)]
        self.grower = Grower(
            self.model,
            self.optimizer,
            budget=case.budget,
            steps=case.epochs,
            slots=case.slots,
            policy=lambda report: births if report.step == 1 else [],
        )

    def minibatches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch; images are neither cropped nor flipped."""
        if len(self.data.train) == 1:
            yield from shuffled(self.data.train, self.case.batch, generator)
            return
        for chosen in torch.randperm(len(self.data.train[0]), generator=generator).split(self.case.batch):
            yield self.data.train[0][chosen], self.data.train[1][chosen]

    def epoch(self) -> None:
        """Train for an epoch."""
        self.model.train()
        for x, y in self.minibatches(self.order):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x).flatten(0, -2), y.flatten()).backward()
            self.optimizer.step()
        self.schedule.step()

    def finish(self) -> float:
        """Train to the end, and score on test data: percent correct, or the loss."""
        for _ in range(1, self.case.epochs):
            self.grower.step(0.0)  # a number: nothing is measured, and the plan does not depend on it
            self.epoch()
        self.grower.finish(keep=() if self.cell is None else (self.cell[0],))
        return score(self.model, self.data.test, self.case.by_loss)


@torch.no_grad()
def score(model: nn.Module, batches: Batches, by_loss: bool) -> float:
    """Loss, or percent correct."""
    model.eval()
    outputs, targets = (
        torch.cat(parts) for parts in zip(*((model(x).flatten(0, -2), y.flatten()) for x, y in batches), strict=True)
    )
    if by_loss:
        return float(F.cross_entropy(outputs, targets))
    return 100 * float((outputs.argmax(-1) == targets).float().mean())


def relative_gradients(run: Run, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Auto-RGN: norm of the gradient by norm of the weights of each slot's submodule, mean over minibatches."""
    parts = {slot: list(run.model.get_submodule(slot).parameters()) for slot in run.case.slots}
    found: dict[str, list[float]] = {slot: [] for slot in parts}
    run.model.eval()
    with fork_rng(run.model):
        for x, y in batches:
            loss = F.cross_entropy(run.model(x).flatten(0, -2), y.flatten())
            for slot, own in parts.items():
                gradients = torch.autograd.grad(loss, own, retain_graph=True)
                norms = [torch.cat([part.flatten() for part in each]).norm() for each in (gradients, own)]
                found[slot].append(float(norms[0] / norms[1].detach()))
    return {slot: statistics.fmean(values) for slot, values in found.items()}


def choices(suggestions: Suggestions, gradients: dict[str, float]) -> dict[str, Cell]:
    """The cell that each rule chooses."""
    by_worth, by_trial = ([(row.slot, row.blueprint) for row in suggestions.sorted(by)] for by in ("worth", "trial"))
    slot = max(gradients, key=lambda name: gradients[name])
    largest = suggestions.sorted("parameters")[-1]
    return {
        "first-order": by_worth[0],
        "trial": by_trial[0],
        "Auto-RGN, first-order": next(cell for cell in by_worth if cell[0] == slot),
        "Auto-RGN, trial": next(cell for cell in by_trial if cell[0] == slot),
        "largest": (largest.slot, largest.blueprint),
    }


def one_seed(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Json]:
    """All cells of a case to the end, and what was chosen after the first epoch."""
    case = CASES[name]._replace(**({} if arguments.epochs is None else {"epochs": arguments.epochs}))
    data = case.load(arguments.data_dir, arguments.samples)
    control = Run(case, data, seed, None)
    control.epoch()
    loader = list(control.minibatches(torch.Generator().manual_seed(1_000 + seed)))
    suggestions = control.grower.suggest(loader, arguments.trial, minibatches=arguments.minibatches, ranks=False)
    gradients = relative_gradients(control, loader[: arguments.minibatches])
    base = control.finish()
    gains: dict[str, Json] = {}
    for row in suggestions.sorted("parameters"):
        run = Run(case, data, seed, (row.slot, row.blueprint))
        run.epoch()
        end = run.finish()
        gains[f"{row.slot} {row.blueprint}"] = 100 * (base - end) / base if case.by_loss else end - base
    return {
        "base": base,
        "gains": gains,
        "chosen": {rule: " ".join(cell) for rule, cell in choices(suggestions, gradients).items()},
        "minibatches": suggestions.cost.minibatches,
        "suggestions": {**suggestions.to_dict(), "relative_gradients": gradients},
    }


def shares(found: Sequence[Any], minibatches: int) -> tuple[dict[str, Any], list[list[object]]]:
    """Share of the best cell's gain by rule, and the rows of the table. (Any: JSON values)"""
    gains = {cell: statistics.fmean(one["gains"][cell] for one in found) for cell in found[0]["gains"]}
    best = max(gains.values())
    cost = {"trial": statistics.fmean(one["minibatches"] for one in found), "largest": 0.0, "random": 0.0}
    cost["Auto-RGN, trial"] = cost["trial"] + minibatches
    summary: dict[str, Any] = {}
    for rule in (*found[0]["chosen"], "random"):
        values = [gains[one["chosen"][rule]] if rule != "random" else statistics.fmean(gains.values()) for one in found]
        each = [100 * value / best for value in values]
        spent = cost.get(rule, float(minibatches) * (2 if rule.startswith("Auto") else 1))
        summary[rule] = {"share": statistics.fmean(each), "by_seed": each, "minibatches": spent}
    return summary, [
        [rule, f"{one['share']:.0f} %", f"{min(one['by_seed']):.0f} to {max(one['by_seed']):.0f} %", one["minibatches"]]
        for rule, one in summary.items()
    ]


def main() -> None:
    """Train all cells, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trial", type=int, default=20)
    parser.add_argument("--minibatches", type=int, default=8, help="for first-order worths, and held out")
    parser.add_argument("--epochs", type=int, default=None, help="instead of each case's own")
    parser.add_argument("--samples", type=int, default=None, help="training samples instead of each case's own")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--keep", type=Path, default=Path("runs/suggest.jsonl"), help="file of finished seeds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: getattr(arguments, name) for name in ("trial", "minibatches", "epochs", "samples")}
    kept = Kept(arguments.keep, settings)
    for name in arguments.cases:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            if f"{name} {seed}" not in kept.runs:
                with contextlib.redirect_stdout(io.StringIO()):
                    found = one_seed(name, seed, arguments)
                kept.add(f"{name} {seed}", found)
                print(f"{name}: seed {seed} done, {found['base']:.3f} without a seed", flush=True)
    rows: list[list[object]] = []
    content: dict[str, Json] = {**settings}
    for name in CASES:
        seeds = [run for key, run in kept.runs.items() if key.split()[0] == name]
        if seeds:
            summary, lines = shares(seeds, arguments.minibatches)
            rows += [[f"{name}, {len(seeds)} seeds", *line] for line in lines]
            content[name] = {"shares": summary, "seeds": seeds}
    header = ["model", "rule", "share", "over seeds", "minibatches"]
    print_table("share of the best cell's gain reached by the first choice", header, rows)
    print(write_result("suggest", content, arguments.out))


if __name__ == "__main__":
    main()
