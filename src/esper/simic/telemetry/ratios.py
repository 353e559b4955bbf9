"""Which probability ratios of an update went out of bounds, and whose they were."""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_positive, require_whole
from esper.simic.telemetry.transfer import fetch

JOINT = "joint"
"""The name of the ratio of whole actions."""


@dataclass(frozen=True)
class RatioLimits:
    """When a ratio is an offender."""

    high: float = 5.0
    """Above this it has exploded: the action is so many times likelier than when it was taken."""
    low: float = 0.1
    """Below this it has vanished."""
    cap: int = 100
    """Offenders that are listed; the counts are exact however many there are."""

    def __post_init__(self) -> None:
        require_positive("low", self.low)
        require_positive("high", self.high)
        require_whole("cap", self.cap, 0)
        if not self.low < 1 < self.high:
            raise BadValueError(f"low {self.low} and high {self.high}; a ratio of 1 must lie between them")


@dataclass(frozen=True)
class Offender:
    """One ratio out of bounds."""

    env: int
    step: int
    head: str
    ratio: float
    action: tuple[int, ...]
    """What was done there, by head; empty where no actions were given."""


@dataclass(frozen=True)
class RatioReport:
    """Exact counts by head, and the worst offenders: those that are not finite, then by |ln ratio|."""

    examined: dict[str, int]
    exploded: dict[str, int]
    """Above the limit, infinity included."""
    vanished: dict[str, int]
    not_a_number: dict[str, int]
    worst: tuple[Offender, ...]

    @property
    def offenders(self) -> int:
        """All of them, listed or not."""
        return sum(sum(counts.values()) for counts in (self.exploded, self.vanished, self.not_a_number))

    @property
    def left_out(self) -> int:
        """Offenders that the list has no room for."""
        return self.offenders - len(self.worst)


class RatioExplosionDiagnostic:
    """Looks at the ratios of a round after its update."""

    def __init__(self, limits: RatioLimits | None = None) -> None:
        self.limits = limits if limits is not None else RatioLimits()

    @torch.no_grad()
    def __call__(
        self,
        ratios: Tensor,
        mask: Tensor | None = None,
        actions: Tensor | None = None,
        heads: tuple[str, ...] = (JOINT,),
    ) -> RatioReport:
        """Ratios (envs, steps, heads), or (envs, steps) of joint actions; `mask`, of their shape: which of them count;
        actions (envs, steps, heads of an action). Host sync: one."""
        ratios, mask = _by_head(ratios, mask, heads)
        _check(ratios, mask, actions, heads)
        broken, high, low = ratios.isnan() & mask, (ratios > self.limits.high) & mask, (ratios < self.limits.low) & mask
        counts = torch.stack([flags.sum((0, 1)) for flags in (mask, high, low, broken)])
        # A fixed number of candidates, healthy ones among them if need be: no shape depends on the data.
        distance = ratios.log().abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        badness = distance.where(high | low | broken, -1.0).flatten()
        order = badness.argsort(descending=True, stable=True)[: self.limits.cap]
        done = torch.zeros((*ratios.shape[:2], 0), device=ratios.device) if actions is None else actions
        rows = done.flatten(0, 1)[order // len(heads)]
        found, places, bad, values, acted = fetch(counts, order, badness[order], ratios.flatten()[order], rows)
        worst = [
            _offender(int(place), ratio, tuple(int(choice) for choice in action), ratios.shape[1], heads)
            for place, badness_here, ratio, action in zip(
                places.tolist(), bad.tolist(), values.tolist(), acted.tolist(), strict=True
            )
            if badness_here >= 0
        ]
        examined, exploded, vanished, broken_counts = (
            {head: int(count) for head, count in zip(heads, row, strict=True)} for row in found.tolist()
        )
        return RatioReport(examined, exploded, vanished, broken_counts, tuple(worst))


def _offender(place: int, ratio: float, action: tuple[int, ...], steps: int, heads: tuple[str, ...]) -> Offender:
    cell, head = divmod(place, len(heads))
    env, step = divmod(cell, steps)
    return Offender(env, step, heads[head], ratio, action)


def _by_head(ratios: Tensor, mask: Tensor | None, heads: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Both as (envs, steps, heads)."""
    mask = torch.ones_like(ratios, dtype=torch.bool) if mask is None else mask
    if heads == (JOINT,) and ratios.dim() == 2:
        ratios = ratios.unsqueeze(-1)
        mask = mask.unsqueeze(-1) if mask.dim() == 2 else mask
    return ratios, mask


def _check(ratios: Tensor, mask: Tensor, actions: Tensor | None, heads: tuple[str, ...]) -> None:
    if ratios.dim() != 3 or ratios.shape[-1] != len(heads):
        raise BadValueError(f"ratios of shape {tuple(ratios.shape)}; wanted (envs, steps, {len(heads)}) for {heads}")
    if mask.shape != ratios.shape or mask.dtype is not torch.bool:
        raise BadValueError(f"a {mask.dtype} mask of shape {tuple(mask.shape)}; wanted bool, {tuple(ratios.shape)}")
    if actions is not None and (actions.dim() != 3 or actions.shape[:2] != ratios.shape[:2]):
        raise BadValueError(f"actions of shape {tuple(actions.shape)}; wanted {(*ratios.shape[:2], 'heads')}")
