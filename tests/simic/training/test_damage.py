"""Damaged checkpoints and configurations: a clear error or the last good state, never a wrong start."""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simic.training.smallest import NAME, ROUNDS, checkpoint, close, contents, results, resume, spoil

from esper.leyline import CheckpointError, EsperError, head_preset
from esper.leyline.records import config_checksum
from esper.simic.agent import load_agent
from esper.simic.evaluation.policies import PolicySpec, make_policy
from esper.simic.training.run_folder import EXTRAS, read_config
from esper.storage.logs import read_lines
from esper.storage.stored import Machine
from esper.tamiyo import growth_table
from esper.tolaria import get_task

FILES = ("agent.json", "agent.safetensors")


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


# -- checkpoints ------------------------------------------------------------------------------------------------------


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


@pytest.mark.requirement(82)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(run: Path, damage: str) -> None:
    """The damaged checkpoint is named and set aside, never executed; the run resumes from the one before."""
    change, reason = DAMAGE[damage]
    change(checkpoint(run, 4))
    events = (run / "events.jsonl").read_bytes()
    told = rf"round-00004 is not used: .*{reason}.* kept as refused-round-00004; continuing from round-00003"
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
    with pytest.warns(RuntimeWarning, match="continuing from round-00002") as told:
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
        make_policy(PolicySpec.parse(str(run)), task, growth_table(head_preset("core"), task.slot_config))
    assert not (run.parent / "executed").exists()


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
        "the run continues, but not bit for bit",
    ]
    assert resumed["machine"] == {"torch": "2.99", "threads": 3, "cpu": "abacus"}


# -- the configuration ------------------------------------------------------------------------------------------------


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


@pytest.mark.invariant(15)
@pytest.mark.parametrize("proven", [True, False], ids=["valid checksum", "no checksum"])
@pytest.mark.parametrize("place", ["config", "ppo"])
def test_an_unknown_setting_is_refused_by_name(run: Path, place: str, proven: bool) -> None:
    """A setting that this version does not know may have mattered to the run, so it is never dropped."""
    content = json.loads((run / "config.json").read_text())
    values = content["config"] if place == "config" else content["config"]["ppo"]
    values["antigravity"] = 1
    del content["checksum"]
    if proven:
        content["checksum"] = config_checksum(content)
    (run / "config.json").write_text(json.dumps(content))
    with pytest.raises(EsperError, match=r"unknown keys \['antigravity'\].*allowed: \['") as refused:
        read_config(run)
    assert place in str(refused.value)
    with pytest.raises(EsperError, match="antigravity"):
        resume(run)
