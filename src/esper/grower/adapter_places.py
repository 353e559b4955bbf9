"""Where a frozen model can be adapted: at its norms, its linear layers and its convolutions, and behind its stages."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from esper.grower.places import Places
from esper.grower.policies import RULES, OwnPolicy
from esper.kasmina.attach import ModuleCall, Stream
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.leyline import BadValueError


def frozen_streams(
    places: Places, wanted: Mapping[str, int | None] | None, policy: str | Path | OwnPolicy
) -> list[Stream]:
    """The slots of a frozen model: those that the user named, or those that the policy can use.

    Random and learned policies know the blueprints of ordinary slots, and get these.
    """
    if wanted is not None:
        return [with_adapters(places, stream) for stream in places.named(wanted)]
    if not callable(policy) and policy not in RULES:
        return places.choose()
    return (policy == "heuristic" and adapter_streams(places)) or all_streams(places)


def adapter_streams(places: Places) -> list[Stream]:
    """Slots at all frozen layers in front of the head that an adapter fits, in the order in which they run."""
    owners = Counter(parameter for module in places.host.modules() for parameter in module._parameters.values())
    streams = []
    for name, call in places.calls.items():
        if not _is_adaptable(call) or not places.before_head(name):
            continue
        if any(owners[parameter] > 1 for parameter in call.module.parameters()):
            continue  # folding an update into a weight that layers share would change both
        if (stream := places.stream(name)) is not None:
            offered = with_adapters(places, stream)
            layers = tuple(offer for offer in offered[0].blueprints if offer.name != "linear1x1")
            streams += [(replace(offered[0], blueprints=layers), stream[1])] if layers else []
    return streams


def all_streams(places: Places) -> list[Stream]:
    """Slots at frozen layers, and behind all blocks but the last, for policies that want both."""
    try:
        blocks = places.choose()
    except BadValueError:
        blocks = []
    found = {stream[0].slot_id: stream for stream in adapter_streams(places)}
    for stream in blocks[: max(1, len(blocks) - 1)]:
        found[stream[0].slot_id] = with_adapters(places, stream)
    if not found:
        raise BadValueError(
            'no layer of the frozen model fits an adapter: name the slots yourself, such as slots=["layer2"]'
        )
    order = list(places.calls)
    return sorted(found.values(), key=lambda stream: order.index(stream[0].slot_id))


def with_adapters(places: Places, stream: Stream) -> Stream:
    """The stream with the adapters that fit there, besides the blueprints that it has."""
    spec, like = stream
    adapters = BlueprintRegistry.adapter_offers(spec, places.host.get_submodule(spec.slot_id))
    return replace(spec, blueprints=(*spec.blueprints, *adapters)), like


def _is_adaptable(call: ModuleCall) -> bool:
    """Whether it is one frozen layer, called with a tensor."""
    module: nn.Module = call.module
    parameters = list(module.parameters())
    leaf = next(module.children(), None) is None
    return leaf and bool(parameters) and isinstance(call.input, Tensor) and not any(p.requires_grad for p in parameters)
