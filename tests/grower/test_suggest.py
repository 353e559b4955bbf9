"""Suggestions: what a seed would be worth, measured without a trace."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loops import MLP, BlindCNN, digits, equal, make, parameters_of, sgd, train_epoch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from esper.grower import Grower
from esper.grower.container import CHILD
from esper.leyline import BadValueError, StageError, UnknownNameError

DATA = digits(600)


def shuffled(size: int = 30) -> DataLoader[Any]:
    """A training loader."""
    return DataLoader(TensorDataset(*DATA), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(0))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augments with three random streams."""

    def __len__(self) -> int:
        return len(DATA[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(())
        return DATA[0][index] + 0.01 * noise, DATA[1][index]


class WithDropout(BlindCNN):
    """Draws in training, and has a counter that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("passes").add_(1)
        return super().forward(F.dropout(x, 0.1, self.training))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> list[Any]:
    """All that must not change."""
    return [
        copy.deepcopy(dict(model.state_dict())),
        copy.deepcopy(optimizer.state_dict()),
        [part.training for part in model.modules()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [p.requires_grad for p in model.parameters()],
        [len(part._forward_hooks) for part in model.modules()],
        [p._version for p in model.parameters()],
        torch.get_rng_state(),
        repr(np.random.get_state()),
        random.getstate(),
        loader.generator.get_state(),
    ]


def same(one: Any, other: Any) -> bool:
    """Equal to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_it_leaves_no_trace(kind: Any) -> None:
    """Weights, gradients, statistics, modes, hooks, the optimizer and four random streams; one seed lives already."""
    torch.manual_seed(0)
    model = WithDropout()
    optimizer = kind(model.parameters(), lr=0.01)
    births = [("germinate", "stage1", "norm")]
    grower = Grower(model, optimizer, budget=2000, steps=8, policy=lambda report: births if report.step == 1 else [])
    train_epoch(model, optimizer, DATA)
    grower.step([DATA])
    train_epoch(model, optimizer, DATA)
    model.stage1[1].eval()  # a norm that the user froze
    loader = DataLoader(Noisy(), batch_size=30, shuffle=True, generator=torch.Generator().manual_seed(3))
    before = everything(model, optimizer, loader)
    suggestions = grower.suggest(loader, 3, minibatches=2)
    assert same(everything(model, optimizer, loader), before)
    assert {row.slot for row in suggestions} == {"stage2"} and all(row.trial is not None for row in suggestions)
    assert str(grower.suggest(loader, 3, minibatches=2)) == str(suggestions)


def test_training_goes_on_as_if_nobody_had_asked() -> None:
    """Also what the Grower itself does."""
    ends = []
    for asked in (False, True):
        births = [("germinate", "stage1", "norm")]
        model, optimizer, grower = make(policy=lambda report, births=births: births if report.step == 1 else [])
        for epoch in range(3):
            train_epoch(model, optimizer, DATA, epoch)
            if asked:
                grower.suggest(shuffled(), 2, minibatches=2)
            record = grower.step([DATA])
        ends.append((parameters_of(model), str(record)))
    assert equal(ends[0][0].items(), ends[1][0].items())
    assert ends[0][1] == ends[1][1]


def test_first_order_worth_is_the_gradient_of_the_scale() -> None:
    """By hand: a seed with a scale of its own at zero, in the model, and autograd."""
    model: Any
    model, _, grower = make(model=MLP())
    batches = [tuple(part[at : at + 50] for part in DATA) for at in (0, 50)]
    suggestions = grower.suggest(batches, 0, minibatches=2)
    (row,) = (row for row in suggestions if (row.slot, row.blueprint) == ("second", "lora"))
    newborn = probe_of(grower, "second", "lora")
    gradients = []
    for images, labels in batches:
        scale = torch.zeros(16, requires_grad=True)
        hidden = model.second(F.relu(model.first(images.flatten(1))))
        output = model.head(F.relu(hidden + scale * newborn(hidden)))
        gradients.append(torch.autograd.grad(F.cross_entropy(output, labels), scale)[0])
    mean = torch.stack(gradients).mean(0)
    assert row.worth.value == pytest.approx(float(mean.norm()), rel=1e-4)
    along = torch.stack(gradients) @ (mean / mean.norm())
    assert row.worth.error == pytest.approx(float(along.std() / math.sqrt(2)), rel=1e-3)
    assert row.trial is None and suggestions.host_loss is None and suggestions.cost.minibatches == 2


def probe_of(grower: Grower, slot_id: str, name: str) -> nn.Module:
    """The newborn that probes use."""
    from esper.tolaria.measurement import make_newborns

    slots = getattr(grower.model, CHILD)
    return make_newborns({slot_id: slots[slot_id].spec}, torch.device("cpu"), torch.float32)[slot_id, name]


def test_a_trial_is_what_the_seed_does_in_the_loop() -> None:
    """The same newborn in a model whose own weights do not move ends at the same loss."""
    model, _, grower = make(model=MLP(), policy=lambda report: [("germinate", "second", "mlp_small")])
    batches = [tuple(part[at : at + 50] for part in DATA) for at in range(0, 600, 50)]
    suggestions = grower.suggest(batches, 8, minibatches=4, ranks=False)
    (row,) = (row for row in suggestions if (row.slot, row.blueprint) == ("second", "mlp_small"))
    model(batches[0][0])
    grower.step(0.0)
    seed = getattr(model, CHILD)["second"].seed
    optimizer = sgd(seed)
    for images, labels in batches[:8]:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        after = torch.cat([F.cross_entropy(model(x), y, reduction="none") for x, y in batches[8:]])
    assert row.trial is not None and suggestions.host_loss is not None
    assert row.trial.loss == pytest.approx(float(after.mean()), rel=1e-5)
    assert row.trial.gain.value == pytest.approx(suggestions.host_loss - row.trial.loss, abs=1e-6)
    assert row.trial.gain.error > 0


def test_norms_are_set_for_each_row() -> None:
    """A host of zero learning: statistics of a fresh BatchNorm are far off, yet the host's loss is that of training."""
    model, _, grower = make()
    batches = [tuple(part[at : at + 100] for part in DATA) for at in range(0, 600, 100)]
    suggestions = grower.suggest(batches, 4, minibatches=2, ranks=False)
    twin = copy.deepcopy(model).train()
    with torch.no_grad():
        loss = torch.stack([F.cross_entropy(twin(x), y) for x, y in batches[4:]]).mean()
    assert suggestions.host_loss == pytest.approx(float(loss), rel=0.01)
    assert suggestions[0].trial is not None and suggestions[0].trial.gain.beyond_error


def test_the_table() -> None:
    """Sorted by trial or otherwise, printed with a row each, and plain JSON."""
    _, _, grower = make(budget=500)
    suggestions = grower.suggest(shuffled(), 2, minibatches=2)
    gains = [row.trial.gain.value for row in suggestions if row.trial is not None]
    assert gains == sorted(gains, reverse=True) and len(gains) == len(suggestions) > 5
    worths = [row.worth.value for row in suggestions.sorted("worth")]
    assert worths == sorted(worths, reverse=True)
    assert suggestions.sorted("parameters")[0].parameters == 24
    assert all(row.parameters <= 500 for row in suggestions)
    lines = str(suggestions).splitlines()
    assert len(lines) == len(suggestions) + 2
    assert lines[0].split()[:4] == ["slot", "blueprint", "parameters", "worth"]
    assert lines[1].startswith(suggestions[0].slot) and "±" in lines[1] and "cost: " in lines[-1]
    content = json.loads(json.dumps(suggestions.to_dict(), allow_nan=False))
    assert content["suggestions"][0]["blueprint"] == suggestions[0].blueprint
    with pytest.raises(UnknownNameError, match="unknown column 'size'"):
        suggestions.sorted("size")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="sort by worth"):
        grower.suggest(shuffled(), 0).sorted("trial")


def test_cost_counts_passes() -> None:
    """What it says is what the model runs: backward passes at least, and forward passes for the rest."""
    _, _, grower = make(budget=500)
    model = grower.model
    model(DATA[0][:2])
    counts = [0]
    model.register_forward_hook(lambda *_: counts.__setitem__(0, counts[0] + 1))
    for top in (None, 2):
        counts[0] = 0
        suggestions = grower.suggest(shuffled(), 5, minibatches=3, top=top)
        cells = len([row for row in suggestions if row.trial is not None])
        assert top is None or (cells, len(suggestions) > 2) == (2, True)
        trained = 3 + cells * 5
        assert suggestions.cost.minibatches == pytest.approx(trained + (counts[0] - trained) / 3)
        assert suggestions.cost.held == 8
        assert suggestions[0].trial is not None and (top is None or suggestions[-1].trial is None)
        lines = str(suggestions).splitlines()
        assert [line.count(" ± ") for line in lines[1:-1]] == [3 if row.trial else 1 for row in suggestions]


def test_rate_and_options_of_the_seeds() -> None:
    """A trial learns at the rate that seeds have in the optimizer, or at the one that is passed."""
    batches, losses = list(shuffled())[:6], []
    for options, rate in [({"lr": 1e-9}, None), ({"lr": 0.05}, None), (None, None), ({"lr": 1e-9}, 0.05)]:
        _, _, grower = make(model=MLP(), seed_options=options, budget=300)
        suggestions = grower.suggest(batches, 4, minibatches=2, rate=rate, ranks=False).sorted("parameters")
        losses.append([row.trial for row in suggestions if row.trial is not None])
    assert all(abs(each.gain.value) < 1e-6 for each in losses[0]) and len(losses[0]) == 4
    assert losses[1] == losses[2] == losses[3]
    assert max(each.gain.value for each in losses[1]) > 1e-5


def test_other_losses_and_batches() -> None:
    """Dicts, a loss of the user's own in percent, a frozen host, and tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model[:3].requires_grad_(False)
    grower = Grower(
        model,
        optimizer,
        budget=2000,
        loss=lambda output, batch: F.mse_loss(output, batch["x"], reduction="none").mean(1),
        forward=lambda model, batch: model(batch["x"]),
    )
    batches = [{"x": DATA[0][at : at + 50].flatten(1)} for at in range(0, 500, 50)]
    suggestions = grower.suggest(batches, 6, minibatches=4)
    assert suggestions.by_loss and "% of the loss" in str(suggestions)
    assert suggestions[0].trial is not None and suggestions[0].trial.points.value > 0
    assert [layer.name for layer in suggestions.profiles] == ["0", "2"]
    (update,) = [row for row in suggestions if (row.slot, row.blueprint) == ("2", "lora_linear_4")]
    assert update.worth.value == 0  # a probe sees outputs, and a low-rank update reads the input
    assert update.trial is not None and update.trial.points.value > 0
    assert not any(parameter.requires_grad for parameter in model[:3].parameters())


def used_up() -> Iterator[tuple[Tensor, Tensor]]:
    """A generator that has nothing left."""
    return iter([DATA])


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (shuffled, {"trial": -1}, "trial -1 is not an integer of 0 or more"),
        (shuffled, {"minibatches": 1}, "minibatches 1 is not an integer of 2 or more: noise"),
        (shuffled, {"top": 0}, "top 0 is not"),
        (shuffled, {"rate": 0.0}, "rate 0.0 is not a finite number above 0"),
        (lambda: shuffled(100), {}, r"yielded 6 minibatches, and 28 are needed \(20 to train on and 8 held out\)"),
        (used_up, {"trial": 0}, r"yielded 1 minibatches, and 8 are needed \(for first-order worths\)"),
        (lambda: DATA[0], {}, "loader is a Tensor; pass your training loader"),
        (lambda: 3, {}, "loader is a int"),
    ],
)
def test_bad_input(loader: Callable[[], Any], options: dict[str, Any], message: str) -> None:
    _, _, grower = make()
    with pytest.raises(BadValueError, match=message):
        grower.suggest(loader(), **options)


def test_when_nothing_may_grow() -> None:
    """No budget left, no empty slot, and the end of growth."""
    births = [("germinate", "stage1", "conv_light"), ("germinate", "stage2", "conv_light")]
    model, optimizer, grower = make(budget=2960, policy=lambda report: births[report.step - 1 : report.step])
    train_epoch(model, optimizer, DATA)
    grower.step([DATA])
    train_epoch(model, optimizer, DATA)
    grower.budget = grower._ready().growing.budget = 610
    with pytest.raises(BadValueError, match=r"10 of the budget of 610 are left, and the smallest .* has 48 parameters"):
        grower.suggest(shuffled(), 0)
    grower._ready().growing.budget = 2960
    grower.step([DATA])
    with pytest.raises(BadValueError, match="no slot is empty: stage1, stage2 hold seeds"):
        grower.suggest(shuffled(), 0)
    grower.finish([DATA])
    with pytest.raises(StageError, match="growth is finished"):
        grower.suggest(shuffled())
