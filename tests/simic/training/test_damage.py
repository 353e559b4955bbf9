"""Runs that were damaged, cut short or crowded out: a clear error or the last good state, never a wrong start."""

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper.leyline import BadValueError, CheckpointError, EsperError, StorageError, head_preset
from esper.leyline.files import folder_taken
from esper.leyline.machine import Machine
from esper.nissa import read_lines
from esper.simic.agent import load_agent, save_agent
from esper.simic.training import runs
from esper.simic.training.config import TrainConfig
from esper.simic.training.named import make_policies
from esper.simic.training.runs import EXTRAS, RunFolder, read_config, read_header
from esper.simic.training.trainer import Trainer
from esper.tamiyo import growth_table
from esper.tolaria import TaskRegistry, get_task

NAME, ROUNDS = "digits_smallest", 4
FILES = ("agent.json", "agent.safetensors")


def config(**changes: Any) -> TrainConfig:  # Any: fields by name
    """A run of a few of the smallest rounds."""
    if NAME not in TaskRegistry.names():
        small = replace(get_task("digits_blind"), name=NAME, steps=5, batches_per_step=1, batch=16, calibration_size=32)
        TaskRegistry.register(small)
    return TrainConfig(**{"task": NAME, "rounds": ROUNDS, "hosts": 2, "members": 1, **changes})


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


def resume(run: Path) -> Trainer:
    """Go on with a run."""
    return Trainer(read_config(run), run, resume=True)


def close(trainer: Trainer) -> None:
    """Let go of the run's files."""
    with trainer.folder:
        pass


def checkpoint(run: Path, rounds: int) -> Path:
    """Where it is."""
    return run / "checkpoints" / f"round-{rounds:05d}"


def contents(run: Path) -> dict[str, bytes]:
    """All files of a run."""
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def results(run: Path) -> tuple[list[dict[str, Any]], bytes, bytes]:
    """Metrics without what depends on the clock, events, and the tensors of the last checkpoint."""
    metrics = [{k: v for k, v in line.items() if k != "timing"} for line in read_lines(run / "metrics.jsonl")]
    last = RunFolder.last_checkpoint(run)
    assert last is not None
    return metrics, (run / "events.jsonl").read_bytes(), (last / "agent.safetensors").read_bytes()


def spoil(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file."""
    path.write_bytes(change(path.read_bytes()))


def rewrite(folder: Path, **changes: Any) -> None:
    """Change a checkpoint's JSON and make its checksum right again."""
    document = json.loads((folder / "agent.json").read_text()) | changes
    document.pop("checksum")
    plain = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    (folder / "agent.json").write_text(json.dumps(document | {"checksum": hashlib.sha256(plain).hexdigest()}))


def emptied(folder: Path) -> Path:
    """A place where nothing is any more."""
    shutil.rmtree(folder)
    return folder


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.target),)


def plant_bomb(folder: Path, *, honest: bool) -> None:
    """A pickle in the place of the tensors, with a digest that is right or not."""
    raw = pickle.dumps(Bomb(folder.parents[2] / "executed"))
    (folder / "agent.safetensors").write_bytes(raw)
    if honest:
        rewrite(folder, weights={"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})


# -- damaged checkpoints ----------------------------------------------------------------------------------------------

DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "half the JSON": (lambda f: spoil(f / FILES[0], lambda raw: raw[: len(raw) // 2]), "truncated or damaged"),
    "no JSON": (lambda f: (f / FILES[0]).unlink(), r"agent\.json cannot be read \(No such file"),
    "half the tensors": (lambda f: spoil(f / FILES[1], lambda raw: raw[: len(raw) // 2]), "truncated or was replaced"),
    "no byte of the tensors": (lambda f: spoil(f / FILES[1], lambda raw: b""), "0 bytes"),
    "no tensors": (lambda f: (f / FILES[1]).unlink(), r"agent\.safetensors cannot be read"),
    "a bit": (lambda f: spoil(f / FILES[1], lambda raw: raw[:-9] + bytes([raw[-9] ^ 4]) + raw[-8:]), "its sha256 is"),
    "a foreign version": (lambda f: rewrite(f, version=7), "version is 7; this Esper reads version 1"),
    "a foreign format": (lambda f: rewrite(f, format="esper-model"), "allowed: 'esper-agent'"),
    "a pickle": (lambda f: plant_bomb(f, honest=False), "truncated or was replaced"),
    "an honest pickle": (lambda f: plant_bomb(f, honest=True), "is no safetensors file"),
    "an empty folder": (lambda f: emptied(f).mkdir(), r"agent\.json cannot be read"),
    "a file": (lambda f: emptied(f).write_text("?"), r"cannot be read \(Not a directory"),
    "another checkpoint": (
        lambda f: shutil.copytree(f.with_name("round-00003"), emptied(f)),
        "holds the checkpoint of round 3",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(run: Path, damage: str) -> None:
    """The newest is damaged: it is named with the reason and set aside, and the run goes on from the one before it.
    Nothing is executed (Requirement 82)."""
    change, reason = DAMAGE[damage]
    change(checkpoint(run, 4))
    events = (run / "events.jsonl").read_bytes()
    told = rf"round-00004 is not used: .*{reason}.* kept as refused-round-00004; going on from round-00003"
    with pytest.warns(RuntimeWarning, match=told):
        again = resume(run)
    close(again)
    assert again.round == 3
    assert again.agent.updates == 3
    assert (run / "checkpoints" / "refused-round-00004").exists() and not checkpoint(run, 4).exists()
    kept = (run / "events.jsonl").read_bytes()
    [tail] = run.glob("events.jsonl.tail-*")
    assert kept + tail.read_bytes() == events and len(list(read_lines(run / "metrics.jsonl"))) == 3
    assert not (run.parent / "executed").exists()
    close(resume(run))  # without a word: what was told is not met again


def test_going_on_from_an_older_checkpoint_is_exact(run: Path, whole: Path) -> None:
    """What is done again comes out as before, and then the newest is good."""
    for rounds in (3, 4):
        spoil(checkpoint(run, rounds) / "agent.safetensors", lambda raw: raw[:-1])
    with pytest.warns(RuntimeWarning, match="going on from round-00002") as told:
        again = resume(run)
    assert [str(each.message).split(" ")[0] for each in told] == ["round-00004", "round-00003"]
    again.run(progress=False)
    assert results(run) == results(whole)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    refused, kept = (["round-00003", "round-00004"], ["round-00002", "round-00003", "round-00004"])
    assert names == [*(f"refused-{name}" for name in refused), *kept]


def test_no_checkpoint_is_good(run: Path) -> None:
    """Then nothing starts, each is named with its reason, and nothing is changed."""
    (checkpoint(run, 2) / "agent.json").unlink()
    plant_bomb(checkpoint(run, 3), honest=True)
    rewrite(checkpoint(run, 4), version=0)
    before = contents(run)
    reasons = r"round-00004: .*version is 0.*round-00003: .*no safetensors.*round-00002: .*cannot be read"
    with pytest.raises(CheckpointError, match=rf"none of the checkpoints .*\({reasons}.*begin anew in another folder"):
        resume(run)
    assert contents(run) == before
    assert not (run.parent / "executed").exists()


def test_lost_checkpoints_are_missed(run: Path) -> None:
    """A run whose metrics tell of rounds does not begin from the start as if there had been none."""
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    with pytest.raises(CheckpointError, match=r"tells of 4 rounds, but .*checkpoints holds no checkpoint; put a copy"):
        resume(run)
    assert contents(run) == before


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_seen(run: Path, name: str) -> None:
    """In many places of both files; but for the layout of the JSON, which means nothing."""
    path, dice = checkpoint(run, 4) / name, random.Random(name)
    raw = path.read_bytes()
    harmless = 0
    for _ in range(100):
        place, bit = dice.randrange(len(raw)), dice.randrange(8)
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :])
        try:
            load_agent(path.parent, EXTRAS)
        except CheckpointError:
            continue
        assert json.loads(path.read_bytes()) == json.loads(raw)
        harmless += 1
    assert harmless < 20


@pytest.mark.parametrize("name", FILES)
def test_any_truncation_is_seen(run: Path, name: str) -> None:
    path, dice = checkpoint(run, 4) / name, random.Random(name)
    raw = path.read_bytes()
    for length in [0, 1, len(raw) - 2, *(dice.randrange(len(raw) - 1) for _ in range(20))]:
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError):
            load_agent(path.parent, EXTRAS)


def test_an_evaluation_does_not_take_an_older_policy(run: Path) -> None:
    """Its figures are of the last checkpoint, always: a damaged one is an error."""
    plant_bomb(checkpoint(run, 4), honest=True)
    task = get_task(NAME)
    with pytest.raises(CheckpointError, match=r"round-00004/agent\.safetensors is no safetensors file"):
        make_policies(str(run), task, growth_table(head_preset("core"), task.slot_config))
    assert not (run.parent / "executed").exists()


# -- a damaged configuration ------------------------------------------------------------------------------------------


def test_any_flipped_bit_of_the_configuration_is_seen(run: Path) -> None:
    """A run does not go on with another seed or rate: what is read is what was written, or an error."""
    path, dice, wanted = run / "config.json", random.Random(0), read_config(run)
    raw = path.read_bytes()
    refused = 0
    for place in dice.sample(range(len(raw)), 300):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << dice.randrange(8)]) + raw[place + 1 :])
        try:
            assert read_config(run) == wanted
        except EsperError as error:
            assert str(run) in str(error) or "config" in str(error)
            refused += 1
    assert refused > 200
    path.write_bytes(raw.replace(b'"seed": 0', b'"seed": 1'))
    with pytest.raises(CheckpointError, match=r"config\.json was changed: it states checksum"):
        resume(run)


def test_where_data_lie_may_differ(run: Path) -> None:
    """A run may be moved to another machine."""
    content = json.loads((run / "config.json").read_text())
    content["config"]["data_dir"] = "elsewhere"
    (run / "config.json").write_text(json.dumps(content))
    assert read_config(run).data_dir == Path("elsewhere")


def test_older_folders_are_read(run: Path) -> None:
    """Those that state no checksum and not how many checkpoints to keep: all, as when they were begun."""
    content = json.loads((run / "config.json").read_text())
    del content["checksum"], content["keep_checkpoints"]
    (run / "config.json").write_text(json.dumps(content))
    assert read_header(run) == (config(), sys.maxsize)
    shutil.copytree(checkpoint(run, 2), checkpoint(run, 1))
    close(resume(run))
    assert checkpoint(run, 1).exists()


# -- damaged logs -----------------------------------------------------------------------------------------------------


def offset(run: Path, rounds: int, name: str) -> int:
    """Where a log was when a checkpoint was written."""
    progress = json.loads((checkpoint(run, rounds) / "agent.json").read_text())["progress"]
    return int(progress[name]["size"])


@pytest.mark.parametrize("name", ["events", "metrics"])
def test_a_torn_line_behind_the_checkpoint(run: Path, name: str) -> None:
    """A half round, killed in mid-line: the run goes on from its last checkpoint, the torn end is kept aside."""
    log = run / f"{name}.jsonl"
    before = log.read_bytes()
    spoil(log, lambda raw: raw + b'{"kind":"stage"}\n{"kind":')
    again = resume(run)
    close(again)
    assert again.round == 4
    assert log.read_bytes() == before
    [tail] = run.glob("*.tail-*")
    assert tail.read_bytes() == b'{"kind":"stage"}\n{"kind":'


@pytest.mark.parametrize("name", ["events", "metrics"])
def test_a_log_that_was_cut(run: Path, whole: Path, name: str) -> None:
    """In mid-line, before the last checkpoint: lines are lost that no later checkpoint brings back. The run goes on
    from the checkpoint whose lines are all there, and writes the others again."""
    size = offset(run, 3, name)
    spoil(run / f"{name}.jsonl", lambda raw: raw[: size + 10])
    with pytest.warns(RuntimeWarning, match=rf"{name}\.jsonl has {size + 10} bytes, round-00004 .*lines are lost"):
        again = resume(run)
    assert again.round == 3
    again.run(progress=False)
    assert results(run) == results(whole)


@pytest.mark.parametrize("name", ["events", "metrics"])
def test_a_log_that_is_lost(run: Path, name: str) -> None:
    """No checkpoint has all its lines: an error that names them."""
    (run / f"{name}.jsonl").unlink()
    before = contents(run)
    with pytest.raises(CheckpointError, match=rf"{name}\.jsonl has 0 bytes, round-00004 .*round-00002 .*begin anew"):
        resume(run)
    assert contents(run) == before


@pytest.mark.parametrize("name", ["events", "metrics"])
@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: b" " + raw,
        lambda raw: raw.replace(b"round", b"rounb", 1),
        lambda raw: raw[:200] + b"X" * 50 + raw[250:],
        lambda raw: raw.split(b"\n", 1)[1] + raw.split(b"\n", 1)[0] + b"\n",
    ],
    ids=["longer", "one letter", "garbage", "another order"],
)
def test_a_log_that_was_edited(run: Path, name: str, edit: Callable[[bytes], bytes]) -> None:
    """Every line is proven to be what was written, however long it is."""
    spoil(run / f"{name}.jsonl", edit)
    before = contents(run)
    with pytest.raises(CheckpointError, match=rf"{name}\.jsonl was changed: its first \d+ bytes are not those"):
        resume(run)
    assert contents(run) == before


def test_a_log_that_was_edited_behind_a_checkpoint(run: Path, whole: Path) -> None:
    """The run goes on from the last checkpoint whose lines are as they were."""
    size = offset(run, 3, "events")
    spoil(run / "events.jsonl", lambda raw: raw[: size + 5] + b"X" + raw[size + 6 :])
    with pytest.warns(RuntimeWarning, match=r"round-00004 is not used: .*events\.jsonl was changed"):
        again = resume(run)
    assert again.round == 3
    again.run(progress=False)
    assert results(run) == results(whole)


@pytest.mark.parametrize("left", ["metrics.jsonl", "events.jsonl", "sessions.jsonl"])
def test_a_run_that_has_lost_its_checkpoints(run: Path, left: str) -> None:
    """Whichever file still tells of rounds: it is not begun again as if there had been none."""
    shutil.rmtree(run / "checkpoints")
    for name in {"metrics.jsonl", "events.jsonl", "sessions.jsonl"} - {left}:
        (run / name).unlink()
    before = contents(run)
    with pytest.raises(CheckpointError, match=rf"{left} tells of {ROUNDS} rounds, but .* holds no checkpoint"):
        resume(run)
    assert contents(run) == before


def test_what_was_not_as_it_was_is_written_down(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged checkpoint and another machine: told once on the screen, and kept with the run."""
    spoil(checkpoint(run, 4) / "agent.safetensors", lambda raw: raw[:-1])
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: cls("2.99", 3, "abacus")))
    with pytest.warns(RuntimeWarning) as told:
        resume(run).run(progress=False)
    *_, resumed, ended = read_lines(run / "sessions.jsonl")
    assert (resumed["kind"], resumed["round"], ended["kind"]) == ("resumed", 3, "ended")
    assert resumed["remarks"] == [str(each.message) for each in told]
    assert [remark.split(":")[0] for remark in resumed["remarks"]] == [
        "round-00004 is not used",
        "the run goes on, but not bit for bit",
    ]
    assert resumed["machine"] == {"torch": "2.99", "threads": 3, "cpu": "abacus"}


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
    told = rf"{what} cannot be written \(File too large\); make room .*go on with --resume {run}"
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
    with pytest.raises(StorageError, match=r"round-00001 cannot be written \(.*\).* go on with --resume"):
        trainer.run(progress=False)
    (tmp_path / "run" / "checkpoints").unlink()
    with pytest.warns(RuntimeWarning, match="no checkpoint yet: it begins again with its first round"):
        again = resume(tmp_path / "run")
    again.run(progress=False)
    assert again.round == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_one_process_at_a_time(run: Path) -> None:
    """A run that still trains is not gone on with beside it, and nothing of it is tidied away: not even what looks like
    the leftovers of a writer that was killed."""
    work = run / "checkpoints" / ".round-00005.abcdefgh" / "new"
    with resume(run).folder:
        work.mkdir(parents=True)
        spoil(checkpoint(run, 4) / "agent.json", lambda raw: raw[:-9])
        with pytest.raises(BadValueError, match=r"run is being written by another process: one at a time"):
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
    with folder_taken(tmp_path / "other"), pytest.raises(BadValueError, match="by another process"):
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

    trainer = Trainer(config(), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "save_agent", interrupted)
        trainer.run(progress=False)
    assert f"stopped after round 1; go on with --resume {tmp_path / 'run'}" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["round-00001"]
    again = resume(tmp_path / "run")
    assert again.round == 1
    again.run(progress=False)
    assert results(tmp_path / "run") == results(whole)


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


# -- how many are kept ------------------------------------------------------------------------------------------------


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
    for place in (run / ".config.json.abcd_123", run / "checkpoints" / ".round-00005.abcd_123"):
        (place / "new").mkdir(parents=True)
    shutil.copytree(checkpoint(run, 2), checkpoint(run, 1))  # one too many: it was to be removed
    close(resume(run))
    assert not checkpoint(run, 1).exists()
    assert not [path for path in run.rglob(".*")]
    (run.parent / "other" / ".config.json.abcd_123").mkdir(parents=True)
    Trainer(config(rounds=1), run.parent / "other").run(progress=False)
    assert not [path for path in (run.parent / "other").rglob(".*")]
