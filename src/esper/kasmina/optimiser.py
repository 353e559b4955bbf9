"""An optimiser that follows the seeds: a seed's optimiser state lives as long as the seed."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from esper.kasmina.model import MorphogeneticModel
from esper.leyline import BadValueError, CheckpointError
from esper.leyline.numbers import require_known, require_positive

HOST = "host"
CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class GrowingOptimizer:
    """Wraps a torch optimiser: one parameter group for the host, one per seed.

    `make` builds it from the host's parameters, for example `lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)`.
    Seeds get the same settings, overridden by `seed_options`. The model reports every birth and death. Groups are
    clipped separately, and a group whose gradient is not finite skips the step.
    """

    def __init__(
        self,
        model: MorphogeneticModel,
        make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        *,
        seed_options: dict[str, Any] | None = None,  # Any: settings of the wrapped optimiser
        clip_norm: float | None = None,
    ) -> None:
        if not callable(getattr(model, "follow", None)):  # a compiled model has it too
            remedy = "wrap it first, with attach(model, slots)"
            raise BadValueError(f"GrowingOptimizer follows a MorphogeneticModel, not {type(model).__name__}: {remedy}")
        if clip_norm is not None:
            require_positive("clip_norm", clip_norm, remark="; None disables clipping")
        self.model = model
        self.clip_norm = clip_norm
        self.seed_options = dict(seed_options or {})
        self.wrapped = make(list(model.host_parameters()))
        if not isinstance(self.wrapped, torch.optim.Optimizer):
            raise BadValueError(f"make() returned {type(self.wrapped).__name__}; it must build a torch optimiser")
        if (count := len(self.wrapped.param_groups)) != 1:
            remedy = "use one group, as in lambda p: torch.optim.AdamW(p, lr=1e-3), whose settings seeds take"
            raise BadValueError(f"make() put the host's parameters into {count} groups: {remedy}")
        settings = [key for key in self.wrapped.param_groups[0] if key != "params"]
        for key in self.seed_options:
            require_known(f"setting of {type(self.wrapped).__name__} in seed_options", key, settings)
        self.wrapped.param_groups[0]["name"] = HOST
        model.follow(self)

    def sync(self) -> None:
        """Make the groups match the live seeds."""
        alive = {slot_id: list(self.model.seed_parameters(slot_id)) for slot_id in self.model.live_slots()}
        groups = self.wrapped.param_groups
        gone = [
            g
            for g in groups
            if g["name"] != HOST and list(map(id, g["params"])) != list(map(id, alive.get(g["name"], [])))
        ]
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
        """Drop all gradients, or set them to zero."""
        self.wrapped.zero_grad(set_to_none=set_to_none)

    # Any: state of the wrapped optimiser
    def state_dict(self) -> dict[str, Any]:
        """Settings and state of all groups, host first, then the slots in their order."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Load the model first, so that it holds the seeds of that time."""
        saved, present = (
            [(group.get("name"), len(group["params"])) for group in groups]
            for groups in (state.get("param_groups", []), self.wrapped.param_groups)
        )
        if saved != present:
            remedy = "load the model that was saved with it first, then its optimiser"
            raise CheckpointError(f"the state has groups (name, parameters) {saved}, the model has {present}: {remedy}")
        self.wrapped.load_state_dict(state)

    def step(self) -> dict[str, float]:
        """Clip each group, step those with finite gradients, and record and return the gradient norms.

        Needs one GPU sync, because the norms decide which groups step.
        """
        groups = {group["name"]: group["params"] for group in self.wrapped.param_groups}
        gradients = {name: [p.grad for p in group if p.grad is not None] for name, group in groups.items()}
        measured = {name: torch.nn.utils.get_total_norm(own) for name, own in gradients.items() if own}
        norms = dict(zip(measured, torch.stack(list(measured.values())).tolist() if measured else [], strict=True))
        for name, norm in norms.items():
            factor = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + CLIP_EPS))
            for parameter in groups[name]:
                if not math.isfinite(norm):
                    parameter.grad = None  # optimisers skip parameters without a gradient
                elif factor < 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.wrapped.step()
        self.model.observe_gradients(norms)
        return norms
