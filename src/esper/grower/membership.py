"""A user's optimizer follows the seeds: their parameters join its groups at birth and leave them at death.

No group is added or removed, so schedulers, gradient scalers and clipping do not notice. A seed's weights join the
group of the weights of the submodule in front of the slot. Its norms and biases join the group of the norms and biases
there. If the user gives options for seeds, one group is added at once instead, and all seeds join it. State and
settings of all other parameters stay as they are.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.grower.container import CHILD
from esper.grower.schedulers import add_group
from esper.leyline import BadValueError
from esper.leyline.numbers import require_known, require_positive

WRAPPERS = ("AcceleratedOptimizer", "LightningOptimizer")
SHARDED = ("ZeroRedundancyOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


class Membership:
    """The parameters of the seeds in one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        host: nn.Module,
        seed_options: Mapping[str, Any] | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    ) -> None:
        optimizer = _unwrap(optimizer)
        _check_optimizer(optimizer, host)
        if seed_options is None and scheduler is not None:
            raise BadValueError("scheduler= is needed only with seed_options=: omit it, schedulers work unchanged")
        self.optimizer = optimizer
        self._seeds: int | None = None
        """The group of all seeds, if they have one"""
        if seed_options is not None:
            _check_options(optimizer, seed_options)
            self._seeds = len(optimizer.param_groups)
            add_group(optimizer, seed_options, _as_list(scheduler))
        seeds = {id(p) for p in getattr(host, CHILD, nn.Module()).parameters()}  # it may have been built from all
        self._own = [[p for p in group["params"] if id(p) not in seeds] for group in optimizer.param_groups]
        """The user's own parameters by group; seeds stand behind them, in the order of their slots"""
        self._own_names = [list(group.get("param_names", ())) for group in optimizer.param_groups]
        """Their names, if the optimizer was built from `named_parameters()`"""
        self._hooks = [
            optimizer.register_load_state_dict_pre_hook(_check_state),
            optimizer.register_step_post_hook(self._count_step),
        ]
        self._steps, self._versions = 0, self._own_versions()
        self._places: dict[str, tuple[int, int]] = {}
        """Groups by slot, once they were looked up"""

    def groups_for(self, host: nn.Module, slot_id: str) -> tuple[int, int]:
        """The groups of a slot's weights, and of its norms and biases."""
        if self._seeds is not None:
            return self._seeds, self._seeds
        if slot_id not in self._places:
            self._places[slot_id] = self._find_groups(host, slot_id)
        return self._places[slot_id]

    def _find_groups(self, host: nn.Module, slot_id: str) -> tuple[int, int]:
        group_of = {id(p): index for index, own in enumerate(self._own) for p in own}
        near = [p for p in host.get_submodule(slot_id).parameters() if id(p) in group_of]
        if not near:  # behind an activation, say: the parameters that come before it
            near = [p for p in _parameters_before(host, slot_id) if id(p) in group_of]
        if not near and not any(p.requires_grad for p in host.get_submodule(slot_id).parameters()):
            near = [p for own in self._own for p in own if p.requires_grad]  # of a frozen model: what learns
        near = near or self._own[0]
        matrices = [group_of[id(p)] for p in near if p.dim() > 1]
        vectors = [group_of[id(p)] for p in near if p.dim() <= 1]
        weights = (matrices or vectors)[-1]
        return weights, (vectors or matrices)[-1]

    def sync(self, host: nn.Module, seeds: Mapping[str, Iterable[nn.Parameter]]) -> None:
        """Make the groups hold the user's own parameters and those of these seeds, by slot."""
        wanted = [list(own) for own in self._own]
        for slot_id, parameters in seeds.items():
            weights, vectors = self.groups_for(host, slot_id)
            for parameter in parameters:
                wanted[weights if parameter.dim() > 1 else vectors].append(parameter)
        names = {id(p): name for name, p in host.named_parameters()}
        alive = {id(p) for parameters in wanted for p in parameters}
        groups = zip(self.optimizer.param_groups, self._own, self._own_names, wanted, strict=True)
        for group, own, own_names, parameters in groups:
            for parameter in group["params"]:
                if id(parameter) not in alive:
                    self.optimizer.state.pop(parameter, None)
            group["params"][:] = parameters  # the list itself stays: a wrapper may hold it
            if "param_names" in group:
                group["param_names"][:] = [*own_names, *(names[id(p)] for p in parameters[len(own) :])]
            if isinstance(self.optimizer, torch.optim.SGD) and group.get("fused") and self._has_momentum(parameters):
                # Fused SGD wants a buffer for all parameters or for none. From zero, the first step is the same.
                for parameter in parameters[len(own) :]:
                    self.optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))

    def _has_momentum(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether SGD has stepped some of these with momentum."""
        state = self.optimizer.state
        return any(state[p].get("momentum_buffer") is not None for p in parameters if p in state)

    def updated_by_another(self) -> bool:
        """Whether the user's parameters have changed since the last call although this optimizer has not stepped."""
        steps, versions = self._steps, self._versions
        self._steps, self._versions = 0, self._own_versions()
        return steps == 0 and versions != self._versions

    def _own_versions(self) -> list[int]:
        """How often each parameter of the user's own was changed in place."""
        return [parameter._version for own in self._own for parameter in own]

    def _count_step(self, *_: object) -> None:
        self._steps += 1

    def adopt(self) -> None:
        """Count all parameters as the user's own, at the end of growth."""
        self._own = [list(group["params"]) for group in self.optimizer.param_groups]
        self._own_names = [list(group.get("param_names", ())) for group in self.optimizer.param_groups]
        for hook in self._hooks:
            hook.remove()


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside the wrappers of Accelerate and Lightning, which have no hooks of their own."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in WRAPPERS:
            inner: Optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # of these wrappers
            return inner
    return optimizer


def _check_optimizer(optimizer: object, host: nn.Module) -> None:
    name = type(optimizer).__name__
    if name in SHARDED or hasattr(optimizer, "_partition_parameters_cache"):
        raise BadValueError(f"{name} shards its state over ranks, and a seed would join none: use a plain optimizer")
    if not isinstance(optimizer, Optimizer):
        several = "the one that holds the layers that should grow" if isinstance(optimizer, list | tuple | dict) else ""
        raise BadValueError(f"optimizer is a {name}; pass {several or 'the torch optimizer that your loop steps'}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadValueError(
            "LBFGS keeps one flat vector of all parameters, so none can join: use SGD, AdamW or RMSprop"
        )
    if name == "Muon":
        raise BadValueError("Muon updates matrices only, and seeds also have norms and scales: use AdamW or SGD")
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = [p for p in host.parameters() if p.requires_grad]
    if trainable and not any(id(p) in known for p in trainable):
        raise BadValueError(
            "the optimizer holds none of the model's parameters: it was built for another model, or before the model "
            "was copied or moved; build it from model.parameters()"
        )


def _check_options(optimizer: Optimizer, options: object) -> None:
    """Raise if a group of this optimizer cannot have these options."""
    if not isinstance(options, Mapping):
        raise BadValueError(f'seed_options is a {type(options).__name__}; pass a dict such as {{"lr": 0.01}}')
    for name in options:
        require_known("option in seed_options", name, optimizer.defaults)
    if "lr" in options:
        require_positive("lr in seed_options", options["lr"])
    elif isinstance(optimizer.defaults.get("lr"), torch.Tensor):
        raise BadValueError("the optimizer's lr is a tensor that its groups share: add a number as lr to seed_options")
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):  # its constructor checks values; add_param_group does not
        accepted = inspect.signature(kind).parameters
        settings = {name: value for name, value in {**optimizer.defaults, **options}.items() if name in accepted}
        try:
            kind([nn.Parameter(torch.zeros(1))], **settings)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadValueError(f"{kind.__name__} refuses seed_options {dict(options)}: {error}") from error


def _as_list(scheduler: LRScheduler | Sequence[LRScheduler] | None) -> list[LRScheduler]:
    if scheduler is None:
        return []
    return list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]


def _parameters_before(host: nn.Module, slot_id: str) -> list[nn.Parameter]:
    """Parameters of the submodules that are registered before the slot's own."""
    found: list[nn.Parameter] = []
    target = host.get_submodule(slot_id)
    for module in host.modules():
        if module is target:
            break
        found += module.parameters(recurse=False)
    return found


def _check_state(optimizer: Optimizer, state: dict[str, Any]) -> None:  # Any: the state of an optimizer
    saved = [len(group["params"]) for group in state.get("param_groups", [])]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if len(saved) != len(present):
        raise BadValueError(
            f"the optimizer's state has {len(saved)} groups, the optimizer has {len(present)}: build the Grower with "
            "seed_options as it was when you saved"
        )
    if saved != present:
        raise BadValueError(
            f"the optimizer's state has groups of {saved} parameters, the optimizer has {present}: load the model's "
            "state dict first, so that its seeds are there, and then the optimizer's"
        )
