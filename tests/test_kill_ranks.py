"""Kills of ranks: what is stored, what is compared, and what a failure is."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from simic.training.tiny import quick_config

from esper.simic.training.trainer import Trainer

ARGUMENTS = ["--runs", "3", "--rounds", "1"]


@pytest.fixture
def script(script_of: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Runs without torchrun: one fails, one trains with another seed, and one ends before its kill."""
    loaded = script_of("kill_ranks")

    def run(folder: Path, _: argparse.Namespace, kills: str = "") -> str | None:
        assert bool(kills) == (folder.name != "whole")
        folder.with_name(f"{folder.name}.restarts").write_text(str(int(folder.name != "run-2")))
        config = replace(quick_config(1), seed=int(folder.name == "run-3"))
        if folder.name == "run-1":
            folder.mkdir()
            return "torchrun ended with 1: the disk is full"
        Trainer(config, folder).run(progress=False)
        return None

    monkeypatch.setattr(loaded, "run", run)
    return loaded


def kill(run_here: Callable[..., str], folder: Path, *more: str) -> tuple[str, dict[str, object]]:
    """What is printed and written; 1 of 3 runs is equal, so the script fails."""
    with pytest.raises(SystemExit, match="1"):
        run_here("kill_ranks", *ARGUMENTS, *more, "--keep", str(folder / "keep"), "--out", str(folder / "out"))
    written: dict[str, object] = json.loads((folder / "out" / "kill_ranks.json").read_text())
    return (folder / "keep" / "runs.jsonl").read_text(), written


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of a run without checkpoints
def test_a_second_call_continues(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: Callable[..., str]
) -> None:
    """A failure and a difference are outcomes. Nothing that is stored runs again."""
    stored, written = kill(run_here, tmp_path)
    assert (written["runs_equal"], written["failed"], written["restarts"], written["runs"]) == (1, 1, 2, 3)
    equal, failed, spared, other = (json.loads(line)["run"] for line in stored.splitlines())
    assert (equal["failure"], equal["differences"]) == (None, [])
    assert (failed["failure"], "differences" in failed) == ("torchrun ended with 1: the disk is full", False)
    assert spared["restarts"] == 0
    assert "metrics.jsonl" in other["differences"]
    assert sorted(path.name for path in (tmp_path / "keep").iterdir()) == [
        "runs.jsonl",
        "whole",
        "whole.done",
        "whole.restarts",
    ]

    first = stored.splitlines(keepends=True)
    (tmp_path / "keep" / "runs.jsonl").write_text("".join(first[:3]))  # stopped before the last one
    begun, run = [], script.run

    def noted(folder: Path, arguments: argparse.Namespace, kills: str = "") -> str | None:
        begun.append(folder.name)
        result: str | None = run(folder, arguments, kills)
        return result

    monkeypatch.setattr(script, "run", noted)
    again, _ = kill(run_here, tmp_path)
    assert begun == ["run-3"]
    assert again.splitlines()[:3] == stored.splitlines()[:3]


def test_the_moments_of_kills(script_of: Callable[[str], ModuleType]) -> None:
    """They depend on the number alone, hit all ranks, by clock and by file, and half of the runs twice."""
    script = script_of("kill_ranks")
    drawn = [script.draw_kills(script.random.Random(f"0 {number}"), 3, 5.0) for number in range(60)]
    assert drawn[7] == script.draw_kills(script.random.Random("0 7"), 3, 5.0)
    words = [kill.split(":") for kills in drawn for kill in kills.split(",")]
    assert {rank for _, rank, _, _ in words} == {"0", "1", "2"}
    assert {(rank, kind) for _, rank, kind, _ in words} >= {("0", "file"), ("0", "clock"), ("1", "clock")}
    assert 20 < sum("," in kills for kills in drawn) < 40
