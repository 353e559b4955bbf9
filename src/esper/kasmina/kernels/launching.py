"""Kernels that can be compiled ahead.

Triton compiles a kernel for every set of sizes when it is first launched, while all others wait. The kernels of all
seeds that a fleet may grow are some hundred; compiled together they take all cores.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import triton

_AHEAD: ContextVar[bool] = ContextVar("ahead", default=False)

# Arguments whose value is no part of what is compiled: they differ from fleet to fleet and from pass to pass.
COUNTS = ["main_rows", "shadow_rows", "batch", "per", "splits", "parameters"]
# Arguments that are read number by number, so that it does not matter where they begin.
SCALARS = ["rows", "members", "strength", "style", "valid", "learns"]


class Kernel:
    """`kernel[grid](…)` launches it; within `compiling_ahead` it is only compiled."""

    def __init__(self, jitted: Any) -> None:  # Any: triton is not typed
        self.jitted = jitted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.jitted.warmup, grid=grid) if _AHEAD.get() else self.jitted[grid]


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorates a function that is launched, as `triton.jit` does those that it calls."""
    return Kernel(triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SCALARS)(function))


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Within this block kernels are compiled, several at a time, and not run: tensors hold anything. At its end all are
    ready."""
    before = _AHEAD.set(True)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        _AHEAD.reset(before)
