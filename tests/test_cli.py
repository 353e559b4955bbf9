"""The command line."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from simic.training.tiny import NAME, tiny_task

from esper.cli import main
from esper.cli.tasks import TasksCommand
from esper.simic.training.trainer import Trainer
from esper.tolaria import TaskRegistry, gains, get_task


@pytest.fixture(autouse=True)
def wide_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wrapped, and none is coloured."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cells of `digits_blind` are published, and nothing else."""
    cells = [
        {"slot": slot_id, "blueprint": "depthwise", "parameters": parameters, "gain": points, "deviation": 1.25}
        for slot_id, parameters, points in (("r1c0", 64, 36.04), ("r1c1", 160, 7.5), ("r1c2", 448, -0.3))
    ]
    path = tmp_path / "gains.json"
    hosts = {"none": {"host_accuracy": 41.3, "repeats": 4, "cells": cells}}
    path.write_text(json.dumps({"digits_blind": {"hosts": hosts}}))
    monkeypatch.setattr(gains, "GAINS_FILE", path)
    gains.published_gains.cache_clear()
    yield
    gains.published_gains.cache_clear()


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """What a command prints."""
    main(list(arguments))
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def test_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    """Every task in the order of the registry, with why, host, budget and length."""
    lines = lines_of(capsys, "tasks")
    heads = [line for line in lines if line.split(" ")[0] in TaskRegistry.names()]
    assert heads == [f"{name}  {get_task(name).why}" for name in TaskRegistry.names()]
    facts = lines[lines.index(heads[0]) + 1]
    assert "digits · host 390 parameters, 1,560 may be grown · 20 steps × 16 minibatches of 64" in facts
    assert "validation 400" in facts


@pytest.mark.usefixtures("figures")
def test_tasks_print_the_best_seed_per_slot(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured gains where there are some, and where there are none it says so."""
    lines = lines_of(capsys, "tasks")
    best = "best seed per slot: r1c0 depthwise +36.0 (64), r1c1 depthwise +7.5 (160), r1c2 depthwise -0.3 (448)"
    assert f"  host alone 41.3 %; {best}" in lines
    assert sum("gains not measured" in line for line in lines) == len(TaskRegistry.names()) - 1


@pytest.mark.usefixtures("figures")
def test_tasks_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Only those that were named, with the whole table."""
    lines = lines_of(capsys, "tasks", "digits_blind")
    text = "\n".join(lines)
    assert not any(line.startswith("digits_varied") for line in lines)
    assert "host 41.3 %" in text
    (row,) = (line for line in lines if "depthwise" in line and "±" in line)
    for shown in ("+36.0 ± 1.2 (64)", "+7.5 ± 1.2 (160)", "-0.3 ± 1.2 (448)"):
        assert shown in row
    assert all(any(name in line for line in lines) for name in get_task("digits_blind").slot_config.blueprint_names)


def test_tasks_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In an empty folder only digits are at hand, which come with a package."""
    lines = lines_of(capsys, "tasks", "--data-dir", str(tmp_path))
    for name in TaskRegistry.names():
        (facts,) = (lines[at + 1] for at, line in enumerate(lines) if line.startswith(f"{name} "))
        assert ("not here yet" in facts) == (get_task(name).dataset != "digits")


@pytest.mark.invariant(15)
def test_unknown_task(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake ends in one line that names it and what is allowed, and in exit code 2; nothing was printed before."""
    with pytest.raises(SystemExit) as ended:
        main(["tasks", "digits_blind", "digts"])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("esper: unknown task 'digts'; allowed: ")
    assert all(name in line for name in TaskRegistry.names())


@pytest.mark.parametrize("arguments", [["tasks", "--colour", "red"], ["tusks"]])
def test_unknown_flag_or_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with exit code 2, naming it."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert arguments[-1] in printed.err or arguments[1] in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], ["tasks", "Grow a neural network"]),
        (["tasks", "--help"], ["--data-dir", "ESPER_DATA", "Show only these"]),
    ],
)
def test_help(arguments: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, with every command and flag."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert all(word.lower() in printed.lower() for word in shown)


def test_arguments_of_the_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the console script calls it."""
    monkeypatch.setattr(sys, "argv", ["esper", "tasks", "digits"])
    main()
    assert capsys.readouterr().out.startswith("digits  ")


# -- train and evaluate -----------------------------------------------------------------------------------------------


def test_train_go_on_and_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A short run, stopped and gone on with, then compared with rules on unseen hosts."""
    tiny_task()
    out, figures = tmp_path / "run", tmp_path / "figures.json"
    arguments = ["train", "--task", NAME, "--rounds", "2", "--hosts", "6", "--members", "2", "--out", str(out)]
    assert "2 of 2 rounds" in lines_of(capsys, *arguments, "--keep-checkpoints", "1")[-1]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["round-00002"]
    logs = {"events.jsonl", "metrics.jsonl", "sessions.jsonl", "live.jsonl"}
    assert {path.name for path in out.iterdir()} == {"config.json", "checkpoints", *logs}
    assert json.loads((out / "config.json").read_text())["config"]["hosts"] == 6
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in metrics] == [0, 1]
    assert "2 of 2 rounds" in lines_of(capsys, "train", "--resume", str(out))[-1]
    for more in (["--rounds", "40"], ["--seed", "9"], ["--ppo.rate", "0.1"], ["--out", str(tmp_path / "x")]):
        with pytest.raises(SystemExit, match="2"):
            main(["train", "--resume", str(out), *more])
        assert f"--resume continues {out} with its own settings; omit {more[0]}\n" in capsys.readouterr().err
    assert "2 of 2 rounds" in lines_of(capsys, "train", "--resume", str(out), "--data-dir", str(tmp_path))[-1]
    policies = f"{out},random,random-commit,heuristic,wait"
    printed = lines_of(
        capsys, "evaluate", "--task", NAME, "--policies", policies, "--hosts", "3", "--json", str(figures)
    )
    assert any("1 training seed)" in line for line in printed)
    found = json.loads(figures.read_text())
    assert list(found["policies"]) == policies.split(",")
    assert found["policies"]["wait"]["objective"] == [0.0] * 3
    assert all(len(policy["added_params"]) == 3 for policy in found["policies"].values())
    assert [entry["against"] for entry in found["differences"]] == ["random", "random-commit", "heuristic", "wait"]
    assert not any(entry["superior"] for entry in found["differences"]), "one seed is no claim"


def test_ctrl_c_ends_without_a_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever no command sees to it itself; with the exit code that shells know."""

    def interrupted(self: object, console: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TasksCommand, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["tasks"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "esper: stopped\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--keep-checkpoints", "0"], "keep 0 is not an integer of 1 or more"),
        (["train", "--task", "nonsense"], "unknown task 'nonsense'"),
        (["train", "--hosts", "7"], "7 hosts cannot be divided into groups of 3 plus a control; use a multiple of 4"),
        (["train", "--resume", "nowhere"], "no run folder"),
        (["evaluate", "--policies", "nonsense"], "unknown policy 'nonsense'"),
        (["evaluate", "--task", "cifar_impaired", "--policies", "schedule"], "for task 'cifar_impaired' is shipped"),
        (["evaluate", "--policies", "heuristic:nowhere.json"], "cannot be read as JSON"),
        (["evaluate", "--task", "nonsense"], "unknown task 'nonsense'"),
        (["train", "--device", "banana"], "device 'banana' is not here; this machine has cpu"),
        (["train", "--device", "cuda:99"], "device 'cuda:99' is not here; this machine has cpu"),
        (["tune", "--device", "cuda:99", "--out", "plan.json"], "device 'cuda:99' is not here; this machine has cpu"),
        (["tune", "--device", "", "--out", "plan.json"], "device '' is not here"),
        (["evaluate", "--device", "cuda:99", "--json", "all.json"], "device 'cuda:99' is not here"),
        (["evaluate", "--device", "meta"], "device 'meta' is not here"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line and exit code 2; nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_stopped_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`esper train … && esper evaluate …` must not evaluate half a run."""
    tiny_task()

    def stop(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run_round", stop)
    with pytest.raises(SystemExit, match="130"):
        main(
            ["train", "--task", NAME, "--rounds", "2", "--hosts", "6", "--members", "2", "--out", str(tmp_path / "run")]
        )
