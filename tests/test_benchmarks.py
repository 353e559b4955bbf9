"""The benchmarks at their smallest: one table, one JSON."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from esper.tolaria import gains, get_task
from esper.tolaria.gains import GAINS_FILE, published_gains

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LIBRARIES = {"harness.py", "one_seed.py", "ppo_envs.py", "random_growth.py"}
RUN_BELOW = {
    *("audition.py", "fleet_throughput.py", "fleet_vs_loop.py", "gain_noise.py", "governor_alarms.py"),
    *("ppo_learning.py", "ppo_update.py"),
}
OTHERS = sorted(path.name for path in BENCHMARKS.glob("*.py") if path.name not in LIBRARIES | RUN_BELOW)


def run_script(name: str, folder: Path, *arguments: str) -> str:
    """What a script prints, run in an empty folder."""
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(BENCHMARKS / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def task_gains(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("task_gains")


@pytest.fixture
def own_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_gains: ModuleType) -> Iterator[Path]:
    """A file of gains for this test alone."""
    path = tmp_path / "task_gains.json"
    monkeypatch.setattr(gains, "GAINS_FILE", path)
    monkeypatch.setattr(task_gains, "GAINS_FILE", path)
    gains._published.cache_clear()
    yield path
    gains._published.cache_clear()


def write_figures(folder: Path, name: str, figures: Mapping[str, object]) -> None:
    """A result as the script writes it."""
    content = {"machine": {"cpu": "?"}, name: figures}
    (folder / f"task_gains_{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", OTHERS)
def test_help(name: str, tmp_path: Path) -> None:
    """Each script that is too slow to run here says what it measures, and how to make it write elsewhere."""
    printed = run_script(name, tmp_path, "--help")
    assert "--out" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fleet_throughput", ["--device", "cpu", "--fp32", "--hosts", "4", "--batch", "8", "--minibatches", "1"]),
        ("fleet_vs_loop", ["--hosts", "4", "--repeats", "1"]),
        ("governor_alarms", ["--tasks", "digits_blind", "--hosts", "4", "--steps", "2"]),
        ("ppo_learning", ["--tasks", "factored", "--seeds", "2", "--episodes", "3", "--shorter", "50"]),
        ("gain_noise", ["--device", "cpu", "--members", "2", "--steps", "1"]),
        ("ppo_update", ["--device", "cpu", "--envs", "4", "--steps", "5", "--repeats", "1"]),
    ],
)
def test_scripts(name: str, arguments: list[str], tmp_path: Path) -> None:
    """At their smallest: one table, one JSON with its machine."""
    repeats = ["--repeats", "1"] if name == "fleet_throughput" else []
    printed = run_script(f"{name}.py", tmp_path, *arguments, *repeats, "--out", str(tmp_path / "out"))
    (path,) = (tmp_path / "out").iterdir()
    assert path.stem.startswith(name)
    assert "machine" in json.loads(path.read_text())
    assert "----" in printed


def test_audition(tmp_path: Path) -> None:
    """Two cells on one seed: a row each, the rank correlations, and all trials in the JSON with their machine."""
    printed = run_script(
        "audition.py",
        tmp_path,
        *("--seeds", "1", "--shadow-steps", "3", "--blueprints", "depthwise", "norm"),
        *("--slots", "r1c0", "--out", str(tmp_path / "out"), "--name", "small"),
    )
    rows = [line for line in printed.splitlines() if line.startswith("r1c0 ")]
    assert [row.split()[1] for row in rows] == ["depthwise", "norm"]
    written = json.loads((tmp_path / "out" / "small.json").read_text())
    assert written["shadow_steps"] == 3
    assert set(written["trials"]) == {"r1c0 depthwise", "r1c0 norm"}
    assert [len(trials) for trials in written["trials"].values()] == [1, 1]
    assert written["trials"]["r1c0 depthwise"][0]["audition"] != written["trials"]["r1c0 norm"][0]["audition"]
    assert {"cpu", "torch", "threads", "date"} <= set(written["machine"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_task_gains(tmp_path: Path) -> None:
    """Every cell of one task, once."""
    printed = run_script("task_gains.py", tmp_path, "--tasks", "digits", "--repeats", "1", "--out", str(tmp_path))
    task = get_task("digits")
    assert all(slot_id in printed for slot_id in task.slot_ids)
    figures = json.loads((tmp_path / "task_gains_digits.json").read_text())["digits"]["none"]
    assert figures["host_accuracy"] > 60
    assert figures["repeats"] == 1
    assert len(figures["cells"]) == sum(len(slot.blueprints) for slot in task.slot_config.slots)


def test_task_gains_are_paired(task_gains: ModuleType, own_gains: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each gain is against the control of the same repeat and kind of host; what is published can be read again.

    By hand: controls 40 and 50; the cell r1c0 depthwise 70 and 90 gains 30 and 40: mean 35, deviation 7.07.
    """
    task = get_task("digits_varied")
    arguments = argparse.Namespace(repeats=2, device="cpu", data_dir=None)
    jobs = task_gains.jobs_of(task, arguments)
    cells = sum(len(slot.blueprints) for slot in task.slot_config.slots)
    assert len(jobs) == len(set(jobs)) == 3 * 2 * (cells + 1)
    found = {}
    for job in jobs:
        control = 40.0 + 10.0 * job.rng_seed + (5.0 if job.defect == "none" else 0.0)
        best = (job.slot_id, job.blueprint) == ("r1c0", "depthwise")
        found[job] = control + (30.0 + 10.0 * job.rng_seed if best else 0.0)
    figures: dict[str, object] = {defect: task_gains.report(task, defect, found) for defect in task.defects}
    write_figures(own_gains.parent, task.name, figures)
    task_gains.publish(own_gains.parent)
    kinds = published_gains(task.name)
    assert [kind.defect for kind in kinds] == list(task.defects)
    assert [kind.host_accuracy for kind in kinds] == [45.0, 50.0, 45.0]
    for kind in kinds:
        best_cell = kind.best("r1c0")
        assert (best_cell.blueprint, best_cell.parameters, best_cell.points) == ("depthwise", 64, 35.0)
        assert best_cell.deviation == pytest.approx(50**0.5)
        assert kind.best("r1c1").points == 0.0
    assert "35.0 ± 7.1" in capsys.readouterr().out


def test_publishing_takes_what_there_is(task_gains: ModuleType, own_gains: Path) -> None:
    """All figures of a folder, in the order of the registry, each with its machine; and none that are gone from it."""
    for name in ("fashion_small", "digits"):
        write_figures(own_gains.parent, name, {})
    task_gains.publish(own_gains.parent)
    published = json.loads(own_gains.read_text())
    assert list(published) == ["digits", "fashion_small"]
    assert published["digits"] == {"machine": {"cpu": "?"}, "hosts": {}}
    (own_gains.parent / "task_gains_digits.json").unlink()
    task_gains.publish(own_gains.parent)
    assert list(json.loads(own_gains.read_text())) == ["fashion_small"]


def test_published_gains_are_the_results(task_gains: ModuleType, own_gains: Path) -> None:
    """What `esper tasks` shows is what the results folder holds."""
    task_gains.publish(BENCHMARKS / "results")
    assert json.loads(own_gains.read_text()) == json.loads(GAINS_FILE.read_text())
