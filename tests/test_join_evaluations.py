"""Policies of two evaluations side by side: only where hosts and arithmetic were the same."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from esper.leyline import BadValueError

RUNS = "+".join(f"runs/a{seed}" for seed in range(5))


@pytest.fixture
def script(script_of: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return script_of("join_evaluations")


def evaluated(**policies: list[list[float]]) -> dict[str, Any]:  # Any: what JSON holds
    """An evaluation with these objectives per training seed and host."""
    rows = {
        RUNS if name == "learned" else name: {
            "objective": [sum(host) / len(seeds) for host in zip(*seeds, strict=True)],
            "by_seed": [{"objective": seed} for seed in seeds],
            "share_of_oracle": None,
        }
        for name, seeds in policies.items()
    }
    made = {"command": f"esper evaluate {' '.join(policies)}"}
    hosts = {"task": "digits_blind", "hosts": 2, "seed": 8, "final": True}
    return {**hosts, "policies": rows, "differences": [], "warnings": [], "provenance": made}


LEARNED = [[10.0 + seed / 10, 12.0 - seed / 10] for seed in range(5)]


def test_a_policy_takes_the_place_of_another(script: ModuleType) -> None:
    """All differences are anew, those of other policies too; the rest stays."""
    earlier = evaluated(learned=LEARNED, schedule=[[1.0, 2.0]], wait=[[0.0, 0.0]], oracle=[[20.0, 20.0]])
    later = evaluated(wait=[[0.0, 0.0]], schedule=[[11.5, 12.0]], heuristic=[[5.0, 5.0]])
    joined = script.join(earlier, later, ["schedule"])
    assert list(joined["policies"]) == [RUNS, "schedule", "wait", "oracle", "heuristic"]
    means = {one["against"]: one["difference"]["mean"] for one in joined["differences"]}
    assert means == pytest.approx({"schedule": -0.75, "wait": 11.0, "oracle": -9.0, "heuristic": 6.0})
    assert joined["policies"]["heuristic"]["share_of_oracle"] == pytest.approx(0.25)
    first = {"policies": ["schedule", "heuristic"], "provenance": later["provenance"]}
    assert joined["joined"] == [first]
    again = evaluated(wait=[[0.0, 0.0]], random=[[1.0, 1.0]])
    second = {"policies": ["random"], "provenance": again["provenance"]}
    assert script.join(joined, again)["joined"] == [first, second]
    assert joined["provenance"] == earlier["provenance"]


@pytest.mark.parametrize("name", ["task", "hosts", "seed", "final"])
def test_other_hosts_are_refused(script: ModuleType, name: str) -> None:
    """Whatever says which hosts they are."""
    earlier, later = evaluated(learned=LEARNED, wait=[[0.0, 0.0]]), evaluated(wait=[[0.0, 0.0]])
    with pytest.raises(BadValueError, match=f"{name} .*different hosts"):
        script.join(earlier, later | {name: "another"})


def test_margins_are_kept(script: ModuleType) -> None:
    """And have to be the same."""
    earlier, later = evaluated(learned=LEARNED, wait=[[0.0, 0.0]]), evaluated(wait=[[0.0, 0.0]], random=[[1.0, 1.0]])
    assert {one["margin"] for one in script.join(earlier, later)["differences"]} == {1.0}
    earlier["differences"] = [{"margin": 5.0}]
    assert {one["margin"] for one in script.join(earlier, later)["differences"]} == {5.0}
    later["differences"] = [{"margin": 1.0}]
    with pytest.raises(BadValueError, match=r"margins \[1.0, 5.0\]"):
        script.join(earlier, later)


def test_something_has_to_be_in_both(script: ModuleType) -> None:
    """And to have come to the same, to the last digit, unless it is said to be another."""
    earlier = evaluated(learned=LEARNED, wait=[[0.0, 0.0]], schedule=[[1.0, 2.0]])
    with pytest.raises(BadValueError, match="no policy is in both"):
        script.join(earlier, evaluated(heuristic=[[5.0, 5.0]]))
    with pytest.raises(BadValueError, match="no policy is in both"):
        script.join(earlier, evaluated(schedule=[[1.0, 2.0]]), ["schedule"])
    with pytest.raises(BadValueError, match="'schedule' is not the same in both"):
        script.join(earlier, evaluated(wait=[[0.0, 0.0]], schedule=[[1.0, 2.0 + 1e-12]]))
    with pytest.raises(BadValueError, match="'oracle' cannot be replaced: it is not in both"):
        script.join(earlier, evaluated(wait=[[0.0, 0.0]]), ["oracle"])


def test_the_script(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Two files become a third."""
    paths = {name: tmp_path / f"{name}.json" for name in ("earlier", "later", "joined")}
    paths["earlier"].write_text(json.dumps(evaluated(learned=LEARNED, wait=[[0.0, 0.0]])))
    paths["later"].write_text(json.dumps(evaluated(wait=[[0.0, 0.0]], random=[[1.0, 1.0]])))
    told = run_here(
        "join_evaluations", *(str(paths[name]) for name in ("earlier", "later")), "--out", str(paths["joined"])
    )
    assert "3 policies, 2 differences" in told
    assert len(json.loads(paths["joined"].read_text())["policies"]) == 3
