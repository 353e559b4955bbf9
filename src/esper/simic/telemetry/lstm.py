"""Whether a recurrent memory is still alive."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.simic.telemetry.transfer import fetch

SATURATED = 0.95
"""|h| above this: output gate and cell are both at their end, and hardly any gradient comes through."""
DEAD = 1e-6
"""A unit whose |h| stays below this in every env says nothing."""


@dataclass(frozen=True)
class LstmHealth:
    """A memory of (envs, units). Norms are over its finite numbers, so that one NaN does not hide the rest."""

    hidden_rms: float
    hidden_max: float
    """Largest |h|"""
    worst_env_rms: float
    """Of the env with the largest hidden state"""
    cell_rms: float | None
    """None where no cell was given"""
    cell_max: float | None
    saturated_share: float
    """Of all hidden numbers"""
    dead_share: float
    """Of the units: those that are silent in every env"""
    nan: int
    inf: int

    @property
    def finite(self) -> bool:
        """Whether every number is."""
        return not self.nan and not self.inf


@torch.no_grad()
def compute_lstm_health(hidden: Tensor | tuple[Tensor, Tensor] | None) -> LstmHealth | None:
    """Health of a memory: (hidden, cell) or hidden alone, each (…, units), as it is in mid-episode: at an episode's end
    memories are empty, and an empty one looks dead. None, and a memory of no env, have none. Host sync: one."""
    if hidden is None:
        return None
    state, cell = hidden if isinstance(hidden, tuple) else (hidden, None)
    if state.dim() < 2 or (cell is not None and cell.shape != state.shape):
        shapes = tuple(state.shape), None if cell is None else tuple(cell.shape)
        raise BadValueError(f"a memory of shapes {shapes}; wanted (envs, units) for hidden and cell alike")
    if not state.numel():
        return None
    rows = _finite(state).flatten(0, -2)
    figures = [
        _rms(rows),
        rows.abs().amax(),
        rows.square().mean(-1).sqrt().amax(),
        (rows.abs() > SATURATED).double().mean(),
        # A unit that is not finite anywhere is broken, not dead.
        ((rows.abs() < DEAD) & state.flatten(0, -2).isfinite()).all(0).double().mean(),
        state.isnan().sum().double(),
        state.isinf().sum().double(),
    ]
    if cell is not None:
        flat = _finite(cell)
        figures += [cell.isnan().sum().double(), cell.isinf().sum().double(), _rms(flat), flat.abs().amax()]
    rms, largest, worst, saturated, dead, nan, inf, *of_cell = fetch(torch.stack(figures))[0].tolist()
    cell_nan, cell_inf, cell_rms, cell_max = of_cell or (0.0, 0.0, None, None)
    return LstmHealth(
        hidden_rms=rms,
        hidden_max=largest,
        worst_env_rms=worst,
        cell_rms=cell_rms,
        cell_max=cell_max,
        saturated_share=saturated,
        dead_share=dead,
        nan=int(nan + cell_nan),
        inf=int(inf + cell_inf),
    )


def worst_health(hidden_states: Iterable[LstmHealth | None]) -> LstmHealth | None:
    """Several memories as one: the largest of each figure, and all faults; None where none was measured."""
    found = [health for health in hidden_states if health is not None]
    if not found:
        return None
    figures: dict[str, Any] = {}
    for field in fields(LstmHealth):
        numbers = [value for health in found if (value := getattr(health, field.name)) is not None]
        figures[field.name] = (sum if field.name in ("nan", "inf") else max)(numbers) if numbers else None
    return LstmHealth(**figures)


def _finite(values: Tensor) -> Tensor:
    values = values.double()
    return values.where(values.isfinite(), 0.0)


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
