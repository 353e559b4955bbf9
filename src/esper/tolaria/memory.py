"""Memory of a fleet: what passes need, what a device has, and errors that say what would fit."""

import traceback
import types
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from esper.kasmina.layers import Statistics
from esper.kasmina.row_layout import take_rows
from esper.leyline import FleetMemoryError
from esper.tolaria.banks import Bank
from esper.tolaria.batches import Samples
from esper.tolaria.passes import CHUNK, calibrate, score, spread
from esper.tolaria.rows import LEAST_ROWS, Rows, deployed_rows, eval_rows

MEMINFO = Path("/proc/meminfo")
PROBES = (2, 3)
"""Inputs of the two passes that a need is measured by. One would not do: with a single input some copies are views."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside and still live. Scratch space inside kernels is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.live = 0
        self.trace: list[int] = []
        """Bytes alive after each operation that made some."""
        self._known: set[int] = set()

    @property
    def peak(self) -> int:
        """The most that was alive at once."""
        return max(self.trace, default=0)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = {part.untyped_storage()._cdata for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, Tensor) and part.untyped_storage()._cdata not in given:
                self._add(part.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.trace.append(self.live)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class Need(NamedTuple):
    """The bytes that live after each operation of a pass, as a line over the number of inputs."""

    fixed: tuple[int, ...]
    per_input: tuple[int, ...]

    @classmethod
    def of(cls, run: Callable[[int], object]) -> Self:
        """Measured without gradients by two passes, `run(inputs)`: what an operation makes is linear in the inputs."""
        traces = []
        for inputs in PROBES:
            with torch.no_grad(), LiveBytes() as meter:
                run(inputs)
            traces.append(meter.trace)
        few, more = traces
        if len(few) != len(more):
            # Another sequence of operations: all of it counted per input is too much, but never too little.
            return cls((0,), (-(-max(more) // PROBES[1]),))
        slopes = tuple((b - a) // (PROBES[1] - PROBES[0]) for a, b in zip(few, more, strict=True))
        return cls(tuple(a - slope * PROBES[0] for a, slope in zip(few, slopes, strict=True)), slopes)

    def at(self, inputs: int) -> int:
        """The most bytes that live at once."""
        return max(fixed + slope * inputs for fixed, slope in zip(self.fixed, self.per_input, strict=True))


# Any: whatever an object graph holds.
def tensors_of(root: Any, *, without: Sequence[object] = ()) -> Iterator[Tensor]:
    """Every tensor that can be reached from an object through its attributes and containers, with its gradient."""
    skipped = (types.ModuleType, types.FunctionType, type, str, bytes, int, float)
    seen = {id(thing) for thing in without}
    waiting: list[Any] = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, skipped):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
            waiting.append(thing.grad if thing.is_leaf else None)
        elif isinstance(thing, Mapping):
            waiting += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
        else:
            waiting += getattr(thing, "__dict__", {}).values()


def held_bytes(root: object, device: torch.device | None = None, *, without: Sequence[object] = ()) -> int:
    """Bytes of all storages that an object holds, each counted once; on one kind of device, or on all."""
    storages = {
        (tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
        for tensor in tensors_of(root, without=without)
        if device is None or tensor.device.type == device.type
    }
    return sum(storages.values())


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on a device; None where the system does not tell."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        granted = int(total * torch.cuda.get_per_process_memory_fraction(device)) - reserved
        # Blocks that torch keeps, but that no tensor uses, are free too.
        return min(free, granted) + reserved - torch.cuda.memory_allocated(device)
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def readable(size: int) -> str:
    """Bytes as people write them."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

CPU_BUDGET = 1 << 30
CUDA_SHARE = 4
"""A validation may take a quarter of the device: weights, graphs and the minibatch live beside it."""


def default_budget(device: torch.device) -> int:
    """Bytes of activations that a validation may take."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // CUDA_SHARE
    return CPU_BUDGET


LEAST_PART = 4
"""Envs: in passes of fewer rows some kernels round differently."""


class EnvChunk(NamedTuple):
    """Envs that are measured together, and how many inputs at a time."""

    envs: Sequence[int]
    chunk: int


class PassMemory:
    """What rows of a fleet need in a validation."""

    @torch.no_grad()
    def __init__(self, fleet: "HostFleet", samples: Samples, calibration: Tensor) -> None:
        self.fleet, self.samples, self.calibration = fleet, samples, calibration
        rows = deployed_rows(fleet, range(LEAST_ROWS))
        bare = Rows(rows.env, rows.births)
        found: list[Statistics] = []

        def calibrating(inputs: int) -> None:
            found[:] = calibrate(fleet, bare, calibration[:inputs])

        self._calibrating = Need.of(calibrating)
        self._scoring = Need.of(lambda inputs: score(fleet, bare, self._some(inputs), found))
        x = spread(fleet, bare, calibration[: PROBES[-1]])
        self._streams = fleet.host.run(bare, x, train=False, tapped=fleet.places.values()).taps
        self._banks: dict[tuple[str, str, frozenset[str]], Need] = {}

    def _some(self, inputs: int) -> Samples:
        return Samples(self.samples.inputs[:inputs], self.samples.targets[:inputs])

    @torch.no_grad()
    def divide(self, envs: Sequence[int], budget: int) -> list[EnvChunk]:
        """Envs in parts whose passes have at most `budget` bytes of activations alive at once.

        Calibration takes its whole batch at once, so there the envs are divided, each with all rows that are born from
        it; scoring takes as many inputs as fit. A part of fewer than twice `LEAST_PART` envs is not divided further,
        nor an input, whatever they need.
        """
        rows, _ = eval_rows(self.fleet, envs)
        if self.calibrating(rows, len(self.calibration)) > budget and len(envs) >= 2 * LEAST_PART:
            half = len(envs) // 2
            return self.divide(envs[:half], budget) + self.divide(envs[half:], budget)
        chunks = range(1, CHUNK[self.fleet.device.type] + 1)
        chunk = bisect_right(chunks, budget, key=lambda inputs: self.scoring(rows, inputs))
        return [EnvChunk(envs, max(chunk, 1))]

    def calibrating(self, rows: Rows, inputs: int) -> int:
        """Bytes alive at once in the train-mode pass over so many inputs."""
        return self._host_share(self._calibrating, rows, inputs) + self._most_of_acts(rows, inputs)

    def scoring(self, rows: Rows, inputs: int) -> int:
        """Bytes alive at once while so many inputs are scored."""
        return self._host_share(self._scoring, rows, inputs) + self._most_of_acts(rows, inputs)

    def _host_share(self, need: Need, rows: Rows, inputs: int) -> int:
        return -(-need.at(inputs) * len(rows) // LEAST_ROWS)

    def _most_of_acts(self, rows: Rows, inputs: int) -> int:
        """Where a bank acts, or rows are born, the streams of all rows are there twice, beside what the bank makes."""
        found = [0]
        for place, stream in self._streams.items():
            again = inputs * len(rows) * stream[0, 0].numel() * stream.element_size()
            acts = rows.acts.get(place, ())
            found.append(again)
            found += [again + -(-self._bank(act.bank, stream).at(inputs) * len(act.rows) // LEAST_ROWS) for act in acts]
        return max(found)

    def _bank(self, bank: Bank, stream: Tensor) -> Need:
        """For `LEAST_ROWS` of its members, with the styles that it has now."""
        key = bank.slot.slot_id, bank.blueprint, bank.styles
        if key not in self._banks:
            members = torch.arange(LEAST_ROWS, device=bank.device)
            valid = torch.ones_like(members, dtype=torch.bool)

            def run(inputs: int) -> Tensor:
                taken = take_rows(stream[:, :inputs], members)
                return bank.effect(taken, members, bank.full[:LEAST_ROWS], valid, valid)

            self._banks[key] = Need.of(run)
        return self._banks[key]


if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

SPARE = 0.9
"""Share of the free memory to plan with: fragments and the scratch space of kernels take the rest."""

MESSAGES = ("not enough memory", "can't allocate memory", "out of memory", "alloc_failed")
"""What RuntimeErrors of allocators say: those of the CPU, of pinned memory and of CUDA's libraries have no type."""


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(part in str(error).lower() for part in MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def memory_guard(fleet: "HostFleet", doing: str) -> Iterator[None]:
    """Turns a shortage inside into a FleetMemoryError. The fleet is in an undefined state then: build a smaller one."""
    try:
        yield
    except FleetMemoryError:
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        # The activations of the pass that failed hang on its frames; nothing could be measured beside them.
        traceback.clear_frames(error.__traceback__)
        raise FleetMemoryError(_explain(fleet, doing)) from error


def _explain(fleet: "HostFleet", doing: str) -> str:
    """What was asked for, what it needs, what there is, and what would fit."""
    failed = f"out of memory on {fleet.device} while {doing}: {fleet.n} hosts of task {fleet.task.name!r}"
    free = _without(fleet)
    there = "how much is free is not known" if free is None else f"{readable(free)} are free without them"
    cost = _cost_of_one(fleet)
    if cost is None:
        return f"{failed}; {there}, and not even one host fits: take a smaller batch, or a device with more memory"
    needs = f"need about {readable(fleet.n * cost)}, {readable(cost)} each"
    fits = fleet.n if free is None else int(SPARE * free) // cost
    if fits >= fleet.n:
        fits = fleet.n // 2  # all should have fitted: what took the memory cannot be seen from here
    remedy = "not even one host fits" if fits < LEAST_ROWS else f"build a fleet of {fits} hosts, which should fit"
    return f"{failed} {needs}; {there}: {remedy}"


def _without(fleet: "HostFleet") -> int | None:
    """Free bytes, were the hosts of the fleet gone; its data stay."""
    free = free_bytes(fleet.device)
    return None if free is None else free + held_bytes(fleet, fleet.device, without=[vars(fleet).get("batches")])


def _cost_of_one(fleet: "HostFleet") -> int | None:
    """Bytes per host in training, measured on the smallest fleet; None where not even that one fits.

    A host is its weights, statistics, optimiser state and gradients, and its share of a minibatch's activations. Shadow
    rows and banks of seeds are counted as far as the fleet has them already.
    """
    batches = vars(fleet).get("batches")
    if fleet.n <= LEAST_ROWS or batches is None:
        return None
    try:
        small = type(fleet)(
            fleet.task,
            LEAST_ROWS,
            fleet.device,
            batches=batches,
            dtype=fleet.dtype,
            compute=fleet.compute,
            graphs=False,
        )
        rate = torch.zeros((), dtype=fleet.dtype, device=fleet.device)
        with LiveBytes() as meter:
            small.run_minibatch(small.plan, small.draw(0), rate, rate)
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        return None
    held = held_bytes(small, fleet.device, without=[batches]) / LEAST_ROWS
    if "snapshots" in vars(fleet):  # built: it may have grown
        held = max(held, held_bytes(fleet, fleet.device, without=[batches]) / fleet.n)
    return int(held + (1 + fleet.shadows_per_host()) * meter.peak / LEAST_ROWS)
