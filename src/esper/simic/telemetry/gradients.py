"""Gradient norms and faults per module, read in one transfer.

`measure_gradients` stays on the device and has no control that depends on data, so a compiled caller is not broken by
it; `collect_gradients` also reads the figures, and is excluded from compilation.
"""

import math
from collections.abc import Callable, Iterable, Mapping
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
    largest: float
    """Largest |entry|"""
    nan: int
    inf: int
    zero_share: float
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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not type it
def collect_gradients(
    gradients: Mapping[str, Tensor | None], group: Callable[[str], str] = module_of
) -> GradientReport:
    """Figures by module. Host sync: one, also where gradients lie on several devices."""
    measured = measure_gradients(gradients, group)
    sizes: dict[Place, int] = dict.fromkeys(measured, 0)
    for name, gradient in gradients.items():
        if _has_values(gradient):
            sizes[group(name), str(gradient.device)] += gradient.numel()
    rows = [figures.tolist() for figures in fetch(*measured.values())] if measured else []
    by_module: dict[str, list[tuple[int, list[float]]]] = {group(name): [] for name in gradients}
    for (module, _), size, row in zip(measured, sizes.values(), rows, strict=True):
        by_module[module].append((size, row))
    return GradientReport(
        modules={module: _combine(found) for module, found in by_module.items()},
        total=_combine(row for found in by_module.values() for row in found),
        unmeasured=tuple(name for name, gradient in gradients.items() if not _has_values(gradient)),
    )


def _has_values(gradient: Tensor | None) -> TypeGuard[Tensor]:
    return gradient is not None and gradient.device.type != "meta" and gradient.numel() > 0


def _figures(flat: Tensor) -> Tensor:
    flat = flat.double()  # squares of large float32 entries overflow
    finite = flat.where(flat.isfinite(), 0.0)
    return torch.stack(
        [finite.square().sum(), finite.abs().amax(), flat.isnan().sum(), flat.isinf().sum(), (flat == 0).sum()]
    )


def _combine(found: Iterable[tuple[int, list[float]]]) -> GradientFigures | None:
    """Parts of a module on several devices as one."""
    parts = list(found)
    if not parts:
        return None
    size = sum(count for count, _ in parts)
    squares, largest, nan, inf, zeros = zip(*(row for _, row in parts), strict=True)
    return GradientFigures(math.sqrt(sum(squares)), max(largest), int(sum(nan)), int(sum(inf)), sum(zeros) / size, size)
