"""Hardening: a grown network as a plain PyTorch module that knows nothing of Esper.

The source of a torch-only file is generated and run as a module, its network is built and given the weights; the file
that a folder gets is that same source. A host of segments becomes `network.py`; an attached host stays the user's own
module, with blocks from `grown_blocks.py`.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from esper.kasmina.body import Body, SegmentedBody
from esper.kasmina.export import ExportError, Growth, bare_copy, blocks_source, execute, network_source
from esper.kasmina.layers import Statistics
from esper.kasmina.slot import Role, SeedSlot
from esper.leyline import ACTIVE_STAGES, LIVE_STAGES, BadValueError, SeedStage, StageError, UnknownNameError
from esper.storage.files import replace_folder, sync_to_disk

WEIGHTS = "weights.safetensors"
NETWORK = "network.py"
BLOCKS = "grown_blocks.py"
PROGRAM = "model.pt2"
CONTENTS = "contents.json"
WRITTEN = (WEIGHTS, NETWORK, BLOCKS, PROGRAM, CONTENTS, "__pycache__")
"""What a folder may hold that is written anew; Python leaves the last one where the source was imported."""


def harden(
    body: Body,
    folder: Path | None = None,
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    calibration: Tensor | None = None,
    example: Tensor | None = None,
) -> nn.Module:
    """The network of `body` in eval mode, with its fossils and the seeds named in `keep` built in.

    A folder gets the source, `weights.safetensors` and `contents.json`; for an attached host also `model.pt2`, for
    inference, if there is an `example` input (or a `calibration`) to trace it with. The folder is replaced as a whole.
    """
    keep, drop = ((names,) if isinstance(names, str) else tuple(names) for names in (keep, drop))
    growths = choose(body, keep, drop)
    statistics = _statistics_without(body, drop, calibration)
    if isinstance(body, SegmentedBody):
        text, network = _from_segments(body, growths, statistics)
        source = NETWORK
    else:
        text, network = _from_attached(body, growths, statistics)
        source = BLOCKS

    def write(new: Path) -> None:
        (new / source).write_text(text, encoding="utf-8")
        contents = _contents(body, growths, recalibrated=bool(statistics)) | {"source": source}
        contents["frozen"] = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
        if source == NETWORK:
            save_file(network.state_dict(), new / WEIGHTS)
        else:
            save_model(network, str(new / WEIGHTS))
            contents["program"] = _write_program(network, calibration if example is None else example, new)
        (new / CONTENTS).write_text(json.dumps(contents, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        for path in new.iterdir():
            sync_to_disk(path)

    if folder is not None:
        replace_folder(folder.resolve(), write, WRITTEN)
    return network


# -- which seeds stay -------------------------------------------------------------------------------------------------


def choose(body: Body, keep: Sequence[str], drop: Sequence[str]) -> list[Growth]:
    """The seeds that are built in: fossils, and acting ones that are named in `keep`."""
    slots = dict(body.slot_items())
    for name in (*keep, *drop):
        if name not in slots:
            raise UnknownNameError("slot", name, slots)
    if both := sorted(set(keep) & set(drop)):
        raise BadValueError(f"slots {', '.join(both)} are in both keep and drop; name each in one of them")
    for name in keep:
        _check_kept(name, slots[name])
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
        raise StageError(
            f"these seeds are no fossils yet: {listed}. Fossilise them, or name each in drop= (left out) "
            "or keep= (built in at its present alpha)"
        )
    stay = {SeedStage.FOSSILIZED}
    return [_growth(body, name, slot) for name, slot in slots.items() if slot.state.stage in stay or name in keep]


def _check_kept(name: str, slot: SeedSlot) -> None:
    stage = slot.state.stage
    if stage not in LIVE_STAGES:
        raise StageError(f"slot {name!r} is {stage.name} and holds no seed: there is nothing to keep")
    if stage not in ACTIVE_STAGES:
        raise StageError(
            f"slot {name!r} is {stage.name}: its seed does not act yet (alpha 0), so there is nothing to keep; "
            "advance it to BLENDING first, or name it in drop="
        )


def _growth(body: Body, name: str, slot: SeedSlot) -> Growth:
    assert slot.seed is not None and slot.state.blueprint is not None  # true of every stage that acts
    return Growth(name, slot.state.blueprint, slot.state.style, _strength(body, name, slot), slot.seed, slot.gate)


def _strength(body: Body, name: str, slot: SeedSlot) -> float:
    """How much of the seed's Δ reaches the stream."""
    if isinstance(body, SegmentedBody):
        return _shortest(slot.alpha * body.host.conductance[body.host.slot_index(name)])
    return _shortest(slot.alpha)


def _shortest(number: Tensor) -> float:
    """The same number in the fewest digits: 0.7 rather than 0.699999988079071, if torch computes in float32."""
    if number.dtype is torch.float64:
        return float(number)
    candidates = (float(f"{float(number):.{digits}g}") for digits in range(1, 18))
    return next(value for value in candidates if torch.tensor(value, dtype=torch.float32).item() == float(number))


@torch.no_grad()
def _statistics_without(body: Body, drop: Sequence[str], calibration: Tensor | None) -> Statistics:
    """The normalisation statistics of the network without the dropped seeds; empty where the running ones hold."""
    slots = dict(body.slot_items())
    missed = [
        name for name in drop if slots[name].state.stage in ACTIVE_STAGES and _strength(body, name, slots[name]) != 0
    ]
    if not missed or not any(name.endswith("running_mean") for name, _ in body.host.named_buffers()):
        return {}
    if calibration is None:
        raise BadValueError(
            f"dropping {', '.join(missed)} changes what the layers behind see, and their running statistics with it: "
            "pass calibration= (training inputs; 512 serve well)"
        )
    with torch.compiler.set_stance("force_eager"):  # a row that runs once is not worth a graph
        return body.calibrate(calibration, dict.fromkeys(drop, Role.SILENT))


# -- built-in hosts ---------------------------------------------------------------------------------------------------


def _from_segments(body: SegmentedBody, growths: Sequence[Growth], statistics: Statistics) -> tuple[str, nn.Module]:
    text, sources = network_source(body.host, growths)
    module = execute(text, NETWORK)
    with torch.device("meta"):
        network: nn.Module = module.Network()
    network.load_state_dict(_weights(body, network, sources, statistics), assign=True)
    _keep_frozen(network, sources)
    counted = sum(parameter.numel() for parameter in network.parameters())
    expected = sum(p.numel() for p in body.host.parameters()) + sum(growth.parameters for growth in growths)
    if counted != expected:
        raise ExportError(
            f"the hardened network has {counted} parameters, but host and kept seeds have {expected}: "
            "layers that share weights cannot be exported; give each its own"
        )
    return text, network.eval()


def _weights(
    body: Body, network: nn.Module, sources: Mapping[str, nn.Module], statistics: Statistics
) -> dict[str, Tensor]:
    """A copy of the live tensors under their names in `network`; recalibrated statistics in place of running ones."""
    fresh = {id(body.get_buffer(name)): value for name, value in statistics.items()}
    live = {
        f"{prefix}.{name}": fresh.get(id(tensor), tensor)
        for prefix, module in sources.items()
        for name, tensor in _tensors(module)
    }
    device = next(body.host.parameters()).device
    weights = {}
    for name in network.state_dict():
        # torch counts batches, Esper does not: the count starts here, and has no effect at a fixed momentum.
        found = live.get(name, torch.zeros((), dtype=torch.int64, device=device))
        if name not in live and not name.endswith("num_batches_tracked"):
            raise ExportError(f"the generated network has a tensor {name!r} for which the live one has no value")
        weights[name] = found.detach().clone(memory_format=torch.contiguous_format)
    return weights


def _keep_frozen(network: nn.Module, sources: Mapping[str, nn.Module]) -> None:
    """What did not train before does not train now."""
    for prefix, module in sources.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            network.get_parameter(f"{prefix}.{name}").requires_grad_(parameter.requires_grad)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


# -- attached hosts ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def _from_attached(body: Body, growths: Sequence[Growth], statistics: Statistics) -> tuple[str, nn.Module]:
    text = blocks_source(body.host, growths)
    module = execute(text, BLOCKS)
    network = bare_copy(body)
    for name, value in statistics.items():
        if name.startswith("host."):
            network.get_buffer(name.removeprefix("host.")).copy_(value)
    bases = {growth.slot_id: network.get_submodule(growth.slot_id) for growth in growths}
    with torch.random.fork_rng(devices=[]):  # building draws weights, which the live ones replace
        module.put_blocks(network)
    blocks = {id(grown.base): grown.block for grown in network.modules() if isinstance(grown, module.Grown)}
    for growth in growths:
        block = blocks[id(bases[growth.slot_id])]
        block.load_state_dict(_weights(body, block, growth.parts, statistics))
        _keep_frozen(block, growth.parts)
    return text, network.eval()


def _write_program(network: nn.Module, example: Tensor | None, folder: Path) -> str:
    """Write `model.pt2` with a free batch axis; its name, or why it is not there."""
    if example is None:
        return "not written: it needs example=, an input to trace the network with"
    if len(example) < 2:
        example = torch.cat([example, example])  # of one input, torch.export concludes that it is always one
    try:
        program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        torch.export.save(program, folder / PROGRAM)
    except Exception as error:  # torch.export raises what it likes; all other files are good
        (folder / PROGRAM).unlink(missing_ok=True)  # it may have been half written
        reason = f"not written: torch.export cannot trace this network ({error})"
        warnings.warn(f"{PROGRAM} was {reason}", stacklevel=6)
        return reason
    return PROGRAM


def _contents(body: Body, growths: Sequence[Growth], *, recalibrated: bool) -> dict[str, Any]:  # Any: JSON values
    return {
        "host": type(body.host).__name__,
        "host_parameters": sum(parameter.numel() for parameter in body.host.parameters()),
        "grown": [
            {
                "slot": growth.slot_id,
                "blueprint": growth.blueprint,
                "style": growth.style,
                "alpha": growth.strength,
                "parameters": growth.parameters,
            }
            for growth in growths
        ],
        "statistics": "set anew, without the dropped seeds" if recalibrated else "the running ones",
        "weights": WEIGHTS,
    }
