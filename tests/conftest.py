"""For all tests: one torch thread, and a random state that no test hands on to the next."""

import signal
from collections.abc import Iterator

import pytest
import torch

from esper.tolaria import TaskRegistry

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so it is where a shell began the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the networks here are small, and bit promises hold for a fixed number of threads


@pytest.fixture(autouse=True)
def fresh_random_state() -> None:
    """Every test starts from the same global generator, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def fresh_registry() -> Iterator[None]:
    """No file of tests hands its own tasks on to the next."""
    before = TaskRegistry._tasks
    TaskRegistry._tasks = dict(before)
    yield
    TaskRegistry._tasks = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of CUDA are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
