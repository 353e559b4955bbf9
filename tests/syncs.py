"""Waiting for a GPU, as an error."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_sync() -> Iterator[None]:
    """Whatever waits for the device inside raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells, once, that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
