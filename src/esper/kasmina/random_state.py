"""The random streams that a module may draw from: where they stand, and how to leave them there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class RandomState(NamedTuple):
    """Where the streams of the CPU and of a module's CUDA devices stand."""

    cpu: Tensor
    cuda: dict[int, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> "RandomState":
        """As it is now."""
        devices = {parameter.device.index for parameter in module.parameters() if parameter.device.type == "cuda"}
        return cls(torch.get_rng_state(), {index: torch.cuda.get_rng_state(index) for index in sorted(devices)})

    def restore(self) -> None:
        """Put the streams back."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)

    def equals(self, other: "RandomState") -> bool:
        """Nothing was drawn between the two."""
        pairs = [(self.cpu, other.cpu), *((state, other.cuda[index]) for index, state in self.cuda.items())]
        return all(torch.equal(left, right) for left, right in pairs)


@contextmanager
def random_state_kept(module: nn.Module) -> Iterator[None]:
    """What is drawn inside is as if it had not been drawn."""
    before = RandomState.of(module)
    try:
        yield
    finally:
        before.restore()
