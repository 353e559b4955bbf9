"""Records that nobody played: random numbers in the shapes of a small header."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from esper.simic.offline.episodes import Episodes, RecordHeader
from esper.tamiyo import ActionTable, ObservationLayout
from esper.tamiyo.heads import ActionHead

TABLE = ActionTable((ActionHead("op", 3), ActionHead("slot", 2, matters=(False, True, True), given="op")))
LAYOUT = ObservationLayout(("time_left",), ("present", "alpha"), critic=("potential", "control_end"), slots=2)
HEADER = RecordHeader("made_up", "core", TABLE, LAYOUT, 4, 10.0, False, ("learned", "random"))


def header(**changes: Any) -> RecordHeader:  # Any: fields by name
    """A small header."""
    return replace(HEADER, **changes)


def episodes(count: int, like: RecordHeader = HEADER, seed: int = 0) -> Episodes:
    """Random episodes; their host seeds count from 0, so that each can be told from the others."""
    generator = torch.Generator().manual_seed(seed)
    steps, table = like.steps, like.table

    def numbers(*shape: int) -> Tensor:
        return torch.rand((count, *shape), generator=generator)

    panics = numbers(steps) < 0.1
    measures = {
        name: 100 * numbers(steps)
        for name in ("gain", "accuracy", "control_accuracy", "acting_parameters", "fossil_parameters")
    }
    return Episodes(
        observations=numbers(steps, like.layout.size),
        masks={head.name: numbers(steps, *table.mask_shape(head)) < 0.5 for head in table.heads},
        actions=(numbers(steps, len(table)) * torch.tensor([head.size for head in table.heads])).long(),
        log_probs=-numbers(steps, len(table)),
        forced=numbers(steps) < 0.5,
        terminated=panics,
        truncated=numbers(steps) < 0.1,
        panics=panics,
        **measures,
        host_parameters=100 + numbers(),
        final_gain=numbers(),
        epsilon=numbers(),
        policy=(numbers() * len(like.policies)).long(),
        host_seed=2**61 + torch.arange(count),
        round=torch.arange(count) - 1,
    )


def same(one: Episodes, other: Episodes) -> bool:
    """Whether two sets are equal, bit for bit and in their dtypes."""
    pairs = [(one.masks[name], other.masks[name]) for name in one.masks | other.masks]
    pairs += [(getattr(one, name), getattr(other, name)) for name in Episodes._fields if name != "masks"]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def part(whole: Episodes, rows: slice | Tensor) -> Episodes:
    """Some of the episodes."""
    masks = {name: mask[rows] for name, mask in whole.masks.items()}
    return Episodes(masks=masks, **{name: v[rows] for name, v in whole._asdict().items() if name != "masks"})
