"""Rows taken, added to and joined, against the plain way: group after group, each with a tensor of the whole size."""

import pytest
import torch
from torch import Tensor

from esper.kasmina.row_layout import (
    add_into_rows,
    add_rows,
    cat_rows,
    copy_rows,
    from_small,
    share_rows,
    split_rows,
    take_rows,
    unfold_rows,
)

SHAPES = {"images": (5, 3, 2, 9, 9), "small images": (5, 3, 2, 4, 4), "tokens": (5, 3, 7, 4), "vectors": (5, 3, 4)}
GROUPS = [torch.tensor([3, 0]), torch.tensor([1, 1, 4])]
"""Disjoint, the second with padding."""


def stream(kind: str) -> Tensor:
    """Rows as a pass has them."""
    generator = torch.Generator().manual_seed(2)
    rows, batch, *rest = SHAPES[kind]
    if kind == "images":
        channels, *size = rest
        return unfold_rows(torch.randn(batch, rows * channels, *size, generator=generator), rows)
    if kind == "small images":
        return from_small(torch.randn(rows, *rest, batch, generator=generator))
    return torch.randn(SHAPES[kind], generator=generator)


def changed(x: Tensor) -> Tensor:
    """Some function of rows."""
    return torch.tanh(x) * x


@pytest.mark.parametrize("kind", SHAPES)
def test_groups_at_once_equal_groups_in_turn(kind: str) -> None:
    """Values bit for bit, gradients to rounding."""
    x = stream(kind).requires_grad_()
    shared, taken = share_rows(x, GROUPS)
    joint = add_rows(shared, GROUPS, [changed(rows) for rows in taken])
    (mine,) = torch.autograd.grad(joint.square().sum(), [x])
    expected = x
    for numbers in GROUPS:
        expected = expected.index_add(0, numbers, changed(x.index_select(0, numbers)))
    (plain,) = torch.autograd.grad(expected.square().sum(), [x])
    assert torch.equal(joint, expected)
    assert torch.allclose(mine, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", SHAPES)
def test_nothing_is_changed_in_place(kind: str) -> None:
    """What was given stays what it was."""
    x = stream(kind)
    before = x.clone()
    shared, taken = share_rows(x, GROUPS)
    add_rows(shared, GROUPS, taken)
    copied = copy_rows(x)
    add_into_rows(copied, GROUPS[0], taken[0])
    assert torch.equal(x, before)
    assert torch.equal(copied[GROUPS[0]], 2 * before[GROUPS[0]])


@pytest.mark.parametrize("kind", SHAPES)
def test_joined_rows_come_apart_again(kind: str) -> None:
    """And lie as rows do."""
    x = stream(kind)
    more = take_rows(x, GROUPS[0])
    joined = cat_rows([x, more])
    assert torch.equal(joined, torch.cat([x, more]))
    first, rest = split_rows(joined, len(x))
    assert torch.equal(first, x)
    assert torch.equal(rest, more)
    assert first.stride() == x.stride()


def test_rows_without_a_gradient_of_their_own_pass_the_others_on() -> None:
    """A group whose result is not used adds nothing."""
    x = stream("vectors").requires_grad_()
    shared, _ = share_rows(x, GROUPS)
    (gradient,) = torch.autograd.grad(shared.sum(), [x])
    assert torch.equal(gradient, torch.ones_like(x))
