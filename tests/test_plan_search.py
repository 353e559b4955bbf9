"""`benchmarks/plan_search.py` at its smallest."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from simic.training.tiny import NAME, tiny_task


@pytest.mark.slow
def test_plan_search(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Two searches of each method on short episodes: a row each, the difference of their means; searches that are
    stored are not repeated."""
    tiny_task()
    arguments = ["--task", NAME, "--episodes", "32", "--searches", "2", "--hosts", "3", "--margin", "0.5"]
    folders = ["--plans", str(tmp_path / "plans"), "--out", str(tmp_path / "out")]
    printed = run_here("plan_search", *arguments, *folders)
    rows = [line.split()[:3] for line in printed.splitlines() if line.startswith(("model ", "halving "))]
    assert rows[:4] == [["model", "16", "100"], ["model", "16", "101"], ["halving", "32", "0"], ["halving", "32", "1"]]
    found = json.loads((tmp_path / "out" / f"plan_search_{NAME}.json").read_text())
    model, halving = (np.array(found["searches_by_method"][method]["objective"]) for method in ("model", "halving"))
    assert model.shape == halving.shape == (2, 3)
    assert found["difference"]["mean"] == pytest.approx(model.mean() - halving.mean())
    assert (found["difference"]["margin"], found["difference"]["enough_seeds"]) == (0.5, False)
    assert "machine" in found
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "plans").iterdir()}
    assert len(written) == 4
    again = run_here("plan_search", *arguments, *folders)
    assert [line for line in again.splitlines() if "@" in line] == [
        line for line in printed.splitlines() if "@" in line
    ]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "plans").iterdir()} == written


def test_too_few_episodes_are_refused(run_here: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything runs."""
    with pytest.raises(SystemExit, match="2"):
        run_here("plan_search", "--episodes", "31")
    assert "--episodes must be at least 32" in capsys.readouterr().err
