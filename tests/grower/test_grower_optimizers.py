"""The user's optimizer stays the user's: births and deaths change nothing for any other parameter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import BlindCNN, digits, loader, plan, step_scheduler, train_epoch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedules

from esper.grower import Grower
from esper.grower.container import CHILD
from esper.leyline import BadValueError

DATA = digits(200)
VALIDATION = digits(300)[0][200:], digits(300)[1][200:]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, foreach=False),
    "sgd_foreach": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "sgd_fused": lambda p: SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01, foreach=False),
    "adamw_foreach": lambda p: AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw_fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True, foreach=False),
    "rmsprop_foreach": lambda p: RMSprop(p, lr=0.01, momentum=0.5, foreach=True),
}
SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "one_cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=100),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 10),
    "plateau": schedules.ReduceLROnPlateau,
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.ExponentialLR(o, 0.9)], [2]
    ),
}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights with decay, norms and biases without."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]


def snapshot(optimizer: Optimizer, own: list[nn.Parameter]) -> list[Any]:
    """Values, state and settings of the user's own parameters."""
    taken: list[Any] = []
    for parameter in own:
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[parameter].items()}
        taken.append((parameter.detach().clone(), state))
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [taken, settings]


def same(one: Any, other: Any) -> bool:
    """Whether two snapshots are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("order", ["shared_groups", "scheduler_first", "grower_first"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_births_and_deaths_disturb_nobody(name: str, schedule: str, order: str) -> None:
    """Neither value, state nor learning rate of any other parameter changes by a bit, with a group for seeds or not."""
    torch.manual_seed(0)
    model = BlindCNN()
    own = list(model.parameters())
    optimizer = OPTIMIZERS[name](two_groups(model))
    scheduler = None if order == "grower_first" else SCHEDULES[schedule](optimizer)
    acts: dict[int, list[tuple[str, ...]]] = {
        1: [("germinate", "stage2", "norm")],
        2: [("germinate", "stage1", "conv_light")],
        3: [("prune", "stage1"), ("prune", "stage2")],
    }
    options: dict[str, Any] = {}
    if order != "shared_groups":
        own_rate = {} if schedule == "one_cycle" else {"lr": 0.003}
        options = {"seed_options": {"weight_decay": 0.1, **own_rate}, "scheduler": scheduler}
    given = [dict(group) for group in optimizer.param_groups]
    grower = Grower(model, optimizer, budget=2000, steps=8, policy=lambda r: acts.get(r.step, []), **options)
    assert optimizer.param_groups[:2] == given
    scheduler = scheduler or SCHEDULES[schedule](optimizer)
    groups = 2 if order == "shared_groups" else 3
    for epoch in range(4):
        train_epoch(model, optimizer, DATA, epoch)
        before = snapshot(optimizer, own)
        grower.step(loader(VALIDATION))
        assert same(before, snapshot(optimizer, own))
        step_scheduler(scheduler)
        seeds = list(getattr(model, CHILD).parameters())
        members = [p for group in optimizer.param_groups for p in group["params"]]
        assert len(members) == len(own) + len(seeds) and len(optimizer.state) <= len(members)
        assert len(optimizer.param_groups) == groups
        assert bool(seeds) == (epoch in (0, 1))
        if options:
            assert [id(p) for p in optimizer.param_groups[2]["params"]] == [id(p) for p in seeds]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_birth_before_the_first_update(name: str) -> None:
    """A seed may be born while no parameter has any state yet."""
    torch.manual_seed(0)
    model = BlindCNN()
    optimizer = OPTIMIZERS[name](model.parameters())
    grower = Grower(model, optimizer, budget=2000, steps=8, policy=plan((1, "stage1", "conv_light")))
    model(DATA[0][:50])
    grower.step(loader(VALIDATION))
    train_epoch(model, optimizer, DATA)
    assert all(bool(p.any()) for p in getattr(model, CHILD).parameters())


def test_seeds_join_the_groups_of_their_neighbours() -> None:
    """Weights that of the weights, norms and biases that of the norms and biases."""
    torch.manual_seed(0)
    model = BlindCNN()
    optimizer = SGD(two_groups(model), lr=0.05)
    grower = Grower(model, optimizer, budget=2000, steps=8, policy=plan((1, "stage1", "conv_light")))
    train_epoch(model, optimizer, DATA)
    grower.step(loader(VALIDATION))
    slots = getattr(model, CHILD)
    for parameter in slots.parameters():
        group = 0 if parameter.dim() > 1 else 1
        assert any(parameter is member for member in optimizer.param_groups[group]["params"])


def test_accumulation_and_clipping() -> None:
    """Seeds are in `model.parameters()`, so clipping sees them; a birth leaves gradients that are half accumulated."""
    torch.manual_seed(0)
    model = BlindCNN()
    optimizer = SGD(model.parameters(), lr=0.05)
    grower = Grower(model, optimizer, budget=2000, steps=8, policy=plan((1, "stage1", "conv_light")))
    train_epoch(model, optimizer, DATA)
    own = list(model.parameters())
    model.train()
    optimizer.zero_grad()
    F.cross_entropy(model(DATA[0][100:150]), DATA[1][100:150]).backward()
    before = snapshot(optimizer, own), [p.grad.clone() for p in own if p.grad is not None]
    grower.step(loader(VALIDATION))
    assert same(before, (snapshot(optimizer, own), [p.grad for p in own]))
    for part in torch.arange(100).split(50):
        F.cross_entropy(model(DATA[0][part]), DATA[1][part]).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters())) and float(norm) > 1e-3
    assert float(nn.utils.get_total_norm(gradients)) == pytest.approx(1e-3, rel=1e-3)
    optimizer.step()


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_mixed_precision(name: str, scaled: bool) -> None:
    """Autocast alone, or with a scaler, which unscales and steps seeds like everything else; a birth disturbs nobody.

    Fused optimizers unscale by themselves.
    """
    torch.manual_seed(0)
    model = BlindCNN()
    own = list(model.parameters())
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=scaled)
    grower = Grower(model, optimizer, budget=2000, steps=8, policy=plan((1, "stage1", "conv_light")))
    for _epoch in range(3):
        model.train()
        for batch in torch.arange(200).split(50):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(DATA[0][batch]), DATA[1][batch])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        before = snapshot(optimizer, own), scaler.state_dict()
        grower.step(loader(VALIDATION))
        assert same(before, (snapshot(optimizer, own), scaler.state_dict()))
    seeds = list(getattr(model, CHILD).parameters())
    assert seeds and all(bool(p.any()) for p in seeds)


def test_optimizers_that_cannot_grow() -> None:
    """Each with its remedy."""
    model, other = BlindCNN(), BlindCNN()
    with pytest.raises(BadValueError, match="holds none of the model's parameters"):
        Grower(model, SGD(other.parameters(), lr=0.1), budget=1000)
    with pytest.raises(BadValueError, match="LBFGS"):
        Grower(model, torch.optim.LBFGS(model.parameters()), budget=1000)
    assert not hasattr(model, CHILD)
