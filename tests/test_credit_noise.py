"""The benchmark of what a critic can know: it finds what was put into gains."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from karn.run_folders import default_events, episode, life, stage, write_run
from simic.training.tiny import QUICK, quick_config

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of later rounds that committed something, each with its group of two; what a panic undid is no plan."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("credit_noise")
    monkeypatch.setattr(module, "read_config", lambda folder: quick_config(members=2))
    undone = [*life(1, 3, "r1c1", 0), stage(1, 5, 3, "r1c1", "FOSSILIZED", "HOLDING", "panic")]
    folder = write_run(tmp_path / "run", events=[*default_events()[:-1], episode(1, 3, 2.0, undone)])
    control = [40.0 + 0.5 * step for step in range(8)]
    plan = ("r1c0/depthwise",)
    expected = [(("run", 1, 0), plan, 4.0, control), (("run", 1, 1), plan, 5.0, control)]
    assert [tuple(found) for found in module.read(folder, 1)] == expected


def test_credit_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Gains made by hand: of the plan, 0.5 of the control's end, 2 per group (its variance is 4), 1 per host."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module, draws = importlib.import_module("credit_noise"), np.random.default_rng(0)
    episodes = []
    for group in range(400):
        control = [30 + draws.normal(), 35 + draws.normal(), 36 + draws.normal(), 40 + 10 * draws.normal()]
        shared = 2 * draws.normal()
        for _ in range(3):
            plan = int(draws.integers(3))
            gain = 10.0 * plan + 0.5 * control[-1] + shared + draws.normal()
            episodes.append(module.Episode(("run", 0, group), (f"r1c{plan}/norm",), gain, control))
    episodes.append(module.Episode(("run", 1, 0), ("rare",), 1000.0, control))
    monkeypatch.setattr(module, "read", lambda folder, first_round: iter(episodes))
    monkeypatch.setattr(module, "read_config", lambda folder: quick_config())
    monkeypatch.setattr(sys, "argv", ["credit_noise.py", "--runs", "any", "--out", str(tmp_path)])
    module.main()
    assert "1200 episodes, 3 plans" in capsys.readouterr().out, "what happened once tells nothing"
    found = json.loads((tmp_path / f"credit_noise_{QUICK}.json").read_text())["variance"]
    assert [found[name] for name in ("plan", "plan, first accuracies")] == pytest.approx([30, 30], rel=0.15)
    assert found["plan, first accuracies, control's end"] == pytest.approx(5, rel=0.15)
    assert found["the same, within groups"] == pytest.approx(1, rel=0.15)
