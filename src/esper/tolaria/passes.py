"""Passes of rows through the stacked hosts, and scores of what comes out."""

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.compare import RowScore
from esper.kasmina.hosts import ConvSegment, Host, PooledSegment, PoolSegment
from esper.kasmina.layers import BatchNorm2d, RowCall, Statistics
from esper.kasmina.row_layout import add_into_rows, add_rows, cat_rows, copy_rows, share_rows, split_rows, take_rows
from esper.tolaria.batches import Samples
from esper.tolaria.rows import Act, PassPlan, Rows
from esper.tolaria.stacked import StackedWeights

LANES = 6

T = TypeVar("T")


class CudaStreams:
    """Side streams of a device."""

    def __init__(self, device: torch.device, count: int = LANES) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []

    @contextmanager
    def over(self, items: Sequence[T]) -> Iterator[Iterator[T]]:
        """Items in turn, each with its lane as the current stream; at the end all lanes are waited for.

        The item at an index has the same lane in every call.
        """
        if not self._streams or not torch.cuda.is_current_stream_capturing():
            yield iter(items)
            return
        main = torch.cuda.current_stream()
        used = self._streams[: len(items)]

        def walk() -> Generator[T]:
            for stream in used:
                stream.wait_stream(main)
            for index, item in enumerate(items):
                with torch.cuda.stream(used[index % len(used)]):
                    yield item

        walking = walk()
        try:
            yield walking
        finally:
            walking.close()  # after an error a lane would stay the current stream, and the capture could not end
            for stream in used:
                main.wait_stream(stream)


if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

CHUNK = {"cpu": 512, "cuda": 4096}
"""Most inputs per pass: what caches like, and what saves launches."""


@torch.no_grad()
def score_rows(
    fleet: "HostFleet", rows: Rows, samples: Samples, calibration: Tensor | None, *, chunk: int | None = None
) -> list[RowScore]:
    """Score all rows on the same inputs, calibrated on training inputs or, with None, by the running statistics."""
    chunk = chunk or CHUNK[fleet.device.type]
    statistics = None if calibration is None else calibrate(fleet, rows, calibration)
    correct, losses = [], []
    for inputs, targets in zip(samples.inputs.split(chunk), samples.targets.split(chunk), strict=True):
        found = score(fleet, rows, Samples(inputs, targets), statistics)
        correct.append(found.correct)
        losses.append(found.losses)
    return [RowScore(*row) for row in zip(torch.cat(correct, 1), torch.cat(losses, 1), strict=True)]


def spread(fleet: "HostFleet", rows: Rows, x: Tensor) -> Tensor:
    """The same inputs for every row that is born at the start."""
    x = x.to(fleet.compute) if x.is_floating_point() else x
    return x.expand(len(rows.births[0].parents), *x.shape)


def calibrate(fleet: "HostFleet", rows: Rows, inputs: Tensor) -> list[Statistics]:
    """Statistics of each row: one train-mode pass, as they are those of the whole batch."""
    return fleet.host.run(rows, spread(fleet, rows, inputs), train=True).statistics


def score(fleet: "HostFleet", rows: Rows, samples: Samples, statistics: list[Statistics] | None) -> RowScore:
    """All rows on a chunk of inputs: (R, predictions) both."""
    inputs, targets = samples
    logits = fleet.host.run(rows, spread(fleet, rows, inputs), train=False, statistics=statistics).output
    wanted = targets.expand(len(logits), *targets.shape)
    loss = F.cross_entropy(logits.flatten(0, -2).to(fleet.dtype), wanted.flatten(), reduction="none")
    return RowScore((logits.argmax(-1) == wanted).flatten(1), loss.view(len(logits), -1))


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
        self.compute, self.lanes = compute, CudaStreams(device)
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

    def train(self, plan: PassPlan, x: Tensor) -> tuple[PassResult, Tensor | None]:
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


def _acted(h: Tensor, acts: Sequence[Act], lanes: CudaStreams) -> Tensor:
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
