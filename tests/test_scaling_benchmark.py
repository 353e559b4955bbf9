"""Weak scaling over ranks, at its smallest."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import safetensors.torch
import torch
from bench import BENCHMARKS, run_script
from ranks import run_ranks
from simic.training.tiny import QUICK, quick_config

from esper.simic.training.episode import EpisodeRunner

SMALL = ["--task", QUICK, "--ranks", "1", "2", "--hosts", "4", "--members", "1", "--rounds", "2"]


@pytest.fixture
def forked(script_of: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script with ranks that are forked from this process, which saves their start."""
    script = script_of("scaling")
    quick_config()

    def start(arguments: argparse.Namespace, ranks: int, hosts: int, folder: Path, *, independent: bool) -> None:
        ended = run_ranks(lambda rank: script.train(arguments, hosts, folder, independent=independent), ranks, tmp_path)
        assert [rank.code for rank in ended] == [0] * ranks, ended

    monkeypatch.setattr(script, "start", start)
    return script


@pytest.mark.usefixtures("forked")
def test_a_row_per_world(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Hosts grow with the ranks; only several ranks exchange anything, and all end with one policy."""
    printed = run_here("scaling", *SMALL, "--out", str(tmp_path / "out"))
    assert [line.split()[:2] for line in printed.splitlines()[-2:]] == [["1", "4"], ["2", "8"]]
    (path,) = (tmp_path / "out").iterdir()
    written = json.loads(path.read_text())
    one, two = written["worlds"]
    assert (one["ranks"], one["efficiency"], one["exchanged_bytes"], one["mean_wait_s"]) == (1, 1.0, 0, 0.0)
    assert two["efficiency"] == pytest.approx(one["round_s"] / two["round_s"])
    assert (one["hardware"], one["joining"], one["independent_s"]) == (1.0, 1.0, one["round_s"])
    assert [len(rounds) for rounds in two["independent_rounds_s"]] == [2, 2]
    assert two["independent_s"] == pytest.approx(sum(rounds[1] for rounds in two["independent_rounds_s"]) / 2)
    assert two["hardware"] == pytest.approx(one["round_s"] / two["independent_s"])
    assert 0 < one["cpu_s"] == one["independent_cpu_s"] and min(two["cpu_s"], two["independent_cpu_s"]) > 0
    assert two["efficiency"] == pytest.approx(two["hardware"] * two["joining"])
    assert two["exchanged_bytes"] > 1000 and two["longest_wait_s"] > 0 and two["ranks_hold_one_policy"]
    assert two["round_s"] == two["rounds_s"][1] > 0 and min(two["collect_s"], two["update_s"]) > 0
    assert (written["rounds"], written["warm"], "cpu" in written["machine"]) == (2, 1, True)


def test_independent_processes_have_the_hosts_of_the_ranks(
    script_of: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every round, whichever policy they have."""
    script, begin = script_of("scaling"), EpisodeRunner.begin
    quick_config()
    settings = {"task": QUICK, "rounds": 2, "members": 1, "device": "cpu", "data_dir": None}

    def noted(self: EpisodeRunner, seeds: list[int]) -> None:
        print(*seeds)
        begin(self, seeds)

    monkeypatch.setattr(EpisodeRunner, "begin", noted)
    arguments = argparse.Namespace(**settings)
    ended = run_ranks(lambda _: script.train(arguments, 8, tmp_path / "run", independent=True), 2, tmp_path)
    first, second = (rank.output.splitlines() for rank in ended)
    for seeds in (first, second):
        assert len(seeds) == 4 and seeds[:2] == seeds[2:], seeds
    assert not set(first) & set(second)


@pytest.mark.usefixtures("forked")
def test_the_same_policy_on_other_ranks(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """To the bit on the CPU."""
    with pytest.raises(SystemExit, match="0"):
        run_here("scaling", *SMALL, "--rounds", "1", "--policies-equal", "--out", str(tmp_path))
    (path,) = tmp_path.glob("scaling_policies_*.json")
    worlds = json.loads(path.read_text())["worlds"]
    assert [(world["ranks"], world["weights_equal"], world["relative_distance"]) for world in worlds] == [
        (1, True, 0.0),
        (2, True, 0.0),
    ]


def test_distance(script_of: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """By hand: weights 3 and 4 against 3 and 3 differ by a fifth of their norm. On the CPU that is a failure."""
    script = script_of("scaling")
    for name, last in (("one", 4.0), ("other", 3.0)):
        folder = tmp_path / name / "checkpoints" / "round-00001"
        folder.mkdir(parents=True)
        tensors = {"weights": torch.tensor([3.0, last]), "generator": torch.zeros(2, dtype=torch.uint8)}
        safetensors.torch.save_file(tensors, folder / "agent.safetensors")
        (folder / "agent.json").write_text("{}")
    found = script.distance(tmp_path / "one", tmp_path / "other")
    assert found == {"relative_distance": 0.2, "largest_difference": 1.0, "weights_equal": False}
    worlds = [found | {"ranks_hold_one_policy": True}]
    verdicts = [script.policies_equal({"device": device, "worlds": worlds}) for device in ("cpu", "cuda")]
    assert verdicts == [False, True]
    assert not script.policies_equal({"device": "cuda", "worlds": [found | {"ranks_hold_one_policy": False}]})


def test_parts_of_a_round(script_of: Callable[[str], ModuleType]) -> None:
    """By hand: rank 0 gathered for 3 s, of which it waited 2 s for rank 1; sharing took another half second."""
    timing = {
        "collect_s": 13.0,
        "update_s": 0.25,
        "spans": {"collect/gather": 3.0, "share": 0.5},
        "ranks": {"collect_s": [8.0, 10.0], "wait_s": [2.0, 0.0], "exchanged_bytes": 7},
    }
    assert script_of("scaling")._parts(timing, 2) == {
        **{"collect_s": 10.0, "mean_wait_s": 1.0, "longest_wait_s": 2.0},
        **{"exchange_s": 1.5, "update_s": 0.25, "exchanged_bytes": 7},
    }


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """It starts its ranks by torchrun; under torchrun it is one of them. Neither needs the command line's packages."""
    small = ["--hosts", "2", "--members", "1", "--rounds", "1", "--out", str(tmp_path / "out")]
    assert "Weak scaling" in run_script("scaling.py", tmp_path, "--ranks", "2", *small)
    launcher = "import sys; sys.modules['tyro'] = None; from torch.distributed.run import main; main()"
    options = ["--standalone", "--nproc-per-node", "2", str(BENCHMARKS / "scaling.py")]
    paths = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent / "src")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", launcher, *options, *small]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}
    cores = f"scaling_{os.cpu_count()}_cores"
    assert {name: [world["ranks"] for world in each["worlds"]] for name, each in written.items()} == {
        cores: [2],
        f"{cores}_2_ranks": [2],
    }
