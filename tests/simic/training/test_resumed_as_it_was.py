"""A run goes on with its own settings and its own data, or not at all."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from simic.training.tiny import quick_config

from esper.leyline import BadValueError, CheckpointError
from esper.simic.training import run_folder as runs
from esper.simic.training.run_folder import read_config
from esper.simic.training.trainer import Trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one of three rounds."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    trainer = Trainer(quick_config(3), folder)
    with trainer.folder:
        trainer.run_round()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_other_settings_are_refused(run: Path) -> None:
    """All that differ are named, and nothing is touched; where data lie is no such setting."""
    own = read_config(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    other = replace(own, seed=99, rounds=5, batch=4, reward=replace(own.reward, rho=7.0))
    named = r"rounds 5, begun with 3; batch 4, begun with None; seed 99, begun with 0; reward .*rho=7.0"
    with pytest.raises(BadValueError, match=named):
        Trainer(other, run, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    again = Trainer(replace(own, data_dir=run), run, resume=True)
    with again.folder:
        assert again.round == 1


def test_other_data_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of the same name may be another copy."""
    own = read_config(run)
    monkeypatch.setattr(runs, "data_digest", lambda data: "0" * 32)
    with pytest.raises(
        CheckpointError, match=r"trained on other data: those of .* have digest 0{32}, it had .*--data-dir"
    ):
        Trainer(own, run, resume=True)
    monkeypatch.undo()
    again = Trainer(own, run, resume=True)  # nothing was lost by the attempt
    with again.folder:
        assert again.round == 1


def test_no_run_begins_inside_another(run: Path) -> None:
    """Neither directly nor further down: its files would be taken for those of the outer run."""
    for inside in (run / "config.json-2", run / "checkpoints" / "new" / "run"):
        with pytest.raises(BadValueError, match=r"lies inside the run .*; choose an --out outside it"):
            Trainer(quick_config(1), inside)
        assert not inside.exists()
