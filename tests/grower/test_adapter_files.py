"""Adapters on disk: what was learned comes back to the bit, and only into the model that it was made for."""

import json
from pathlib import Path

import pytest
import torch
from frozen import CNN, VALIDATION, FrozenGPT, adapt, base, frozen_cnn, learning, outputs
from loops import equal
from safetensors.torch import load_file, save_file
from torch import nn

from esper.grower import Grower, expect_seeds, hidden_seeds
from esper.grower.adapter_files import CONTENT, WEIGHTS
from esper.grower.container import CHILD
from esper.grower.folding import FoldError, fold_checked
from esper.leyline import BadValueError, CheckpointError, HostMismatchError, StageError


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[CNN, Path]:
    """An adapted model and its adapter."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    model, grower, _ = adapt(until=5)
    grower.save(folder)
    return model, folder


def test_a_round_trip(adapted: tuple[CNN, Path]) -> None:
    """Loaded it computes the same, merged too; the merged model is plain, with the names of the base."""
    model, folder = adapted
    other = base()
    before = outputs(other)
    adapter = Grower.load_adapter(other, folder)
    assert torch.equal(outputs(other), outputs(model))
    assert adapter.parameters == 292
    assert adapter.merge() is other
    assert torch.allclose(outputs(other), outputs(model), atol=1e-5)
    assert not torch.allclose(outputs(other), before, atol=1e-2)
    assert list(other.state_dict()) == list(base().state_dict())
    assert not any(part._forward_hooks for part in other.modules())
    with pytest.raises(StageError, match="merged or removed already"):
        adapter.merge()


def test_removed(adapted: tuple[CNN, Path]) -> None:
    """The base comes back to the bit, and another adapter may follow."""
    other = base()
    Grower.load_adapter(other, adapted[1]).remove()
    assert equal(other.state_dict().items(), base().state_dict().items())
    Grower.load_adapter(other, adapted[1]).merge()


def test_it_holds_what_differs(adapted: tuple[CNN, Path]) -> None:
    """Seeds, head and recalibrated statistics; no frozen weight."""
    tensors = load_file(adapted[1] / WEIGHTS)
    assert {name.partition("/")[0] for name in tensors} == {"seed", "base"}
    statistics = {
        f"base/{stage}.1.{name}" for stage in ("stage1", "stage2") for name in ("running_mean", "running_var")
    }
    assert {name for name in tensors if name.startswith("base")} == {"base/head.weight", "base/head.bias", *statistics}
    assert sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("seed")) == 292
    content = json.loads((adapted[1] / CONTENT).read_text())
    assert (content["format"], content["statistics"], content["host"]) == ("esper-adapter", "recalibrated", "CNN")


def test_the_wrong_model(adapted: tuple[CNN, Path]) -> None:
    """Other names, other shapes, other weights: refused, and the model is untouched."""
    _, folder = adapted
    with pytest.raises(HostMismatchError, match=r"another model .a CNN.*lacks 'head.bias'.*Build the pretrained model"):
        Grower.load_adapter(FrozenGPT(), folder)
    wider = base()
    wider.head = nn.Linear(16, 11)
    with pytest.raises(HostMismatchError, match=r"shape \(11, 16\) here, and \(10, 16\) there.*head of the same size"):
        Grower.load_adapter(wider, folder)
    other = base()
    with torch.no_grad():
        other.stage1[0].get_parameter("weight")[0, 0, 0, 0] += 1e-3
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(HostMismatchError, match=r"weights of 'stage1.0.weight' differ. Load the pretrained"):
        Grower.load_adapter(other, folder)
    assert equal(other.state_dict().items(), before.items()) and not hasattr(other, CHILD)


def test_another_head_is_no_other_model(adapted: tuple[CNN, Path]) -> None:
    """The head is part of the adapter."""
    model, folder = adapted
    other = base()
    nn.init.zeros_(other.head.weight)
    Grower.load_adapter(other, folder)
    assert torch.equal(outputs(other), outputs(model))


def test_damaged_files(adapted: tuple[CNN, Path], tmp_path: Path) -> None:
    """Each is named, and the model stays plain."""
    source = adapted[1]

    def broken(name: str, text: str | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / WEIGHTS).write_bytes((source / WEIGHTS).read_bytes())
        (folder / CONTENT).write_text((source / CONTENT).read_text() if text is None else text)
        return folder

    content = json.loads((source / CONTENT).read_text())
    model = base()
    with pytest.raises(CheckpointError, match="holds no adapter"):
        Grower.load_adapter(model, tmp_path)
    with pytest.raises(CheckpointError, match="no adapter of Esper"):
        Grower.load_adapter(model, broken("other", "{}"))
    with pytest.raises(CheckpointError):
        Grower.load_adapter(model, broken("text", "{"))
    with pytest.raises(CheckpointError, match="version 9"):
        Grower.load_adapter(model, broken("newer", json.dumps(content | {"version": 9})))
    with pytest.raises(CheckpointError, match="shapes"):
        Grower.load_adapter(model, broken("shapes", json.dumps(content | {"shapes": [1]})))
    folder = broken("changed")
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="changed or damaged"):
        Grower.load_adapter(model, folder)
    folder = broken("short")
    (folder / WEIGHTS).write_bytes((source / WEIGHTS).read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        Grower.load_adapter(model, folder)
    assert not hasattr(model, CHILD) and equal(model.state_dict().items(), base().state_dict().items())


def test_saved_by_a_grower_that_came_after_the_checkpoint(tmp_path: Path) -> None:
    """Frameworks load the weights before the Grower exists: the statistics of the base are those from before."""
    grown, _, _ = adapt(until=5)
    model = frozen_cnn()
    expect_seeds(model)
    model.load_state_dict(grown.state_dict())
    with hidden_seeds(model):
        optimizer = learning(model)
    Grower(model, optimizer, budget=400, steps=8).save(tmp_path / "adapter")
    other = base()
    Grower.load_adapter(other, tmp_path / "adapter")
    assert torch.equal(outputs(other), outputs(grown))


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    """A model that is not frozen has no adapter; a model with an adapter takes no second one."""
    model = base()
    grower = Grower(model, learning(model), budget=4000, steps=8)
    model.train()
    model(VALIDATION[0][:8])
    with pytest.raises(StageError, match="not frozen: use finish"):
        grower.save(tmp_path / "adapter")
    with pytest.raises(BadValueError, match="has a Grower or an adapter already"):
        Grower.load_adapter(model, tmp_path)


def test_what_is_not_linear_is_not_merged(tmp_path: Path) -> None:
    """Loaded, it acts all the same, and the remedies are those of an adapter. A finished model has none to save."""
    births = [("germinate", "stage1", "bottleneck")]
    model, grower, _ = adapt(until=3, budget=4000, policy=lambda report: births if report.step == 1 else [])
    grower.save(tmp_path / "adapter")
    other = base()
    adapter = Grower.load_adapter(other, tmp_path / "adapter")
    with pytest.raises(BadValueError, match=r"bottleneck behind stage1 cannot be merged.*as it is, or remove\(\) it"):
        adapter.merge()
    assert torch.equal(outputs(other), outputs(model))
    grower.finish(drop=["stage1"])
    with pytest.raises(StageError, match=r"save\(\) before finish\(\) or merge\(\)"):
        grower.save(tmp_path / "adapter")


class CentredNorm(nn.Module):
    """A norm whose weight is an offset from one, as in some language models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def test_a_norm_that_uses_its_weight_in_its_own_way() -> None:
    """Folding is checked against what the submodule computed, and undone."""
    model = nn.Sequential(nn.Linear(4, 6), CentredNorm(6), nn.Linear(6, 6), nn.Linear(6, 2)).requires_grad_(False)
    model[3].requires_grad_(True)
    optimizer = learning(model)
    births = [("germinate", "1", "scale")]
    grower = Grower(model, optimizer, budget=100, steps=4, policy=lambda report: births if report.step == 1 else [])
    x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
    for _ in range(2):
        model.train()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        grower.step([(x, y)])
    slots = getattr(model, CHILD)
    before = outputs(model, x)
    with pytest.raises(FoldError, match="'1' does not compute the same with its scale seed folded in"):
        fold_checked(slots, ["1"])
    assert torch.equal(outputs(model, x), before)
