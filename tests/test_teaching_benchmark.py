"""`benchmarks/teaching.py` at its smallest."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from simic.training.tiny import NAME, tiny_task


@pytest.mark.slow
def test_teaching(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Two seeds are taught, trained for a round and compared with the plans of two searches; a second call continues
    with what is stored."""
    tiny_task()
    sizes = ["--teach", "90", "--rounds", "1", "--hosts", "8", "--seeds", "0", "1", "--eval-hosts", "2"]
    folders = ["--keep", str(tmp_path / "keep"), "--out", str(tmp_path / "out")]
    printed = run_here("teaching", "--task", NAME, *sizes, "--against", "wait", *folders)
    for row in ("taught (2 seeds)", "run (2 seeds)", "schedule:plan (2 seeds)", "wait", "taught (2 seeds) − wait"):
        assert row in printed
    found = json.loads((tmp_path / "out" / f"teaching_{NAME}_validation.json").read_text())
    assert [len(policy["by_seed"]) for policy in found["policies"].values()] == [2, 2, 2, 1]
    assert str(tmp_path) not in json.dumps(found), "no paths of a machine"
    written = (tmp_path / "keep" / "plan0.json").stat().st_mtime_ns
    run_here("teaching", "--task", NAME, *sizes, "--against", "wait", *folders, "--stage", "search", "evaluate")
    assert (tmp_path / "keep" / "plan0.json").stat().st_mtime_ns == written
