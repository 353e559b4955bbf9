"""Policy specs, and runs that are joined into one policy: different training seeds of one configuration."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from simic.training.tiny import QUICK, quick_config

from esper.cli import main
from esper.leyline import BadValueError
from esper.simic.agent.policy import write_policy
from esper.simic.evaluation.comparison import run_comparisons
from esper.simic.evaluation.policies import (
    EvaluationConfig,
    PolicySpec,
    check_same_recipe,
    check_specs,
    learned_runs,
    unfinished,
)
from esper.simic.telemetry import AlarmLimits
from esper.simic.training.config import TrainConfig
from esper.simic.training.policy_files import open_policy
from esper.simic.training.run_folder import RunFolder
from esper.simic.training.trainer import Trainer


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs by short names, in an empty folder."""
    monkeypatch.chdir(tmp_path)


def configure(name: str, config: TrainConfig | None = None, **changes: object) -> str:
    """A run that has only been configured."""
    with RunFolder.create(Path(name), config or quick_config(**changes)):  # type: ignore[arg-type]  # by name
        return name


def train(name: str, **changes: object) -> str:
    """A run of one round."""
    Trainer(quick_config(1, **changes), Path(name)).run(progress=False)
    return name


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("wait", PolicySpec("wait", "wait")),
        ("heuristic", PolicySpec("heuristic", "heuristic")),
        ("heuristic:a/b.json", PolicySpec("heuristic:a/b.json", "heuristic", tuned=("a/b.json",))),
        ("schedule", PolicySpec("schedule", "schedule", tuned=("shipped",))),
        ("runs/a+b", PolicySpec("runs/a+b", "learned", runs=("runs/a", "b"))),
        ("static:a", PolicySpec("static:a", "static", base=PolicySpec("a", "learned", runs=("a",)))),
    ],
)
def test_parsed_specs(text: str, spec: PolicySpec) -> None:
    """By hand; and each training seed is a spec of its own."""
    assert PolicySpec.parse(text) == spec
    members = ["runs/a", "b"] if "+" in text else [text]
    assert spec.members == [PolicySpec.parse(member) for member in members]


def test_one_folder_is_one_training_seed() -> None:
    """However it is written."""
    configure("a")
    Path("link").symlink_to("a")
    for other in ("a", "a/", "./a", str(Path("a").resolve()), "link"):
        with pytest.raises(BadValueError, match=rf"^a and {other} are one folder"):
            check_same_recipe(["a", other])


def test_a_copy_is_no_training_seed() -> None:
    """Not where it was given other data folders, limits or threads either, which no number depends on."""
    configure("a", seed=3)
    shutil.copytree("a", "copy")
    configure("same", seed=3, threads=2, data_dir=Path("elsewhere"), alarms=AlarmLimits())
    for other in ("copy", "same"):
        with pytest.raises(BadValueError, match=f"^a and {other} have the same configuration and training seed 3"):
            check_same_recipe(["a", other])
    configure("begun", seed=3, start=Path("a"))
    configure("begun too", seed=3, start=Path("copy"))
    check_same_recipe(["a", "begun", "begun too"])


def test_what_training_seeds_may_differ_in() -> None:
    configure("a", seed=0)
    configure("b", seed=1, start=Path("x"), threads=2, data_dir=Path("y"))
    configure("c", replace(quick_config(seed=2), device="cuda:7"))
    check_same_recipe(["a", "b", "c"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 13}, "rounds is 12 in the first and 13 in the second"),
        ({"hosts": 8}, "hosts is 4 in the first and 8 in the second"),
        ({"members": 3}, "members is 1 in the first and 3"),
        ({"task": "digits_blind"}, f"task is '{QUICK}' in the first and 'digits_blind'"),
        ({"preset": "full"}, "preset is 'core' in the first and 'full'"),
        ({"sensing": True}, "sensing is False in the first and True"),
        ({"isolation": "straight_through"}, "isolation is 'shadow' in the first and 'straight_through'"),
        ({"ppo": {"epochs": 3}}, "ppo.epochs is 2 in the first and 3"),
        ({"reward": {"rho": 3.0}}, "reward.rho is 2.0 in the first and 3.0"),
    ],
)
def test_other_configurations_are_other_policies(changes: dict[str, object], words: str) -> None:
    """The error names the runs, the setting and both values."""
    configure("a", seed=0)
    config = quick_config(seed=1)
    inner = {name: replace(getattr(config, name), **new) for name, new in changes.items() if isinstance(new, dict)}
    configure("b", replace(config, **changes | inner))  # type: ignore[arg-type]  # by name
    with pytest.raises(BadValueError, match=r"^a and b are no training seeds of one configuration: ") as refused:
        check_same_recipe(["a", "b"])
    assert words in str(refused.value)
    assert "comma" in str(refused.value)


def test_an_evaluation_refuses_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Also beside controls, which have the runs of the policy they name; one run that is two policies is none twice."""
    train("a", seed=0)
    train("b", seed=1)
    config = EvaluationConfig(QUICK, 2, 7)
    check_specs([PolicySpec.parse(text) for text in ("a+b", "a", "retrained:a+b", "static:a+b")], config)
    specs = [PolicySpec.parse(text) for text in ("a+b", "./a", "retrained:a+b", "wait")]
    assert learned_runs(specs) == [Path("a"), Path("b")]
    for policies in ("a+a/+a+a+a,wait", "a+a,retrained:a+a", "wait,a+a,static:a+a"):
        with pytest.raises(SystemExit) as stopped:
            main(["evaluate", "--task", QUICK, "--hosts", "2", "--final", "--policies", policies])
        assert stopped.value.code == 2
        assert "are one folder" in capsys.readouterr().err
    assert not (Path("a") / "final.jsonl").exists()


def test_an_unfinished_run_is_warned_of() -> None:
    """By its own name, with both numbers, on the screen and in the JSON."""
    train("a", seed=0)
    trainer = Trainer(quick_config(3, seed=1), Path("b"))
    with trainer.folder, trainer.recorder.hub:
        trainer.run_round()
    found = run_comparisons([QUICK], ["a", "b", "static:b"], EvaluationConfig(QUICK, 2, 7), progress=False)
    (warning,) = found.warnings
    assert warning.startswith("b has completed 1 of its 3 rounds")
    assert json.loads(json.dumps(found.to_json()))["warnings"] == [warning]
    assert unfinished([Path("a")]) == []


def test_policy_files_are_evaluated_like_runs() -> None:
    """A file has the figures of the run that it comes from; a copy of it is no other training seed."""
    train("a", seed=0)
    agent, preset = open_policy(Path("a"))
    write_policy(Path("file"), agent, preset)
    shutil.copy("file", "copy")
    found = run_comparisons([QUICK], ["a", "file"], EvaluationConfig(QUICK, 2, 7, final=True), progress=False)
    one, other = (found.tasks[QUICK].policies[name][0] for name in ("a", "file"))
    assert one == other
    assert Path("file.final.jsonl").is_file(), "signed beside it"
    with pytest.raises(BadValueError, match="file and copy hold the same policy"):
        check_same_recipe(["file", "copy"])
