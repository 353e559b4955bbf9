"""What `Grower.suggest` returns: slots × blueprints with what a seed there would be worth, and ranks for LoRA."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args, overload

from esper.grower.linear_ranks import MOST, LayerProfile, allocate
from esper.leyline import BadValueError, Measurement
from esper.leyline.numbers import require_known
from esper.leyline.records import Json

Column = Literal["trial", "worth", "parameters"]


class SeedTrial(NamedTuple):
    """A newborn that was trained alone, at full strength, behind a host that stood still."""

    loss: float
    """On the held-out minibatches, with the seed"""
    gain: Measurement
    """The host's loss minus that, with its paired standard error"""
    points: Measurement
    """The same in points of accuracy; in percent of the loss where it is the user's own"""


class Suggestion(NamedTuple):
    """One blueprint in one slot."""

    slot: str
    blueprint: str
    parameters: int
    worth: Measurement
    """First-order worth: norm of ∂L/∂scale of a newborn with scale 1, with its standard error over minibatches"""
    trial: SeedTrial | None = None


class Cost(NamedTuple):
    """What the suggestions cost, in minibatches: a forward and a backward pass of the model over one of them."""

    first_order: float
    trials: float
    """Forward passes alone count as a third"""
    held: int
    """Minibatches in memory at once"""
    gradients: int
    """Bytes of the gradients of linear layers, for ranks"""

    @property
    def minibatches(self) -> float:
        """All of it."""
        return self.first_order + self.trials


@dataclass(frozen=True)
class Suggestions(Sequence[Suggestion]):
    """A table of slots × blueprints, the best first. Printed, it is text."""

    rows: tuple[Suggestion, ...]
    cost: Cost
    trial: int
    """Minibatches that each newborn was trained for; 0 without trials"""
    host_loss: float | None = None
    """On the held-out minibatches, without a new seed"""
    by_loss: bool = False
    """Whether points are percent of the loss"""
    profiles: tuple[LayerProfile, ...] = ()
    """Linear layers of the model, for `rank_pattern`"""

    @overload
    def __getitem__(self, index: int) -> Suggestion: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Suggestion, ...]: ...

    def __getitem__(self, index: int | slice) -> Suggestion | tuple[Suggestion, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Suggestion]:
        return iter(self.rows)

    def sorted(self, by: Column = "trial") -> "Suggestions":
        """The same table in another order: `trial` and `worth` have the best first, `parameters` the smallest."""
        require_known("column", by, get_args(Column))
        if by == "trial" and not self.trial:
            raise BadValueError("no seed was trained, as trial=0 says: sort by worth")
        return replace(self, rows=order(self.rows, by))

    def to_dict(self) -> dict[str, Json]:
        """Everything as plain JSON. A number that is not finite is None."""
        return {
            "trial": self.trial,
            "host_loss": _number(self.host_loss),
            "cost": {**self.cost._asdict(), "minibatches": self.cost.minibatches},
            "suggestions": [
                {
                    "slot": row.slot,
                    "blueprint": row.blueprint,
                    "parameters": row.parameters,
                    "worth": _measurement(row.worth),
                    "trial": None
                    if row.trial is None
                    else {
                        "loss": _number(row.trial.loss),
                        "gain": _measurement(row.trial.gain),
                        "points": _measurement(row.trial.points),
                    },
                }
                for row in self.rows
            ],
            "layers": [
                {"name": each.name, "parameters": each.parameters, "worths": each.worths, "agreement": each.agreement}
                for each in self.profiles
            ],
        }

    def rank_pattern(
        self, budget: int, *, max_rank: int = MOST, target_modules: str | Sequence[str] | None = None
    ) -> dict[str, int]:
        """Ranks of LoRA adapters by layer, worth most together under a budget of parameters.

        For PEFT: `LoraConfig(rank_pattern=ranks, target_modules=list(ranks))`. Layers that earn no rank are omitted.
        `target_modules` limits the layers, by endings of names or a regular expression, as in PEFT.
        """
        if not self.profiles:
            raise BadValueError("no linear layer was measured: call suggest() with ranks=True on a model that has some")
        return allocate(self.profiles, budget, max_rank=max_rank, modules=target_modules)

    def __str__(self) -> str:
        unit = "% of the loss" if self.by_loss else "points"
        header = ["slot", "blueprint", "parameters", "worth"]
        header += [f"loss saved in {self.trial} minibatches", unit] if self.trial else []
        lines = [
            [row.slot, row.blueprint, f"{row.parameters:,}", _shown(row.worth, "")]
            + (
                [_shown(row.trial.gain, "+"), _shown(row.trial.points, "+", ".2f")]
                if row.trial
                else [""] * len(header[4:])
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        text = [
            "  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(pairs))
            for line in (header, *lines)
            for pairs in [list(zip(line, widths, strict=True))]
        ]
        loss = "" if self.host_loss is None else f"; loss without a new seed {self.host_loss:.4g}"
        return "\n".join([line.rstrip() for line in text] + [f"cost: {self.cost.minibatches:.0f} minibatches{loss}"])


def order(rows: Sequence[Suggestion], by: Column) -> tuple[Suggestion, ...]:
    """The rows by a column; ties by size, and what is not finite last."""

    def key(row: Suggestion) -> tuple[float, int]:
        value = row.worth.value if by == "worth" else -math.inf if row.trial is None else row.trial.gain.value
        return (-value if math.isfinite(value) else math.inf), row.parameters

    if by == "parameters":
        return tuple(sorted(rows, key=lambda row: row.parameters))
    return tuple(sorted(rows, key=key))


def _shown(measured: Measurement, sign: str, form: str = ".3g") -> str:
    if not math.isfinite(measured.value):
        return "diverged"
    return f"{measured.value:{sign}{form}} ± {measured.error:{form}}"


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _measurement(measured: Measurement) -> dict[str, Json]:
    return {"value": _number(measured.value), "error": _number(measured.error)}
