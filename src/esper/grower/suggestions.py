"""`Grower.suggest`: what every blueprint would be worth in every empty slot, before anything grows.

First-order worth: a backward pass gives the gradient g at each slot. A seed is born with scale 0, so with f the seed at
scale 1, ∂L/∂scale = Σ g·f(h) says how strongly it would be pulled in. The passes behave as in training, but without
dropout, and norms write no statistics. A trial then trains the newborn itself (`seed_trials`).
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.grower.container import CHILD
from esper.grower.decisions import Decider
from esper.grower.growing_model import GrowingModel
from esper.grower.linear_ranks import LinearTap
from esper.grower.scoring import Batch, Scorer, eval_mode, to_device
from esper.grower.seed_trials import Trials, training_pass
from esper.grower.sensing import sensed_slots
from esper.grower.suggestion_table import Cost, SeedTrial, Suggestion, Suggestions, order
from esper.kasmina.slot import fork_rng
from esper.leyline import BadValueError, Measurement, SeedStage
from esper.leyline.numbers import require_positive, require_whole
from esper.tolaria.measurement import make_newborns

FORWARD = 1 / 3
"""Cost of a forward pass relative to a minibatch of training"""
CALIBRATED = 512
"""Samples that set the statistics of norms, as in `Grower.step`"""


@dataclass(frozen=True)
class SuggestionPlan:
    """How much is measured."""

    trial: int
    """Minibatches that each newborn trains for; 0: first-order worths only"""
    minibatches: int
    """For first-order worths, and as many are held out to compare losses on"""
    top: int | None
    """Trials only for this number of seeds with the largest first-order worth"""
    rate: float | None
    """Learning rate of the trials in place of the one that seeds have now"""
    ranks: bool
    """Whether gradients of linear layers are decomposed for `rank_pattern`"""

    def __post_init__(self) -> None:
        require_whole("trial", self.trial, 0, remark=": it is the number of minibatches that each seed is trained for")
        require_whole("minibatches", self.minibatches, 2, remark=": noise is measured between minibatches")
        if self.top is not None:
            require_whole("top", self.top, 1)
        if self.rate is not None:
            require_positive("rate", self.rate)

    @property
    def needed(self) -> int:
        """Minibatches that the loader must yield."""
        return self.minibatches + self.trial


def read_batches(loader: Iterable[Batch], plan: SuggestionPlan) -> list[Batch]:
    """The first minibatches of a loader."""
    if isinstance(loader, Tensor) or not isinstance(loader, Iterable):
        raise BadValueError(f"loader is a {type(loader).__name__}; pass your training loader, or a list of batches")
    batches = list(islice(loader, plan.needed))
    if len(batches) < plan.needed:
        use = f"{plan.trial} to train on and {plan.minibatches} held out" if plan.trial else "for first-order worths"
        raise BadValueError(
            f"the loader yielded {len(batches)} minibatches, and {plan.needed} are needed ({use}): lower trial= or "
            "minibatches=, or let the loader yield smaller batches. A generator is empty after its first use"
        )
    return batches


def run_once(host: nn.Module, scorer: Scorer, batch: Batch) -> None:
    """Run the model in eval mode, so that a Grower finds its slots."""
    device = next(host.parameters()).device
    with eval_mode(host), torch.no_grad():
        scorer.forward(host, to_device(batch, device))


@contextmanager
def untouched(host: nn.Module, loader: object) -> Iterator[None]:
    """Undo what the block does to buffers of the model and to random streams: torch, numpy, Python, the loader's."""
    buffers = {buffer: buffer.clone() for buffer in host.buffers()}
    generators = {each: each.get_state() for each in _generators(loader)}
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with fork_rng(host):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        for generator, state in generators.items():
            generator.set_state(state)
        with torch.no_grad():
            for buffer, before in buffers.items():
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _generators(loader: object) -> set[torch.Generator]:
    """The random generators of a loader and its samplers."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(owner, "generator", None) for owner in owners)
    return {each for each in found if isinstance(each, torch.Generator)}


Cell = tuple[str, str]
"""A slot and a blueprint"""


def legal_cells(growing: GrowingModel) -> dict[Cell, int]:
    """The seeds that could germinate now, with their parameters."""
    left = growing.budget - growing.grown_parameters(0)
    empty = [spec for spec in growing.slots.values() if growing.states[0][spec.slot_id].stage is SeedStage.DORMANT]
    if not empty:
        raise BadValueError(f"no slot is empty: {', '.join(growing.slots)} hold seeds, or rest after a prune")
    cells = {
        (spec.slot_id, offer.name): offer.parameters
        for spec in empty
        for offer in spec.blueprints
        if offer.parameters <= left
    }
    if not cells:
        least = min(offer.parameters for spec in empty for offer in spec.blueprints)
        raise BadValueError(
            f"no blueprint fits: {left:,} of the budget of {growing.budget:,} are left, and the smallest seed for an "
            f"empty slot has {least:,} parameters. Build the Grower with a larger budget"
        )
    return cells


def make_suggestions(decider: Decider, batches: Sequence[Batch], plan: SuggestionPlan) -> Suggestions:
    """Measure all legal seeds. The caller undoes draws of random numbers."""
    growing, runner, scorer = decider.growing, decider.runner, decider.scorer
    cells = legal_cells(growing)
    train, held = batches[: plan.trial], batches[plan.trial :]
    norms = runner.norms()
    linear = LinearTap(growing.host, f"{CHILD}.") if plan.ranks else None
    probe = FirstOrder(decider, cells, linear)
    for index, batch in enumerate(held if not plan.trial else (*train, *held)[: plan.minibatches]):
        with training_pass(growing.host, runner, norms):
            probe.add(to_device(batch, growing.device), index % 2)
    rows = [Suggestion(*cell, parameters, probe.worth(cell)) for cell, parameters in cells.items()]
    rows = list(order(rows, "worth"))
    found: dict[Cell, SeedTrial] = {}
    loss, by_loss, trials_cost = None, False, 0.0
    if plan.trial:
        calibration = _last_samples(train, CALIBRATED)
        trials = Trials(growing, runner, scorer, norms, calibration=calibration, rate=plan.rate)
        host = trials.host(held)
        if not len(host.losses):
            raise BadValueError("no held-out sample counts: all targets are ignored; pass other batches")
        loss, by_loss = host.loss, host.correct is None
        for row in rows[: plan.top]:
            found[row.slot, row.blueprint] = trials.run(row.slot, row.blueprint, train, held, host)
        scored = FORWARD * (len(held) + (len(calibration) if norms else 0))
        trials_cost = scored + len(found) * (plan.trial + scored)
    rows = [row._replace(trial=found.get((row.slot, row.blueprint))) for row in rows]
    size = 0 if linear is None else linear.bytes
    cost = Cost(float(plan.minibatches), trials_cost, len(batches), size)
    ranked = order(rows, "trial" if plan.trial else "worth")
    return Suggestions(ranked, cost, plan.trial, loss, by_loss, () if linear is None else linear.profiles())


def _last_samples(batches: Sequence[Batch], samples: int) -> Sequence[Batch]:
    """The last batches, with at least this number of samples if there are as many."""
    count = 0
    for index in range(len(batches) - 1, 0, -1):
        count += _size(batches[index])
        if count >= samples:
            return batches[index:]
    return batches


def _size(batch: Batch) -> int:
    """Samples in a batch: the length of its first tensor."""
    parts: Iterable[Any] = batch.values() if isinstance(batch, Mapping) else batch  # Any: what the user's loader yields
    first = batch if isinstance(batch, Tensor) else next((part for part in parts if isinstance(part, Tensor)), None)
    return 1 if first is None or not first.dim() else len(first)


class FirstOrder:
    """Gradients of the scales of newborns, minibatch by minibatch."""

    def __init__(self, decider: Decider, cells: Iterable[Cell], linear: LinearTap | None) -> None:
        self.host, self.scorer, self.linear = decider.growing.host, decider.scorer, linear
        self.slots = sensed_slots(decider.growing.slots)
        self.vectors: dict[Cell, list[Tensor]] = {
            (slot_id, blueprint): []
            for slot_id, blueprint in cells
            if blueprint in {offer.name for offer in self.slots[slot_id].blueprints}
        }
        """∂L/∂scale (width,) per minibatch, of seeds that are sensed"""
        self._newborns: dict[Cell, nn.Module] = {}

    def add(self, batch: Batch, half: int) -> None:
        """One forward and backward pass. Weights get no gradient."""
        streams: dict[str, Tensor] = {}

        def catch(slot_id: str, output: Tensor) -> Tensor:
            streams[slot_id] = output if output.requires_grad else output.detach().requires_grad_()
            return streams[slot_id].clone()  # what follows may work in place

        handles = [
            self.host.get_submodule(slot_id).register_forward_hook(
                lambda _, args, output, slot_id=slot_id: catch(slot_id, output), prepend=True
            )
            for slot_id in self.slots
        ]
        try:
            with LinearTap.none() if self.linear is None else self.linear.watching() as calls:
                losses = self.scorer(self.host, batch).losses
        finally:
            for handle in handles:
                handle.remove()
        caught = [(name, x, y) for name, own in calls.items() for x, y in own]
        wanted = [*streams.values(), *(y for _, _, y in caught)]
        gradients = torch.autograd.grad(losses.mean(), wanted, allow_unused=True)
        filled = [torch.zeros_like(h) if g is None else g for h, g in zip(wanted, gradients, strict=True)]
        self._note(streams, dict(zip(streams, filled, strict=False)))
        if self.linear is not None:
            arrived: dict[str, list[tuple[Tensor, Tensor]]] = {}
            for (name, x, _), g in zip(caught, filled[len(streams) :], strict=True):
                arrived.setdefault(name, []).append((x, g))
            self.linear.add(half, arrived)

    @torch.no_grad()
    def _note(self, streams: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        for slot_id, blueprint in self.vectors:
            h, g = streams[slot_id].detach(), gradients[slot_id]
            if (slot_id, blueprint) not in self._newborns:
                self._newborns |= make_newborns({slot_id: self.slots[slot_id]}, h.device, h.dtype)
            effect = self._newborns[slot_id, blueprint](h) * g
            axes = (0, 2, 3) if h.dim() == 4 else tuple(range(h.dim() - 1))
            self.vectors[slot_id, blueprint].append(effect.float().sum(axes))

    def worth(self, cell: Cell) -> Measurement:
        """Norm of the mean gradient, and its standard error along its own direction. 0 ± 0 if it is not sensed."""
        if cell not in self.vectors:
            return Measurement(0.0, 0.0)
        vectors = torch.stack(self.vectors[cell]).double()
        mean = vectors.mean(0)
        value = mean.norm()
        along = vectors @ (mean / value.clamp(min=torch.finfo(torch.float64).tiny))
        return Measurement(float(value), float(along.std() / len(vectors) ** 0.5))
