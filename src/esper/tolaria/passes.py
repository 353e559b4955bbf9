"""One pass: the rows of a fleet from the input to the output. The same function trains, validates and ablates."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.cnn import ConvSegment, PooledSegment, PoolSegment
from esper.kasmina.host import Host
from esper.kasmina.layers import BatchNorm2d, RowCall, Statistics, add_rows, cat_rows, take_rows
from esper.tolaria.rows import START, Rows
from esper.tolaria.stacked import StackedWeights


class PassResult(NamedTuple):
    """Outputs (R, B, …), batch statistics per segment, and the streams behind the tapped places."""

    output: Tensor
    statistics: list[Statistics]
    taps: dict[int, Tensor]


def _joined(segments: Sequence[nn.Module], places: Collection[int]) -> list[nn.Module | None]:
    """Segments with the pool behind them taken along where no slot lies between; None in the pool's place."""
    joined: list[nn.Module | None] = list(segments)
    for index, (segment, following) in enumerate(pairwise(segments)):
        if isinstance(segment, ConvSegment) and isinstance(following, PoolSegment) and index not in places:
            joined[index], joined[index + 1] = PooledSegment(segment), None
    return joined


class StackedHost:
    """Hosts of one shape with weights stacked over envs."""

    def __init__(
        self,
        hosts: list[Host],
        places: Collection[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        compute: torch.dtype,
    ) -> None:
        """`places` are where slots are in use; `dtype` is that of the weights and statistics, `compute` of streams."""
        self.skeleton = hosts[0].to(device=device, dtype=dtype)
        joined = _joined(list(self.skeleton.segments), places)
        self._segments = [None if segment is None else RowCall(segment) for segment in joined]
        self.compute = compute
        shapes = {name: parameter.shape for name, parameter in self.skeleton.named_parameters()}
        self.weights = StackedWeights(len(hosts), shapes, device, dtype)
        self.buffers = {
            name: torch.zeros(len(hosts), *buffer.shape, device=device, dtype=dtype)
            for name, buffer in self.skeleton.named_buffers()
        }
        self.fill(hosts)
        # Normalisation over the batch keeps its affine part and its statistics in full precision.
        self._full_precision = {
            f"{name}.{kind}"
            for name, module in self.skeleton.named_modules()
            if isinstance(module, BatchNorm2d)
            for kind in ("weight", "bias", "running_mean", "running_var")
        }

    @torch.no_grad()
    def fill(self, hosts: Sequence[Host]) -> None:
        """Take weights and buffers from these hosts."""
        for env, host in enumerate(hosts):
            self.weights.write(env, dict(host.named_parameters()))
            for name, buffer in host.named_buffers():
                self.buffers[name][env] = buffer

    def segment_state(self, index: int, rows: Rows, present: int) -> dict[str, Tensor]:
        """Weights and buffers of one segment for the rows that are there."""
        prefix = f"segments.{index}."
        state = {}
        for name, tensor in (self.weights.leaves | self.buffers).items():
            if name.startswith(prefix):
                chosen = tensor if rows.whole_fleet else tensor.detach().index_select(0, rows.env[:present])
                dtype = tensor.dtype if name in self._full_precision else self.compute
                state[name.removeprefix(prefix)] = chosen.to(dtype)
        return state

    def run(
        self,
        rows: Rows,
        x: Tensor | None,
        *,
        train: bool,
        statistics: list[Statistics] | None = None,
        tapped: Collection[int] = (),
        attached: bool = False,
        streams: Mapping[int, Tensor] | None = None,
    ) -> PassResult:
        """From the input `x` (rows born at the start, B, …) to the output.

        `statistics` replace the running ones; `streams` are where rows are born from instead of this pass's own. Taps
        are detached unless they are to stay `attached`, for a gradient there.
        """
        births = {birth.place: birth.parents for birth in rows.births}
        h = None if START not in births else x
        taps: dict[int, Tensor] = {}
        found: list[Statistics] = []
        for index, segment in enumerate(self._segments):
            found.append({})
            if h is not None and segment is not None:
                state = self.segment_state(index, rows, len(h)) | (statistics[index] if statistics else {})
                h, found[index] = segment(state, h, train)
            if h is not None and index in tapped:
                taps[index] = h if attached else h.detach()
            if index in births:
                source = h if streams is None else streams[index]
                assert source is not None, "rows that are born without a stream"
                born = take_rows(source, births[index])
                h = born if h is None else cat_rows([h, born])
            for act in rows.acts.get(index, ()):
                assert h is not None, "a bank acts where there are no rows"
                taken = take_rows(h.detach() if act.silent else h, act.rows)
                effect = act.bank.effect(taken, act.members, act.strength, act.valid, detached=act.detached)
                if act.silent:
                    effect = effect - effect.detach()
                h = add_rows(h, act.rows, effect)
        assert h is not None, "a pass without rows"
        return PassResult(h, found, taps)
