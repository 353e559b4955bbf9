"""Scores of a user's model on batches of validation data: of the network itself, and of rows without a seed.

Rows that are compared have their own normalisation statistics, from the last training inputs. The layers behind a seed
have adapted their running statistics to it. With those, silencing the seed would overstate its contribution.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

from esper.grower.container import ModelSlots
from esper.kasmina.attach import gathering_statistics
from esper.kasmina.compare import IGNORED, RowScore
from esper.kasmina.slot import Role, Roles
from esper.leyline import BadValueError

Batch = Any  # what the user's loader yields
Loss = Callable[[Any, Batch], Tensor]
"""(output of the model, batch) → one value per sample or token"""
Forward = Callable[[nn.Module, Batch], Any]
"""(model, batch) → output of the model"""
PIXELS = "loss=lambda output, batch: F.cross_entropy(output, batch[1], reduction='none').flatten(1).mean(1)"
EXAMPLE = "loss=lambda output, batch: F.mse_loss(output, batch[1], reduction='none').flatten(1).mean(1)"


def check_loss(loss: object) -> None:
    """Raise for what cannot be the user's loss."""
    if loss is not None and not callable(loss):
        raise BadValueError(f"loss is a {type(loss).__name__}; pass a function of (output, batch)")
    if isinstance(loss, _Loss):
        raise BadValueError(
            f"nn.{type(loss).__name__} takes (output, target); pass a function of (output, batch) that returns one "
            f"value per sample, such as {EXAMPLE}"
        )


def call_model(model: nn.Module, batch: Batch) -> Any:
    """`model(**batch)` for a dict, `model(*batch[:-1])` for a tuple that ends with the target, else `model(batch)`."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch[:-1]) if isinstance(batch, tuple | list) and len(batch) > 1 else model(batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with all its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]  # a dict of its own kind
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    return type(batch)(to_device(value, device) for value in batch) if isinstance(batch, tuple | list) else batch


TEMPERATURES = tuple(2 ** (exponent / 4) for exponent in range(-8, 17))
"""By which logits are divided when the temperature is fitted"""


class Scores(NamedTuple):
    """Losses (n,), and for classes also whether each prediction is correct (n,)."""

    losses: Tensor
    correct: Tensor | None
    tempered: Tensor
    """Losses (n,) with the logits divided by the fitted temperature"""
    graded: Tensor | None = None
    """Sums of the losses at each of `TEMPERATURES`, where they were asked for"""


class Scorer:
    """Turns a batch into scores, by the user's loss or by cross-entropy."""

    def __init__(self, loss: Loss | None, forward: Forward | None) -> None:
        self.loss, self.forward = loss, forward or call_model
        self.temperature = 1.0
        """By which logits are divided where rows are compared; a loss of the user's own has none"""

    def __call__(self, model: nn.Module, batch: Batch, *, grade: bool = False) -> Scores:
        output = self.forward(model, batch)
        if self.loss is None:
            return _classify(output, batch, self.temperature, grade)
        losses = _checked(self.loss(output, batch))
        return Scores(losses, None, losses)

    def of_number(self, number: float) -> RowScore:
        """The score behind a number: a loss where the loss is the user's own, else an accuracy in percent."""
        loss = number if self.loss is not None else 1 - number / 100
        return RowScore(None, torch.tensor([loss]))


def _checked(losses: object) -> Tensor:
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.is_floating_point() or not len(losses):
        given = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise BadValueError(
            f"loss() returned {given}; return one floating-point value per sample, shape (batch,), such as {EXAMPLE}"
        )
    return losses


def _classify(output: object, batch: Batch, temperature: float, grade: bool) -> Scores:
    targets = batch[-1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    clear = (
        isinstance(output, Tensor)
        and isinstance(targets, Tensor)
        and output.is_floating_point()
        and targets.dtype in (torch.int64, torch.int32, torch.uint8)
        and output.dim() >= 2
        and output.shape[:-1] == targets.shape
        and output.shape[-1] > 1
    )
    if not clear:
        shown = [
            f"{tuple(each.shape)} of {each.dtype}" if isinstance(each, Tensor) else type(each).__name__
            for each in (output, batch if targets is None else targets)
        ]
        per_pixel = isinstance(targets, Tensor) and not targets.is_floating_point() and targets.dim() > 1
        example = PIXELS if per_pixel else EXAMPLE
        raise BadValueError(
            f"outputs {shown[0]} and targets {shown[1]} do not say what the loss is: class scores (…, classes) with "
            f"class indices (…) would. Pass your own, one value per sample, such as {example}"
        )
    assert isinstance(output, Tensor) and isinstance(targets, Tensor)
    counts = targets.flatten() != IGNORED
    logits, classes = output.flatten(0, -2)[counts].float(), targets.flatten()[counts].long()
    losses = F.cross_entropy(logits, classes, reduction="none")
    tempered = losses if temperature == 1 else F.cross_entropy(logits / temperature, classes, reduction="none")
    graded = None
    if grade:
        sums = [F.cross_entropy(logits / each, classes, reduction="sum") for each in TEMPERATURES]
        graded = torch.stack(sums).double()
    return Scores(losses, logits.argmax(-1) == classes, tempered, graded)


FirstPass = Callable[[tuple[Any, ...], dict[str, Any]], None]


class InputTap:
    """A forward pre-hook that keeps the last training inputs since the last step, 512 samples if there are as many.

    Inputs from before a step do not count, so a resumed run keeps the same ones. A copy of the model keeps none.
    """

    def __init__(self, on_first: FirstPass | None = None, samples: int = 512) -> None:
        """`on_first` is called with the arguments of the first forward pass."""
        self.on_first, self.samples = on_first, samples
        self.kept: list[tuple[tuple[Any, ...], dict[str, Any], int]] = []
        self.passes = 0
        """Training passes since the last step"""
        self.on_training: Callable[[], None] | None = None
        """Called once, before the next training pass"""
        self.active = True
        self.redirected: Callable[[], bool] = bool
        """Whether `forward` stands for another method at the moment, so that its arguments are not the model's"""
        self._compiled: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.active or self.redirected():
            return
        if self.on_first is not None:
            self.active = False  # the first pass is traced, which runs the model
            try:
                self.on_first(args, kwargs)
                self.on_first = None
            finally:
                self.active = True
        if not module.training or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            # A compiled graph repeats an assignment. All that is read here would be a guard, and compiled again.
            self._compiled = args, kwargs
            return
        if self.on_training is not None:
            begin, self.on_training = self.on_training, None
            begin()
        self._keep(args, kwargs)

    def collect(self) -> None:
        """Keep the last batch of a compiled model too. Others of its batches are not seen."""
        if self._compiled is not None:
            (args, kwargs), self._compiled = self._compiled, None
            self._keep(args, kwargs)

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()), None)
        if self.passes == 0:
            self.kept.clear()
        self.kept.append((args, kwargs, 1 if first is None else len(first)))
        self.passes += 1
        while sum(count for *_, count in self.kept[1:]) >= self.samples:
            del self.kept[0]

    def __deepcopy__(self, memo: object) -> "InputTap":
        return _idle_tap()

    def __reduce__(self) -> tuple[Callable[[], "InputTap"], tuple[()]]:
        return _idle_tap, ()


def _idle_tap() -> InputTap:
    tap = InputTap()
    tap.active = False
    return tap


Statistics = dict[tuple[_NormBase, str], Tensor]


class RowRunner:
    """Runs the user's model as it is, or with other roles and statistics, without leaving a trace."""

    def __init__(self, host: nn.Module, slots: ModelSlots, tap: InputTap) -> None:
        self.host, self.slots, self.tap = host, slots, tap

    def norms(self) -> list[_NormBase]:
        """Norms with running statistics that training updates; the user may have frozen others by eval mode."""
        fixed = self.slots.fixed_norms()
        norms = [m for m in self.host.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
        norms = [norm for norm in norms if norm not in fixed]
        return [norm for norm in norms if norm.training or not self.host.training]

    def calibrated(self, roles: Roles) -> Statistics:
        """Normalisation statistics of a row, from the kept training inputs."""
        norms = self.norms()
        with eval_mode(self.host):
            return self.calibrate(roles, norms)

    @torch.no_grad()
    def calibrate(self, roles: Roles, norms: Sequence[_NormBase]) -> Statistics:
        """Normalisation statistics of a row: the mean over the kept batches of each batch's own."""
        if not norms or not self.tap.kept:
            return {}
        names = ("running_mean", "running_var", "num_batches_tracked")
        blank = {(norm, name): torch.zeros_like(getattr(norm, name)) for norm in norms for name in names}
        with self._playing(roles), _swapped(blank), gathering_statistics(norms, momentum=None):
            for args, kwargs, _ in self.tap.kept:
                self.host(*args, **kwargs)
        return {(norm, name): value for (norm, name), value in blank.items() if name != names[-1]}

    @contextmanager
    def row(self, roles: Roles, statistics: Statistics) -> Iterator[nn.Module]:
        """The model in eval mode with these roles and statistics."""
        with self._playing(roles), _swapped(statistics):
            yield self.host

    @contextmanager
    def _playing(self, roles: Roles) -> Iterator[None]:
        active, self.tap.active = self.tap.active, False
        for slot_id, role in roles.items():
            self.slots[slot_id].role = role
        # A row that runs once is not worth a graph. The compiler is imported only if the user has done so.
        compiler = "torch._dynamo" in sys.modules
        try:
            with torch.compiler.set_stance("force_eager") if compiler else nullcontext():
                yield
        finally:
            self.tap.active = active
            for slot_id in roles:
                self.slots[slot_id].role = Role.MAIN


class RowScores(NamedTuple):
    """The model as it is, and rows to compare."""

    main: RowScore
    rows: dict[str | None, RowScore]
    """By name; the model itself is None. Their losses are tempered."""
    graded: dict[str | None, Tensor]
    """Mean losses at each of `TEMPERATURES`, where they were asked for"""


def score_rows(
    runner: RowRunner,
    scorer: Scorer,
    batches: Iterable[Batch],
    silenced: Mapping[str, Roles],
    device: torch.device,
    *,
    trials: Mapping[str, Statistics] | None = None,
    grade: bool = False,
) -> RowScores:
    """Score the model as it is, and rows to compare, in one pass over the batches.

    The rows are the model (None), the model with each of `silenced`, each with its own statistics, and the model with
    the statistics of each of `trials`. With `grade`, the model and the trials are also scored at all temperatures.
    """
    tried = {} if trials is None else dict(trials)
    rows = dict[str | None, Roles](silenced.items())
    norms = runner.norms()
    if silenced and norms:
        rows[None] = {}
    whole: list[Scores] = []
    with eval_mode(runner.host), torch.no_grad():
        statistics = {name: runner.calibrate(roles, norms) for name, roles in rows.items()}
        for trial, values in tried.items():
            rows[trial], statistics[trial] = {}, values
        parts: dict[str | None, list[Scores]] = {name: [] for name in rows}
        for batch in batches:
            moved = to_device(batch, device)
            with runner.row({}, {}) as model:
                whole.append(scorer(model, moved, grade=grade))
            for name, roles in rows.items():
                with runner.row(roles, statistics[name]) as model:
                    parts[name].append(scorer(model, moved, grade=grade and name in tried))
    compared: dict[str | None, RowScore] = {None: _joined(whole, tempered=True)}
    compared |= {name: _joined(scores, tempered=True) for name, scores in parts.items()}
    graded = {
        name: grades for name, scores in {None: whole, **parts}.items() if (grades := _grades(scores)) is not None
    }
    return RowScores(_joined(whole), compared, graded)


def _grades(scores: Sequence[Scores]) -> Tensor | None:
    sums = [each.graded for each in scores if each.graded is not None]
    count = sum(len(each.losses) for each in scores)
    return torch.stack(sums).sum(0) / max(count, 1) if sums else None


def _joined(scores: Sequence[Scores], *, tempered: bool = False) -> RowScore:
    losses = torch.cat([(each.tempered if tempered else each.losses).float() for each in scores])
    correct = [each.correct for each in scores if each.correct is not None]
    return RowScore(torch.cat(correct) if correct else None, losses)


@contextmanager
def eval_mode(host: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and every part back into its own mode on exit."""
    before = [(part, part.training) for part in host.modules()]
    host.eval()
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode


@contextmanager
def _swapped(statistics: Statistics) -> Iterator[None]:
    before = {(norm, name): getattr(norm, name) for norm, name in statistics}
    try:
        for (norm, name), value in statistics.items():
            norm._buffers[name] = value
        yield
    finally:
        for (norm, name), value in before.items():
            norm._buffers[name] = value
