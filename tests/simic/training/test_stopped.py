"""Runs that were crowded out or stopped: the last good state is whole, and nothing lies beside it."""

import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from simic.training.smallest import checkpoint, close, config, results, resume, spoil

from esper.leyline import BadValueError, StorageError
from esper.nissa import Event, RoundMeasured
from esper.simic.agent import save_agent
from esper.simic.training import run_folder as runs
from esper.simic.training.run_folder import RunFolder
from esper.simic.training.trainer import Trainer
from esper.storage.files import folder_lock

# -- a full disk, a folder that cannot be written ---------------------------------------------------------------------


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A limit of the system on the size of files, for this process: a disk that takes no more of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("place", ["events", "checkpoint"])
@pytest.mark.default_cases("checkpoint")
def test_a_disk_that_takes_no_more(run: Path, whole: Path, place: str) -> None:
    """In the middle of the log, or of a checkpoint: the error says where and how to go on. The last good state is
    whole, nothing lies beside it, and once there is room the run ends as if nothing had happened."""
    shutil.rmtree(checkpoint(run, 4))
    again = resume(run)
    room = (run / "events.jsonl").stat().st_size + 50
    if place == "checkpoint":
        room = (checkpoint(run, 3) / "agent.safetensors").stat().st_size // 2
        assert room > 2 * (run / "events.jsonl").stat().st_size
    what = "events.jsonl" if place == "events" else "round-00004"
    told = rf"{what} cannot be written \(File too large\); make room .*continue with --resume {run}"
    with largest_file(room), pytest.raises(StorageError, match=told):
        again.run(progress=False)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["round-00002", "round-00003"]
    again = resume(run)
    assert again.round == 3
    again.run(progress=False)
    assert results(run) == results(whole)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """Permissions do not bind root; a file where a folder should be stops everybody."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match=r"run cannot be written \(Not a directory\); make room there, or make it w"):
        Trainer(config(), tmp_path / "file" / "run")
    trainer = Trainer(config(rounds=1), tmp_path / "run")
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError, match=r"round-00001 cannot be written \(.*\).* continue with --resume"):
        trainer.run(progress=False)
    (tmp_path / "run" / "checkpoints").unlink()
    with pytest.warns(RuntimeWarning, match="no checkpoint yet: it begins again with its first round"):
        again = resume(tmp_path / "run")
    again.run(progress=False)
    assert again.round == 1
    assert (tmp_path / "file").read_text() == "mine"


# -- one process at a time --------------------------------------------------------------------------------------------


def test_one_process_at_a_time(run: Path) -> None:
    """A run that still trains is not gone on with beside it, and nothing of it is tidied away: not even what looks like
    the leftovers of a writer that was killed."""
    work = run / "checkpoints" / ".round-00005.esper-tmp" / "new"
    with resume(run).folder:
        work.mkdir(parents=True)
        spoil(checkpoint(run, 4) / "agent.json", lambda raw: raw[:-9])
        with pytest.raises(BadValueError, match=r"run is being written by another process, or by .*; end that first"):
            resume(run)
        assert work.exists()
        assert checkpoint(run, 4).exists()
    with pytest.warns(RuntimeWarning, match="round-00004 is not used"):
        close(resume(run))
    assert not work.exists()


def test_one_process_begins(tmp_path: Path) -> None:
    """The second one finds the folder taken, or in use."""
    trainer = Trainer(config(rounds=1), tmp_path / "run")
    with trainer.folder, pytest.raises(BadValueError, match="is in use"):
        Trainer(config(rounds=1), tmp_path / "run")
    (tmp_path / "other").mkdir()
    with folder_lock(tmp_path / "other"), pytest.raises(BadValueError, match="by another process"):
        RunFolder.create(tmp_path / "other", config())
    assert list((tmp_path / "other").iterdir()) == []


# -- stopped by hand --------------------------------------------------------------------------------------------------


def test_ctrl_c_during_a_checkpoint(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits until the checkpoint is written, then the run ends; going on, nothing is missing."""

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        save_agent(*arguments)

    trainer, shown = Trainer(config(), tmp_path / "run"), list[Event]()
    with monkeypatch.context() as patch:
        patch.setattr(runs, "save_agent", interrupted)
        patch.setattr(trainer.recorder.hub, "publish", shown.append)
        trainer.run(progress=False)
    assert f"stopped after round 1; continue with --resume {tmp_path / 'run'}" in capsys.readouterr().out
    assert [event.round for event in shown if isinstance(event, RoundMeasured)] == [0], "it counts, so it is shown"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["round-00001"]
    again = resume(tmp_path / "run")
    assert again.round == 1
    again.run(progress=False)
    assert results(tmp_path / "run") == results(whole)


def test_ctrl_c_does_not_hide_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops a run whose checkpoint is failing is told of that."""

    def fails(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        raise StorageError("round-00001 cannot be written (No space left on device)")

    monkeypatch.setattr(runs, "save_agent", fails)
    with pytest.raises(StorageError, match="No space left on device"):
        Trainer(config(), tmp_path / "run").run(progress=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_a_round(
    run: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """By Ctrl-C or by SIGTERM: it ends with the last complete round, and the signal means again what it meant."""
    shutil.rmtree(checkpoint(run, 4))
    before, again = signal.getsignal(number), resume(run)

    def stopped(*arguments: Any) -> None:
        again.folder.events.write(kind="stage", half=True)
        signal.raise_signal(number)

    monkeypatch.setattr(again.collector, "collect", stopped)
    again.run(progress=False)
    assert "stopped after round 3" in capsys.readouterr().out
    assert signal.getsignal(number) == before
    after = resume(run)
    after.run(progress=False)
    assert results(run) == results(whole)


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_the_last_checkpoints_are_kept(run: Path, tmp_path: Path) -> None:
    """Three by default, or as many as the run was begun with; also after it is gone on with."""
    assert sorted(path.name[-1] for path in (run / "checkpoints").iterdir()) == ["2", "3", "4"]
    trainer = Trainer(config(rounds=3), tmp_path / "one", keep_checkpoints=1)
    with trainer.folder:
        trainer.run_round()
        trainer.run_round()
    assert [path.name for path in (tmp_path / "one" / "checkpoints").iterdir()] == ["round-00002"]
    resume(tmp_path / "one").run(progress=False)
    assert [path.name for path in (tmp_path / "one" / "checkpoints").iterdir()] == ["round-00003"]
    with pytest.raises(BadValueError, match="keep"):
        Trainer(config(), tmp_path / "none", keep_checkpoints=0)
    assert not (tmp_path / "none").exists()


def test_what_a_killed_process_left_is_cleaned_up(run: Path) -> None:
    """In the run's folder and among its checkpoints; a folder with nothing else in it is free for a new run."""
    for place in (run / ".config.json.esper-tmp", run / "checkpoints" / ".round-00005.esper-tmp"):
        (place / "new").mkdir(parents=True)
    shutil.copytree(checkpoint(run, 2), checkpoint(run, 1))  # one too many: it was to be removed
    close(resume(run))
    assert not checkpoint(run, 1).exists()
    assert not [path for path in run.rglob(".*")]
    (run.parent / "other" / ".config.json.esper-tmp").mkdir(parents=True)
    Trainer(config(rounds=1), run.parent / "other").run(progress=False)
    assert not [path for path in (run.parent / "other").rglob(".*")]
