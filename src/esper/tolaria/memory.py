"""The memory of a fleet: validations that keep to a budget, and an error that helps when memory runs out."""

import traceback
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from esper.kasmina.row_layout import take_rows
from esper.leyline import FleetMemoryError
from esper.tolaria.banks import Bank
from esper.tolaria.batches import Samples
from esper.tolaria.passes import CHUNK, calibrate, score, spread
from esper.tolaria.rows import LEAST_ROWS, START, Birth, Rows, eval_rows, indices

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

CPU_BUDGET = 1 << 30
CUDA_SHARE = 4  # a validation may take a quarter of the device; weights, graphs and the minibatch need the rest
PROBES = (2, 3)  # inputs of the two passes that an estimate is made from; with a single input some copies are views
LEAST_PART = 4  # envs: in passes of fewer rows some kernels round differently
# Texts of the untyped RuntimeErrors that allocators raise: on the CPU, for pinned memory, in CUDA libraries.
SHORTAGES = ("not enough memory", "can't allocate memory", "out of memory", "alloc_failed")

PeakBytes = Callable[[int], int]  # the most bytes that a pass has alive at once, by the number of inputs


def default_budget(device: torch.device) -> int:
    """Bytes of activations that a validation may take."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // CUDA_SHARE
    return CPU_BUDGET


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that were made inside. Does not see the scratch space of kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.live = 0
        self.trace: list[int] = []  # bytes alive after each operation that allocated some
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = {part.untyped_storage()._cdata for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in (part.untyped_storage() for part in tree_leaves(result) if isinstance(part, Tensor)):
            if storage._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.trace.append(self.live)
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())
        return result

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_bytes(run: Callable[[int], object]) -> PeakBytes:
    """Estimates the peak of `run(inputs)` from two small passes, as each operation allocates linearly in the inputs."""
    traces = []
    for inputs in PROBES:
        with torch.no_grad(), LiveBytes() as meter:
            run(inputs)
        traces.append(meter.trace)
    few, more = traces
    if len(few) != len(more):
        # Another sequence of operations: to count all of it per input is too much, but never too little.
        per_input = -(-max(more) // PROBES[1])
        return lambda inputs: per_input * inputs
    return lambda inputs: max(a + (b - a) * (inputs - PROBES[0]) for a, b in zip(few, more, strict=True))


class ValidationMemory:
    """Estimates what the passes of a validation need, and divides it accordingly."""

    @torch.no_grad()
    def __init__(self, fleet: "HostFleet", samples: Samples, calibration: Tensor) -> None:
        self.fleet, self.samples, self.calibration = fleet, samples, calibration
        first = indices(range(LEAST_ROWS), fleet.device)
        rows = Rows(first, (Birth(START, first),))
        # Of `LEAST_ROWS` main rows, without banks.
        self.calibrating = peak_bytes(lambda inputs: calibrate(fleet, rows, calibration[:inputs]))
        statistics = calibrate(fleet, rows, calibration[: PROBES[0]])
        self.scoring = peak_bytes(
            lambda inputs: score(fleet, rows, Samples(*(part[:inputs] for part in samples)), statistics)
        )
        x = spread(fleet, rows, calibration[: PROBES[-1]])
        self._streams = fleet.host.run(rows, x, train=False, tapped=fleet.places.values()).taps
        self._banks: dict[tuple[str, str, frozenset[str]], PeakBytes] = {}

    @torch.no_grad()
    def divide(self, envs: Sequence[int], budget: int) -> list[tuple[Sequence[int], int]]:
        """Divides envs into parts whose passes have at most `budget` bytes of activations alive at once.

        Returns the envs of each part, and how many inputs to score at a time. Calibration takes its whole batch at
        once. Fewer than twice `LEAST_PART` envs are not divided further, nor is an input, whatever they need.
        """
        rows, _ = eval_rows(self.fleet, envs)
        if self.needs(self.calibrating, rows, len(self.calibration)) > budget and len(envs) >= 2 * LEAST_PART:
            half = len(envs) // 2
            return self.divide(envs[:half], budget) + self.divide(envs[half:], budget)
        chunks = range(1, CHUNK[self.fleet.device.type] + 1)
        chunk = bisect_right(chunks, budget, key=lambda inputs: self.needs(self.scoring, rows, inputs))
        return [(envs, max(chunk, 1))]

    def needs(self, peak: PeakBytes, rows: Rows, inputs: int) -> int:
        """Bytes alive at once while these rows calibrate or score this number of inputs."""
        return self._share(peak, inputs, len(rows)) + self._at_slots(rows, inputs)

    @staticmethod
    def _share(peak: PeakBytes, inputs: int, rows: int) -> int:
        return -(-peak(inputs) * rows // LEAST_ROWS)

    def _at_slots(self, rows: Rows, inputs: int) -> int:
        """Where a bank acts, or rows are born, the streams of all rows exist twice, beside what the bank makes."""
        most = 0
        for index, stream in self._streams.items():
            copy = inputs * len(rows) * stream[0, 0].numel() * stream.element_size()
            acts = rows.acts.get(index, ())
            effects = [self._share(self._bank(act.bank, stream), inputs, len(act.rows)) for act in acts]
            most = max(most, copy + max(effects, default=0))
        return most

    def _bank(self, bank: Bank, stream: Tensor) -> PeakBytes:
        """For `LEAST_ROWS` of its members, with its present styles."""
        key = bank.slot.slot_id, bank.blueprint, bank.styles
        if key not in self._banks:
            members = torch.arange(LEAST_ROWS, device=bank.device)
            fixed = members, bank.full[:LEAST_ROWS], members >= 0, members >= 0
            self._banks[key] = peak_bytes(lambda inputs: bank.effect(take_rows(stream[:, :inputs], members), *fixed))
        return self._banks[key]


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    if error is None or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return error is not None
    untyped = isinstance(error, RuntimeError) and any(text in str(error).lower() for text in SHORTAGES)
    return untyped or is_shortage(error.__cause__ or error.__context__)


@contextmanager
def memory_guard(fleet: "HostFleet", doing: str) -> Iterator[None]:
    """Turns a shortage into a FleetMemoryError. The fleet's state is undefined afterwards: build a smaller one."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, FleetMemoryError) or not is_shortage(error):
            raise
        # The activations of the pass that failed hang on its frames; a smaller fleet needs their memory.
        traceback.clear_frames(error.__traceback__)
        fewer = f"build a fleet of {fleet.n // 2} hosts, " if fleet.n > 1 else ""
        raise FleetMemoryError(
            f"out of memory on {fleet.device} while {doing}: {fleet.n} hosts of task {fleet.task.name!r} do not fit; "
            f"{fewer}use a smaller batch, or a device with more memory"
        ) from error
