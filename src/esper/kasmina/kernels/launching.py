"""Launches kernels, or compiles them ahead.

Triton compiles a kernel for every set of sizes when it is first launched, one after the other. The kernels of all seeds
that a fleet may grow are some hundred; compiled together they take all cores.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

_AHEAD: ContextVar[bool] = ContextVar("ahead", default=False)

# Arguments whose value is no part of what is compiled. Counts change with the fleet and the part of a validation.
COUNTS = ["main_rows", "shadow_rows", "batch", "per", "splits"]
# Arguments read number by number, so that it does not matter where they begin.
SCALARS = ["rows", "members", "strength", "style", "valid", "learns", "gradient"]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **names: Any) -> None:  # Any: triton is not typed
    """Launch a kernel; within `compiling_ahead` only compile it."""
    if _AHEAD.get():
        kernel.warmup(*arguments, grid=grid, **names)
    else:
        kernel[grid](*arguments, **names)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Within this block launches compile their kernels, several at a time, and run nothing; at its end all are ready."""
    before = _AHEAD.set(True)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        _AHEAD.reset(before)
