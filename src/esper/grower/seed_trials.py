"""Newborn seeds that are trained alone for some minibatches, at full strength behind a host that stands still.

Such a trial is a shadow row: the stream in front of the seed is detached, and no other weight gets a gradient. Norms
use the statistics of the batch while the seed trains. For the comparison, the host and the host with the seed each have
their own, gathered over the same training batches.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from esper.grower.growing_model import GrowingModel, silence_by_last_layer
from esper.grower.scoring import Batch, RowRunner, Scorer, Statistics, eval_mode, to_device
from esper.grower.suggestion_table import SeedTrial
from esper.kasmina import lifecycle
from esper.kasmina.attach import gathering_statistics
from esper.kasmina.compare import RowScore, paired_difference
from esper.kasmina.slot import Role, SeedSlot
from esper.leyline import BadValueError, derive_seed

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Trials:
    """Trials of newborns in one model. Nothing in it changes."""

    def __init__(
        self,
        growing: GrowingModel,
        runner: RowRunner,
        scorer: Scorer,
        norms: Sequence[_NormBase],
        *,
        calibration: Sequence[Batch],
        rate: float | None,
    ) -> None:
        """`norms` are trained by the user, `calibration` sets their statistics; `rate` replaces the seeds' own."""
        self.growing, self.runner, self.scorer, self.norms = growing, runner, scorer, norms
        self.calibration, self.rate = calibration, rate

    def host(self, held: Sequence[Batch]) -> RowScore:
        """The score of the model as it is."""
        return self._score(held)

    def run(
        self, slot_id: str, blueprint: str, train: Sequence[Batch], held: Sequence[Batch], host: RowScore
    ) -> SeedTrial:
        """Train a newborn and compare the model with it with the score of the host."""
        slot, handle = self._newborn(slot_id, blueprint)
        try:
            parameters = list(slot.parameters())
            optimizer = make_optimizer(self.growing, slot_id, parameters, self.rate)
            for batch in train:
                with training_pass(self.growing.host, self.runner, self.norms):
                    loss = self.scorer(self.growing.host, to_device(batch, self.growing.device)).losses.mean()
                    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            score = self._score(held)
        finally:
            handle.remove()
        difference = paired_difference(score, host)
        return SeedTrial(score.loss, difference.loss, difference.points)

    def _newborn(self, slot_id: str, blueprint: str) -> tuple[SeedSlot, RemovableHandle]:
        """The seed that the grower would plant there next, in a slot of its own, and the handle of its hook."""
        growing = self.growing
        spec, real = growing.slots[slot_id], growing.modules
        state = lifecycle.act_at_once(lifecycle.germinate(growing.states[0][slot_id], spec, blueprint))
        slot = SeedSlot(spec)
        handle = slot.put_behind(growing.host.get_submodule(slot_id))
        rng_seed = derive_seed(growing.rng_seed, slot_id, state.germinations)
        slot.plant(state, rng_seed, like=growing.host.get_parameter(real.like[slot_id]))
        assert slot.seed is not None
        silence_by_last_layer(slot.seed)
        slot.role = Role.SHADOW
        return slot, handle

    @torch.no_grad()
    def _score(self, held: Sequence[Batch]) -> RowScore:
        losses, correct = list[Tensor](), list[Tensor]()
        host, device = self.growing.host, self.growing.device
        with eval_mode(host), self.runner.row({}, self._calibrated()):
            for batch in held:
                scores = self.scorer(host, to_device(batch, device))
                losses.append(scores.losses.float())
                correct += [] if scores.correct is None else [scores.correct]
        return RowScore(torch.cat(correct) if correct else None, torch.cat(losses))

    @torch.no_grad()
    def _calibrated(self) -> Statistics:
        """Statistics of the norms as the row is now: the mean over batches of each batch's own."""
        if not self.norms:
            return {}
        blank = blank_statistics(self.norms)
        host = self.growing.host
        with eval_mode(host), self.runner.row({}, blank), gathering_statistics(self.norms, momentum=None):
            for batch in self.calibration:
                self.scorer.forward(host, to_device(batch, self.growing.device))
        return {(norm, name): value for (norm, name), value in blank.items() if name != STATISTICS[-1]}


def blank_statistics(norms: Sequence[_NormBase]) -> Statistics:
    """Buffers that take the place of the norms' own, so that nothing is written there."""
    return {(norm, name): torch.zeros_like(getattr(norm, name)) for norm in norms for name in STATISTICS}


@contextmanager
def training_pass(host: nn.Module, runner: RowRunner, norms: Sequence[_NormBase]) -> Iterator[None]:
    """A forward pass with gradients in which norms use the statistics of the batch and write nowhere. No dropout."""
    with (
        eval_mode(host),
        runner.row({}, blank_statistics(norms)),
        gathering_statistics(norms, momentum=None),
        torch.enable_grad(),
    ):
        yield


def make_optimizer(
    growing: GrowingModel, slot_id: str, parameters: Sequence[nn.Parameter], rate: float | None
) -> Optimizer:
    """An optimizer like the user's for one seed, with the options that the seed would have there."""
    users = unwrapped(growing.membership.optimizer)
    weights, vectors = growing.membership.groups_for(growing.host, slot_id)
    groups = []
    for index, chosen in (
        (weights, [p for p in parameters if p.dim() > 1]),
        (vectors, [p for p in parameters if p.dim() <= 1]),
    ):
        if chosen:
            options = _options(users.param_groups[index])
            groups.append({**options, **({} if rate is None else {"lr": rate}), "params": chosen})
    kind = type(users)
    accepted = inspect.signature(kind).parameters
    settings = {name: value for name, value in _options(users.defaults).items() if name in accepted}
    try:
        return kind(groups, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadValueError(
            f"no second {kind.__name__} can be built to try seeds with ({error}): pass trial=0 for first-order worths"
        ) from error


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside those of Accelerate and others."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _options(group: Mapping[str, Any]) -> dict[str, Any]:  # Any: options of an optimizer
    """Options without parameters; a rate that is a tensor is copied, as an optimizer may change it."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
