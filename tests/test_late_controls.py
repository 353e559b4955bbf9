"""Controls that are run later are those that would have been run at once."""

import json
from collections.abc import Callable
from types import ModuleType

import pytest
from simic.training.tiny import tiny_task

from esper.leyline import BadValueError
from esper.simic.evaluation.comparison import run_comparisons
from esper.simic.evaluation.policies import Contender, EvaluationConfig, PolicySpec

pytestmark = pytest.mark.slow

GROWS, RUN = "random-commit", "runs/a0"


@pytest.fixture
def script(script_of: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return script_of("late_controls")


def test_controls_from_a_file(script: ModuleType) -> None:
    """To the last digit, with their costs; a policy that commits stands in for a learned one."""
    task = tiny_task()
    names = [GROWS, "wait", f"retrained:{GROWS}", f"static:{GROWS}"]
    config = EvaluationConfig(task.name, 3, 5)
    whole = run_comparisons([task.name], names, config, progress=False).to_json()["policies"]
    assert isinstance(whole, dict)
    found = {"policies": {RUN: whole[GROWS], "wait": whole["wait"]}, "provenance": {"command": "esper evaluate"}}
    found = json.loads(json.dumps(found))  # as a file has it
    later = script.run_controls(found, ["retrained", "static"], config, workers=1)["policies"]
    assert any(whole[GROWS]["added_params"]), "nothing was grown, nothing is shown"
    assert list(later) == ["wait", f"retrained:{RUN}", f"static:{RUN}"]
    for name, each in later.items():
        before = whole[name.replace(RUN, GROWS)]
        assert each == before, name
    (oracle,) = script.contenders_of(found, ["oracle"], config)["oracle"]  # the same as at once: it has no base
    assert oracle == Contender(config, PolicySpec.parse("oracle"))


def test_a_learned_policy_has_to_be_there(script: ModuleType) -> None:
    """And something that is run again."""
    config = EvaluationConfig(tiny_task().name, 3, 5)
    for names in (["wait", "random"], [RUN, "random"]):
        with pytest.raises(BadValueError, match="a learned policy and 'wait' have to be among"):
            script.contenders_of({"policies": dict.fromkeys(names)}, ["oracle"], config)


def test_other_kinds_of_seeds_are_refused(script: ModuleType) -> None:
    """A file does not say how a fossil acts; those of the core heads all act alike."""
    config = EvaluationConfig(tiny_task().name, 3, 5)
    found = {"policies": {RUN: {}, "wait": {}}, "provenance": {"command": "esper evaluate --preset full"}}
    with pytest.raises(BadValueError, match="--preset has seeds of other kinds"):
        script.contenders_of(found, ["retrained"], config)
