"""One pass: the rows of a fleet from the input to the output, to train, validate, ablate and probe them."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.cnn import ConvSegment, PooledSegment, PoolSegment
from esper.kasmina.host import Host
from esper.kasmina.layers import BatchNorm2d, RowCall, Statistics
from esper.kasmina.row_layout import add_into_rows, add_rows, cat_rows, copy_rows, share_rows, split_rows, take_rows
from esper.tolaria.lanes import Lanes
from esper.tolaria.rows import Act, Plan, Rows
from esper.tolaria.stacked import StackedWeights


class PassResult(NamedTuple):
    """Outputs (R, B, …), batch statistics per segment, and the streams at the tapped places, before banks act."""

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
        self.compute, self.lanes = compute, Lanes(device)
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
        x: Tensor,
        *,
        train: bool,
        statistics: list[Statistics] | None = None,
        tapped: Collection[int] = (),
    ) -> PassResult:
        """From the input `x` (rows born at the start, B, …) to the output; `statistics` replace the running ones."""
        births = {birth.place: birth.parents for birth in rows.births}
        h, taps = x, dict[int, Tensor]()
        found: list[Statistics] = []
        for index, segment in enumerate(self._segments):
            found.append({})
            if segment is not None:
                state = self.segment_state(index, rows, len(h)) | (statistics[index] if statistics else {})
                h, found[index] = segment(state, h, train)
            if index in tapped:
                taps[index] = h
            if index in births:
                h = cat_rows([h, take_rows(h, births[index])])
            if index in rows.acts:
                h = _acted(h, rows.acts[index], self.lanes)
        return PassResult(h, found, taps)

    def train(self, plan: Plan, x: Tensor) -> tuple[PassResult, Tensor | None]:
        """The main rows from the input `x` (R, B, …), and the outputs of the shadow rows that are born from them.

        Both walk through the host side by side, as only main rows train it; where banks act they are one.
        """
        main, shadow, acts = plan
        births = {} if shadow is None else {birth.place: birth.parents for birth in shadow.births}
        h, beside = x, None
        found: list[Statistics] = []
        for index, segment in enumerate(self._segments):
            found.append({})
            if segment is not None:
                h, found[index] = segment(self.segment_state(index, main, len(h)), h, True)
                if beside is not None:
                    assert shadow is not None
                    beside, _ = segment(self.segment_state(index, shadow, len(beside)), beside, True)
            if index in births:
                born = take_rows(h.detach(), births[index])
                beside = born if beside is None else cat_rows([beside, born])
            if index in acts:
                if beside is None:
                    h = _acted(h, acts[index], self.lanes)
                else:
                    h, beside = split_rows(_acted(cat_rows([h, beside]), acts[index], self.lanes), len(h))
        return PassResult(h, found, {}), beside


def _acted(h: Tensor, acts: Sequence[Act], lanes: Lanes) -> Tensor:
    """The streams with what all banks of one slot add. A row has one seed there, so no bank waits for another."""
    if not torch.is_grad_enabled():
        result = copy_rows(h)
        for act in acts:
            add_into_rows(result, act.rows, _effect(act, take_rows(h, act.rows)))
        return result
    if any(act.silent for act in acts):
        # In turn: a bank that acts and trains on main rows has two groups, whose gradients are to meet on one stream.
        effects = [_effect(act, take_rows(h.detach() if act.silent else h, act.rows)) for act in acts]
        return add_rows(h, [act.rows for act in acts], effects)
    h, taken = share_rows(h, [act.rows for act in acts], lanes.over)
    with lanes.over(list(zip(acts, taken, strict=True))) as pairs:
        effects = [_effect(act, rows) for act, rows in pairs]
    return add_rows(h, [act.rows for act in acts], effects)


def _effect(act: Act, taken: Tensor) -> Tensor:
    effect = act.bank.effect(taken, act.members, act.strength, act.valid, act.learns)
    return effect - effect.detach() if act.silent else effect
