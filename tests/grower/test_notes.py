"""Tensors and states as notes."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from esper.grower.notes import leaves_of, pack, rebuilt, unpack


class State(NamedTuple):
    """Of a policy, say."""

    hidden: Tensor
    parts: list[Tensor]
    steps: int


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([True, False]),
        torch.tensor([0.1, -torch.inf, 1e-40], dtype=torch.bfloat16),
    ],
)
def test_a_tensor_comes_back_to_the_bit(tensor: Tensor) -> None:
    """A scalar, an empty one, a transposed one and other types too."""
    found = unpack(pack(tensor))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_a_state_is_put_together_from_its_leaves() -> None:
    """What is no tensor stays."""
    state = State(torch.ones(2), [torch.zeros(1), torch.full((1,), 5.0)], 7)
    again = rebuilt(state, iter([leaf + 1 for leaf in leaves_of(state)]))
    assert isinstance(again, State)
    assert [float(leaf[0]) for leaf in leaves_of(again)] == [2.0, 1.0, 6.0]
    assert again.steps == 7
