"""Models that a Grower finished leave Python as any other: TorchScript, traces, torch.export and ONNX."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export_formats import FORMATS, OwnGPT, OwnMLP, check, ids, vectors
from loops import BlindCNN, digits, plan
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower import Grower

Model = tuple[Callable[[], nn.Module], Callable[[int], Tensor], int, list[tuple[int, str, str]]]
# Model, inputs, number of classes, and the seeds: (step, slot, blueprint).
MODELS: dict[str, Model] = {
    "cnn": (BlindCNN, lambda count: digits(count)[0], 10, [(1, "stage1", "conv_light"), (1, "stage2", "norm")]),
    "gpt": (OwnGPT, ids, OwnGPT.VOCAB, [(1, "layers.0.attention", "attention"), (1, "layers.1.mlp", "lora")]),
    "mlp": (OwnMLP, vectors, 3, [(1, "first", "mlp_small"), (1, "second", "lora")]),
}


def finished(name: str) -> nn.Module:
    """A model that was trained for three steps with two seeds, and finished."""
    build, inputs, classes, seeds = MODELS[name]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = inputs(32)
    targets = torch.arange(32 * (x.shape[1] if name == "gpt" else 1)).view(32, -1).squeeze(1) % classes
    grower = Grower(model, optimizer, budget=5000, steps=4, policy=plan(*seeds))
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        grower.step([(x, targets)])
    return grower.finish(keep=[slot for _, slot, _ in seeds])


@pytest.mark.default_cases("cnn-script", "gpt-script")
@pytest.mark.parametrize("way", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_a_finished_model_leaves(name: str, way: str, tmp_path: Path) -> None:
    """The same outputs for other batch sizes than the one it was written with."""
    model = finished(name)
    grown = [child for child, _ in model.named_modules() if child.endswith("grown")]
    assert len(grown) == 2
    check(way, model, MODELS[name][1], tmp_path)
