"""The registry of blueprints."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import BlueprintRegistry, BlueprintSpec
from esper.kasmina.layers import Scale
from esper.leyline import BadValueError, BlueprintOffer, SlotSpec, Topology, UnknownNameError

BUILT_IN: dict[Topology, list[str]] = {
    "image": ["norm", "attention", "depthwise", "bottleneck", "conv_small", "conv_light", "conv_heavy"],
    "tokens": ["norm", "lora", "lora_large", "attention", "mlp_small", "mlp"],
    "vector": ["norm", "lora", "lora_large", "mlp_small", "mlp"],
}


class Own(nn.Module):
    """The simplest seed: a scaled copy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(h)


@pytest.fixture
def own() -> Iterator[str]:
    """A blueprint of the user's own, for vectors of an even width of at least 4."""
    BlueprintRegistry.register("vector", "own", lambda width: width, min_width=4, multiple_of=2)(Own)
    yield "own"
    BlueprintRegistry.unregister("vector", "own")


@pytest.mark.parametrize("topology", BUILT_IN)
def test_built_in(topology: Topology) -> None:
    """The blueprints of the design, no more and no fewer."""
    assert sorted(BlueprintRegistry.names(topology)) == sorted(BUILT_IN[topology])


@pytest.mark.parametrize(
    ("topology", "name"), [(topology, name) for topology in BUILT_IN for name in BUILT_IN[topology]]
)
def test_counts_are_true(topology: Topology, name: str) -> None:
    """The stated parameters are those of the module, at several widths."""
    for width in (4, 16, 32):
        module = BlueprintRegistry.build(topology, name, width, resolution=8)
        count = sum(parameter.numel() for parameter in module.parameters())
        assert BlueprintRegistry.spec(topology, name).count(width) == count


def test_counts_by_hand() -> None:
    """Depthwise: 9c + c² + 2c (norm) + c (scale) = c² + 12c: 64 at width 4, 1,408 at 32."""
    spec = BlueprintRegistry.spec("image", "depthwise")
    assert (spec.count(4), spec.count(32)) == (64, 1408)


def test_duplicate_name(own: str) -> None:
    """A name that is taken raises, and the first blueprint stays; another topology may use it."""
    with pytest.raises(BadValueError, match="blueprint 'own' for vector slots is registered already"):
        BlueprintRegistry.register("vector", own, lambda width: 0)
    assert BlueprintRegistry.spec("vector", own).build is Own
    BlueprintRegistry.register("tokens", own, lambda width: width)(Own)
    BlueprintRegistry.unregister("tokens", own)


@pytest.mark.invariant(15)
def test_unknown_names() -> None:
    """The error names the value and what is allowed."""
    allowed = "unknown vector blueprint 'x'; allowed: norm, lora, lora_large, mlp_small, mlp"
    with pytest.raises(UnknownNameError, match=allowed):
        BlueprintRegistry.spec("vector", "x")
    with pytest.raises(UnknownNameError, match=allowed):
        BlueprintRegistry.build("vector", "x", 8)
    with pytest.raises(UnknownNameError, match=allowed):
        BlueprintRegistry.unregister("vector", "x")


@pytest.mark.invariant(15)
def test_unknown_topology() -> None:
    """An unknown topology is refused when reading and when registering."""
    sound: Topology = "sound"  # type: ignore[assignment]  # wrong on purpose
    with pytest.raises(UnknownNameError, match="unknown topology 'sound'; allowed: image, tokens, vector"):
        BlueprintRegistry.names(sound)
    with pytest.raises(UnknownNameError, match="unknown topology 'sound'"):
        BlueprintRegistry.register(sound, "x", lambda width: 0)


def test_unregister(own: str) -> None:
    """A seed that was built lives on; the name can be given anew."""
    seed = BlueprintRegistry.build("vector", own, 4)
    BlueprintRegistry.unregister("vector", own)
    assert own not in BlueprintRegistry.names("vector")
    assert torch.equal(seed(torch.ones(1, 4)), torch.zeros(1, 4))
    BlueprintRegistry.register("vector", own, lambda width: width)(Own)


@pytest.mark.parametrize(
    ("spec", "width", "resolution", "problem"),
    [
        (BlueprintSpec("x", "image", Own, int, min_width=4), 4, 1, None),
        (BlueprintSpec("x", "image", Own, int, min_width=4), 3, 1, "width 3 is below its minimum of 4"),
        (BlueprintSpec("x", "image", Own, int, multiple_of=4), 6, 1, "width 6 is not a multiple of 4"),
        (BlueprintSpec("x", "image", Own, int, min_resolution=3), 1, 3, None),
        (BlueprintSpec("x", "image", Own, int, min_resolution=3), 1, 2, "resolution 2 is below its minimum of 3"),
        (BlueprintSpec("x", "image", Own, int, min_resolution=3), 1, None, None),
        # 3 channels of 1 pixel are 3 values, of 2×2 pixels 12
        (BlueprintSpec("x", "image", Own, int, min_values=4), 3, 1, "gives its norm 3 values of 4 needed"),
        (BlueprintSpec("x", "image", Own, int, min_values=4), 3, 2, None),
        (BlueprintSpec("x", "image", Own, int, min_values=4), 3, None, None),
        # a norm over tokens or vectors sees the width alone
        (BlueprintSpec("x", "tokens", Own, int, min_values=4), 3, 9, "gives its norm 3 values of 4 needed"),
    ],
)
def test_misfit(spec: BlueprintSpec, width: int, resolution: int | None, problem: str | None) -> None:
    """Minimum width, multiple, resolution and values; an unknown resolution is given the benefit of the doubt."""
    result = spec.misfit(width, resolution)
    assert result is None if problem is None else result is not None and problem in result


def test_build_refuses_a_misfit(own: str) -> None:
    """A typed error that names the blueprint and its limit."""
    with pytest.raises(BadValueError, match="blueprint 'own' for vector slots: width 2 is below its minimum of 4"):
        BlueprintRegistry.build("vector", own, 2)


@pytest.mark.invariant(13)
def test_build_is_a_function_of_its_seed() -> None:
    """Equal seeds give equal weights, and different seeds different ones."""
    first, again, other = (BlueprintRegistry.build("vector", "mlp", 4, rng_seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["up.weight"], other["up.weight"])


def test_offers(own: str) -> None:
    """What fits a slot, with its parameters there: at width 2 no norm (minimum 3) and none of the user's (4)."""
    narrow = BlueprintRegistry.offers(SlotSpec("r0c0", 2, "vector", 0.5))
    assert [offer.name for offer in narrow] == ["lora", "lora_large", "mlp_small", "mlp"]
    wide = {offer.name: offer for offer in BlueprintRegistry.offers(SlotSpec("r0c0", 4, "vector", 0.5))}
    assert wide[own] == BlueprintOffer("own", 4, 1, 4)
    assert wide["lora"].parameters == 17 * 4


def test_offers_by_resolution() -> None:
    """A sequence of one token has nothing to attend to."""
    for resolution, offered in ((1, False), (2, True), (None, True)):
        names = [o.name for o in BlueprintRegistry.offers(SlotSpec("r0c0", 8, "tokens", 0.5, resolution))]
        assert ("attention" in names) is offered
