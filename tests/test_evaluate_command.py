"""`esper evaluate`: where it writes, and what a terminal of 80 columns shows."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from simic.training.tiny import QUICK, quick_config

from esper.cli import evaluate, main
from esper.cli.evaluate import claim_line, kind_table, policy_table
from esper.simic.agent.policy import write_policy
from esper.simic.evaluation.comparison import KindSummary, TaskComparison
from esper.simic.evaluation.policies import EvaluationConfig, PolicySpec, preset_of, short_names
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.statistics import compare_all
from esper.simic.training.policy_files import open_policy
from esper.simic.training.trainer import Trainer

# -- where it writes --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(quick_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(quick_run, "a")
    return "a"


def refused(capsys: pytest.CaptureFixture[str], run: str, *arguments: str) -> str:
    """The one line in which a final evaluation ended before it was signed."""
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", "--task", QUICK, "--policies", run, "--hosts", "2", "--final", *arguments])
    assert stopped.value.code == 2
    assert not (Path(run) / "final.jsonl").exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(("flag", "name"), [("--json", "all.json"), ("--picture", "all.svg")])
def test_what_cannot_be_written_is_refused_before_signing(
    flag: str, name: str, run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a device, a place that takes no files though its rights allow it, a protected file."""
    Path(name).mkdir()
    assert f"{name} cannot be written: it is no file" in refused(capsys, run, flag, name)
    Path(name).rmdir()
    if Path("/proc/self").exists():
        assert f"/proc/{name} cannot be written" in refused(capsys, run, flag, f"/proc/{name}")
    Path(name).touch()
    access = os.access
    # Root may write everywhere: so this is what others see.
    monkeypatch.setattr(os, "access", lambda path, mode: path != Path(name) and access(path, mode))
    assert f"{name} cannot be written: it is write-protected" in refused(capsys, run, flag, name)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["a", name]


def test_the_json_is_replaced_as_a_whole(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there stays until the new one is complete; a link goes on being one."""
    Path("elsewhere").mkdir()
    Path("elsewhere/all.json").write_text("old")
    Path("all.json").symlink_to("elsewhere/all.json")
    arguments = ["evaluate", "--task", QUICK, "--policies", "wait,random", "--hosts", "2", "--json", "all.json"]
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
    assert stopped.value.code == 2
    assert Path("all.json").read_text() == "old"
    main(arguments)
    assert json.loads(Path("elsewhere/all.json").read_text())["task"] == QUICK
    assert Path("all.json").is_symlink()
    assert [path.name for path in Path("elsewhere").iterdir()] == ["all.json"]


def test_a_picture_that_cannot_be_drawn_to_the_end(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and the JSON is there."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate, "draw", full)
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", "--task", QUICK, "--policies", "wait,random", "--hosts", "2",
              "--json", "all.json", "--picture", "all.svg"])  # fmt: skip
    assert stopped.value.code == 2
    assert "all.svg cannot be written (No space left on device)" in capsys.readouterr().err
    assert Path("all.json").is_file()


# -- what it shows ----------------------------------------------------------------------------------------------------

SEEDS = "+".join(f"runs/blind{number}" for number in range(5))


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("wait", "wait"),
        ("heuristic:shipped", "heuristic:shipped"),
        ("heuristic:tuned/blind.json", "heuristic:blind.json"),
        ("runs/blind0", "blind0"),
        ("runs/blind0/", "blind0"),
        (SEEDS, "blind (5 seeds)"),
        (f"static:{SEEDS}", "static:blind (5 seeds)"),
        ("a+b", "a (2 seeds)"),
        ("runs/0+runs/1", "0 (2 seeds)"),
    ],
)
def test_short_names(spec: str, name: str) -> None:
    assert PolicySpec.parse(spec).short == name


def test_names_that_would_be_alike_are_written_out() -> None:
    specs = ["x/blind0", "y/blind0", SEEDS, "wait"]
    assert list(short_names(specs).values()) == ["x/blind0", "y/blind0", "blind (5 seeds)", "wait"]


def found() -> TaskComparison:
    """Policies with long names and figures as wide as they come, on hosts of two kinds."""
    one = Result([32.0, 33.5], [74.5, 75.5], [40.0, 41.0], [1234, 12345], [[], []], {"train": [12.5, 12.5]},
                 {"1": [30.5, 30.25], "4": [-30.5, -30.25]})  # fmt: skip
    names = {SEEDS: 5, "runs/somewhere/first": 1, "elsewhere/first": 1, "random-commit": 1, f"static:{SEEDS}": 5}
    policies = {
        name: [replace(one, objective=[32.0 + seed, 33.5]) for seed in range(seeds)] for name, seeds in names.items()
    }
    kind = KindSummary(64, 32.0, 34.25, 0.12, 1.5, {"r1c0": 0.75, "r1c1": 0.25}, "r1c0", 0.75)
    kinds = {name: {"blind_first_slot_cut": kind, "none": kind} for name in policies}
    return TaskComparison(
        EvaluationConfig("digits_varied", 2, 7), policies, compare_all(policies), {SEEDS: [one]}, kinds
    )


def shown(table: Table, capsys: pytest.CaptureFixture[str]) -> str:
    Console(width=80, color_system=None).print(table)
    return capsys.readouterr().out


def first_column(printed: str) -> str:
    """Its words, put together again."""
    lines = [line[1:] for line in printed.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("policy"))
    width = len(lines[at]) - len(lines[at].removeprefix("policy").lstrip())
    return "".join(line[: width - 1].replace(" ", "") for line in lines[at + 2 :])


def test_no_name_is_cut_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Folded where it must be; figures are whole."""
    for comparison in (found(), replace(found(), greedy={})):
        printed = shown(policy_table(comparison), capsys)
        assert "…" not in printed
        assert max(map(len, printed.splitlines())) <= 80
        for figure in ("+33.75", "+32.75", "+30.38", "-30.38", "75.0", "+36.58", "6790", "12.5×"):
            assert figure in printed
    names = short_names(comparison.policies).values()
    assert "".join(name.replace(" ", "") for name in names) in first_column(printed)
    by_kind = shown(kind_table(found()), capsys)
    assert "…" not in by_kind
    assert max(map(len, by_kind.splitlines())) <= 80


def test_differences_have_short_names() -> None:
    comparison = found()
    names = short_names(comparison.policies)
    told = [claim_line(one, names) for one in comparison.claims]
    assert any(line.startswith("blind (5 seeds) − random-commit: ") for line in told)
    assert any(line.startswith("blind (5 seeds) − runs/somewhere/first: ") for line in told)
    assert not any("blind0" in line for line in told)


def test_the_command_prints_short_names(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everywhere; the JSON has the whole ones."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    Trainer(quick_config(1, seed=1), Path("deep/er/a1")).run(progress=False)
    policies = f"{run}+deep/er/a1"
    main(["evaluate", "--task", QUICK, "--policies", f"{policies},wait", "--hosts", "2", "--json", "all.json"])
    printed = capsys.readouterr().out
    assert "a (2 seeds) − wait: " in printed
    assert "deep" not in printed
    assert list(json.loads(Path("all.json").read_text())["policies"]) == [policies, "wait"]


def test_shares_of_the_oracle_and_of_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice what the first policy has on average, 33.75 points, makes it a half."""
    comparison = found()
    assert "50%" not in shown(policy_table(comparison), capsys)
    result = replace(comparison.policies["random-commit"][0], objective=[67.5, 67.5])
    for name in ("oracle", "told:plans.json"):
        policies = {SEEDS: comparison.policies[SEEDS], name: [result]}
        printed = shown(policy_table(replace(comparison, policies=policies)), capsys)
        assert name.partition(":")[0] in printed
        assert "50%" in printed and "100%" in printed


def test_a_policy_is_compared_under_its_own_preset(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under another one it would be offered ops that it never saw. By default the learned policies decide."""
    agent = open_policy(Path(run))[0]
    write_policy(tmp_path / "commit.policy", agent, "commit")
    flags = ["evaluate", "--task", QUICK, "--hosts", "2", "--policies"]
    with pytest.raises(SystemExit):
        main([*flags, "commit.policy", "--preset", "core"])
    assert "'commit.policy' was trained under preset commit; use --preset commit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*flags, f"commit.policy,{run}"])
    assert "policies of different head presets cannot be compared" in capsys.readouterr().err
    assert preset_of(["commit.policy", "wait"]) == "commit"
    assert preset_of(["heuristic"]) == "core"
