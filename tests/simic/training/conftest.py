"""The smallest run, trained once for all tests."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from simic.training.smallest import config

from esper.simic.training.trainer import Trainer


@pytest.fixture(scope="module")
def whole(shared_folder: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A run that nothing happened to."""
    settings = config()  # registers its task in this file of tests too
    return shared_folder("smallest", lambda folder: Trainer(settings, folder).run(progress=False))


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to damage: all rounds are done, the last three checkpoints are there."""
    return Path(shutil.copytree(whole, tmp_path / "run"))
