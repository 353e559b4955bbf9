"""The benchmark on memory environments at its smallest, and the one piece of RecurrentPPO that it replaces."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench import run_script

from esper.leyline import BadValueError

Load = Callable[[str], ModuleType]


@pytest.mark.slow
def test_memory_envs(tmp_path: Path) -> None:
    """Both agents on three environments: a row each and the difference; finished cells are not run again."""
    for package in ("sb3_contrib", "popgym", "minigrid"):
        pytest.importorskip(package)
    arguments = ["--part", "development", "--steps", "4096", "--seeds", "2"]
    folders = ["--keep", str(tmp_path / "keep"), "--out", str(tmp_path / "out")]
    printed = run_script("memory_envs.py", tmp_path, *arguments, *folders)
    rows = [line.split() for line in printed.splitlines() if line.startswith(("learn  ", "RecurrentPPO  "))]
    assert [(row[0], len(row)) for row in rows] == [("learn", 10), ("RecurrentPPO", 7)]
    written = json.loads((tmp_path / "out" / "memory_envs.json").read_text())
    assert written["settings"] == {"steps": 4096, "envs": 16, "seeds": 2, "part": "development"}
    ours = written["agents"]["learn"]
    assert [len(values) for values in ours["returns"].values()] == [2, 2, 2] and len(ours["difference"]) == 2
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "keep").iterdir()}
    assert len(kept) == 3 + 2 * 3 * 2
    table = printed[printed.index("Normalised") :]
    assert run_script("memory_envs.py", tmp_path, *arguments, *folders).lstrip() == table
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "keep").iterdir()} == kept


def test_returns_are_normalised_and_judged(
    script_of: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: random 0.2, best 1; ours 0.6 and 0.8, theirs 0.4 and 1.0 on one environment, equal on the other."""
    module = script_of("memory_envs")
    tasks = [task for task in module.TASKS.values() if task.part == "final"]
    returns = {
        ("learn", 0): 0.6,
        ("learn", 1): 0.8,
        ("RecurrentPPO", 0): 0.4,
        ("RecurrentPPO", 1): 1.0,
        ("random", 0): 0.2,
    }

    def run(cell: tuple[str, str, int, int]) -> dict[str, object]:
        agent, task, seed, _ = cell
        value = returns[agent, seed] if task == tasks[0].name or agent == "random" else 0.6
        return {"return": value, "seconds": 3.0, "settings": cell.settings}  # type: ignore[attr-defined]

    def at_once(wanted: list[tuple[str, str, int, int]], *_: object) -> dict[object, dict[str, object]]:
        return {cell: run(cell) for cell in wanted}

    monkeypatch.setattr(module, "run_cells", at_once)
    monkeypatch.setattr("sys.argv", ["x", "--part", "final", "--seeds", "2", "--out", str(tmp_path)])
    module.main()
    written = json.loads((tmp_path / "memory_envs.json").read_text())["agents"]
    assert written["learn"]["returns"][tasks[0].name] == pytest.approx([0.5, 0.75])
    assert written["RecurrentPPO"]["returns"][tasks[0].name] == pytest.approx([0.25, 1.0])
    assert written["learn"]["mean"] == pytest.approx(0.5625)
    low, high = written["learn"]["difference"]  # of +0.125 and −0.125
    assert (low + high) / 2 == pytest.approx(0.0) and high == pytest.approx(0.125 * 12.706, rel=1e-3)
    assert written["learn"]["reached"] is False
    assert "+0.000" in capsys.readouterr().out


def test_a_sequence_in_one_call_is_their_lstm_step_by_step(script_of: Load) -> None:
    """Also from states that a new episode discards; a start within a sequence is refused."""
    policies = pytest.importorskip("sb3_contrib.common.recurrent.policies")
    process = script_of("memory_envs").process_sequence
    theirs = policies.RecurrentActorCriticPolicy._process_sequence
    lstm = torch.nn.LSTM(3, 8)
    features, state = torch.randn(4 * 6, 3), (torch.randn(1, 4, 8), torch.randn(1, 4, 8))
    starts = torch.zeros(4, 6)
    starts[[1, 3], 0] = 1
    expected, found = (call(features, state, starts.flatten(), lstm) for call in (theirs, process))
    for one, other in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
        torch.testing.assert_close(one, other)
    starts[0, 2] = 1
    with pytest.raises(BadValueError, match="starts within a sequence"):
        process(features, state, starts.flatten(), lstm)
