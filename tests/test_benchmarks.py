"""The benchmarks at their smallest: one table, one JSON."""

import argparse
import importlib
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from simic.training.tiny import QUICK, quick_config
from torch import Tensor

from esper.leyline import BadValueError, CheckpointError, SeedStage, head_preset
from esper.simic.training.evaluation import UnseenHosts
from esper.simic.training.observe import accuracy_of
from esper.simic.training.trainer import Trainer
from esper.tolaria import HostFleet, Task, TaskRegistry, gains, get_task
from esper.tolaria.gains import GAINS_FILE, published_gains

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LIBRARIES = {"harness.py", "kills.py", "one_seed.py", "ppo_envs.py", "random_growth.py"}
RUN_BELOW = {
    *("audition.py", "fleet_throughput.py", "fleet_vs_loop.py", "gain_noise.py", "governor_alarms.py"),
    *("ppo_learning.py", "ppo_update.py", "ablations.py", "audited_credit.py", "gain_lasts.py", "loop_throughput.py"),
    "event_volume.py",
    *("healthy_rounds.py", "telemetry_cost.py", "credit_noise.py"),
    *("kill_resume.py", "results_page.py"),
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
        ("loop_throughput", ["--task", "digits_blind", "--hosts", "4", "--rounds", "1"]),
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


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Scripts as modules; tasks that they register are gone with the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(TaskRegistry, "_tasks", dict(TaskRegistry._tasks))
    return importlib.import_module


@pytest.fixture
def run_here(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What a script prints, run in this process with few bootstraps: no time for another start of torch."""

    def run(name: str, *arguments: str) -> str:
        script = benchmark(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.setattr(script, "BOOTSTRAPS", 20, raising=False)
        script.main()
        return capsys.readouterr().out

    return run


def test_kill_resume(tmp_path: Path, run_here: Callable[..., str], benchmark: Callable[[str], ModuleType]) -> None:
    """Three runs, each killed at least once, end bit for bit as the one that was not; a difference would be seen."""
    printed = run_here("kill_resume", "--runs", "3", "--rounds", "2", "--out", str(tmp_path / "out"))
    assert printed.splitlines()[-1].startswith("3 of 3 runs end bit for bit")
    written = json.loads((tmp_path / "out" / "kill_resume.json").read_text())
    assert [each["differences"] for each in written["outcomes"]] == [[]] * 3
    assert all(each["kills"] for each in written["outcomes"])
    script = benchmark("kill_resume")
    for seed in range(2):
        config = script.TrainConfig(script.tiny_task("digits_blind"), rounds=1, hosts=2, members=1, seed=seed)
        script.Trainer(config, tmp_path / f"{seed}").run(progress=False)
    found = script.differences(tmp_path / "0", tmp_path / "1")
    assert {"metrics.jsonl", "events.jsonl", "generator"} <= set(found)


def test_ablations(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Two variants, one seed: a row each; what is done is not done again, and other settings are refused."""
    arguments = ["--rounds", "1", "--hosts", "4", "--unseen", "2", "--seeds", "1", "--steps", "2"]
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    only = ["--only", "default", "straight-through"]
    printed = run_here("ablations", *arguments, *folders, *only)
    rows = [line for line in printed.splitlines() if "±" in line and not line.startswith("digits")]
    assert [row.split()[0] for row in rows] == ["default", "straight-through"]
    written = json.loads((tmp_path / "out" / "ablations_digits_blind.json").read_text())
    assert set(written["variants"]) == {"default", "straight-through"}
    assert [len(hosts["objective"]) for hosts in written["variants"]["default"]["hosts"]] == [2]
    config = json.loads((tmp_path / "runs" / "straight-through-0" / "config.json").read_text())["config"]
    assert config["isolation"] == "straight_through"
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    again = run_here("ablations", *arguments, *folders, *only)
    assert again.splitlines()[-4:] == printed.splitlines()[-4:]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()} == done
    with pytest.raises(BadValueError, match="made with other settings"):
        run_here("ablations", *arguments, *folders, *only, "--rounds", "2")


def test_ablations_change_one_thing_each(benchmark: Callable[[str], ModuleType]) -> None:
    """All ten variants differ from the default and from each other."""
    script = benchmark("ablations")
    variants = script.variants(script.TrainConfig())
    assert len(variants) == 11
    assert len(set(variants.values())) == 11
    assert variants["default"] == script.TrainConfig()


def test_measuring_needs_no_screen() -> None:
    """A machine without the packages of the command line can import what runs for long."""
    paths = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent / "src")])
    code = "import sys; sys.modules['tyro'] = None; import ablations, audited_credit, gain_lasts"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, check=True, timeout=60)


def test_audited_credit(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """A handful of seeds from one fleet: correlations with their intervals, and every audit in the JSON."""
    printed = run_here(
        "audited_credit", "--live", "6", "--hosts", "8", "--batches", "2", "--out", str(tmp_path / "out")
    )
    assert "accuracy, within slots" in printed
    written = json.loads((tmp_path / "out" / "audited_credit_digits_blind.json").read_text())
    assert written["spearman"]["accuracy, all"]["seeds"] == len(written["audits"]) == 6
    assert len({audit["host"] for audit in written["audits"]}) == 6
    assert any(audit["contribution"] != 0 for audit in written["audits"])
    assert any(audit["effect"] != 0 for audit in written["audits"])


def test_twins_differ_by_the_cut_alone(benchmark: Callable[[str], ModuleType]) -> None:
    """From one snapshot: what is not cut ends alike to the last bit, what is cut does not; images are halved."""
    script = benchmark("audited_credit")
    fleet = HostFleet(replace(get_task("digits_blind"), batches_per_step=8), 4, seeds=[3, 4, 5, 6])
    halves = script.Halves(fleet)
    assert [len(part.targets) for part in (halves.first, halves.second)] == [200, 200]
    together = torch.cat([halves.first.inputs, halves.second.inputs]).flatten(1).sum(1).sort().values
    assert torch.equal(together, fleet.batches.validation().inputs.flatten(1).sum(1).sort().values)
    plan = {"r1c0": script.Sowing("r1c0", "depthwise", 0, 2)}
    script.grow(fleet, [plan] * 4, 9)
    chosen = script.choose(fleet, random.Random(0))
    assert chosen == dict.fromkeys(range(4), "r1c0")
    fleet.snapshots.take()
    kept, cut = script.twin(fleet, halves, 9, {}), script.twin(fleet, halves, 9, {0: "r1c0", 2: "r1c0"})
    assert fleet.step_index == 14
    assert [torch.equal(a.losses, b.losses) for a, b in zip(kept, cut, strict=True)] == [False, True, False, True]


def test_rank_correlations(benchmark: Callable[[str], ModuleType]) -> None:
    """By hand. Ranks 1 2 3 4 against 2 1 4 3: 1 − 6·4/(4·15) = 0.6. Within two slots of three: 1 and −1, so 0; over all
    six the slots agree, 1 2 3 4 5 6 against 1 2 3 6 5 4: 1 − 6·8/(6·35) = 0.771."""
    script = benchmark("audited_credit")
    one, other = np.array([1.0, 2, 3, 4]), np.array([2.0, 1, 4, 3])
    assert script.spearman(one, other) == pytest.approx(0.6)
    assert math.isnan(script.spearman(one, np.ones(4)))
    first, second = np.arange(6.0), np.array([1.0, 2, 3, 30, 20, 10])
    slots = np.array(["a"] * 3 + ["b"] * 3)
    assert script.within(first, second, slots) == pytest.approx(0.0)
    assert script.spearman(first, second) == pytest.approx(1 - 48 / 210)
    # Ties take their mean rank: 1.5 1.5 3 against 1 2 3 has a covariance of 1.5 and variances of 1.5 and 2.
    assert script.spearman(np.array([0.0, 0, 1]), np.arange(3.0)) == pytest.approx(1.5 / math.sqrt(1.5 * 2))


def test_gain_lasts(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Two hosts under two rules: who waits has no gain, and so no share of it; the work of growth is counted."""
    printed = run_here(
        "gain_lasts",
        *("--policies", "random-commit", "wait", "--hosts", "2", "--steps", "2", "--out", str(tmp_path / "out")),
    )
    assert "over equal compute" in printed
    policies = json.loads((tmp_path / "out" / "gain_lasts_digits_blind.json").read_text())["policies"]
    waited, grown = policies["wait"], policies["random-commit"]
    assert (waited["figures"]["gain"], waited["figures"]["gain_later"], waited["figures"]["share"]) == (0, 0, None)
    assert grown["figures"]["work"] > waited["figures"]["work"] > 1
    assert waited["by_seed"][0]["work_later"] == [1.0, 1.0]
    later, control = waited["by_seed"][0]["compute_later"], waited["by_seed"][0]["control_later"]
    assert later != control, "it was given more training than the control"


def test_gain_lasts_on_test_images_is_signed(
    tmp_path: Path, run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the learned runs, before anything is measured; a second look, and a run that is not finished, are warned of
    on the screen and in the JSON. One run is no two training seeds."""
    monkeypatch.chdir(tmp_path)
    Trainer(quick_config(1), Path("a")).run(progress=False)
    unfinished = Trainer(quick_config(2, seed=1, start=Path("a")), Path("b"))
    with unfinished.folder, unfinished.hub:
        unfinished.run_round()
    arguments = ["--task", QUICK, "--hosts", "2", "--steps", "2", "--out", "out"]
    run_here("gain_lasts", "--policies", "a", *arguments)
    assert not Path("a/final.jsonl").exists()
    run_here("gain_lasts", "--policies", "a", "wait", "--final", *arguments)
    (line,) = Path("a/final.jsonl").read_text().splitlines()
    assert json.loads(line)["policies"] == ["a", "wait"]
    assert json.loads(Path(f"out/gain_lasts_{QUICK}.json").read_text())["warnings"] == []
    printed = run_here("gain_lasts", "--policies", "b", "--final", *arguments)
    warned = json.loads(Path(f"out/gain_lasts_{QUICK}.json").read_text())["warnings"]
    assert warned[0].startswith("b has 1 of its 2 rounds behind it")
    assert warned[1].startswith("b began with the controller of a, which has been in a final evaluation once")
    assert [line for line in printed.splitlines() if line.startswith("warning: ")] == [f"warning: {w}" for w in warned]
    with pytest.raises(BadValueError, match="one folder"):
        run_here("gain_lasts", "--policies", "a+a", "--final", *arguments)
    assert len(Path("a/final.jsonl").read_text().splitlines()) == 1


def test_waiting_with_the_work_of_a_control_is_the_control(benchmark: Callable[[str], ModuleType]) -> None:
    """Given one training's work and as much again, a host ends where its control does, at T and later, whatever another
    host is given; given twice the work it ends where an episode of twice the length does."""
    script = benchmark("gain_lasts")
    task = replace(get_task("digits_blind"), steps=3, batches_per_step=4)
    unseen = UnseenHosts(task, 2, 7, head_preset("core"))

    def trained(episode: Task, steps: int, env: int) -> Tensor:
        alone = HostFleet(episode, 2, seeds=unseen.seeds, batches=unseen.data)
        for _ in range(steps):
            alone.train_step()
            alone.tick()
        return accuracy_of(alone.validate_committed())[env]

    at_end, later = script.wait_for(unseen, unseen.seeds, np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    double = replace(task, steps=6)
    assert at_end.tolist() == [trained(task, 3, 0), trained(double, 6, 1)]
    assert later.tolist() == [trained(task, 6, 0), trained(double, 12, 1)]


def test_only_fossils_are_trained_on(benchmark: Callable[[str], ModuleType]) -> None:
    """Env 0 has committed one of its two seeds, env 1 none: afterwards there is one seed left in all, which learns."""
    script = benchmark("gain_lasts")
    fleet = HostFleet(replace(get_task("digits_blind"), steps=9, batches_per_step=2), 2)
    for env, slot_id in ((0, "r1c0"), (0, "r1c1"), (1, "r1c0")):
        fleet.germinate(env, slot_id, "depthwise")
    for _ in range(9):
        for env, states in enumerate(fleet.states):
            for slot_id, state in list(states.items()):
                if state.stage is SeedStage.TRAINING and state.steps_in_stage >= 2:
                    fleet.advance(env, slot_id)
        fleet.train_step()
        fleet.validate(deployed=False)
        fleet.tick()
    fleet.fossilize(0, "r1c0")
    before = fleet.banks["r1c0", "depthwise"].weights.matrix[0].clone()
    _, work = script.train_on(fleet, [0, 1], final=False)
    assert [fleet.grown_parameters(env) for env in (0, 1)] == [64, 0]
    assert not torch.equal(fleet.banks["r1c0", "depthwise"].weights.matrix[0], before)
    assert not fleet.banks["r1c1", "depthwise"].weights.matrix.any(), "what is not there has no weights"
    assert work[0] > work[1] == 1.0


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
    """One pair: both runs end alike, one of them left a log and the other did not, and telemetry took a part of it."""
    quick_config()
    arguments = ["--task", QUICK, "--hosts", "4", "--pairs", "1", "--warm", "0"]
    printed = run_here("telemetry_cost", *arguments, "--out", str(tmp_path))
    assert "results are bit-identical" in printed
    written = json.loads((tmp_path / f"telemetry_cost_{QUICK}.json").read_text())
    seconds = written["seconds"]
    assert 0 < seconds["telemetry"][0] < seconds["with"][0] / 2
    figures = written["figures"]["wall time, with / without"]
    assert figures == {"median": seconds["with"][0] / seconds["without"][0], "low": None, "high": None}


def test_nothing_is_watched_where_nothing_is_to_be(tmp_path: Path, benchmark: Callable[[str], ModuleType]) -> None:
    """The run without telemetry writes no event and no metric, looks at no clock, and knows of failed minibatches."""
    script = benchmark("telemetry_cost")
    run = script.Run(quick_config(), tmp_path / "run", watched=False)
    run.trainer.agent.network.critic_out.weight.register_hook(lambda gradient: gradient * math.nan)
    with run.trainer.folder:
        run.round()
    assert run.trainer.agent.failures == 1
    assert [(tmp_path / "run" / name).stat().st_size for name in ("events.jsonl", "metrics.jsonl")] == [0, 0]
    assert run.trainer.spans.drain() == {}
    assert run.telemetry == [0.0]


def test_interval_of_a_median(benchmark: Callable[[str], ModuleType]) -> None:
    """By hand: of 30 values, 21 or more lie below the median with probability 0.0214: the 10th and the 21st are the
    ends. Of 6 all do with 1/64, so the extremes are; of 5 with 1/32, more than 0.025: no end is safe."""
    script = benchmark("telemetry_cost")
    assert script.interval([float(value) for value in range(30, 0, -1)]) == (15.5, 10.0, 21.0)
    assert script.interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (3.5, 1.0, 6.0)
    assert script.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, None, None)


def test_shares_of_gains(benchmark: Callable[[str], ModuleType]) -> None:
    """By hand: gains of 10 and 30 of which 10 and 20 are left, 30/40; not the mean of 1 and 2/3."""
    script = benchmark("gain_lasts")
    assert script.share_of(np.array([[10.0, 30.0]]), np.array([[10.0, 20.0]])) == pytest.approx(0.75)
    assert script.share_of(np.zeros((1, 2)), np.ones((1, 2))) is None
    low, high = script.share_interval(np.array([[10.0, 30.0]]), np.array([[10.0, 20.0]]))
    assert (low, high) == (pytest.approx(2 / 3), pytest.approx(1.0))
    assert script.share_interval(np.array([[10.0, -30.0]]), np.ones((1, 2))) == (None, None)


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


def test_simulated_rounds_are_whole_episodes(benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Each host of a simulated round has the decisions, changes and parameters of one host that was played."""
    script = benchmark("event_volume")
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
    assert figures["rounds_simulated"] == figures["rounds_per_day"] == 3456
    assert (figures["hosts"], figures["round_seconds"]) == (64, 25.0)
    assert figures["share_of_gib"] < 1
    assert max(question["seconds"] for question in figures["questions"].values()) < 30
    assert max(question["cpu_seconds"] for question in figures["questions"].values()) < 15


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
