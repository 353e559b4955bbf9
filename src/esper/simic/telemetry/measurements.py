"""Figures of gradients and of the LSTM's hidden state, measured on the device and read in one transfer."""

import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

SATURATED = 0.95  # |h| above which output gate and cell are both at their bounds and pass hardly any gradient
DEAD = 1e-6  # |h| below which a unit is silent


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Copies of tensors on the CPU, in float64 and their own shapes. Device sync: one in all.

    Counts stay exact up to 2^53. Tensors of several devices are gathered on the first accelerator among them.
    """
    home = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    flat = torch.cat([tensor.detach().to(home, torch.float64).flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _finite(values: Tensor) -> Tensor:
    """In float64, so that squares of large entries do not overflow; 0 for what is not finite."""
    values = values.double()
    return values.where(values.isfinite(), 0.0)


@dataclass(frozen=True)
class GradientFigures:
    """Gradients of one module. Norms cover the finite entries, so that one NaN does not hide the rest."""

    norm: float  # largest over the backward passes
    largest: float  # largest |entry|
    nan: int  # sum over the passes
    inf: int
    zero_share: float  # mean over the passes
    size: int  # measured entries


@dataclass(frozen=True)
class GradientReport:
    """Gradients of all modules; None for a module without gradients."""

    modules: dict[str, GradientFigures | None]
    total: GradientFigures | None
    unmeasured: tuple[str, ...]  # parameters without a gradient, or with one on the meta device

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Modules with a NaN or an infinity."""
        return tuple(name for name, figures in self.modules.items() if figures and figures.nan + figures.inf)


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The current gradients of a module's parameters, by name."""
    return {name: weight.grad for name, weight in module.named_parameters()}


def module_of(name: str) -> str:
    """`heads.op` for `heads.op.weight`, `lstm` for `lstm.weight_ih`: heads one by one, the rest by first name."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "heads" and len(rest) > 1 else first


@torch.no_grad()
def measure_gradients(gradients: Mapping[str, Tensor | None]) -> dict[tuple[str, str], Tensor]:
    """By module and device (6,): sum of squares, largest |entry|, NaN, infinities, zeros, size. No device sync.

    No control flow depends on data, so that a compiled caller stays one graph.
    """
    parts: dict[tuple[str, str], list[Tensor]] = {}
    for name, gradient in gradients.items():
        if _has_values(gradient):
            parts.setdefault((module_of(name), str(gradient.device)), []).append(gradient.flatten())
    return {key: _figures(torch.cat(tensors)) for key, tensors in parts.items()}


def _has_values(gradient: Tensor | None) -> TypeGuard[Tensor]:
    return gradient is not None and gradient.device.type != "meta" and gradient.numel() > 0


def _figures(flat: Tensor) -> Tensor:
    finite = _finite(flat)
    counts = flat.isnan().sum(), flat.isinf().sum(), (flat == 0).sum(), finite.new_full((), flat.numel())
    return torch.stack([finite.square().sum(), finite.abs().amax(), *counts])


class GradientMonitor:
    """Measures the gradients of several backward passes and reads them together."""

    def __init__(self) -> None:
        self._passes: list[dict[tuple[str, str], Tensor]] = []
        self._measured: dict[str, bool] = {}

    def add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Measure the gradients of one pass, by parameter. No device sync."""
        for name, gradient in gradients.items():
            self._measured[name] = self._measured.get(name, False) or _has_values(gradient)
        self._passes.append(measure_gradients(gradients))

    def report(self) -> GradientReport:
        """Figures by module. Device sync: one, for any number of passes and devices."""
        keys = [(index, name) for index, figures in enumerate(self._passes) for name, _ in figures]
        tensors = [tensor for figures in self._passes for tensor in figures.values()]
        rows = [row.tolist() for row in fetch(*tensors)] if tensors else []

        def over(modules: Iterable[str]) -> GradientFigures | None:
            passes: dict[int, list[list[float]]] = {}
            for (index, name), row in zip(keys, rows, strict=True):
                if name in modules:
                    passes.setdefault(index, []).append(row)
            return _combine(list(passes.values()))

        names = list(dict.fromkeys(map(module_of, self._measured)))
        unmeasured = tuple(name for name, measured in self._measured.items() if not measured)
        return GradientReport({name: over([name]) for name in names}, over(names), unmeasured)


def _combine(passes: list[list[list[float]]]) -> GradientFigures | None:
    """The rows of every pass as one figure each, and the worst of the passes."""
    if not passes:
        return None
    squares, largest, nan, inf, zeros, size = zip(*([*zip(*rows, strict=True)] for rows in passes), strict=True)
    shares = [sum(count) / sum(entries) for count, entries in zip(zeros, size, strict=True)]
    return GradientFigures(
        norm=max(math.sqrt(sum(parts)) for parts in squares),
        largest=max(map(max, largest)),
        nan=int(sum(map(sum, nan))),
        inf=int(sum(map(sum, inf))),
        zero_share=statistics.fmean(shares),
        size=int(sum(size[-1])),
    )


def collect_gradients(gradients: Mapping[str, Tensor | None]) -> GradientReport:
    """Figures of one pass by module. Device sync: one."""
    # Never compiled. The decorator would do, but it imports the compiler, which takes longer than torch itself.
    eager = torch.compiler.disable(_collect) if "torch._dynamo" in sys.modules else _collect
    return eager(gradients)


def _collect(gradients: Mapping[str, Tensor | None]) -> GradientReport:
    monitor = GradientMonitor()
    monitor.add(gradients)
    return monitor.report()


@dataclass(frozen=True)
class LstmHealth:
    """A hidden state of (envs, units). Norms cover the finite values, so that one NaN does not hide the rest."""

    hidden_rms: float
    hidden_max: float  # largest |h|
    worst_env_rms: float  # largest root mean square of an env
    cell_rms: float | None  # None without a cell
    cell_max: float | None
    saturated_share: float  # of all hidden values
    dead_share: float  # share of units that are silent in every env
    nan: int
    inf: int

    @property
    def faults(self) -> int:
        """Values that are not finite."""
        return self.nan + self.inf


@torch.no_grad()
def compute_lstm_health(hidden: Tensor | tuple[Tensor, Tensor] | None) -> LstmHealth | None:
    """Health of (hidden, cell), or of hidden alone, each (…, units); None without a state. Device sync: one.

    Measure it in the middle of an episode: at the end the state is reset, and looks dead.
    """
    state, cell = hidden if isinstance(hidden, tuple) else (hidden, None)
    if state is None or not state.numel():
        return None
    rows = _finite(state).flatten(0, -2)
    figures = [
        _rms(rows),
        rows.abs().amax(),
        rows.square().mean(-1).sqrt().amax(),
        (rows.abs() > SATURATED).double().mean(),
        # A unit with a value that is not finite is broken, not dead.
        ((rows.abs() < DEAD) & state.flatten(0, -2).isfinite()).all(0).double().mean(),
        state.isnan().sum().double(),
        state.isinf().sum().double(),
    ]
    if cell is not None:
        flat = _finite(cell)
        figures += [cell.isnan().sum().double(), cell.isinf().sum().double(), _rms(flat), flat.abs().amax()]
    rms, largest, worst, saturated, dead, nan, inf, *of_cell = fetch(torch.stack(figures))[0].tolist()
    cell_nan, cell_inf, cell_rms, cell_max = of_cell or (0.0, 0.0, None, None)
    faults = int(nan + cell_nan), int(inf + cell_inf)
    return LstmHealth(rms, largest, worst, cell_rms, cell_max, saturated, dead, *faults)


def worst_health(healths: Iterable[LstmHealth | None]) -> LstmHealth | None:
    """The largest of each figure over several hidden states, with faults added up; None if none was measured."""
    measured = [health for health in healths if health is not None]
    if not measured:
        return None
    figures: dict[str, Any] = {}  # Any: the fields of LstmHealth
    for field in fields(LstmHealth):
        values = [value for health in measured if (value := getattr(health, field.name)) is not None]
        figures[field.name] = (sum if field.name in ("nan", "inf") else max)(values) if values else None
    return LstmHealth(**figures)


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
