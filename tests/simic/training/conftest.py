"""The smallest run, once for each file of tests."""

import shutil
from pathlib import Path

import pytest
from simic.training.smallest import config

from esper.simic.training.trainer import Trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    Trainer(config(), folder).run(progress=False)
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to damage: all rounds are done, the last three checkpoints are there."""
    return Path(shutil.copytree(whole, tmp_path / "run"))
