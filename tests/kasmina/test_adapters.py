"""Adapters: blueprints that fold into the weights of the submodule in front of them."""

import pytest
import torch
from hardening import attached, close, images, plant
from torch import Tensor, nn

from esper.kasmina import BlueprintRegistry, attach, check_blueprint
from esper.kasmina.blueprints.adapters import RANKS
from esper.kasmina.check import ALIVE_RATIO
from esper.leyline import TOPOLOGIES, BlueprintContractError, GateRefusedError, SlotSpec, Topology

EVERYTHING = [(topology, name) for topology in TOPOLOGIES for name in BlueprintRegistry.adapters(topology)]


def test_built_in() -> None:
    """They stand apart: no task and no trained policy sees them."""
    lora = [f"lora_linear_{rank}" for rank in RANKS]
    assert BlueprintRegistry.adapters("tokens") == ["affine", "scale", *lora] == BlueprintRegistry.adapters("vector")
    convolutions = [f"lora_conv_{rank}" for rank in RANKS]
    assert BlueprintRegistry.adapters("image") == ["affine", "scale", *convolutions, "linear1x1"]
    for topology in TOPOLOGIES:
        offered = {offer.name for offer in BlueprintRegistry.offers(SlotSpec("r0c0", 8, topology, 0.5, 8))}
        assert not offered & set(BlueprintRegistry.adapters(topology))


@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize(("topology", "name"), EVERYTHING)
@pytest.mark.default_cases("*_1-*", "*affine-8", "*scale-8", "*linear1x1-8")
def test_the_contract(topology: Topology, name: str, width: int) -> None:
    """Zero at birth, alive, counted; an update is checked behind an example of its layer."""
    report = check_blueprint(topology, name, width, seeds=5)
    assert report.parameters == BlueprintRegistry.spec(topology, name).count(width)
    assert report.weakest_ratio > ALIVE_RATIO


class Loud(nn.Module):
    """Reads the input, and is not zero at birth."""

    reads_input = True

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.map = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.map(x)
        return y


def test_a_broken_contract_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is not zero at birth, behind its example."""
    from esper.kasmina.blueprints.registry import Folding

    def build(base: nn.Module) -> nn.Module:
        assert isinstance(base, nn.Linear)
        return Loud(base)

    monkeypatch.setattr(BlueprintRegistry, "_specs", dict(BlueprintRegistry._specs))
    folding = Folding(lambda base: True, lambda *_: None, build, lambda base: 6, lambda width: nn.Linear(width, 2))
    BlueprintRegistry.register("vector", "loud", lambda width: 2 * width, folding=folding)(
        lambda width: build(nn.Linear(width, 2))
    )
    with pytest.raises(BlueprintContractError, match="clause 2"):
        check_blueprint("vector", "loud", 3, seeds=1)


LAYERS = [
    nn.Linear(5, 7),
    nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
    nn.Conv2d(4, 6, (3, 5), dilation=2, padding="same", padding_mode="circular"),
    nn.Conv2d(8, 8, 1),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_low_rank_updates_fold(layer: nn.Linear | nn.Conv2d, alpha: float) -> None:
    """The layer with folded weights computes what layer and seed do; counted by hand r · (inputs + outputs)."""
    linear = isinstance(layer, nn.Linear)
    topology: Topology = "vector" if linear else "image"
    name = "lora_linear_2" if linear else "lora_conv_2"
    spec = BlueprintRegistry.spec(topology, name)
    seed = BlueprintRegistry.build(topology, name, len(layer.weight), rng_seed=0, base=layer)
    assert sum(p.numel() for p in seed.parameters()) == 2 * (layer.weight[0].numel() + len(layer.weight))
    x = torch.randn(2, 5) if linear else torch.randn(2, layer.weight.shape[1], 9, 9)
    assert not seed(x).any() and seed(x).shape == layer(x).shape
    for parameter in seed.parameters():
        nn.init.normal_(parameter)
    y = layer(x) + alpha * seed(x)
    assert spec.folding is not None
    with torch.no_grad():
        values = spec.folding.fold(layer, seed, alpha)
        assert values is not None
        before = layer.weight.clone()
        layer.weight.copy_(values["weight"])
        torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-4)
        layer.weight.copy_(before)


@pytest.mark.parametrize(
    ("base", "topology", "name", "shape"),
    [
        (nn.BatchNorm2d(6), "image", "affine", (3, 6, 4, 4)),
        (nn.GroupNorm(2, 6), "image", "affine", (3, 6, 4, 4)),
        (nn.LayerNorm(6), "tokens", "affine", (3, 5, 6)),
        (nn.RMSNorm(6), "tokens", "scale", (3, 5, 6)),
        (nn.BatchNorm1d(6), "vector", "affine", (3, 6)),
        (nn.Conv2d(4, 6, 3), "image", "linear1x1", (3, 4, 7, 7)),
    ],
)
def test_seeds_of_the_output_fold(base: nn.Module, topology: Topology, name: str, shape: tuple[int, ...]) -> None:
    """Behind norms with a weight and a bias of their own, and behind a convolution."""
    seed = BlueprintRegistry.build(topology, name, 6)
    for parameter in (*base.parameters(), *seed.parameters()):
        nn.init.normal_(parameter)
    folding = BlueprintRegistry.spec(topology, name).folding
    x = torch.randn(shape)
    assert folding is not None and folding.fits(base)
    with torch.no_grad():
        h = base.eval()(x)
        values = folding.fold(base, seed, 0.7)
        assert values is not None
        for key, value in values.items():
            base.get_parameter(key).copy_(value)
        torch.testing.assert_close(base(x), h + 0.7 * seed(h), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("base", "topology", "fitting"),
    [
        (nn.Conv2d(8, 8, 3, groups=8), "image", {"linear1x1"}),
        (nn.Conv2d(2, 4, 1), "image", {"lora_conv_1", "linear1x1"}),  # 12 parameters, an update of rank 2 as many
        (nn.ReLU(), "tokens", set()),
        (nn.BatchNorm2d(8, affine=False), "image", {"linear1x1"}),
        (nn.LayerNorm(8), "tokens", {"affine"}),
        (nn.LayerNorm(8, bias=False), "tokens", {"scale"}),
        (nn.Linear(4, 8, bias=False), "vector", {"lora_linear_1", "lora_linear_2"}),  # 32 parameters, 12 per rank
    ],
)
def test_what_is_offered(base: nn.Module, topology: Topology, fitting: set[str]) -> None:
    """By the kind of layer, and only updates that are smaller than it."""
    width = 4 if isinstance(base, nn.Conv2d) and base.groups == 1 else 8
    offers = BlueprintRegistry.adapter_offers(SlotSpec("a", width, topology, 0.5), base)
    assert {offer.name for offer in offers} == fitting


def test_grouped_convolutions_and_activations_do_not_fold() -> None:
    """A 1×1 seed behind them stays a layer."""
    folding = BlueprintRegistry.spec("image", "linear1x1").folding
    seed = BlueprintRegistry.build("image", "linear1x1", 8)
    assert folding is not None
    assert folding.fold(nn.Conv2d(8, 8, 3, groups=8), seed, 1.0) is None
    assert folding.fold(nn.ReLU(), seed, 1.0) is None


def test_an_attached_model_hardens_with_its_updates_folded() -> None:
    """By hand: a low-rank update at a convolution is no block in the hardened model, but part of its weights."""
    model = attached()
    plant(model, "stem.0", "lora_conv_1")
    y = model(images())
    hardened = model.harden()
    close(hardened(images()), y)
    assert sum(p.numel() for p in hardened.parameters()) == model.host_parameter_count
    assert not torch.equal(hardened.get_parameter("stem.0.weight"), model.host.get_parameter("stem.0.weight"))


def test_elsewhere_it_does_not_grow() -> None:
    """The gate says why."""
    model = attach(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), {"1": 6}, example=torch.randn(2, 4))
    with pytest.raises(GateRefusedError, match="'lora_linear_1' adapts certain submodules of pretrained models"):
        model.germinate_seed("1", "lora_linear_1")
