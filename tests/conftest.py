"""For all tests: one torch thread, a random state that no test hands on to the next, and benchmarks as modules."""

import fcntl
import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench import BENCHMARKS

from esper.simic.training.config import TrainConfig, taught_config
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


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Build a folder once for all workers of pytest-xdist: the first to ask fills it. Tests that change it copy it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def provide(name: str, fill: Callable[[Path], None]) -> Path:
        folder = root / "shared" / name
        folder.parent.mkdir(exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                draft = folder.with_suffix(".draft")  # a worker that fails half-way leaves no folder
                shutil.rmtree(draft, ignore_errors=True)
                fill(draft)
                draft.rename(folder)
        return folder

    return provide


@pytest.fixture
def quick_run(shared_folder: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A trained run of one quick round, to be read or copied. Its task is registered."""
    from simic.training.tiny import quick_config  # only the workers need it

    from esper.simic.training.trainer import Trainer

    config = quick_config(1)
    return shared_folder("quick", lambda folder: Trainer(config, folder).run(progress=False))


@pytest.fixture
def script_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Scripts as modules; tasks that they register are gone with the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(TaskRegistry, "_tasks", dict(TaskRegistry._tasks))
    return importlib.import_module


@pytest.fixture
def run_here(
    script_of: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What a script prints, run in this process with few bootstraps: no time for another start of torch."""

    def run(name: str, *arguments: str) -> str:
        script = script_of(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.setattr(script, "BOOTSTRAPS", 20, raising=False)
        script.main()
        return capsys.readouterr().out

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests of CUDA without a device, and mark all but the default cases of a test as slow."""
    matched: dict[str, list[bool]] = {}
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if mark := item.get_closest_marker("default_cases"):
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            default = any(fnmatchcase(case, pattern) for pattern in mark.args)
            matched.setdefault(test, []).append(default)
            if not default:
                item.add_marker(pytest.mark.slow)
    chosen_by_id = any("::" in argument for argument in config.args)
    for test, found in matched.items():
        if not any(found) and not chosen_by_id:
            raise pytest.UsageError(f"{test}: default_cases matches none of its cases")


def pytest_collection_finish() -> None:
    """Exclude all that exists by now from garbage collection: tests that call it would spend their time there."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks under their own names with a fiftieth of the work."""
    small = {
        name: replace(task, steps=12, batches_per_step=2, batch=16, calibration_size=64)
        for name, task in TaskRegistry._tasks.items()
        if name.startswith("digits")
    }
    monkeypatch.setattr(TaskRegistry, "_tasks", TaskRegistry._tasks | small)
    monkeypatch.setattr("esper.cli.train.taught_config", quickly_taught)


def quickly_taught(episodes: int) -> TrainConfig:
    """The settings of a taught run, with little imitation."""
    config = taught_config(episodes)
    return replace(config, teach=replace(config.teach, betas=(1.0,), folds=2, epochs=2))
