"""Hardening: a grown network as a plain PyTorch module that does not depend on Esper.

It generates torch-only source, runs it, builds the network and copies the weights. The written file is the same source.
A host of segments becomes `network.py`. An attached host stays the user's module, with blocks from `grown_blocks.py`.
"""

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from esper.kasmina.export import (
    ExportError,
    Growth,
    bare_copy,
    blocks_source,
    carve,
    execute,
    is_limited,
    network_source,
)
from esper.kasmina.layers import Statistics, count_parameters
from esper.kasmina.slot import Body, Role, SeedSlot, SegmentedBody
from esper.leyline import ACTIVE_STAGES, LIVE_STAGES, BadValueError, SeedStage, StageError
from esper.storage.files import replace_folder, sync_to_disk

if TYPE_CHECKING:
    from esper.kasmina.model import MorphogeneticModel

WEIGHTS, CONTENTS = "weights.safetensors", "contents.json"
NETWORK, BLOCKS, PROGRAM = "network.py", "grown_blocks.py", "model.pt2"
# What a folder that is replaced may hold; Python adds the last one when it imports the source.
WRITTEN = (WEIGHTS, NETWORK, BLOCKS, PROGRAM, CONTENTS, "__pycache__")


def harden(
    model: "MorphogeneticModel",
    folder: str | Path | None = None,
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    calibration: Tensor | None = None,
    example: Tensor | None = None,
) -> nn.Module:
    """A plain torch module in eval mode, with the fossils built in. With a folder, also write files that load without
    Esper; they replace what is there.

    Name live seeds that are not fossils in `keep` or `drop`. Dropping an acting seed changes the activations behind
    it, so the running statistics are recomputed from `calibration` (training inputs). An attached host is also
    written as `model.pt2`, traced with the `example` input. The model itself does not change.
    """
    body = model.body
    keep, drop = ((names,) if isinstance(names, str) else tuple(names) for names in (keep, drop))
    growths = choose(body, keep, drop)
    statistics = _statistics_without(body, drop, calibration)
    if isinstance(body, SegmentedBody):
        source, (text, network) = NETWORK, _from_segments(body, growths, statistics)
    else:
        source, (text, network) = BLOCKS, _from_attached(body, growths, statistics)

    def folds(growth: Growth) -> bool:
        return body.slot(growth.slot_id).folded() is not None

    def write(new: Path) -> None:
        (new / source).write_text(text, encoding="utf-8")
        contents: dict[str, Any] = {  # Any: JSON values
            "host": type(body.host).__name__,
            "host_parameters": count_parameters(network) - sum(each.parameters for each in growths if not folds(each)),
            "grown": [
                {
                    "slot": growth.slot_id,
                    "blueprint": growth.blueprint,
                    "style": growth.style,
                    "alpha": growth.strength,
                    "parameters": growth.parameters,
                    **({"folded": True} if folds(growth) else {}),
                }
                for growth in growths
            ],
            "statistics": "recalibrated without the dropped seeds" if statistics else "the running ones",
            "weights": WEIGHTS,
            "source": source,
            "frozen": [name for name, parameter in network.named_parameters() if not parameter.requires_grad],
        }
        if source == NETWORK:
            save_file(network.state_dict(), new / WEIGHTS)
        else:
            save_model(network, str(new / WEIGHTS))
            contents["program"] = _write_program(network, calibration if example is None else example, new)
        (new / CONTENTS).write_text(json.dumps(contents, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        for path in new.iterdir():
            sync_to_disk(path)

    if folder is not None:
        replace_folder(Path(folder).resolve(), write, WRITTEN)
    return network


# -- choice of seeds --------------------------------------------------------------------------------------------------


def choose(body: Body, keep: Sequence[str], drop: Sequence[str]) -> list[Growth]:
    """The seeds to build in: fossils, and acting ones named in `keep`."""
    slots = dict(body.slot_items())
    for name in (*keep, *drop):
        body.slot(name)
    if both := sorted(set(keep) & set(drop)):
        raise BadValueError(f"slots {', '.join(both)} are in both keep and drop; name each in one of them")
    for name in keep:
        stage = slots[name].state.stage
        if stage not in ACTIVE_STAGES:
            silent = ": its seed does not act yet (alpha 0); advance it to BLENDING first, or name it in drop="
            why = silent if stage in LIVE_STAGES else " and holds no seed"
            raise StageError(f"there is nothing to keep: slot {name!r} is {stage.name}{why}")
    for name in drop:
        if slots[name].state.stage is SeedStage.FOSSILIZED:
            raise StageError(f"slot {name!r} is FOSSILIZED, and a fossil is permanent: it cannot be dropped")
    undecided = {
        name: slot.state.stage
        for name, slot in slots.items()
        if slot.state.stage in LIVE_STAGES - {SeedStage.FOSSILIZED} and name not in (*keep, *drop)
    }
    if undecided:
        listed = ", ".join(f"{name} ({stage.name})" for name, stage in undecided.items())
        remedy = "Fossilise them, or name each in drop= (omitted) or keep= (built in at its present alpha)"
        raise StageError(f"these seeds are no fossils yet: {listed}. {remedy}")
    return [
        Growth(name, slot.state.blueprint, slot.state.style, _strength(body, name, slot), slot.seed, slot.gate)
        for name, slot in slots.items()
        if (name in keep or slot.state.stage is SeedStage.FOSSILIZED) and slot.seed and slot.state.blueprint
    ]


def _strength(body: Body, name: str, slot: SeedSlot) -> float:
    """Alpha times conductance, in the fewest digits: 0.7 rather than 0.699999988079071 in float32."""
    conductance = body.host.conductance[body.host.slot_index(name)] if isinstance(body, SegmentedBody) else 1.0
    number = slot.alpha * conductance
    if number.dtype is torch.float64:
        return float(number)
    candidates = (float(f"{float(number):.{digits}g}") for digits in range(1, 18))
    return next(value for value in candidates if torch.tensor(value, dtype=torch.float32).item() == float(number))


@torch.no_grad()
def _statistics_without(body: Body, drop: Sequence[str], calibration: Tensor | None) -> Statistics:
    """Normalisation statistics without the dropped seeds; empty if the running ones still hold."""
    slots = dict(body.slot_items())
    acting = [
        name for name in drop if slots[name].state.stage in ACTIVE_STAGES and _strength(body, name, slots[name]) != 0
    ]
    if not acting or not any(name.endswith("running_mean") for name, _ in body.host.named_buffers()):
        return {}
    if calibration is None:
        remedy = "pass calibration= (training inputs; 512 are enough)"
        raise BadValueError(f"dropping {', '.join(acting)} changes running statistics: {remedy}")
    with torch.compiler.set_stance("force_eager"):  # a row that runs once is not worth a graph
        return body.calibrate(calibration, dict.fromkeys(drop, Role.SILENT))


# -- hosts of segments ------------------------------------------------------------------------------------------------


def _from_segments(body: SegmentedBody, growths: Sequence[Growth], statistics: Statistics) -> tuple[str, nn.Module]:
    host = body.host
    if is_limited(host):
        own = {name.removeprefix("host."): value for name, value in statistics.items()}
        host, statistics = carve(host, own, [growth.slot_id for growth in growths]), {}
    text, sources = network_source(host, growths)
    module = execute(text, NETWORK)
    with torch.device("meta"):
        network: nn.Module = module.Network()
    _copy_weights(body, network, sources, statistics)
    count = count_parameters(network)
    expected = count_parameters(host) + sum(growth.parameters for growth in growths)
    if count != expected:
        remedy = "layers that share weights cannot be exported; give each its own"
        raise ExportError(f"the hardened network has {count} parameters instead of {expected}: {remedy}")
    return text, network.eval()


def _copy_weights(body: Body, network: nn.Module, sources: Mapping[str, nn.Module], statistics: Statistics) -> None:
    """Give `network` copies of the live tensors, and of recalibrated statistics; frozen parameters stay frozen."""
    fresh = {id(body.get_buffer(name)): value for name, value in statistics.items()}
    live = {
        f"{prefix}.{name}": fresh.get(id(tensor), tensor)
        for prefix, module in sources.items()
        for name, tensor in itertools.chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        )
    }
    device = next(body.host.parameters()).device
    weights = {}
    for name in network.state_dict():
        # Only torch counts batches; the count has no effect at a fixed momentum.
        value = live.get(name, torch.zeros((), dtype=torch.int64, device=device))
        if name not in live and not name.endswith("num_batches_tracked"):
            raise ExportError(f"the generated network has a tensor {name!r} for which the live one has no value")
        weights[name] = value.detach().clone(memory_format=torch.contiguous_format)
    network.load_state_dict(weights, assign=True)
    for prefix, module in sources.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            network.get_parameter(f"{prefix}.{name}").requires_grad_(parameter.requires_grad)


# -- attached hosts ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def _from_attached(body: Body, growths: Sequence[Growth], statistics: Statistics) -> tuple[str, nn.Module]:
    folded = {growth.slot_id: body.slot(growth.slot_id).folded() for growth in growths}
    growths = [growth for growth in growths if folded[growth.slot_id] is None]
    text = blocks_source(body.host, growths)
    module = execute(text, BLOCKS)
    network = bare_copy(body)
    for slot_id, values in folded.items():
        for name, value in (values or {}).items():
            network.get_submodule(slot_id).get_parameter(name).copy_(value)
    for name, value in statistics.items():
        if name.startswith("host."):
            network.get_buffer(name.removeprefix("host.")).copy_(value)
    with torch.random.fork_rng(devices=[]):  # the live weights replace the drawn ones
        blocks = module.put_blocks(network)
    for growth in growths:
        _copy_weights(body, blocks[growth.slot_id], growth.parts, statistics)
    return text, network.eval()


def _write_program(network: nn.Module, example: Tensor | None, folder: Path) -> str:
    """Write `model.pt2` with a dynamic batch axis. Returns its name, or why it was not written."""
    if example is None:
        return "not written: it needs example=, an input to trace the network with"
    if len(example) < 2:
        example = torch.cat([example, example])  # torch.export would take a batch of one as constant
    try:
        program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        torch.export.save(program, folder / PROGRAM)
    except Exception as error:  # torch.export may raise anything; the other files are complete
        (folder / PROGRAM).unlink(missing_ok=True)
        reason = f"not written: torch.export cannot trace this network ({error})"
        warnings.warn(f"{PROGRAM} was {reason}", stacklevel=5)
        return reason
    return PROGRAM
