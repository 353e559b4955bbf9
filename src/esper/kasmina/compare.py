"""Comparison of rows on the same images, each with its own normalisation statistics.

With the host's running statistics a good seed in an early slot auditions far below zero: the layers behind it normalise
by what they saw without it. For the same reason, silencing a seed overstates its contribution. So each row, including
the main one, is calibrated by one train-mode forward pass over the same training inputs before it is scored.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina.slot import Body, Role, Roles
from esper.leyline import ACTIVE_STAGES, BadValueError, Measurement, SeedStage, relative_gain
from esper.leyline.numbers import refuse

CHUNK = 1024  # inputs per forward pass: it bounds memory and does not change results
IGNORED = -100  # as in torch: the target of padding, or of a token that need not be predicted


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of (…, classes) against (…); targets of −100 are ignored."""
    check_targets(logits, targets)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def check_targets(logits: Tensor, targets: Tensor) -> None:
    """Raise unless there is one class index per row of scores. Does not read values, so it needs no GPU sync."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        given = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise BadValueError(f"the host returns {given}; class scores, one floating-point tensor, are needed")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        remedy = "train on them with losses(…, criterion=…); only classes have accuracies, and so auditions"
        raise BadValueError(f"targets of {targets.dtype} are no class indices (int64): {remedy}")
    if logits.dim() < 2 or logits.shape[:-1] != targets.shape:
        fit = f"targets of shape {tuple(targets.shape)} do not fit scores of shape {tuple(logits.shape)}"
        raise BadValueError(f"{fit}: scores (…, classes) need targets (…), with the classes in the last axis")


class RowScore(NamedTuple):
    """Results of one row, a value per prediction (an image, or a token of a sequence)."""

    correct: Tensor | None  # None where only losses exist
    losses: Tensor

    @property
    def hits(self) -> Tensor:
        """Which predictions are correct; raises BadValueError where only losses exist."""
        if self.correct is None:
            raise BadValueError("this row was scored by loss alone; it has no accuracy")
        return self.correct

    @property
    def accuracy(self) -> float:
        """Accuracy in percent; raises BadValueError where only losses exist."""
        return 100.0 * float(self.hits.double().mean())

    @property
    def loss(self) -> float:
        """Mean loss."""
        return float(self.losses.double().mean())

    def part(self, predictions: slice) -> "RowScore":
        """The results of some of the predictions."""
        return RowScore(None if self.correct is None else self.correct[predictions], self.losses[predictions])


class PairedDifference(NamedTuple):
    """A seed's effect in points and in loss; positive is better."""

    points: Measurement  # of accuracy, or percent of the loss where only losses exist
    loss: Measurement


def paired_difference(row: RowScore, other: RowScore) -> PairedDifference:
    """How much better `row` is than `other`, with paired standard errors."""
    return paired_differences([row], [other])[0]


def paired_differences(rows: Sequence[RowScore], others: Sequence[RowScore]) -> list[PairedDifference]:
    """How much better each row is than its counterpart, with paired standard errors. All have the same predictions.

    That of the accuracy follows from discordant predictions: sqrt(p01 + p10 − (p01 − p10)²) / sqrt(n). Where a row has
    only losses, points are the percentage by which its loss is below that of the other. Device sync: one for all rows.
    """
    if not rows:
        return []
    mine, theirs = (torch.stack([row.losses for row in part]) for part in (rows, others))
    losses, count = (theirs - mine).double(), mine.shape[1]
    error = losses.std(1) / math.sqrt(count) if count > 1 else torch.full_like(losses[:, 0], math.inf)
    if any(row.correct is None for row in (*rows, *others)):
        level = theirs.double().mean(1)
        points = relative_gain(level, mine.double().mean(1)), 100.0 * error / level
    else:
        points = _points(*(torch.stack([row.hits for row in part]) for part in (rows, others)))
    numbers = torch.stack([*points, losses.mean(1), error], 1).tolist()
    return [PairedDifference(Measurement(*one[:2]), Measurement(*one[2:])) for one in numbers]


def _points(hits: Tensor, other_hits: Tensor) -> tuple[Tensor, Tensor]:
    """Points (rows,) by which hits (rows, n) are more than those of others, and their standard errors."""
    count = hits.shape[1]
    won, lost = (part.sum(1).double() / count for part in (hits & ~other_hits, other_hits & ~hits))
    variance = (won + lost - (won - lost) ** 2).clamp_min(0.0)
    return 100.0 * (won - lost), 100.0 * (variance / count).sqrt()


class Comparison(NamedTuple):
    """Scores of a network, and differences by slot."""

    main: RowScore
    deployed: RowScore | None
    """The main row with the running statistics; None where that pass was omitted."""
    auditions: dict[str, PairedDifference]
    """Shadow row minus main row, for seeds in TRAINING."""
    contributions: dict[str, PairedDifference]
    """Main row minus the row with this seed silenced, for seeds that act."""


@torch.no_grad()
def score_row(
    body: Body, x: Tensor, targets: Tensor, roles: Roles, calibration: Tensor | None, *, by_loss: bool = False
) -> RowScore:
    """Score one row, calibrated on training inputs or, with None, by the running statistics. `by_loss`: no accuracy."""
    statistics = None if calibration is None else body.calibrate(calibration, roles)
    correct, losses = [], []
    for inputs, wanted in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
        output = body.evaluate(inputs, roles, statistics)
        check_targets(output, wanted)
        counts = wanted.flatten() != IGNORED
        logits, classes = output.flatten(0, -2)[counts], wanted.flatten()[counts]
        if bool(((classes < 0) | (classes >= logits.shape[-1])).any()):
            given = f"targets from {int(classes.min())} to {int(classes.max())}"
            count = logits.shape[-1]
            raise BadValueError(
                f"{given} are no classes of a host with {count} scores; use {IGNORED} to ignore a target"
            )
        correct.append(logits.argmax(-1) == classes)
        losses.append(F.cross_entropy(logits, classes.long(), reduction="none"))
    return RowScore(None if by_loss else torch.cat(correct), torch.cat(losses))


def compare(body: Body, x: Tensor, targets: Tensor, calibration: Tensor, *, by_loss: bool = False) -> Comparison:
    """Audition every TRAINING seed and silence every acting one, against the main row."""
    _check_inputs(x, targets, calibration)
    score = partial(score_row, body, x, targets, by_loss=by_loss)
    main, deployed = score({}, calibration), score({}, None)
    comparison = Comparison(main, deployed, {}, {})
    for slot_id, slot in body.slot_items():
        if slot.state.stage is SeedStage.TRAINING:
            comparison.auditions[slot_id] = paired_difference(score({slot_id: Role.SHADOW}, calibration), main)
        elif slot.state.stage in ACTIVE_STAGES:
            comparison.contributions[slot_id] = paired_difference(main, score({slot_id: Role.SILENT}, calibration))
    return comparison


def _check_inputs(x: Tensor, targets: Tensor, calibration: Tensor) -> None:
    for name, given in (("inputs", x), ("targets", targets), ("calibration", calibration)):
        if not isinstance(given, Tensor):
            raise BadValueError(f"{name} are a {type(given).__name__}; one tensor is needed")
        if given.dim() == 0 or given.numel() == 0:
            raise BadValueError(f"{name} of shape {tuple(given.shape)} are empty: there is nothing to measure")
    ignored = f"all {targets.numel()} targets are {IGNORED}, which ignores them: there is nothing to measure"
    unequal = f"{len(x)} inputs but {len(targets)} targets: each input needs its own"
    refuse({unequal: len(x) != len(targets), ignored: bool((targets == IGNORED).all())})
