"""An optimiser that follows membership: a seed's state is born and dies with the seed."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.leyline import BadValueError, CheckpointError, UnknownNameError
from esper.leyline.numbers import require_positive

if TYPE_CHECKING:
    from esper.kasmina.model import MorphogeneticModel

HOST = "host"
CLIP_EPS = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


class GrowingOptimizer:
    """Wraps a torch optimiser: one parameter group for the host, one per seed.

    `make` builds it from the host's parameters, for example `lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)`;
    seeds get the same settings, changed by `seed_options`. The model tells it of every birth and death, so there is
    nothing to remember. Groups are clipped apart, and a group whose gradient is not finite is left out of the step.
    """

    def __init__(
        self,
        model: "MorphogeneticModel",
        make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        *,
        seed_options: dict[str, Any] | None = None,  # Any: whatever the wrapped optimiser takes
        clip_norm: float | None = None,
    ) -> None:
        if not callable(getattr(model, "follow", None)):  # what no other module has
            raise BadValueError(
                f"GrowingOptimizer follows a MorphogeneticModel, not {type(model).__name__}: "
                "wrap it first, with attach(model, slots)"
            )
        if clip_norm is not None:
            require_positive("clip_norm", clip_norm, remark="; None clips nothing")
        self.model = model
        self.clip_norm = clip_norm
        self.seed_options = dict(seed_options or {})
        self.wrapped = _make_one_group(make, list(model.host_parameters()))
        settings = [key for key in self.wrapped.param_groups[0] if key != "params"]
        for key in self.seed_options:
            if key not in settings:
                raise UnknownNameError(f"setting of {type(self.wrapped).__name__} in seed_options", key, settings)
        self.wrapped.param_groups[0]["name"] = HOST
        model.follow(self)

    def sync(self) -> None:
        """Make the groups those of the seeds that live now."""
        alive = {slot_id: list(self.model.seed_parameters(slot_id)) for slot_id in self.model.live_slots()}
        groups = self.wrapped.param_groups
        gone = [g for g in groups if g["name"] != HOST and not _same(g["params"], alive.get(g["name"]))]
        for parameter in (parameter for group in gone for parameter in group["params"]):
            self.wrapped.state.pop(parameter, None)
        # By identity: groups hold tensors, which have no truth value to compare by.
        groups[:] = [group for group in groups if not any(group is dead for dead in gone)]
        known = {group["name"] for group in groups}
        settings = {key: value for key, value in groups[0].items() if key not in ("params", "name")}
        for slot_id, parameters in alive.items():
            if slot_id not in known:
                self.wrapped.add_param_group({**settings, **self.seed_options, "params": parameters, "name": slot_id})
        # The host first, then the slots in their order: a state dict then means the same after a reload.
        order = [HOST, *alive]
        groups.sort(key=lambda group: order.index(group["name"]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set them to zero."""
        self.wrapped.zero_grad(set_to_none=set_to_none)

    # Any: what the wrapped optimiser keeps
    def state_dict(self) -> dict[str, Any]:
        """Settings and state of all groups, host first, then the slots in their order."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume. The model must hold the seeds that it had then: load it before."""
        given = [group.get("name") for group in state.get("param_groups", [])]
        here = [group["name"] for group in self.wrapped.param_groups]
        sizes = [len(group["params"]) for group in state.get("param_groups", [])]
        if given != here or sizes != [len(group["params"]) for group in self.wrapped.param_groups]:
            raise CheckpointError(
                f"the state is of groups {given} with {sizes} parameters, the model has {here} with "
                f"{[len(group['params']) for group in self.wrapped.param_groups]}: "
                "load the model that was saved beside it first, then its optimiser"
            )
        self.wrapped.load_state_dict(state)

    def step(self) -> dict[str, float]:
        """Clip each group, step those that are finite, and tell the seeds their gradient norms (which it returns).

        One host sync: the norms decide who steps.
        """
        groups, norms = self._norms()
        for name, norm in norms.items():
            factor = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + CLIP_EPS))
            for parameter in groups[name]:
                if not math.isfinite(norm):
                    parameter.grad = None  # optimisers pass over parameters without a gradient
                elif factor < 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.wrapped.step()
        self.model.observe_gradients(norms)
        return norms

    def _norms(self) -> tuple[dict[str, list[nn.Parameter]], dict[str, float]]:
        groups = {group["name"]: group["params"] for group in self.wrapped.param_groups}
        norms: list[Tensor] = []
        names: list[str] = []
        for name, parameters in groups.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if gradients:
                names.append(name)
                norms.append(torch.nn.utils.get_total_norm(gradients))
        values = torch.stack(norms).tolist() if norms else []
        return groups, dict(zip(names, values, strict=True))


def _make_one_group(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    made = make(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise BadValueError(f"make() returned {type(made).__name__}; it must build a torch optimiser of what it gets")
    if len(made.param_groups) != 1:
        raise BadValueError(
            f"make() put the host's parameters into {len(made.param_groups)} groups, and a seed could not know whose "
            "settings to take: use one group, as in lambda p: torch.optim.AdamW(p, lr=1e-3)"
        )
    return made


def _same(left: list[nn.Parameter], right: list[nn.Parameter] | None) -> bool:
    """Whether two lists hold the same parameter objects."""
    return right is not None and [id(p) for p in left] == [id(p) for p in right]
