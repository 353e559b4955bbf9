"""Logs that were torn, cut, lost or edited: a run goes on where all its lines are there, or nothing starts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from simic.training.smallest import checkpoint, close, contents, results, resume, spoil

from esper.leyline import CheckpointError


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
