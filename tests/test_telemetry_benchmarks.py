"""The benchmarks of telemetry: false alarms, its cost, and how much it writes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench import BENCHMARKS
from simic.training.tiny import QUICK, quick_config

from esper.leyline import BadValueError, CheckpointError

pytestmark = pytest.mark.slow


def test_healthy_rounds(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """A run of one round: trained, read, and read once more with a warning in its log; one that was not watched to its
    end is refused."""
    quick_config()
    run, out = tmp_path / "runs" / f"{QUICK}-7", ["--out", str(tmp_path / "out")]
    arguments = ["--task", QUICK, "--rounds", "1", "--hosts", "4", "--seeds", "7", "--into", str(run.parent)]
    printed = run_here("healthy_rounds", *arguments, *out)
    assert printed.splitlines()[-1] == "0 of severity warning or above in 1 rounds of 1 runs"
    alarm = {"kind": "alarm", "alarm": "kl_spike", "severity": "warning", "round": 0, "subject": "", "ended": False}
    with (run / "events.jsonl").open("a") as events:
        for number in (0, 1):  # round 1 is not complete
            events.write(json.dumps({**alarm, "round": number, "cause": "the joint KL is 0.2"}) + "\n")
    printed = run_here("healthy_rounds", "--runs", str(run), *out)
    [row] = [line for line in printed.splitlines() if "kl_spike" in line]
    assert row.split()[-7:] == ["warning", "kl_spike", "the", "joint", "KL", "is", "0.2"]
    assert printed.splitlines()[-1] == "1 of severity warning or above in 1 rounds of 1 runs"
    written = json.loads((tmp_path / "out" / "healthy_rounds.json").read_text())
    assert (written["rounds"], written["warnings"], written["runs"][0]["seed"]) == (1, 1, 7)
    printed = run_here("healthy_rounds", "--runs", str(run), "--replay", *out)
    assert printed.splitlines()[-1] == "0 of severity warning or above in 1 rounds of 1 runs", "its KL was ordinary"
    line = json.loads((run / "metrics.jsonl").read_text())
    (run / "metrics.jsonl").write_text(json.dumps({**line, "ppo/max_kl": 0.2, "ppo/policy_loss": "nan"}) + "\n")
    printed = run_here("healthy_rounds", "--runs", str(run), "--replay", *out)
    assert "the joint KL is 0.2 (limit 0.18)" in printed
    assert printed.splitlines()[-1] == "2 of severity warning or above in 1 rounds of 1 runs"
    agent = run / "checkpoints" / "round-00001" / "agent.json"
    agent.write_text(agent.read_text().replace('"last_round": 0', '"last_round": -1'))
    with pytest.raises((BadValueError, CheckpointError)):
        run_here("healthy_rounds", "--runs", str(run), *out)


def test_telemetry_cost(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Three pairs, with a change of roles: both runs end alike, and telemetry took a part of every watched round."""
    quick_config()
    arguments = ["--task", QUICK, "--hosts", "4", "--pairs", "3", "--warm", "0"]
    printed = run_here("telemetry_cost", *arguments, "--out", str(tmp_path))
    assert "results are bit-identical" in printed
    written = json.loads((tmp_path / f"telemetry_cost_{QUICK}.json").read_text())
    seconds = written["seconds"]
    assert all(0 < part < whole / 2 for part, whole in zip(seconds["telemetry"], seconds["with"], strict=True))
    ratios = [one / other for one, other in zip(seconds["with"], seconds["without"], strict=True)]
    figures = written["figures"]["wall time, with / without"]
    assert figures == {"median": sorted(ratios)[1], "low": None, "high": None}


def test_nothing_is_watched_where_nothing_is_to_be(tmp_path: Path, script_of: Callable[[str], ModuleType]) -> None:
    """The run without telemetry writes no event and no metric, looks at no clock, and knows of failed minibatches."""
    script = script_of("telemetry_cost")
    run, times = script.Run(quick_config(), tmp_path / "run"), script.Times(watched=False)
    run.trainer.agent.network.critic_out.weight.register_hook(lambda gradient: gradient * math.nan)
    with run.trainer.folder:
        run.round(times)
    assert run.trainer.agent.failures == 1
    assert [(tmp_path / "run" / name).stat().st_size for name in ("events.jsonl", "metrics.jsonl")] == [0, 0]
    assert run.trainer.spans.drain() == {}
    assert times.telemetry == [0.0]


def test_interval_of_a_median(script_of: Callable[[str], ModuleType]) -> None:
    """By hand: of 30 values, 21 or more lie below the median with probability 0.0214: the 10th and the 21st are the
    ends. Of 6 all do with 1/64, so the extremes are; of 5 with 1/32, more than 0.025: no end is safe."""
    script = script_of("telemetry_cost")
    assert script.interval([float(value) for value in range(30, 0, -1)]) == (15.5, 10.0, 21.0)
    assert script.interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (3.5, 1.0, 6.0)
    assert script.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, None, None)


def test_event_volume(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Three rounds stand for a day of 1,728; every question finds something, and who never waits writes more."""
    arguments = ["--rounds", "3", "--hosts", "8", "--played", "1", "--round-seconds", "50"]
    printed = run_here("event_volume", *arguments, "--out", str(tmp_path / "out"))
    assert "1728 rounds a day of 8 hosts; 3 simulated" in printed
    written = json.loads((tmp_path / "out" / "event_volume.json").read_text())
    assert set(written["bytes_per_day"]) == {"events.jsonl", "metrics.jsonl"}
    assert written["share_of_gib"] == pytest.approx(sum(written["bytes_per_day"].values()) / 2**30)
    assert written["never_waits"]["acts_per_episode"] > written["acts_per_episode"] > 1
    assert written["never_waits"]["share_of_gib"] > written["share_of_gib"] > 0
    assert len(written["questions"]) == 5
    assert all(question["rows"] > 0 for question in written["questions"].values())


def test_simulated_rounds_are_whole_episodes(script_of: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Each host of a simulated round has the decisions, changes and parameters of one host that was played."""
    script = script_of("event_volume")
    pool = script.play(8, 2, 0, tmp_path / "played")
    played = [
        (record.actions[:, env].tolist(), [(step, one.change) for step, one in record.changes if one.env == env])
        for record in pool.records
        for env in range(6)
    ]
    drawn = script.resample(pool, torch.Generator().manual_seed(1))
    for env in range(6):
        life = [(step, one.change) for step, one in drawn.changes if one.env == env]
        place = played.index((drawn.actions[:, env].tolist(), life))
        of_round = pool.records[place // 6]
        assert drawn.added_parameters[env] == of_round.added_parameters[place % 6]
        assert torch.equal(drawn.alphas[:, env], of_round.alphas[:, place % 6])
    assert any(one.env == env for env in range(6) for _, one in drawn.changes)


def test_a_day_of_events() -> None:
    """As it was measured, on a machine with other work to do: under 1 GiB, and every question answered in seconds."""
    figures = json.loads((BENCHMARKS / "results" / "event_volume.json").read_text())
    assert figures["rounds_simulated"] == figures["rounds_per_day"] == 9600
    assert (figures["hosts"], figures["round_seconds"]) == (64, 9.0)
    assert figures["share_of_gib"] < 1
    assert max(question["seconds"] for question in figures["questions"].values()) < 30
    assert max(question["cpu_seconds"] for question in figures["questions"].values()) < 25
