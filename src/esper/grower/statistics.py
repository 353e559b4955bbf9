"""Norm statistics of a frozen model: they do not drift while the rest trains, and are chosen on validation data.

A frozen norm keeps its statistics in train mode too. Which ones is open until the first step: the original ones, or
those of the new data. A head that trains with one kind would fit that kind. So until then, every second minibatch is
normalised by its own statistics, and the head learns on both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from esper.grower.scoring import RowRunner, RowScores, Statistics, eval_mode

ORIGINAL, RECALIBRATED = "original", "recalibrated"
FEWEST = 8  # samples in a minibatch that may be normalised by its own statistics


def frozen_norms(host: nn.Module) -> list[str]:
    """Names of the norms with running statistics whose own parameters, if any, are frozen."""
    return [
        name
        for name, module in host.named_modules()
        if isinstance(module, _NormBase)
        and module.running_mean is not None
        and not any(parameter.requires_grad for parameter in module.parameters())
    ]


@torch.no_grad()
def write_statistics(statistics: Statistics) -> None:
    """Put statistics into their norms."""
    for (norm, name), value in statistics.items():
        norm.get_buffer(name).copy_(value)


class Alternation:
    """Hooks that let every second training pass use the statistics of its own minibatch, and write none."""

    def __init__(self, host: nn.Module, norms: Sequence[_NormBase]) -> None:
        self.norms = list(norms)
        self.passes = 1  # the first one is under way
        self._own: list[dict[str, Tensor | None]] = []
        """Buffers of the norms while others stand in for them"""
        self._handles = [
            host.register_forward_pre_hook(self._before, with_kwargs=True),
            host.register_forward_hook(self._after, always_call=True),
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # Any: of the user's
        if torch.compiler.is_compiling() or not host.training or not torch.is_grad_enabled():
            return
        self.passes += 1
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()), None)
        if self.passes % 2 or self._own or first is None or len(first) < FEWEST:
            return
        self._own = [dict(norm._buffers) for norm in self.norms]
        for norm, own in zip(self.norms, self._own, strict=True):
            norm._buffers.update({name: None if value is None else value.clone() for name, value in own.items()})
            norm.training = True

    def _after(self, *_: object) -> None:
        for norm, own in zip(self.norms, self._own, strict=bool(self._own)):
            norm._buffers.update(own)
            norm.training = False
        self._own = []

    def __deepcopy__(self, memo: object) -> "Alternation":
        return _idle()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _idle, ()


def _idle() -> Alternation:
    return Alternation(nn.Identity(), [])


class StatisticsChoice:
    """The choice between the original statistics of the frozen norms and those of the new data."""

    def __init__(self, runner: RowRunner) -> None:
        self.runner = runner
        fixed = runner.slots.fixed_norms()
        self.norms = [each for each in runner.host.modules() if isinstance(each, _NormBase) and each in fixed]
        runner.slots.train(runner.host.training)
        self._alternation: Alternation | None = None

    def open(self) -> None:
        """Let training passes alternate, from now until the choice is made."""
        if self.norms and self._alternation is None:
            self._alternation = Alternation(self.runner.host, self.norms)

    def close(self) -> None:
        """The choice is made: every pass uses the statistics of the norms."""
        if self._alternation is not None:
            self._alternation.stop()
            self._alternation = None

    def trials(self) -> dict[str, Statistics]:
        """The statistics to try on validation data besides those that the norms have."""
        with eval_mode(self.runner.host):
            statistics = self.runner.calibrate({}, self.norms)
        return {RECALIBRATED: statistics} if statistics else {}

    def choose(self, scores: RowScores, trials: dict[str, Statistics]) -> tuple[str, str]:
        """The better statistics, now in the norms, and a remark about them. Each is judged at its best temperature."""
        self.close()
        losses = {
            ORIGINAL if name is None else name: row.loss
            if name not in scores.graded
            else float(scores.graded[name].min())
            for name, row in scores.rows.items()
            if name is None or name in trials
        }
        if len(losses) < 2:
            return ORIGINAL, ""
        best = min(losses, key=lambda name: losses[name])
        write_statistics(trials.get(best, {}))
        other = next(name for name in losses if name != best)
        return best, f"{best} norm statistics (loss {losses[best]:.3f}; {other}: {losses[other]:.3f})"
