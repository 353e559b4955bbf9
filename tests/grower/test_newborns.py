"""How a seed starts in a user's model: silent, and ready to learn."""

import pytest
import torch
from loops import MLP, BlindCNN, digits, loader, plan, sgd, train_epoch
from torch import nn

from esper.grower import Grower
from esper.grower.growing_model import born_zero, last_linear, silence_by_last_layer
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.layers import Scale
from esper.leyline import BadValueError, Topology

DATA = digits(200)


@pytest.mark.parametrize(
    ("topology", "name"),
    [("vector", "lora"), ("vector", "mlp"), ("tokens", "attention"), ("tokens", "mlp_small")],
)
def test_the_last_layer_silences(topology: Topology, name: str) -> None:
    """The output is zero, and the first gradient reaches the whole last layer, not only a factor per channel."""
    seed = BlueprintRegistry.build(topology, name, 8, resolution=5, rng_seed=0)
    silence_by_last_layer(seed)
    last = last_linear(seed)
    assert last is not None
    shape = (3, 8) if topology == "vector" else (3, 5, 8)
    output = seed(torch.randn(shape))
    assert not output.any()
    (output - torch.randn(shape)).square().sum().backward()
    assert last.weight.grad is not None and last.weight.grad.all()
    assert born_zero(seed) == list(last.parameters())


@pytest.mark.parametrize(("topology", "name"), [("image", "conv_heavy"), ("vector", "norm")])
def test_other_seeds_keep_their_zero_scale(topology: Topology, name: str) -> None:
    """Seeds that end in a norm or a nonlinearity are silenced by their scale."""
    seed = BlueprintRegistry.build(topology, name, 8, resolution=5, rng_seed=0)
    silence_by_last_layer(seed)
    scales = [part.weight for part in seed.modules() if isinstance(part, Scale)]
    assert len(scales) == 1 and not scales[0].any()
    assert born_zero(seed) == scales


@pytest.mark.parametrize(
    ("model", "slot", "blueprint"), [(MLP, "first", "mlp_small"), (BlindCNN, "stage1", "conv_light")]
)
def test_never_updated(model: type[nn.Module], slot: str, blueprint: str) -> None:
    """Both ways of silence tell a seed that no optimizer updates, and one that learns."""
    for stepped_by_loop in (True, False):
        torch.manual_seed(0)
        net = model()
        given = sgd(net)
        stepped = given if stepped_by_loop else sgd(net)
        grower = Grower(net, given, budget=5000, steps=8, policy=plan((1, slot, blueprint)))
        train_epoch(net, stepped, DATA)
        grower.step(loader(DATA))
        train_epoch(net, stepped, DATA, 1)
        if stepped_by_loop:
            grower.step(loader(DATA))
        else:
            with pytest.raises(BadValueError, match="never updated"):
                grower.step(loader(DATA))
