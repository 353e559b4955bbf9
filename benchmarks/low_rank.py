"""Low-rank updates without a Grower, as comparisons need them: the same modules, in a fixed set of layers."""

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn

from esper.kasmina.blueprints import BlueprintRegistry
from esper.leyline import Topology


def add_updates(layers: Iterable[nn.Module], topology: Topology, blueprint: str) -> list[nn.Parameter]:
    """Let an update act at each layer. Returns the parameters of all of them."""
    added: list[nn.Parameter] = []
    for index, layer in enumerate(layers):
        weight = layer.get_parameter("weight")
        seed = BlueprintRegistry.build(topology, blueprint, len(weight), rng_seed=index, base=layer)
        layer.register_forward_hook(partial(_add_update, seed.to(weight.device)))
        added += seed.parameters()
    return added


def _add_update(seed: nn.Module, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    updated: Tensor = output + seed(args[0])
    return updated
