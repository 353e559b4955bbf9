"""What tensors cost: the bytes that live during a pass, that an object holds, and that are free."""

import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
