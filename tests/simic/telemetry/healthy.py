"""Rounds as they are when nothing is wrong: 43 of two real runs, and metrics made from them."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from esper.simic.agent import HeadMetrics, PPOUpdateMetrics
from esper.simic.telemetry import RoundFacts

HEADS = ("op", "slot", "blueprint")


@dataclass(frozen=True)
class HealthyRound:
    """One round of a run."""

    run: str
    number: int
    metrics: PPOUpdateMetrics
    facts: RoundFacts


def _cast(kind: type[Any], row: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """The fields of a dataclass of numbers; one that the table does not know is 0."""
    whole = {"int": int, "bool": bool, int: int, bool: bool}
    numbers = {field.name: (field.type, float(row.get(prefix + field.name, "0"))) for field in fields(kind)}
    return {name: whole.get(hint, float)(number) for name, (hint, number) in numbers.items()}


def _round(row: Mapping[str, str]) -> HealthyRound:
    heads = {head: HeadMetrics(**_cast(HeadMetrics, row, f"{head}/")) for head in HEADS}
    counts: dict[str, Any] = {name: int(row[name]) for name in ("episodes", "committed", "germinated", "panics")}
    metrics = PPOUpdateMetrics(**{**_cast(PPOUpdateMetrics, row), "heads": heads})
    return HealthyRound(row["run"], int(row["round"]), metrics, RoundFacts(**counts))


def healthy_rounds() -> list[HealthyRound]:
    """Both runs, one after the other."""
    with (Path(__file__).parent / "healthy_rounds.csv").open() as file:
        return [_round(row) for row in csv.DictReader(file)]


ORDINARY = healthy_rounds()[10]


def metrics_with(**changes: Any) -> PPOUpdateMetrics:
    """The metrics of an ordinary round with these changed."""
    return replace(ORDINARY.metrics, **changes)


def metrics_with_head(head: str, **changes: Any) -> PPOUpdateMetrics:
    """The metrics of an ordinary round with figures of one head changed; without exploration, as late in a run."""
    metrics = ORDINARY.metrics
    return replace(metrics, heads={**metrics.heads, head: replace(metrics.heads[head], **changes)}, epsilon=0.0)
