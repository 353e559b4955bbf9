"""Out of memory: an error that says how much a fleet needs, how much there is, and how many hosts would fit."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from esper.leyline import FleetMemoryError
from esper.tolaria.memory import LiveBytes, free_bytes, held_bytes, readable
from esper.tolaria.rows import LEAST_ROWS

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
