"""`benchmarks/teaching.py` and `benchmarks/ppo_defaults.py` at their smallest."""

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
    assert found["provenance"]["command"].startswith(
        f"python benchmarks/teaching.py --task {NAME} --teach 90 --rounds 1 "
    )
    written = (tmp_path / "keep" / "plan0.json").stat().st_mtime_ns
    run_here("teaching", "--task", NAME, *sizes, "--against", "wait", *folders, "--stage", "search", "evaluate")
    assert (tmp_path / "keep" / "plan0.json").stat().st_mtime_ns == written


@pytest.mark.slow
def test_seeds_together(tmp_path: Path, run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage by stage in shared fleets, as a GPU is lent: the searches, the imitation, PPO, the opponents, the table. A
    second call plays nothing again, also if it was killed between a search and its file."""
    tiny_task()
    sizes = ["--task", NAME, "--teach", "90", "--rounds", "1", "--hosts", "8", "--seeds", "0", "1", "--eval-hosts", "2"]
    common = [
        *sizes,
        "--against",
        "wait",
        "--together",
        "--keep",
        str(tmp_path / "keep"),
        "--out",
        str(tmp_path / "out"),
    ]
    for stage in ("records", "imitate", "train", "search", "heuristic"):
        run_here("teaching", *common, "--stage", stage)
    keep = tmp_path / "keep"
    assert {path.name for path in (keep / "runs").iterdir()} == {"seeds.json", "seed0", "seed1"}
    plan = (keep / "plan0.json").read_text()
    (keep / "plan0.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr("esper.simic.evaluation.arena.play_episode", lambda *_: pytest.fail("it was recorded"))
        run_here("teaching", *common, "--stage", "records", "imitate", "search", "heuristic")
    assert (keep / "plan0.json").read_text() == plan
    printed = run_here("teaching", *common, "--stage", "evaluate")
    for row in (
        "taught (2 seeds)",
        "seed (2 seeds)",
        "schedule:plan (2 seeds)",
        "heuristic:heuristic (2 seeds)",
        "wait",
    ):
        assert row in printed


@pytest.mark.slow
def test_the_course_of_a_run(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """With --every 1, the policy after each round is compared with the start; likeliest actions are not played."""
    tiny_task()
    sizes = ["--teach", "90", "--rounds", "2", "--every", "1", "--hosts", "8", "--seeds", "0", "1", "--eval-hosts", "2"]
    folders = ["--keep", str(tmp_path / "keep"), "--out", str(tmp_path / "out")]
    printed = run_here("teaching", "--task", NAME, *sizes, "--against", "wait", *folders)
    found = json.loads((tmp_path / "out" / f"teaching_{NAME}_course.json").read_text())
    names = ["taught0+taught1", "round1-0+round1-1", "run0+run1", "schedule:plan0.json+plan1.json", "wait"]
    assert list(found["policies"]) == names
    assert all(policy["greedy"] is None for policy in found["policies"].values())
    assert "taught (2 seeds) − run (2 seeds)" in printed


@pytest.mark.slow
def test_ppo_defaults(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Two settings of two seeds each: a row per setting, and the mean objective of every seed."""
    tiny_task()
    sizes = ["--episodes", "12", "--seeds", "0", "1", "--eval-hosts", "2", "--settings", "core", "commit"]
    folders = ["--keep", str(tmp_path / "keep"), "--out", str(tmp_path / "out")]
    printed = run_here("ppo_defaults", "--tasks", NAME, *sizes, *folders)
    assert [line.split()[0] for line in printed.splitlines() if "±" in line] == ["core", "commit"]
    found = json.loads((tmp_path / "out" / "ppo_defaults.json").read_text())
    assert {name: len(values) for name, values in found["objectives"][NAME].items()} == {"core": 2, "commit": 2}
