"""Launches the kernels of a bank: its seeds act on their rows of a stream, and take their gradients back."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from esper.kasmina.kernels.seed_gradients import kernel_gradient, stage_backward, sum_splits
from esper.kasmina.kernels.seeds import stage_forward
from esper.kasmina.kernels.squeeze import squeeze_backward, squeeze_forward
from esper.kasmina.stages import Chain, Squeeze, Stage

# Programs per entry. A program waits for memory most of the time, so a few entries need many of them; backwards each
# leaves sums for all weights, so there are fewer.
SPLITS, SPLITS_BACK = 128, 32
CELLS = {32: 256, 64: 128, 128: 64}  # of a tile, by the most channels
LEAST_CHANNELS = 16  # of a tile: what a matrix product takes
COLUMNS = 256  # parameters per program of the last sum
# Measured on an H200: without pipelining, the stages of four blueprints in three slots take 0.73 of the time.
OPTIONS = {"num_warps": 8, "num_stages": 1}


class Streams(NamedTuple):
    """Images of the main rows, and of shadow rows: (batch, height, width, rows, channels)."""

    main: Tensor
    shadow: Tensor | None

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Both; without shadow rows the main ones twice, as no entry names a shadow row then."""
        return self.main, self.main if self.shadow is None else self.shadow

    def copy(self) -> "Streams":
        """A copy of both."""
        return Streams(self.main.clone(), None if self.shadow is None else self.shadow.clone())


class Entries(NamedTuple):
    """Which members of a bank act on which rows, and how. Shadow rows are numbered after the main ones."""

    rows: Tensor
    members: Tensor
    strength: Tensor
    style: Tensor  # of every member of the bank
    valid: Tensor  # others are padding
    learns: Tensor
    multiplies: bool  # whether some have the style `multiply`


class Tiling(NamedTuple):
    """How programs divide the work."""

    samples: int  # in one tile
    wide: int  # pixels of a tile
    tiles: int  # per sample
    per: int  # samples per program
    splits: int  # programs per entry

    @classmethod
    def of(cls, batch: int, pixels: int, channels: int, splits: int) -> "Tiling":
        """For images of this size."""
        cells = next(cells for most, cells in CELLS.items() if channels <= most)
        wide = min(cells, triton.next_power_of_2(pixels))
        samples = cells // wide
        per = triton.cdiv(triton.cdiv(batch, splits), samples) * samples
        return cls(samples, wide, triton.cdiv(pixels, wide), per, triton.cdiv(batch, per))

    @property
    def names(self) -> dict[str, int]:
        """For the kernels."""
        return {"SAMPLES": self.samples, "WIDE": self.wide, "TILES": self.tiles}


def _across(channels: int) -> int:
    return max(LEAST_CHANNELS, int(triton.next_power_of_2(channels)))


def _groups(stage: Stage) -> dict[str, int]:
    """Channels of a group of the norm, and those of its tile."""
    if not stage.groups:
        return {"GROUP": 0, "GROUP_WIDE": 1}
    width = stage.outputs // stage.groups
    return {"GROUP": width, "GROUP_WIDE": width if stage.groups > 1 else _across(width)}


class Kept(NamedTuple):
    """What a stage leaves for the backward pass."""

    y: Tensor  # before the norm; of an inner stage without a norm, z
    statistics: Tensor  # (entries, batch, 2, channels): mean and 1/√(var + ε)
    z: Tensor  # what it passes on; the last stage passes nothing on


def act(
    program: Chain | Squeeze, streams: Streams, target: Streams, entries: Entries, matrix: Tensor, *, keeps: bool
) -> list[Kept]:
    """Add what these entries do to `target`, a copy of the streams. Returns what `take_back` needs, if it `keeps`."""
    tiling = Tiling.of(*_size(streams), program.channels, SPLITS)
    return _run(program, streams, target, entries, matrix, tiling, keeps=keeps, sums=None)


def worth(program: Chain | Squeeze, stream: Tensor, gradient: Tensor, matrix: Tensor) -> Tensor:
    """(rows, channels): Σ f(h)·∂L/∂h over all rows of a stream, for the seed f whose parameters are `matrix` (1, P)."""
    rows = torch.arange(stream.shape[3], device=stream.device)
    none, ones = torch.zeros_like(rows), torch.ones_like(rows)
    entries = Entries(rows, none, ones, none, ones, ones, multiplies=False)
    streams = Streams(stream, None)
    tiling = Tiling.of(*_size(streams), program.channels, SPLITS_BACK)
    sums = matrix.new_empty(len(rows), tiling.splits, stream.shape[4])
    _run(program, streams, Streams(gradient, None), entries, matrix, tiling, keeps=False, sums=sums)
    return sums.sum(1)


def _size(streams: Streams) -> tuple[int, int]:
    """Samples, and pixels of each."""
    batch, height, width, _, _ = streams.main.shape
    return batch, height * width


def _run(
    program: Chain | Squeeze,
    streams: Streams,
    target: Streams,
    entries: Entries,
    matrix: Tensor,
    tiling: Tiling,
    *,
    keeps: bool,
    sums: Tensor | None,
) -> list[Kept]:
    """All stages, one kernel each. With `sums` they probe, and `target` is the gradient of the stream."""
    batch, height, width, main_rows, _ = streams.main.shape
    shadow_rows, probes = streams.pair[1].shape[3], sums is not None
    grid, parameters = (tiling.splits, len(entries.rows)), matrix.shape[1]
    left = matrix if sums is None else sums
    chosen = (entries.rows, entries.members, entries.strength, entries.style, entries.valid)
    if isinstance(program, Squeeze):
        squeeze_forward[grid](
            *streams.pair, *target.pair, left, matrix, *chosen, main_rows, shadow_rows, batch, tiling.per,
            height * width, parameters, program.squeeze, program.excite, program.scale,
            **_squeeze_names(program, tiling), MULTIPLIES=entries.multiplies, PROBES=probes, **OPTIONS,
        )  # fmt: skip
        return []
    kept: list[Kept] = []
    source = streams.main
    for number, stage in enumerate(program.stages):
        last = stage is program.stages[-1]
        shape = (len(entries.rows), batch, height * width, stage.outputs)
        z = streams.main if last else streams.main.new_empty(shape)
        saves = keeps and (stage.groups > 0 or last)
        y = streams.main.new_empty(shape) if saves else z
        statistics = matrix.new_empty(len(entries.rows), batch, 2, stage.outputs) if saves and stage.groups else matrix
        stage_forward[grid](
            *streams.pair, *target.pair, source, y, z, statistics, left, matrix, *chosen,
            main_rows, shadow_rows, batch, tiling.per, height, width, parameters,
            stage.weight, stage.gamma, stage.beta, program.scale, stage.eps,
            INPUTS=stage.inputs, OUTPUTS=stage.outputs, SIDE=stage.side, DEPTHWISE=stage.depthwise, **_groups(stage),
            RELU=stage.relu, FIRST=number == 0, LAST=last, LESS=last and program.less_input,
            MULTIPLIES=last and entries.multiplies, KEEPS=saves, PROBES=last and probes,
            **tiling.names, IN=_across(stage.inputs), OUT=_across(stage.outputs), **OPTIONS,
        )  # fmt: skip
        if keeps:
            kept.append(Kept(y, statistics, z))
        source = z
    return kept


def take_back(
    program: Chain | Squeeze,
    kept: Sequence[Kept],
    streams: Streams,
    incoming: Streams,
    target: Streams,
    entries: Entries,
    matrix: Tensor,
    gradient: Tensor,
) -> None:
    """Add what these entries send back to `target`, a copy of the `incoming` gradients; write those of the members that
    learn into `gradient` (members, parameters)."""
    batch, height, width, main_rows, _ = streams.main.shape
    shadow_rows, count = streams.pair[1].shape[3], len(entries.rows)
    tiling = Tiling.of(batch, height * width, program.channels, SPLITS_BACK)
    grid = (tiling.splits, count)
    sums = matrix.new_empty(count, tiling.splits, matrix.shape[1])
    chosen = (entries.rows, entries.members, entries.strength, entries.style, entries.valid)
    if isinstance(program, Squeeze):
        squeeze_backward[grid](
            *streams.pair, *incoming.pair, *target.pair, matrix, sums, *chosen,
            main_rows, shadow_rows, batch, tiling.per, height * width,
            matrix.shape[1], program.squeeze, program.excite, program.scale,
            **_squeeze_names(program, tiling), MULTIPLIES=entries.multiplies, **OPTIONS,
        )  # fmt: skip
    else:
        _chain_back(program, kept, streams, incoming, target, entries, matrix, sums, tiling)
    columns = _last_column(program)
    sum_splits[triton.cdiv(columns, COLUMNS), count](
        sums, gradient, entries.members, entries.learns, tiling.splits, matrix.shape[1], columns, COLUMNS
    )


def _chain_back(
    program: Chain,
    kept: Sequence[Kept],
    streams: Streams,
    incoming: Streams,
    target: Streams,
    entries: Entries,
    matrix: Tensor,
    sums: Tensor,
    tiling: Tiling,
) -> None:
    """From the last stage to the first: ∂L/∂y, then the gradient of the stage's kernel."""
    batch, height, width, main_rows, channels = streams.main.shape
    shadow_rows = streams.pair[1].shape[3]
    chosen = (entries.rows, entries.members, entries.strength, entries.style, entries.valid)
    sizes = (main_rows, shadow_rows, batch, tiling.per, height, width, matrix.shape[1])

    def backward(stage: Stage, saved: Kept, following: Tensor, after: Stage | None, out: Tensor, **last: bool) -> None:
        stage_backward[tiling.splits, len(entries.rows)](
            *streams.pair, *incoming.pair, *target.pair, following, saved.y, saved.statistics, matrix, out, sums,
            *chosen, *sizes, after.weight if after else 0, stage.gamma, stage.beta, program.scale,
            OUTPUTS=stage.outputs, NEXT=after.outputs if after else 1, NEXT_SIDE=after.side if after else 1,
            NEXT_DEPTHWISE=after is not None and after.depthwise, **_groups(stage), RELU=stage.relu, **last,
            **tiling.names, OUT=_across(stage.outputs), NEXT_WIDE=_across(after.outputs if after else 1),
            **OPTIONS,
        )  # fmt: skip

    following, after = streams.main, None
    for number in reversed(range(len(program.stages))):
        stage, saved, last = program.stages[number], kept[number], after is None
        to_stream = stage.side == 0
        out = streams.main if to_stream else streams.main.new_empty(saved.y.shape)
        multiplies, less = last and entries.multiplies, last and program.less_input
        backward(stage, saved, following, after, out, LAST=last, LESS=less, MULTIPLIES=multiplies, TO_STREAM=to_stream)
        if to_stream:
            return
        source = kept[number - 1].z if number else streams.main
        kernel_gradient[tiling.splits, len(entries.rows), stage.side**2](
            *streams.pair, source, out, sums, entries.rows, entries.learns, *sizes, stage.weight,
            INPUTS=stage.inputs, OUTPUTS=stage.outputs, SIDE=stage.side, DEPTHWISE=stage.depthwise, FIRST=number == 0,
            **tiling.names, IN=_across(stage.inputs), OUT=_across(stage.outputs), **OPTIONS,
        )  # fmt: skip
        following, after = out, stage
    start = Stage(channels, channels)
    backward(start, kept[0], following, after, streams.main, LAST=False, LESS=False, MULTIPLIES=False, TO_STREAM=True)


def _squeeze_names(program: Squeeze, tiling: Tiling) -> dict[str, int]:
    sizes = {"CHANNELS": program.channels, "HIDDEN": program.hidden, "WIDE": tiling.wide, "TILES": tiling.tiles}
    return sizes | {"ACROSS": _across(program.channels), "INNER": triton.next_power_of_2(program.hidden)}


def _last_column(program: Chain | Squeeze) -> int:
    """The number of parameters of a seed: the scale is the last of them."""
    return program.scale + (program.stages[-1].outputs if isinstance(program, Chain) else program.channels)
