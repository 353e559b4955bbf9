"""Processes that are forked from a test, and live until it lets them go."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def forked_process() -> Iterator[None]:
    """Inside, a process that was forked where the block begins lives and does nothing."""
    (begun, begin), (ended, end) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.write(begin, b"!")
        os.read(ended, 1)
        os._exit(0)
    os.read(begun, 1)
    yield
    os.close(end)
    assert os.waitpid(child, 0)[1] == 0
    for handle in (begun, begin, ended):
        os.close(handle)
