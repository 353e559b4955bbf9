"""A parameter group joins an optimizer and its schedulers late, as if it had been there from the beginning.

Schedulers store rates and functions per group, and most compute a rate from the one before. So copies of the schedulers
run again from their start, on copies of all groups and the new one. From there the new group gets its rate, and each
scheduler its new entries. The other groups prove the copies right: they must arrive at the rates that they have.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from esper.leyline import BadValueError

REMEDY = "build the Grower before the scheduler"


class PerGroup(NamedTuple):
    """What a scheduler stores for each group from its own arguments."""

    lists: tuple[str, ...] = ()
    """Attributes with one entry per group"""
    keys: tuple[str, ...] = ()
    """Keys in the optimizer's groups; with `initial_lr`, the scheduler ignores the rate that a group had before"""


MOMENTUM = ("base_momentum", "max_momentum")
KNOWN: dict[type, PerGroup] = {
    lr_scheduler.LambdaLR: PerGroup(("lr_lambdas",)),
    lr_scheduler.MultiplicativeLR: PerGroup(("lr_lambdas",)),
    lr_scheduler.StepLR: PerGroup(),
    lr_scheduler.MultiStepLR: PerGroup(),
    lr_scheduler.ConstantLR: PerGroup(),
    lr_scheduler.LinearLR: PerGroup(),
    lr_scheduler.ExponentialLR: PerGroup(),
    lr_scheduler.PolynomialLR: PerGroup(),
    lr_scheduler.CosineAnnealingLR: PerGroup(),
    lr_scheduler.CosineAnnealingWarmRestarts: PerGroup(),
    lr_scheduler.OneCycleLR: PerGroup((), ("initial_lr", "max_lr", "min_lr", *MOMENTUM)),
    lr_scheduler.CyclicLR: PerGroup(
        ("base_lrs", "max_lrs", "base_momentums", "max_momentums"), ("initial_lr", *MOMENTUM)
    ),
    ReduceLROnPlateau: PerGroup(("min_lrs",)),
    SequentialLR: PerGroup(),
    ChainedScheduler: PerGroup(),
}


def add_group(optimizer: Optimizer, options: Mapping[str, Any], schedulers: Sequence[LRScheduler]) -> None:
    """Add a group without parameters to the optimizer and to its schedulers. An error leaves them as they are."""
    group: dict[str, Any] = {**optimizer.defaults, **options, "params": []}
    if any("param_names" in each for each in optimizer.param_groups):
        group["param_names"] = []
    # ReduceLROnPlateau leaves no trace, but it also copes with a new group by itself.
    if hasattr(optimizer.step, "_wrapped_by_lr_sched") or any("initial_lr" in g for g in optimizer.param_groups):
        if not schedulers:
            raise BadValueError(
                "the optimizer has a scheduler, which does not know the group of the seeds: build the Grower before "
                "the scheduler, or pass scheduler="
            )
        group["initial_lr"] = group["lr"]
    parts = _parts(schedulers)
    for part in parts:
        _check(part, optimizer, options)
        for key in KNOWN[type(part)].keys:
            if key in optimizer.param_groups[0]:
                group[key] = _common(part, key, [each[key] for each in optimizer.param_groups])
    if len({id(part) for part in parts}) < len(parts):
        raise BadValueError("scheduler= names a scheduler twice: pass each once, and none that is part of another")
    twins = _run_again(optimizer, schedulers, group)
    for part, twin in zip(parts, _parts(twins), strict=True):
        for name in _lists(part):  # replaced, not extended: a SequentialLR shares `_last_lr` with one of its parts
            setattr(part, name, [*getattr(part, name), getattr(twin, name)[-1]])
    optimizer.add_param_group(group)


def _parts(schedulers: Iterable[LRScheduler]) -> list[LRScheduler]:
    """The schedulers, and those that they consist of."""
    return [part for each in schedulers for part in (each, *_parts(getattr(each, "_schedulers", ())))]


def _lists(part: LRScheduler) -> list[str]:
    """The attributes of a scheduler with one entry per group."""
    return [name for name in {"base_lrs", "_last_lr", *KNOWN[type(part)].lists} if hasattr(part, name)]


def _check(part: LRScheduler, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    """Raise if a scheduler cannot learn of the new group, or would overwrite its options."""
    name = type(part).__name__
    if type(part) not in KNOWN:
        known = ", ".join(each.__name__ for each in KNOWN)
        raise BadValueError(f"{name} cannot learn of the group of the seeds: {REMEDY} (known: {known})")
    if part.optimizer is not optimizer:
        raise BadValueError(f"{name} belongs to another optimizer: pass the scheduler of the one that grows")
    if isinstance(part, ReduceLROnPlateau) and part.last_epoch > part.patience:
        raise BadValueError(
            f"{name} may have reduced rates in its {part.last_epoch} steps, and does not store it: build a new one "
            "after the Grower"
        )
    momentum = "betas" if getattr(part, "use_beta1", False) else "momentum"
    fixed = ["lr", momentum] if getattr(part, "cycle_momentum", False) else ["lr"]
    if "initial_lr" in KNOWN[type(part)].keys and any(option in options for option in fixed):
        raise BadValueError(
            f"{name} sets {' and '.join(fixed)} of every group from its own arguments: omit that in seed_options, or "
            f"{REMEDY} and pass a list to {name}, with an entry for the seeds"
        )


def _common(part: LRScheduler, name: str, values: Sequence[Any]) -> Any:  # Any: a rate or a function
    if any(value != values[0] for value in values):
        raise BadValueError(
            f"{type(part).__name__} has a different {name} for each group, and none for the seeds: {REMEDY}, and add "
            "an entry for the seeds"
        )
    return values[0]


def _run_again(optimizer: Optimizer, schedulers: Sequence[LRScheduler], group: dict[str, Any]) -> list[LRScheduler]:
    """Copies of the schedulers that have run from their start with the new group, which then has its present rate."""
    if not schedulers:
        return []
    groups = [*(dict(own) for own in optimizer.param_groups), group]
    for each in groups:
        each["lr"] = float(each.get("initial_lr", each["lr"]))  # a number, because a tensor would be changed in place
    stage = SimpleNamespace(param_groups=groups, step=optimizer.step, _opt_called=True)
    twins = [_restart(scheduler, stage) for scheduler in schedulers]
    for scheduler, twin in zip(schedulers, twins, strict=True):
        for _ in range(_steps(scheduler)):  # 4 µs each
            twin.step()
    for index, (own, again) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        if not math.isclose(own["lr"], again["lr"], rel_tol=1e-4, abs_tol=1e-12):  # a tensor rounds at every step
            raise BadValueError(
                f"group {index} of the optimizer has the rate {float(own['lr']):g}, but scheduler= leads to "
                f"{float(again['lr']):g}, so the rate of the seeds is unknown: pass all schedulers, or {REMEDY}"
            )
    return twins


def _restart(scheduler: LRScheduler, stage: Any) -> LRScheduler:  # Any: the part of an optimizer that schedulers use
    """A copy at its first step."""
    if isinstance(scheduler, SequentialLR):
        return SequentialLR(stage, [_restart(each, stage) for each in scheduler._schedulers], scheduler._milestones)
    if isinstance(scheduler, ChainedScheduler):
        return ChainedScheduler([_restart(each, stage) for each in scheduler._schedulers], stage)
    twin = copy.copy(scheduler)
    twin.optimizer = stage
    group, shared = stage.param_groups[-1], KNOWN[type(scheduler)].lists
    base = group.get("initial_lr", group["lr"])
    for name in _lists(scheduler):
        values = getattr(scheduler, name)
        setattr(twin, name, [*values, _common(scheduler, name, values) if name in shared else base])
    if not isinstance(twin, ReduceLROnPlateau):
        twin.last_epoch = -1
        twin._initial_step()
    return twin


def _steps(scheduler: LRScheduler) -> int:
    """The number of steps that may have changed a rate."""
    if isinstance(scheduler, ChainedScheduler):
        return _steps(scheduler._schedulers[0])
    return 0 if isinstance(scheduler, ReduceLROnPlateau) else scheduler.last_epoch
