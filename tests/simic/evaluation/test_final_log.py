"""Signatures of final evaluations: also those of the runs that a run began with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from simic.training.tiny import quick_config

from esper.simic.evaluation.final_log import sign_final, sign_policies
from esper.simic.evaluation.policies import PolicySpec
from esper.simic.training.run_folder import RunFolder

ENTRY = {"when": "then", "task": "t", "hosts": 2, "seed": 1}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs by short names, in an empty folder."""
    monkeypatch.chdir(tmp_path)


def configure(name: str, start: str | None = None) -> Path:
    """A run that has only been configured."""
    config = replace(quick_config(), start=None if start is None else Path(start))
    with RunFolder.create(Path(name), config):
        return Path(name)


def test_a_look_is_inherited() -> None:
    """Through all generations; the signature itself goes into the run alone."""
    parent, child, grandchild = configure("a"), configure("b", "a"), configure("c", "b")
    assert sign_final([parent], ENTRY) == []
    (warning,) = sign_final([grandchild], {**ENTRY, "when": "later"})
    assert warning == (
        "c started from the controller of a, which has been in a final evaluation once at then (t, 2 hosts, seed 1): "
        "its figures on test images are no longer those of a first look"
    )
    assert not (child / "final.jsonl").exists()
    assert len((parent / "final.jsonl").read_text().splitlines()) == 1
    again = sign_final([grandchild, child], ENTRY)
    assert [words.split(" has been")[0] for words in again] == [
        "c", "c started from the controller of a, which", "b started from the controller of a, which",
    ]  # fmt: skip


def test_going_on_is_no_inherited_look_either() -> None:
    """Parent and child in one evaluation that was stopped and begun again."""
    both = [configure("a"), configure("b", "a")]
    assert sign_final(both, ENTRY, resumed=True) == []
    assert sign_final(both, {**ENTRY, "when": "later"}, resumed=True) == []
    assert len(sign_final(both, {**ENTRY, "seed": 2}, resumed=True)) == 3


def test_the_chain_ends() -> None:
    """At a folder that is gone, at one that is no run, and where it comes back to itself."""
    gone, around = configure("a", "gone"), configure("b", "c")
    configure("c", "b")
    Path("no_run").mkdir()
    Path("no_run/final.jsonl").write_text(json.dumps(ENTRY) + "\n")
    stranger = configure("d", "no_run")
    assert sign_final([gone, around], ENTRY) == []
    assert "d started from the controller of no_run, which has been" in sign_final([stranger], ENTRY)[0]
    warnings = sign_final([Path("c")], ENTRY)
    assert [words.split(" has been")[0] for words in warnings] == ["c started from the controller of b, which"]


def test_a_run_of_two_policies_is_signed_once() -> None:
    for name in "ab":
        configure(name)
    assert sign_policies([PolicySpec.parse(text) for text in ("a+b", "./a", "wait")], ["t", "u"], 4, 9) == []
    (line,) = Path("a/final.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["task"], entry["hosts"], entry["seed"]) == ("t,u", 4, 9)
    assert entry["policies"] == ["a+b", "./a", "wait"]


def test_a_look_is_inherited_after_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run and what it started from were moved together, and the working folder is another."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    sign_final([configure("a")], ENTRY)
    configure("b", "a")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").rename(tmp_path / "there")
    (warning,) = sign_final([Path("there/b")], ENTRY)
    assert warning.startswith(
        "there/b started from the controller of there/a, which has been in a final evaluation once"
    )
