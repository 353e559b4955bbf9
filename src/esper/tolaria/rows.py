"""Which rows a pass has, where they are born, and which seeds act on them.

A pass is one forward evaluation of many rows. Rows are born at the input, or behind a segment from the stream of
another row (the parent). At each slot, every bank acts on the rows that its members are to change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from esper.tolaria.banks import Bank

START = -1
"""The place in front of the first segment; other places are the index of the segment they lie behind."""

LEAST_ROWS = 2
"""The fewest rows of a pass, and members of a group: kernels for a single one round differently. So a fleet of one
carries a dead second row."""


class Birth(NamedTuple):
    """Rows that join at a place; their streams are taken from these parents."""

    place: int
    parents: Tensor


class Act(NamedTuple):
    """A bank at its slot: entry e changes row `rows[e]` by member `members[e]`."""

    bank: Bank
    rows: Tensor
    members: Tensor
    strength: Tensor
    valid: Tensor
    """Others are padding."""
    learns: Tensor
    """Whether its seed gets gradient: not where another seed's row passes it, nor in padding."""
    silent: bool = False
    """Straight through: the rows stay what they are; members get the gradient as if they acted, and nothing in front of
    them does."""


@dataclass(frozen=True)
class Rows:
    """The rows of a pass in order of birth."""

    env: Tensor
    """(R,): whose weights each row uses."""
    births: tuple[Birth, ...]
    acts: dict[int, list[Act]] = field(default_factory=dict)
    valid: Tensor | None = None
    """(R,), None: all. Others are padding."""
    whole_fleet: bool = False
    """Row i is env i, and its weights get gradient; else weights are taken by `env` and detached."""

    def __len__(self) -> int:
        return len(self.env)


class Plan(NamedTuple):
    """A training minibatch: the main rows, and a row for every seed that trains beside them."""

    main: Rows
    """With the banks that act on them, for passes without shadows."""
    shadow: Rows | None
    """Without banks."""
    acts: dict[int, list[Act]]
    """By place, what banks do to the main rows and, numbered behind them, to the shadow rows: one group per bank,
    whosever rows they are, as every group costs dozens of kernels."""


class Extra(NamedTuple):
    """A row beside the main ones: it differs from its env's main row at one slot, and is born there."""

    env: int
    place: int
    silent: bool
    """The seed there is silenced (ablation), instead of acting at full strength (shadow)."""


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """Row or member numbers as a tensor."""
    return torch.tensor(list(values), dtype=torch.int64, device=device)
