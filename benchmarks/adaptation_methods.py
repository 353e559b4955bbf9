"""The ways to adapt the ResNet of `adaptation_cases.py` that `adaptation.py` compares, each as one training."""

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from adaptation_cases import Parts, parts_of, pretrained
from harness import Json, describe_machine
from low_rank import add_updates
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower import Grower

LORA = {
    "lora 1 all": (1, ""),
    "lora 4 all": (4, ""),
    "lora 4 stage 1": (4, "layer1."),
    "lora 4 stage 2": (4, "layer2."),
    "lora 4 stage 3": (4, "layer3."),
}
"""Rank, and how the names of the convolutions begin"""
BUDGETS = (1, 3, 10)
"""Percent of the model's parameters"""
OURS = {f"ours {budget} %": budget for budget in BUDGETS}
USUAL = ("head", "norms", *LORA)
FULL = "full"
CHUNK = 500  # images per forward pass without gradients


@dataclass(frozen=True)
class Settings:
    """What a run depends on, besides its case, seed, method and rate."""

    train: int
    validation: int
    test: int
    epochs: int
    batch: int


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
    def name(self) -> str:
        """By which it is stored."""
        return "/".join(str(value) for value in asdict(self).values())


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


def run_one(run: Run, settings: Settings, folder: Path, device: str) -> dict[str, Json]:
    """One run, from the pretrained weights to its accuracies."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    start = time.perf_counter()
    parts = parts_of(run.case, run.seed, (settings.train, settings.validation, settings.test), folder, device)
    model = pretrained(folder).to(device)
    story: list[str] = []
    if run.method == FULL:
        train(model, list(model.parameters()), run, parts, settings, True)
        added = sum(p.numel() for p in model.parameters())
    elif run.method in OURS:
        added = run_ours(model, run, parts, settings, story)
    else:
        added = run_usual(model, run, parts, settings)
    return {
        **asdict(run),
        "added": added,
        "validation": accuracy(model, parts.validation),
        "test_accuracy": accuracy(model, parts.test),
        "seconds": time.perf_counter() - start,
        "story": story,
        "machine": describe_machine(),
    }


def run_usual(model: nn.Module, run: Run, parts: Parts, settings: Settings) -> int:
    """The head, with norms or low-rank updates. Returns what was added to the head."""
    model.requires_grad_(False)
    if run.statistics == "recalibrated":
        recalibrate(model, parts.train[0])
    more: list[nn.Parameter] = []
    if run.method == "norms":
        more = [p for part in model.modules() if isinstance(part, nn.BatchNorm2d) for p in part.parameters()]
    elif run.method in LORA:
        rank, prefix = LORA[run.method]
        convolutions = [
            part for name, part in model.named_modules() if isinstance(part, nn.Conv2d) and name.startswith(prefix)
        ]
        more = add_updates(convolutions, "image", f"lora_conv_{rank}")
    learning = [*model.get_submodule("linear").parameters(), *more]
    for parameter in learning:
        parameter.requires_grad_(True)
    train(model, learning, run, parts, settings, False)
    return sum(p.numel() for p in more)


def run_ours(model: nn.Module, run: Run, parts: Parts, settings: Settings, story: list[str]) -> int:
    """The Grower at a budget. Its budget holds at every step, and merging changes no output. Returns what it added."""
    host = sum(p.numel() for p in model.parameters())
    budget = host * OURS[run.method] // 100
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
