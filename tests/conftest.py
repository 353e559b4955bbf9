"""For all tests: one torch thread, a random state that no test hands on to the next, and benchmarks as modules."""

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from bench import BENCHMARKS

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


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Scripts as modules; tasks that they register are gone with the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(TaskRegistry, "_tasks", dict(TaskRegistry._tasks))
    return importlib.import_module


@pytest.fixture
def run_here(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What a script prints, run in this process with few bootstraps: no time for another start of torch."""

    def run(name: str, *arguments: str) -> str:
        script = benchmark(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.setattr(script, "BOOTSTRAPS", 20, raising=False)
        script.main()
        return capsys.readouterr().out

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of CUDA are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
