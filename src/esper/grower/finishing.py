"""The end of growth: the user's model becomes plain PyTorch again, in place.

Every seed that stays becomes a block of generated torch-only classes, a child of the submodule that it grew behind. The
block takes over the seed's own Parameter objects, so the optimizer and its state still fit. Hooks are removed.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from esper.grower.averages import averaged_twins
from esper.grower.container import ModelSlots
from esper.grower.folding import can_fold, fold, unfold
from esper.grower.scoring import InputTap, RowRunner, eval_mode
from esper.kasmina.export import Growth, blocks_source, execute
from esper.kasmina.harden import BLOCKS, WEIGHTS, WRITTEN
from esper.kasmina.lifecycle import SeedState
from esper.kasmina.slot import Role
from esper.leyline import BadValueError, EsperError, SeedStage, StageError
from esper.storage.files import replace_folder, sync_to_disk

TOLERANCE = {"cpu": 1e-4}
"""Largest difference of the finished model, relative to its largest output. On a GPU, TF32 alone rounds by 1e-3."""
TOLERANCE_ELSEWHERE = 1e-2


class FinishError(EsperError, RuntimeError):
    """The finished model would not compute what the grown one does."""


def choose_seeds(
    live: Mapping[str, SeedState], keep: Sequence[str], drop: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The slots whose seeds stay, and those whose seeds go: what the user says, else by contribution."""
    for slot_id in (*keep, *drop):
        if slot_id not in live:
            raise BadValueError(f"there is no seed behind {slot_id!r}; seeds are behind {list(live) or 'none'}")
    if both := sorted(set(keep) & set(drop)):
        raise BadValueError(f"{', '.join(both)} are in both keep and drop; name each in one of them")
    fossils = [slot_id for slot_id, state in live.items() if state.stage is SeedStage.FOSSILIZED]
    open_ones = {
        slot_id: state.contribution for slot_id, state in live.items() if slot_id not in (*fossils, *keep, *drop)
    }
    unknown = [slot_id for slot_id, contribution in open_ones.items() if contribution is None]
    if unknown:
        raise StageError(
            f"contributions of the seeds behind {', '.join(unknown)} were never measured: call "
            "finish(val_loader), or name them in keep= or drop="
        )
    paying = [slot_id for slot_id, measured in open_ones.items() if measured is not None and measured.beyond_error]
    kept = [slot_id for slot_id in live if slot_id in (*fossils, *keep, *paying) and slot_id not in drop]
    return kept, [slot_id for slot_id in live if slot_id not in kept]


def build_in(slots: ModelSlots, tap: InputTap, keep: Sequence[str], drop: Sequence[str]) -> str:
    """Turn the kept seeds into plain blocks and remove everything else of Esper. Returns the source of the blocks.

    Adapters fold into the weights in front of them instead. If the model would then compute something else, it stays
    as it is.
    """
    host = slots.host
    runner = RowRunner(host, slots, tap)
    silent = dict.fromkeys(drop, Role.SILENT)
    statistics = runner.calibrated(silent) if drop else {}
    if drop and not statistics and runner.norms():
        raise FinishError(
            f"dropping the seeds behind {', '.join(drop)} changes what the norms behind them see, and there is no "
            "training input to set their statistics by: train for a batch, or name the seeds in keep="
        )
    folded = [slot_id for slot_id in keep if can_fold(slots[slot_id])]
    keep = [slot_id for slot_id in keep if slot_id not in folded]
    growths = [_growth(slot_id, slots) for slot_id in keep]
    text = blocks_source(host, growths)
    module = execute(text, BLOCKS)
    buffers = {getattr(norm, name): value for (norm, name), value in statistics.items()}
    undo = [(buffer, buffer.clone()) for buffer in buffers]
    _write(buffers.items())
    with runner.row(silent, {}):
        before = _outputs(host, tap)
    bases = [host.get_submodule(slot_id) for slot_id in keep]
    kinds = [(base, type(base), set(base._modules)) for base in bases]
    _place(host, module, growths)
    unfolded = fold(slots, folded)
    with runner.row(dict.fromkeys((*keep, *folded, *drop), Role.SILENT), {}):
        difference = _largest_difference(_outputs(host, tap), before)
    if difference:
        for base, kind, children in kinds:
            base.__class__ = kind
            for name in set(base._modules) - children:
                del base._modules[name]
        _write(undo)
        unfold(unfolded)
        raise FinishError(
            f"the finished model differs from the grown one by {difference:.2g}: one of the submodules "
            f"{', '.join((*keep, *folded))} runs its children in its own way; put the slot behind another one, or "
            "drop= its seed"
        )
    averages = averaged_twins(slots)
    slots.remove()
    for twin in averages:
        _finish_average(twin, module, keep, folded)
    return text


@torch.no_grad()
def _write(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    for target, value in values:
        target.copy_(value)


def _place(host: nn.Module, module: ModuleType, growths: Sequence[Growth]) -> None:
    """Put blocks with the seeds' own weights behind their submodules."""
    with torch.random.fork_rng(devices=[]):  # the live parameters replace the drawn ones
        blocks = module.put_blocks(host)
    for growth in growths:
        blocks[growth.slot_id].train(host.training)
        _take_over(blocks[growth.slot_id], growth)


def _largest_difference(after: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    """The largest difference of outputs if one exceeds its tolerance, else 0."""
    largest = 0.0
    for mine, theirs in zip(after, before, strict=True):
        limit = TOLERANCE.get(mine.device.type, TOLERANCE_ELSEWHERE) * theirs.abs().nan_to_num().max()
        if bool(((mine - theirs).abs() > limit).any()):
            largest = max(largest, float((mine - theirs).abs().max()))
    return largest


def write_finished(host: nn.Module, source: str, folder: Path) -> None:
    """Write the weights and the source of the blocks. The folder is replaced as a whole."""

    def write(new: Path) -> None:
        (new / BLOCKS).write_text(source, encoding="utf-8")
        save_model(host, str(new / WEIGHTS))
        for path in new.iterdir():
            sync_to_disk(path)

    replace_folder(folder.resolve(), write, WRITTEN)


def _finish_average(twin: ModelSlots, module: ModuleType, keep: Sequence[str], folded: Sequence[str]) -> None:
    """End growth in an averaged copy too, so that it still pairs with the model. Its norms stay as they are."""
    fold(twin, folded)
    growths = [_growth(slot_id, twin) for slot_id in keep]
    twin.remove()
    _place(twin.host, module, growths)


def _growth(slot_id: str, slots: ModelSlots) -> Growth:
    slot = slots[slot_id]
    assert slot.seed is not None and slot.state.blueprint is not None
    return Growth(slot_id, slot.state.blueprint, slot.state.style, slot.state.alpha, slot.seed, slot.gate)


def _take_over(block: nn.Module, growth: Growth) -> None:
    """Put the seed's own Parameter objects and buffers into the block."""
    for prefix, part in growth.parts.items():
        for name, parameter in part.named_parameters():
            owner, _, leaf = f"{prefix}.{name}".rpartition(".")
            block.get_submodule(owner)._parameters[leaf] = parameter
        for name, buffer in part.named_buffers():
            owner, _, leaf = f"{prefix}.{name}".rpartition(".")
            block.get_submodule(owner)._buffers[leaf] = buffer


@torch.no_grad()
def _outputs(host: nn.Module, tap: InputTap) -> list[Tensor]:
    """Tensors that the model returns for one kept batch, in eval mode."""
    if not tap.kept:
        return []
    args, kwargs, _ = tap.kept[-1]
    active, tap.active = tap.active, False
    try:
        with eval_mode(host):
            return list(_tensors(host(*args, **kwargs)))
    finally:
        tap.active = active


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in _tensors(part)]
    parts = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else {}
    return [tensor for part in parts.values() for tensor in _tensors(part)]
