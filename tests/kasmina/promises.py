"""Ways to train a growing network, and to see what it promises: what learns, what is freed, what stays as it was."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esper.kasmina import GrowingOptimizer, MorphogeneticModel
from esper.leyline import EsperError


def total(losses: dict[str, Tensor]) -> Tensor:
    """What a loop calls backward on."""
    return torch.stack(list(losses.values())).sum()


def sgd(parameters: object) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]  # what GrowingOptimizer hands


def adamw(parameters: object) -> torch.optim.Optimizer:
    """With weight decay."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)  # type: ignore[arg-type]  # likewise


def gradients_of(model: MorphogeneticModel, loss: Tensor) -> dict[str, Tensor | None]:
    """By the names of parameters; the model has none afterwards."""
    model.zero_grad()
    loss.backward()
    result = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return result


def assert_optimiser_follows(model: MorphogeneticModel, optimiser: GrowingOptimizer) -> None:
    """Its groups hold the parameters that exist, each once, and its state no others."""
    groups = [id(p) for group in optimiser.wrapped.param_groups for p in group["params"]]
    assert sorted(groups) == sorted(id(p) for p in model.parameters())
    assert {id(p) for p in optimiser.wrapped.state} <= set(groups)


class unchanged:  # noqa: N801  # reads as a statement: with unchanged(model)
    """Asserts that weights, buffers, states, optimiser groups and the random stream are the same afterwards."""

    def __init__(self, model: MorphogeneticModel, optimiser: GrowingOptimizer | None = None) -> None:
        self.model, self.optimiser = model, optimiser

    def look(self) -> tuple[list[object], dict[str, Tensor]]:
        slots = self.model.seed_slots.values()
        plain: list[object] = [(slot.state, id(slot.seed), id(slot.gate), slot.role) for slot in slots]
        if self.optimiser is not None:
            plain += [(g["name"], [id(p) for p in g["params"]]) for g in self.optimiser.wrapped.param_groups]
        tensors = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return plain, tensors | {"random stream": torch.get_rng_state()}

    def __enter__(self) -> None:
        self.before = self.look()

    def __exit__(self, *_: object) -> None:
        (plain, tensors), (plain_now, tensors_now) = self.before, self.look()
        assert plain == plain_now
        assert tensors.keys() == tensors_now.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, tensors_now[name]), name


def refused(model: MorphogeneticModel, error: type[EsperError], message: str, verb: Callable[[], object]) -> None:
    """A verb raises this error and changes nothing."""
    with unchanged(model), pytest.raises(error, match=message):
        verb()
