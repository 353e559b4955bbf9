"""Hardening an attached host: it stays the user's own module, with what has grown in it."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from hardening import VOCAB, Foreign, attached, close, count, images, plant, run_without_esper, tokens, train
from torch import Tensor, nn

from esper.kasmina.attach import attach
from esper.kasmina.slot import Role
from esper.leyline import BadValueError, SeedStage

FOREIGN_SOURCE = """
from torch import Tensor, nn
class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 5)
    def forward(self, x):
        h = self.block(self.stem(x))
        return self.head(h.mean((-2, -1)).to(self.head.weight.dtype))
network = grow(Foreign(), folder)
"""


@pytest.mark.slow
def test_an_attached_host_stays_the_users_module(tmp_path: Path) -> None:
    model = attached()
    plant(model, "stem", "depthwise", "gate")
    plant(model, "stem.0", "conv_small", "multiply")
    plant(model, "head", "mlp_small")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    y = model(images())
    hardened = model.harden(tmp_path, example=images(1))
    assert isinstance(hardened, Foreign) and hardened is not model.host
    close(hardened(images()), y)
    assert torch.equal(model(images()), y)  # the live model still grows
    assert count(hardened) == model.host_parameter_count + model.grown_parameter_count
    assert not any("esper" in type(module).__module__ for module in hardened.modules() if module is not hardened)
    close(torch.compile(copy.deepcopy(hardened), backend="eager", fullgraph=True)(images()), y)
    losses = train(hardened, images(), torch.arange(8) % 5)
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    targets = torch.arange(8) % 5
    assert run_without_esper(tmp_path, "grown_blocks", FOREIGN_SOURCE, images(), y, targets) == count(hardened)


def test_an_attached_host_as_a_program_for_inference(tmp_path: Path) -> None:
    model = attached()
    plant(model, "block", "conv_light")
    model.harden(tmp_path / "without")
    contents = json.loads((tmp_path / "without" / "contents.json").read_text())
    assert contents["program"].startswith("not written") and not (tmp_path / "without" / "model.pt2").exists()
    model.harden(tmp_path / "with", example=images(1))
    assert json.loads((tmp_path / "with" / "contents.json").read_text())["program"] == "model.pt2"
    program = torch.export.load(tmp_path / "with" / "model.pt2").module()
    for size in (2, 7):
        close(program(images(size)), model(images(size)))


def test_dropping_from_an_attached_host_recalibrates_the_export_alone() -> None:
    model = attached()
    plant(model, "stem.0", "conv_light", stage=SeedStage.HOLDING)
    with pytest.raises(BadValueError, match="calibration="):
        model.harden(drop=["stem.0"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibration = images(64, rng_seed=5)
    hardened = model.harden(drop=["stem.0"], calibration=calibration)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    roles = {"stem.0": Role.SILENT}
    close(hardened(images()), model.body.evaluate(images(), roles, model.body.calibrate(calibration, roles)))
    assert count(hardened) == model.host_parameter_count


class Tied(nn.Module):
    """Tied weights, and a submodule that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.mix = nn.Linear(8, 8)
        self.chain = nn.Sequential(self.mix, nn.Tanh())
        self.head = nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.chain(self.embed(ids)))
        return scores


def test_an_attached_host_with_shared_parts(tmp_path: Path) -> None:
    model = attach(Tied(), {"mix": 8}, example=tokens(2)).eval()
    plant(model, "mix", "mlp", "multiply")
    hardened = model.harden(tmp_path)
    close(hardened(tokens()), model(tokens()))
    assert count(hardened) == model.host_parameter_count + model.grown_parameter_count
    spec = importlib.util.spec_from_file_location("grown_blocks", tmp_path / "grown_blocks.py")
    assert spec is not None and spec.loader is not None
    blocks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(blocks)
    close(blocks.grow(Tied(), tmp_path)(tokens()), model(tokens()))


class Branching(nn.Module):
    """Control flow that torch.export cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if bool(y.sum() > 0) else -y


def test_a_network_that_cannot_be_traced_is_written_without_a_program(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"of an earlier network")
    example = torch.randn(4, 4)
    model = attach(Branching(), {"linear": 4}, example=example)
    plant(model, "linear", "norm")
    with pytest.warns(UserWarning, match="not written: torch.export cannot trace"):
        model.harden(tmp_path, example=example)
    assert not (tmp_path / "model.pt2").exists()
    assert (tmp_path / "weights.safetensors").exists()


def test_hooks_of_the_user_stay() -> None:
    model = attached()
    calls: list[str] = []
    model.host.get_submodule("block").register_forward_hook(lambda *_: calls.append("block"))
    plant(model, "block", "norm")
    model.harden()(images())
    assert calls == ["block"]
