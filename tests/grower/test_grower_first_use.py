"""What a new user does first: usual arguments, saving, and what the messages say."""

import copy
from typing import Any

import pytest
import torch
from loops import BlindCNN, digits, loader, make, plan, sgd, train_epoch
from torch import nn

from esper.grower import Grower
from esper.leyline import BadValueError

IMAGES, LABELS = digits(400)
DATA, VALIDATION = (IMAGES[:300], LABELS[:300]), (IMAGES[300:], LABELS[300:])
BIRTHS = plan((1, "stage1", "conv_light"), (1, "stage2", "depthwise"))


def test_named_parameters() -> None:
    """An optimizer built from `named_parameters()` has one name per parameter, also for seeds and blocks."""
    torch.manual_seed(0)
    model = BlindCNN()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05)
    grower = Grower(model, optimizer, budget=2000, steps=8, policy=BIRTHS)
    for epoch in range(2):
        train_epoch(model, optimizer, DATA, epoch)
        grower.step(loader(VALIDATION))
        assert named(optimizer) == {id(p): name for name, p in model.named_parameters()}
    grower.finish(keep=["stage1"], drop=["stage2"])
    assert named(optimizer) == {id(p): name for name, p in model.named_parameters()}


def named(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    pairs = [zip(group["params"], group["param_names"], strict=True) for group in optimizer.param_groups]
    return {id(p): name for group in pairs for p, name in group}


@pytest.mark.parametrize("number", [torch.tensor(70.0), 70, 70.0])
def test_a_number_may_be_a_tensor(number: Any) -> None:
    """Metrics often come as tensors without axes."""
    model, optimizer, grower = make()
    train_epoch(model, optimizer, DATA)
    assert grower.step(number).step == 1


def test_finish_says_what_it_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds that are dropped do not vanish silently."""
    model, optimizer, grower = make(policy=BIRTHS)
    train_epoch(model, optimizer, DATA)
    grower.step(loader(VALIDATION))
    grower.finish(keep=["stage1"], drop=["stage2"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Esper: kept conv_light behind stage1 (600 parameters); dropped depthwise behind stage2"


def test_messages_of_first_mistakes() -> None:
    """Each says what to do."""
    model = BlindCNN()
    optimizer = sgd(model)
    with pytest.raises(BadValueError, match=r"nn.CrossEntropyLoss takes \(output, target\)"):
        Grower(model, optimizer, budget=1000, loss=nn.CrossEntropyLoss())
    with pytest.raises(BadValueError, match="the one that holds the layers that should grow"):
        Grower(model, [optimizer], budget=1000)  # type: ignore[arg-type]  # what users may try
    matrices = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    with pytest.raises(BadValueError, match="Muon updates matrices only"):
        Grower(matrices, torch.optim.Muon(matrices.parameters()), budget=1000)
    Grower(model, optimizer, budget=1000)
    with pytest.raises(BadValueError, match="has a Grower already"):
        Grower(copy.deepcopy(model), optimizer, budget=1000)
    with pytest.raises(BadValueError, match="has a Grower already"):
        Grower(model, optimizer, budget=1000)


def test_an_empty_generator_and_pixels() -> None:
    """A generator is used up after one step; labels per pixel get an example that fits them."""
    model, optimizer, grower = make()
    train_epoch(model, optimizer, DATA)
    with pytest.raises(BadValueError, match="A generator is empty after its first use"):
        grower.step(iter([]))
    with pytest.raises(BadValueError, match=r"F.cross_entropy\(output, batch\[1\], reduction='none'\)"):
        grower.step([(VALIDATION[0], torch.zeros(100, 8, 8, dtype=torch.int64))])
