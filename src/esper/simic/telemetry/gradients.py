"""Gradient norms and faults per module, read in one transfer.

`measure_gradients` stays on the device and has no control that depends on data, so a compiled caller is not broken by
it; `collect_gradients` also reads the figures, and is excluded from compilation.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from esper.simic.telemetry.transfer import fetch

Place = tuple[str, str]
"""Module and device."""


@dataclass(frozen=True)
class GradientFigures:
    """One module. Norms are over finite entries, so that one NaN does not hide the rest."""

    norm: float
    """Of several backward passes the largest"""
    largest: float
    """Largest |entry|"""
    nan: int
    """In all passes together"""
    inf: int
    zero_share: float
    """Mean over passes"""
    size: int
    """Entries that were looked at"""

    @property
    def finite(self) -> bool:
        """Whether every entry is."""
        return not self.nan and not self.inf


@dataclass(frozen=True)
class GradientReport:
    """All modules. What has no gradient, or one without values (on the meta device), is not measured: never 0."""

    modules: dict[str, GradientFigures | None]
    total: GradientFigures | None
    unmeasured: tuple[str, ...]
    """Parameters without a gradient that has values"""

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Modules with a NaN or an infinity."""
        return tuple(name for name, figures in self.modules.items() if figures is not None and not figures.finite)


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of a module's parameters by name, as they are now."""
    return {name: weight.grad for name, weight in module.named_parameters()}


def module_of(name: str) -> str:
    """`heads.op` of `heads.op.weight`, `lstm` of `lstm.weight_ih`: each head by itself, all else by its first name."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "heads" and len(rest) > 1 else first


@torch.no_grad()
def measure_gradients(
    gradients: Mapping[str, Tensor | None], group: Callable[[str], str] = module_of
) -> dict[Place, Tensor]:
    """Per module and device: sum of squares, largest |entry|, NaN, infinities, zeros (5,). No host sync."""
    parts: dict[Place, list[Tensor]] = {}
    for name, gradient in gradients.items():
        if _has_values(gradient):
            parts.setdefault((group(name), str(gradient.device)), []).append(gradient.flatten())
    return {place: _figures(torch.cat(tensors)) for place, tensors in parts.items()}


class GradientMonitor:
    """Gradients of one backward pass after another, measured where they are and read together."""

    def __init__(self, group: Callable[[str], str] = module_of) -> None:
        self._group = group
        self._passes: list[dict[Place, tuple[int, Tensor]]] = []
        """Of every place how many entries it has, and its figures"""
        self._modules: dict[str, None] = {}
        self._unmeasured: list[str] | None = None

    def add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Those of one pass; their figures are kept, nothing else. No host sync."""
        sizes: dict[Place, int] = {}
        missing = []
        for name, gradient in gradients.items():
            self._modules[self._group(name)] = None
            if _has_values(gradient):
                place = self._group(name), str(gradient.device)
                sizes[place] = sizes.get(place, 0) + gradient.numel()
            elif self._unmeasured is None or name in self._unmeasured:
                missing.append(name)
        measured = measure_gradients(gradients, self._group)
        self._passes.append({place: (sizes[place], figures) for place, figures in measured.items()})
        self._unmeasured = missing

    def report(self) -> GradientReport:
        """Figures by module. Host sync: one, however many passes there were and on however many devices."""
        measured = [figures for each in self._passes for _, figures in each.values()]
        rows = iter([figures.tolist() for figures in fetch(*measured)] if measured else [])
        passes = [[(name, size, next(rows)) for (name, _), (size, _) in each.items()] for each in self._passes]

        def over(*names: str) -> GradientFigures | None:
            """These modules together."""
            mine = [[(size, row) for name, size, row in each if name in names] for each in passes]
            return _worst([figures for parts in mine if (figures := _combine(parts)) is not None])

        modules = {name: over(name) for name in self._modules}
        return GradientReport(modules, over(*modules), tuple(self._unmeasured or ()))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not type it
def collect_gradients(
    gradients: Mapping[str, Tensor | None], group: Callable[[str], str] = module_of
) -> GradientReport:
    """Figures by module. Host sync: one, also where gradients lie on several devices."""
    watch = GradientMonitor(group)
    watch.add(gradients)
    return watch.report()


def _has_values(gradient: Tensor | None) -> TypeGuard[Tensor]:
    return gradient is not None and gradient.device.type != "meta" and gradient.numel() > 0


def _figures(flat: Tensor) -> Tensor:
    flat = flat.double()  # squares of large float32 entries overflow
    finite = flat.where(flat.isfinite(), 0.0)
    return torch.stack(
        [finite.square().sum(), finite.abs().amax(), flat.isnan().sum(), flat.isinf().sum(), (flat == 0).sum()]
    )


def _combine(parts: Sequence[tuple[int, list[float]]]) -> GradientFigures | None:
    """Parts of a module on several devices as one."""
    if not parts:
        return None
    size = sum(count for count, _ in parts)
    squares, largest, nan, inf, zeros = zip(*(row for _, row in parts), strict=True)
    return GradientFigures(math.sqrt(sum(squares)), max(largest), int(sum(nan)), int(sum(inf)), sum(zeros) / size, size)


def _worst(passes: Sequence[GradientFigures]) -> GradientFigures | None:
    """The same module in several passes as one."""
    if not passes:
        return None
    return GradientFigures(
        norm=max(figures.norm for figures in passes),
        largest=max(figures.largest for figures in passes),
        nan=sum(figures.nan for figures in passes),
        inf=sum(figures.inf for figures in passes),
        zero_share=statistics.fmean(figures.zero_share for figures in passes),
        size=passes[-1].size,
    )
