"""A parameter group for seeds: schedulers treat it as if it had been there from the beginning."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import MLP, BlindCNN, digits, equal, loader, plan, step_scheduler, train_epoch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from esper.grower import Grower
from esper.grower.container import CHILD
from esper.leyline import BadValueError, UnknownNameError

DATA = digits(200)
VALIDATION = digits(300)[0][200:], digits(300)[1][200:]
FOLLOWING: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5) * 0.9**step),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda step: 1 - 0.1 / step),
    "step": lambda o: schedules.StepLR(o, 3),
    "multi_step": lambda o: schedules.MultiStepLR(o, [2, 5, 5]),
    "constant": lambda o: schedules.ConstantLR(o, 0.3, total_iters=5),
    "linear": lambda o: schedules.LinearLR(o, 0.1, total_iters=5),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedules.PolynomialLR(o, 10, power=2.0),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 5, eta_min=1e-3),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2, 2, eta_min=1e-3),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=4, min_lr=0.003),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.CosineAnnealingLR(o, 7, 1e-3)], [3]
    ),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.9)]),
    "nested": lambda o: schedules.ChainedScheduler([FOLLOWING["sequential"](o), schedules.StepLR(o, 2)]),
}
"""Schedulers that start from the rate of a group"""
SETTING: dict[str, Callable[[Optimizer], Any]] = {
    "one_cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "one_cycle_three_phases": lambda o: schedules.OneCycleLR(
        o, 0.1, total_steps=20, three_phase=True, cycle_momentum=False
    ),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.001, 0.1, step_size_up=3, mode="triangular2"),
    "cyclic_plain": lambda o: schedules.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=False),
}
"""Schedulers that set the rate of every group"""
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=0.05),
}


def advance(optimizer: Optimizer, scheduler: Any, steps: int) -> list[list[Any]]:
    """Settings of all groups after each of so many steps, and what the scheduler reports."""
    settings = []
    for _ in range(steps):
        optimizer.step()
        step_scheduler(scheduler)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        settings.append([groups, scheduler.get_last_lr()])
    return settings


def check_following(
    make: Callable[[Any], Optimizer], schedule: Callable[[Optimizer], Any], begun: int, options: dict[str, Any]
) -> None:
    """Compare with an optimizer that has an empty group with these options before the scheduler is built."""
    model, other = BlindCNN(), BlindCNN()
    optimizer = make([{"params": model.parameters(), "weight_decay": 0.01}])
    wanted = make([{"params": other.parameters(), "weight_decay": 0.01}, {"params": [], **options}])
    scheduler, wanted_scheduler = schedule(optimizer), schedule(wanted)
    advance(optimizer, scheduler, begun)
    advance(wanted, wanted_scheduler, begun)
    before = dict(optimizer.param_groups[0])
    Grower(model, optimizer, budget=2000, seed_options=options, scheduler=scheduler)
    assert optimizer.param_groups[0] == before
    assert scheduler.get_last_lr() == wanted_scheduler.get_last_lr()
    assert optimizer.param_groups[1] == wanted.param_groups[1]
    assert advance(optimizer, scheduler, 8) == advance(wanted, wanted_scheduler, 8)


@pytest.mark.parametrize("begun", [0, 1, 4])
@pytest.mark.parametrize("schedule", FOLLOWING)
def test_rates_are_those_of_a_group_from_the_beginning(schedule: str, begun: int) -> None:
    """To the bit, whether the scheduler has run before or not."""
    check_following(OPTIMIZERS["sgd"], FOLLOWING[schedule], begun, {"lr": 0.01, "weight_decay": 0.0})


@pytest.mark.parametrize("begun", [0, 4])
@pytest.mark.parametrize("schedule", SETTING)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rates_and_momentum_that_the_scheduler_sets(name: str, schedule: str, begun: int) -> None:
    """The seeds' group gets those of the other groups, and keeps its other options."""
    check_following(OPTIMIZERS[name], SETTING[schedule], begun, {"weight_decay": 0.0})


def test_several_schedulers() -> None:
    """As a list, in the order in which they were built."""
    model = MLP()
    optimizer = SGD(model.parameters(), lr=0.1)
    warmup, decay = schedules.LinearLR(optimizer, 0.5, total_iters=4), schedules.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    warmup.step()
    decay.step()
    decay.step()
    Grower(model, optimizer, budget=1000, seed_options={"lr": 0.01}, scheduler=[warmup, decay])
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.01 * 0.625 * 0.25)
    assert warmup.base_lrs == decay.base_lrs == [0.1, 0.01]


def test_a_tensor_as_rate_stays_the_users() -> None:
    """The seeds' rate is a number, and the tensor keeps its identity and value."""
    model, rate = MLP(), torch.tensor(0.1)
    optimizer = AdamW(model.parameters(), lr=rate, foreach=False)
    scheduler = schedules.ExponentialLR(optimizer, 0.9)
    advance(optimizer, scheduler, 2)
    with pytest.raises(BadValueError, match="add a number as lr"):
        Grower(model, optimizer, budget=1000, seed_options={}, scheduler=scheduler)
    Grower(model, optimizer, budget=1000, seed_options={"lr": 0.01}, scheduler=scheduler)
    assert float(optimizer.param_groups[0]["initial_lr"]) == pytest.approx(0.1)
    advance(optimizer, scheduler, 1)
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.0729)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.00729)


def test_the_group_of_the_seeds() -> None:
    """It has the given options and the optimizer's defaults, holds all seeds and their names, and outlives growth."""
    model = BlindCNN()
    optimizer = RMSprop(model.named_parameters(), lr=0.01, alpha=0.9)
    births = plan((1, "stage1", "conv_light"), (2, "stage2", "norm"))
    grower = Grower(model, optimizer, budget=2000, steps=8, policy=births, seed_options={"lr": 0.003})
    own, seeds = optimizer.param_groups
    assert (seeds["lr"], seeds["alpha"], seeds["params"], own["lr"]) == (0.003, 0.9, [], 0.01)
    for epoch in range(3):
        train_epoch(model, optimizer, DATA, epoch)
        grower.step(loader(VALIDATION))
    members = dict(getattr(model, CHILD).named_parameters(prefix=CHILD))
    assert equal(members.items(), zip(seeds["param_names"], seeds["params"], strict=True))
    grower.finish(keep=["stage1"], drop=["stage2"])
    assert seeds["params"] and {id(p) for p in seeds["params"]} < {id(p) for p in members.values()}
    train_epoch(model, optimizer, DATA)
    assert optimizer.param_groups == [own, seeds]


class Own(schedules.ExponentialLR):
    """A scheduler of the user's own."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr in seed_options 0.0 is not a finite number above 0"),
        ({"lr": float("nan")}, "lr in seed_options nan"),
        ({"lr": "fast"}, "lr in seed_options 'fast'"),
        ({"momentum": -1.0}, "SGD refuses seed_options .*momentum"),
        ({"nesterov": True}, "SGD refuses seed_options .*[Nn]esterov"),
        ([("lr", 0.1)], "seed_options is a list; pass a dict"),
    ],
)
def test_options_that_are_refused(options: Any, message: str) -> None:
    """The error names the value, and the optimizer keeps its groups."""
    model = MLP()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadValueError, match=message):
        Grower(model, optimizer, budget=1000, seed_options=options)
    assert len(optimizer.param_groups) == 1 and not hasattr(model, CHILD)


def test_an_unknown_option() -> None:
    """The error lists those that the optimizer knows."""
    model = MLP()
    with pytest.raises(UnknownNameError, match="'learning_rate'; allowed: lr, momentum"):
        Grower(model, SGD(model.parameters(), lr=0.1), budget=1000, seed_options={"learning_rate": 0.1})


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Own, "Own cannot learn of the group of the seeds: build the Grower before the scheduler"),
        (SWALR, "SWALR cannot learn"),
        (lambda o, _: ["cosine"], "str cannot learn"),
        (lambda o, _: schedules.LambdaLR(o, [lambda s: 1.0, lambda s: 0.5]), "LambdaLR has a different lr_lambdas"),
        (lambda o, _: schedules.ReduceLROnPlateau(o, min_lr=[0.1, 0.2]), "ReduceLROnPlateau has a different min_lrs"),
        (lambda o, _: schedules.OneCycleLR(o, 0.1, 10), "OneCycleLR sets lr and momentum of every group"),
        (lambda o, _: schedules.StepLR(SGD([nn.Parameter(torch.ones(1))]), 1), "StepLR belongs to another optimizer"),
        (lambda o, _: [schedules.StepLR(o, 1)] * 2, "names a scheduler twice"),
    ],
)
def test_schedulers_that_are_refused(schedule: Callable[[Optimizer, float], Any], message: str) -> None:
    """By name and with the remedy; the optimizer keeps its groups."""
    model = MLP()
    optimizer = SGD([{"params": [p]} for p in list(model.parameters())[:2]], lr=0.1, momentum=0.9)
    with pytest.raises(BadValueError, match=message):
        Grower(model, optimizer, budget=1000, seed_options={"lr": 0.01}, scheduler=schedule(optimizer, 0.9))
    assert len(optimizer.param_groups) == 2 and not hasattr(model, CHILD)


def test_schedulers_that_are_missing_or_not_needed() -> None:
    """A scheduler that exists must be passed, but only for a group of the seeds."""
    model = MLP()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = schedules.StepLR(optimizer, 1)
    with pytest.raises(BadValueError, match="build the Grower before the scheduler, or pass scheduler="):
        Grower(model, optimizer, budget=1000, seed_options={"lr": 0.01})
    with pytest.raises(BadValueError, match="scheduler= is needed only with seed_options="):
        Grower(model, optimizer, budget=1000, scheduler=scheduler)


def test_rates_that_no_scheduler_explains() -> None:
    """A rate that was changed by hand, or that a plateau may have reduced, has no counterpart for the seeds."""
    model = MLP()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler, plateau = schedules.StepLR(optimizer, 10), schedules.ReduceLROnPlateau(optimizer, patience=2)
    optimizer.param_groups[0]["lr"] = 0.07
    with pytest.raises(BadValueError, match=r"group 0 of the optimizer has the rate 0.07, but scheduler= leads to 0.1"):
        Grower(model, optimizer, budget=1000, seed_options={"lr": 0.01}, scheduler=scheduler)
    for _ in range(3):
        plateau.step(1.0)
    with pytest.raises(BadValueError, match="may have reduced rates in its 3 steps"):
        Grower(model, optimizer, budget=1000, seed_options={"lr": 0.01}, scheduler=[scheduler, plateau])
