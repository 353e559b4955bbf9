"""The four lines: a model grows in an unchanged loop and ends as plain torch."""

import copy
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loops import BlindCNN, digits, equal, loader, make, parameters_of, plan, sgd, train_epoch
from torch import nn

from esper.grower import Grower
from esper.grower.container import CHILD
from esper.grower.finishing import FinishError
from esper.leyline import SeedStage, StageError

DATA = digits(400)
VALIDATION = digits(700)[0][400:], digits(700)[1][400:]


def grow(grower: Grower, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, passes: int = 1) -> list[str]:
    """Train and grow; returns the printed lines."""
    lines = []
    for epoch in range(steps):
        for part in range(passes):
            train_epoch(model, optimizer, DATA, passes * epoch + part)
        lines.append(str(grower.step(loader(VALIDATION))))
    return lines


def test_four_lines() -> None:
    """The heuristic grows a model that cannot see shapes, and the same object comes back, better and plain."""
    model, optimizer, grower = make(steps=10, budget=2000)
    lines = grow(grower, model, optimizer, 10, passes=4)
    assert any("germinated" in line for line in lines)
    finished = grower.finish(loader(VALIDATION))
    assert finished is model
    model.eval()
    grown = float((model(VALIDATION[0]).argmax(-1) == VALIDATION[1]).float().mean())
    torch.manual_seed(0)
    alone = BlindCNN()
    own = sgd(alone)
    for epoch in range(40):
        train_epoch(alone, own, DATA, epoch)
    alone.eval()
    assert grown > float((alone(VALIDATION[0]).argmax(-1) == VALIDATION[1]).float().mean()) + 0.1


def test_the_line_of_a_step() -> None:
    """It names the seed, the place and the budget."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")), budget=50_000)
    assert grow(grower, model, optimizer, 2) == [
        "step 1: germinated conv_light behind stage1 (600 of 50,000)",
        "step 2: waited (600 of 50,000)",
    ]


def test_nothing_jumps_at_birth() -> None:
    """A newborn leaves the output as it is, to the bit."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light"), (1, "stage2", "conv_light")), budget=3000)
    train_epoch(model, optimizer, DATA)
    model.eval()
    before = model(VALIDATION[0])
    grower.step(loader(VALIDATION))
    assert torch.equal(model(VALIDATION[0]), before)
    assert len(list(getattr(model, CHILD).parameters())) > 0


def test_the_budget_is_never_exceeded() -> None:
    """Whatever a policy does."""
    model, optimizer, grower = make(policy="random", budget=700, steps=12)
    for epoch in range(12):
        train_epoch(model, optimizer, DATA, epoch)
        record = grower.step(loader(VALIDATION))
        assert record.grown == sum(p.numel() for p in getattr(model, CHILD).parameters()) <= 700


def test_finished_models_compute_the_same() -> None:
    """Blocks take over the seeds' own parameters, under new keys; the user's keys and Parameter objects stay."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light"), (2, "stage2", "bottleneck")))
    own = dict(model.named_parameters())
    seen = {name for name in own if not name.startswith(CHILD)}
    grow(grower, model, optimizer, 4)
    model.eval()
    before = model(VALIDATION[0])
    seeds = {id(p) for p in getattr(model, CHILD).parameters()}
    grower.finish(keep=["stage1", "stage2"])
    assert torch.allclose(model(VALIDATION[0]), before, atol=1e-6)
    after = dict(model.named_parameters())
    assert all(after[name] is own[name] for name in seen)
    assert {id(p) for name, p in after.items() if name not in seen} == seeds
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not any(type(module).__module__.startswith("esper") for module in model.modules())


class OwnWay(nn.Module):
    """A submodule that runs its children in its own way, so that a new child changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x).relu()
        return x


def test_an_end_that_fails_changes_nothing() -> None:
    """The seed still grows, and may be dropped instead."""
    torch.manual_seed(0)
    blind = BlindCNN()
    blind.stage1 = nn.Sequential(OwnWay(), nn.BatchNorm2d(8))
    births = plan((1, "stage1.0", "conv_light"), (1, "stage2", "conv_light"))
    model, optimizer, grower = make(model=blind, slots=["stage1.0", "stage2"], policy=births, budget=5000)
    grow(grower, model, optimizer, 3)
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    output, members = model(VALIDATION[0]), list(optimizer.param_groups[0]["params"])
    with pytest.raises(FinishError, match=r"differs from the grown one .* or drop="):
        grower.finish(keep=["stage1.0"], drop=["stage2"])
    assert equal(before.items(), model.state_dict().items())
    assert torch.equal(model(VALIDATION[0]), output)
    assert type(blind.stage1[0]) is OwnWay
    assert all(a is b for a, b in zip(members, optimizer.param_groups[0]["params"], strict=True))
    grow(grower, model, optimizer, 1)
    model.eval()
    assert grower.finish(keep=["stage2"], drop=["stage1.0"]) is model
    assert not any(module.training for module in model.modules())


def test_training_continues_after_the_end() -> None:
    """With the same optimizer, whose state still fits."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")))
    grow(grower, model, optimizer, 3)
    states = len(optimizer.state)
    grower.finish(keep=["stage1"])
    before = parameters_of(model)
    train_epoch(model, optimizer, DATA, 9)
    after = dict(model.named_parameters())
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    assert len(optimizer.state) == states


def test_seeds_that_do_not_pay_are_dropped() -> None:
    """Their parameters leave the optimizer, and the norms behind them are calibrated anew."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")))
    grow(grower, model, optimizer, 3)
    norm = model.get_submodule("stage2.1")
    mean = norm.get_buffer("running_mean").clone()
    grower.finish(drop=["stage1"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(BlindCNN().parameters()))
    assert not torch.equal(norm.get_buffer("running_mean"), mean)
    assert dict(model.named_parameters()).keys() == dict(BlindCNN().named_parameters()).keys()


def test_unmeasured_seeds_are_asked_about() -> None:
    """A contribution that was never measured decides nothing."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")))
    grow(grower, model, optimizer, 1)
    with pytest.raises(StageError, match="never measured"):
        grower.finish()
    assert grower.finish(loader(VALIDATION)) is model


def test_a_grower_that_waits_changes_nothing() -> None:
    """Not a bit of the weights, and not the random stream."""
    torch.manual_seed(0)
    alone = BlindCNN()
    own = sgd(alone)
    model, optimizer, grower = make(policy="wait")
    for epoch in range(3):
        train_epoch(alone, own, DATA, epoch)
        state = torch.get_rng_state()
        train_epoch(model, optimizer, DATA, epoch)
        grower.step(loader(VALIDATION))
        assert torch.equal(torch.get_rng_state(), state)
    grower.finish()
    assert equal(alone.state_dict().items(), model.state_dict().items())


def test_a_number_is_enough_for_a_step() -> None:
    """It grows, and says what it cannot measure."""
    model, optimizer, grower = make(steps=10)
    train_epoch(model, optimizer, DATA)
    first = grower.step(31.0)
    assert first.actions and first.accuracy is None
    train_epoch(model, optimizer, DATA, 1)
    assert "contributions need validation data" in str(grower.step(33.0))


def test_reports() -> None:
    """A policy of one's own sees seeds, contributions and offers."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")), budget=5000)
    grow(grower, model, optimizer, 3)
    report = grower.report()
    seed = report.slots["stage1"]
    assert seed.stage is SeedStage.HOLDING and seed.contribution is not None
    assert not report.offers["stage1"] and report.offers["stage2"]["conv_light"].parameters == 2352
    assert max(offer.worth for offer in report.offers["stage2"].values()) > 0


def test_finished_models_load_without_esper(tmp_path: Path) -> None:
    """In a fresh process, from the folder and the user's own class."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light"), (1, "stage2", "norm")))
    grow(grower, model, optimizer, 2)
    grower.finish(keep=["stage1", "stage2"], folder=tmp_path / "finished")
    model.eval()
    torch.save({"images": VALIDATION[0], "wanted": model(VALIDATION[0]).detach()}, tmp_path / "data.pt")
    script = f"""
import sys
import torch
from loops_of_user import BlindCNN
from grown_blocks import grow
data = torch.load({str(tmp_path / "data.pt")!r})
model = grow(BlindCNN(), {str(tmp_path / "finished")!r})
assert torch.allclose(model(data["images"]), data["wanted"], atol=1e-6)
assert not any(name.startswith("esper") for name in sys.modules)
"""
    source = inspect.getsource(BlindCNN)
    header = "import torch\nfrom torch import Tensor, nn\nfrom torch.nn import functional as F\n"
    (tmp_path / "loops_of_user.py").write_text(header + source)
    path = os.pathsep.join([str(tmp_path), str(tmp_path / "finished")])
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_streams_keep_their_dtype() -> None:
    """Under autocast a seed does not widen what passes its slot."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")))
    seen = []
    model.get_submodule("stage2").register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    grow(grower, model, optimizer, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(VALIDATION[0])
    assert seen[-1] == torch.bfloat16


def test_a_copy_is_independent() -> None:
    """A deep copy has its own seeds and no grower."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")))
    grow(grower, model, optimizer, 2)
    twin = copy.deepcopy(model)
    before = parameters_of(twin)
    train_epoch(model, optimizer, DATA, 5)
    assert equal(before.items(), parameters_of(twin).items())
    twin.eval()
    assert twin(VALIDATION[0]).shape == (300, 10)
