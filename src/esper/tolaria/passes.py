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
from esper.kasmina.layers import RowCall, Statistics
from esper.kasmina.norms import BatchNorm2d
from esper.kasmina.row_hints import living_rows, shared_inputs
from esper.kasmina.row_layout import add_into_rows, add_rows, cat_rows, copy_rows, share_rows, split_rows, take_rows
from esper.tolaria.banks import StackedWeights
from esper.tolaria.batches import Samples
from esper.tolaria.rows import Act, Rows

if TYPE_CHECKING:
    from esper.kasmina.kernels.acting import Group
    from esper.tolaria.fleet import HostFleet

CHUNK = {"cpu": 512, "cuda": 4096}  # most inputs per pass: on the CPU for the caches, on CUDA to save launches
SIDE_STREAMS = 6

T = TypeVar("T")


class SideStreams:
    """CUDA streams on which banks run in parallel while a graph is captured."""

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(SIDE_STREAMS)] if device.type == "cuda" else []

    @contextmanager
    def over(self, items: Sequence[T]) -> Iterator[Iterator[T]]:
        """Items in turn, each on its side stream, the same one in every call. Waits for all of them at the end."""
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
            walking.close()  # else after an error a side stream would stay current, and the capture could not end
            for stream in used:
                main.wait_stream(stream)


@torch.no_grad()
def score_rows(
    fleet: "HostFleet", rows: Rows, samples: Samples, calibration: Tensor | None, *, chunk: int | None = None
) -> list[RowScore]:
    """Score all rows on the same inputs, calibrated on training inputs or, with None, with running statistics."""
    chunk = chunk or CHUNK[fleet.device.type]
    statistics = None if calibration is None else calibrate(fleet, rows, calibration)
    chunks = zip(samples.inputs.split(chunk), samples.targets.split(chunk), strict=True)
    scores = [score(fleet, rows, Samples(*part), statistics) for part in chunks]
    correct, losses = (torch.cat(parts, 1) for parts in zip(*scores, strict=True))
    by_loss = fleet.task.by_loss
    return [RowScore(None if by_loss else hits, row) for hits, row in zip(correct, losses, strict=True)]


def row_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per row: (R, B, …, classes) against (R, B, …) → (R,)."""
    flat = logits.flatten(0, -2)
    losses = F.cross_entropy(flat.float() if flat.dtype.itemsize < 4 else flat, targets.flatten(), reduction="none")
    return losses.view(len(logits), -1).mean(1)


def spread(fleet: "HostFleet", rows: Rows, x: Tensor) -> Tensor:
    """The same inputs for every row that is born at the start."""
    x = x.to(fleet.compute) if x.is_floating_point() else x
    return x.expand(len(rows.births[0].parents), *x.shape)


def calibrate(fleet: "HostFleet", rows: Rows, inputs: Tensor) -> list[Statistics]:
    """Batch statistics of each row, from one train-mode pass over all inputs."""
    return fleet.host.run(rows, spread(fleet, rows, inputs), train=True).statistics


def score(
    fleet: "HostFleet", rows: Rows, samples: Samples, statistics: list[Statistics] | None
) -> tuple[Tensor, Tensor]:
    """Which predictions of a chunk of inputs are correct, and their losses: (R, predictions) both."""
    inputs, targets = samples
    logits = fleet.host.run(rows, spread(fleet, rows, inputs), train=False, statistics=statistics).output
    expected = targets.expand(len(logits), *targets.shape)
    loss = F.cross_entropy(logits.flatten(0, -2).to(fleet.dtype), expected.flatten(), reduction="none")
    return (logits.argmax(-1) == expected).flatten(1), loss.view(len(logits), -1)


class PassResult(NamedTuple):
    """Outputs (R, B, …) of rows and of shadow rows, batch statistics per segment, and streams at the tapped places."""

    output: Tensor
    shadow_output: Tensor | None
    statistics: list[Statistics]
    taps: dict[int, Tensor]  # before banks act


def _fuse_pools(segments: Sequence[nn.Module], places: Collection[int]) -> list[nn.Module | None]:
    """Segments fused with the pool after them where no slot lies between; None instead of the pool."""
    fused: list[nn.Module | None] = list(segments)
    for index, (segment, following) in enumerate(pairwise(segments)):
        if isinstance(segment, ConvSegment) and isinstance(following, PoolSegment) and index not in places:
            fused[index], fused[index + 1] = PooledSegment(segment), None
    return fused


class StackedHost:
    """Hosts of one shape with weights stacked over envs."""

    def __init__(
        self, hosts: list[Host], places: Collection[int], device: torch.device, dtype: torch.dtype, compute: torch.dtype
    ) -> None:
        """`places` are those of the slots in use; `dtype` is for weights and statistics, `compute` for streams."""
        skeleton = hosts[0].to(device=device, dtype=dtype)
        fused = _fuse_pools(list(skeleton.segments), places)
        self._segments = [None if segment is None else RowCall(segment) for segment in fused]
        self.compute, self.streams = compute, SideStreams(device)
        shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
        self.weights = StackedWeights(len(hosts), shapes, device, dtype)
        self.buffers = {
            name: torch.zeros(len(hosts), *buffer.shape, device=device, dtype=dtype)
            for name, buffer in skeleton.named_buffers()
        }
        self.fill(hosts)
        # Normalisation over the batch keeps its affine part and its statistics in full precision.
        self._full_precision = {
            f"{name}.{kind}"
            for name, module in skeleton.named_modules()
            if isinstance(module, BatchNorm2d)
            for kind in ("weight", "bias", "running_mean", "running_var")
        }

    @torch.no_grad()
    def fill(self, hosts: Sequence[Host]) -> None:
        """Copy weights and buffers from these hosts."""
        for env, host in enumerate(hosts):
            self.weights.write(env, dict(host.named_parameters()))
            for name, buffer in host.named_buffers():
                self.buffers[name][env] = buffer

    def segment_state(self, index: int, rows: Rows, present: int) -> dict[str, Tensor]:
        """Weights and buffers of one segment for the first `present` rows."""
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
        shadow: Rows | None = None,
    ) -> PassResult:
        """From the input `x` (rows born at the start, B, …) to the output; `statistics` replace the running ones.

        Shadow rows are born from these rows and pass through the host beside them, as only the latter train it. Banks
        act on both: `rows.acts` numbers the shadow rows after the others.
        """
        births = {birth.place: birth.parents for birth in rows.births}
        shadow_births = {birth.place: birth.parents for birth in shadow.births} if shadow else {}
        h, shadow_h, taps = x, None, dict[int, Tensor]()
        batch_statistics: list[Statistics] = [{} for _ in self._segments]
        for index, segment in enumerate(self._segments):
            if segment is not None:
                state = self.segment_state(index, rows, len(h)) | (statistics[index] if statistics else {})
                with shared_inputs(x, rows.tiles):
                    h, batch_statistics[index] = segment(state, h, train)
                if shadow is not None and shadow_h is not None:
                    assert shadow.valid is not None
                    with living_rows(shadow.valid[: len(shadow_h)]):
                        shadow_h, _ = segment(self.segment_state(index, shadow, len(shadow_h)), shadow_h, train)
            if index in tapped:
                taps[index] = h
            if index in births:
                h = cat_rows([h, take_rows(h, births[index])])
            if index in shadow_births:
                born = take_rows(h.detach(), shadow_births[index])
                shadow_h = born if shadow_h is None else cat_rows([shadow_h, born])
            if index in rows.acts:
                h, shadow_h = _act(h, shadow_h, rows.acts[index], self.streams)
        return PassResult(h, shadow_h, batch_statistics, taps)


def _act(h: Tensor, shadow_h: Tensor | None, acts: Sequence[Act], streams: SideStreams) -> tuple[Tensor, Tensor | None]:
    """The streams of main and shadow rows with the effects of all banks of one slot."""
    straight_through = any(act.silent for act in acts)
    whole = [act for act in acts if not straight_through and act.bank.runs_whole(h)]
    if whole:
        from esper.kasmina.kernels.acting import act_whole  # needs triton, which only CUDA builds bring along

        h, shadow_h = act_whole(h, shadow_h, [_group_of(act) for act in whole], streams.over)
    rest = [act for act in acts if not any(act is one for one in whole)]
    if not rest:
        return h, shadow_h
    if shadow_h is None:
        return _act_on(h, rest, streams), None
    return split_rows(_act_on(cat_rows([h, shadow_h]), rest, streams), len(h))


def _group_of(act: Act) -> "Group":
    """An act in the terms of the kernels that run whole stages."""
    from esper.kasmina.kernels.acting import Group  # needs triton
    from esper.kasmina.kernels.programs import Entries

    bank = act.bank
    assert bank.program is not None
    multiplies = "multiply" in bank.styles
    entries = Entries(act.rows, act.members, act.strength, bank.style, act.valid, act.learns, multiplies)
    return Group(bank.program, entries, bank.weights.whole)


def _act_on(h: Tensor, acts: Sequence[Act], streams: SideStreams) -> Tensor:
    """The streams with the effects of all banks of one slot. A row has one seed there, so banks are independent."""
    if not torch.is_grad_enabled():
        result = copy_rows(h)
        for act in acts:
            add_into_rows(result, act.rows, _effect(act, take_rows(h, act.rows)))
        return result
    if any(act.silent for act in acts):
        # In turn: a bank that acts and trains on main rows has two groups, whose gradients must add up on one stream.
        effects = [_effect(act, take_rows(h.detach() if act.silent else h, act.rows)) for act in acts]
        return add_rows(h, [act.rows for act in acts], effects)
    h, inputs = share_rows(h, [act.rows for act in acts], streams.over)
    with streams.over(list(zip(acts, inputs, strict=True))) as pairs:
        effects = [_effect(act, own) for act, own in pairs]
    return add_rows(h, [act.rows for act in acts], effects)


def _effect(act: Act, h: Tensor) -> Tensor:
    effect = act.bank.effect(h, act.members, act.strength, act.valid, act.learns)
    return effect - effect.detach() if act.silent else effect
