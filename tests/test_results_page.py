"""The page of results: it is what was measured, and says it in the words that the figures allow."""

import importlib
import json
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import pytest

from esper.simic.evaluation import statistics

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("results_page")


def test_the_page_of_results_is_what_was_measured(results: ModuleType) -> None:
    """If not: `python benchmarks/results_page.py > docs/results.md`."""
    written = (ROOT / "docs" / "results.md").read_text()
    assert written == results.page()


def test_stored_differences_are_those_of_the_stored_rows(results: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: `python benchmarks/results_page.py --refresh > docs/results.md`. Bootstraps take long; they are as good
    as the file says."""
    monkeypatch.setattr(statistics, "BOOTSTRAPS", 2)
    compared = 0
    for path in sorted((ROOT / "benchmarks" / "results").glob("evaluation_*.json")):
        found = json.loads(path.read_text())
        for stored, now in zip(found["differences"], results.evaluation_anew(found)["differences"], strict=True):
            compared += 1
            assert _comparable(stored) == _comparable(now)
    for path in sorted((ROOT / "benchmarks" / "results").glob("gain_lasts_*.json")):
        found = json.loads(path.read_text())
        for name, now in results.gain_lasts_anew(found)["policies"].items():
            for when in ("over_compute", "over_compute_later"):
                compared += 1
                stored = {"difference": found["policies"][name]["figures"][when]}
                assert _comparable(stored) == _comparable({"difference": now["figures"][when]})
    assert compared > 20


def _comparable(one: dict[str, Any]) -> dict[str, Any]:
    """Without the bootstrap; figures rounded, since processors add in different orders."""
    figures = {name: float(f"{value:.6g}") for name, value in one["difference"].items() if "bootstrap" not in name}
    p = {"adjusted_p": float(f"{one['adjusted_p']:.6g}")} if "adjusted_p" in one else {}
    return one | p | {"difference": figures}


def test_refresh_writes_what_changed_and_nothing_else(
    results: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By hand: gaps 1 and 3 on two hosts, mean 2; policies, rows and all else stay."""
    monkeypatch.setattr(statistics, "BOOTSTRAPS", 2)
    rows = {"runs/a": [[2.0, 5.0]], "wait": [[1.0, 2.0]]}
    policies = {name: {"by_seed": [{"objective": row} for row in each]} for name, each in rows.items()}
    path = tmp_path / "evaluation_digits.json"
    path.write_text(json.dumps({"task": "digits", "policies": policies, "differences": [{"margin": 2.5}]}))
    assert results.refresh(tmp_path) == [path]
    found = json.loads(path.read_text())
    assert (found["task"], found["policies"]) == ("digits", policies)
    (one,) = found["differences"]
    assert (one["policy"], one["against"], one["margin"], one["difference"]["mean"]) == ("runs/a", "wait", 2.5, 2.0)
    assert results.refresh(tmp_path) == []


def test_a_row_of_the_page(results: ModuleType) -> None:
    """Means over hosts, spread over seeds, and what the first policy has over this one; words only for enough seeds."""
    seeds = [{"objective": [2.0, 4.0]}, {"objective": [5.0, 5.0]}]
    figures = {"accuracy": [80.0, 90.0], "added_params": [100.0, 300.0], "cost": [2.0, 2.0]}
    learned = {"objective": [3.5, 4.5], "by_seed": seeds, "by_kind": {}, "share_of_oracle": 0.5, **figures}
    learned["greedy"] = {"objective": [4.25, 4.75]}
    waits = {"objective": [0.0, 0.0], "by_seed": seeds[:1], "by_kind": {}, **figures}
    difference = {"mean": 4.0, "low": 1.5, "high": 6.5, "bootstrap_low": 1.0, "bootstrap_high": 7.0}
    compared = {"policy": "runs/a0+runs/a1", "against": "wait", "difference": difference, "superior": True}
    machine = {"accelerator": None, "cores": 2}
    found = {
        "task": "digits_blind", "hosts": 2, "final": True, "policies": {"runs/a0+runs/a1": learned, "wait": waits},
        "differences": [compared | {"not_worse": True, "enough_seeds": False}],
        "provenance": {"command": "esper evaluate", "torch": "2.13.0", "machine": machine}, "warnings": [],
    }  # fmt: skip
    text = results.evaluation(found)
    assert "| a (2 seeds) | +4.00 (+3.0 to +5.0) | +4.50 | 85.0 | 200 | 2.0× |  |" in text
    assert "| wait | +0.00 |  | 85.0 | 200 | 2.0× | +4.00 (+1.50 to +6.50; boot +1.00 to +7.00) |" in text
    assert "50 % of the oracle's objective" in text
    found["differences"] = [compared | {"not_worse": True, "enough_seeds": True}]
    assert "(+1.50 to +6.50; boot +1.00 to +7.00), superior |" in results.evaluation(found)
    assert "Warned" not in text
    found["warnings"] = ["runs/a0 was seen", "runs/a1 was seen"]
    assert "Warned: runs/a0 was seen (and 1 more like it)." in results.evaluation(found)
    assert "Run later" not in text
    later = {"command": "esper evaluate --policies wait", "torch": "2.13.0", "machine": machine}
    found["joined"] = [{"policies": ["wait", "random"], "provenance": later}]
    told = "Run later, on the same hosts: wait, random (2 CPU cores, torch 2.13.0):\n\n"
    assert f"{told}```text\nesper evaluate --policies wait\n```\n" in results.evaluation(found)


def test_lines_of_the_page_fit_a_screen(results: ModuleType) -> None:
    """Tables alone may be wider."""
    lines = [line for line in results.page().splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 100] == []


def test_long_commands_can_be_pasted(results: ModuleType) -> None:
    """A shell removes a backslash with the newline after it, within words and between them."""
    runs = "+".join(f"runs/varied{number}" for number in range(20))
    command = f"esper evaluate --policies {runs},wait --hosts 128 --workers 2 --json results.json --greedy --final"
    first, *block, last = results._command(command).splitlines()
    assert (first, last) == ("```text", "```")
    assert len(block) == 4
    assert max(map(len, block)) <= 100
    assert "\n".join(block).replace("\\\n", "").split() == command.split()


def test_the_summary_names_the_best_rule(results: ModuleType) -> None:
    """By hand: the schedule beats waiting; an oracle is no rule."""
    objectives = {"runs/a": [2.0, 4.0], "schedule": [1.0, 2.0], "wait": [0.0, 0.0], "oracle": [9.0, 9.0]}
    policies = {name: {"objective": values} for name, values in objectives.items()}
    difference = {"mean": 1.5, "low": 1.0, "high": 2.0, "bootstrap_low": 1.0, "bootstrap_high": 2.0}
    one = {"policy": "runs/a", "difference": difference, "superior": True, "not_worse": True, "enough_seeds": False}
    found = {"policies": policies, "differences": [one | {"against": name} for name in ("wait", "schedule", "oracle")]}
    *_, row = results.summary({"digits": found}).splitlines()
    assert row == "| digits | a | +3.00 | schedule | +1.50 (+1.00 to +2.00; boot +1.00 to +2.00) |"


def test_a_second_look_at_test_images_is_on_the_page(results: ModuleType) -> None:
    """Also where the gain was measured later; results from before there were warnings have none."""
    points = {"mean": 1.0, "low": 0.5, "high": 1.5}
    figures = {
        "gain": 2.0, "gain_later": 1.5, "share": 0.75, "share_low": 0.5, "share_high": 0.9,
        "over_compute": points, "over_compute_later": points,
    }  # fmt: skip
    found = {"task": "digits_blind", "hosts": 2, "seed": 7, "final": True, "steps": 20,
             "policies": {"a0+a1": {"seeds": 2, "figures": figures}}}  # fmt: skip
    plain = results.gain_lasts(found)
    assert "--policies runs/a0+runs/a1 --hosts 2 --seed 7 --final\n" in plain
    assert "| a (2 seeds) | 2 | +2.0 | +1.5 | 75 % (50 to 90) |" in plain
    assert results.gain_lasts(found | {"warnings": []}) == plain
    assert results.gain_lasts(found | {"warnings": ["a0 was seen"]}) == plain + "\nWarned: a0 was seen.\n"


def stored(name: str) -> Any:
    """A stored result."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def signed(mean: float, half: float, digits: int) -> str:
    """As the tables show it."""
    return f"{mean:+.{digits}f} ± {half:.{digits}f}".replace("-", "−")


def test_own_models_are_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tables of own models, recomputed from the stored scores; the budget held, and no model lost by growth."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("own_models")
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs" / "own-models.md").read_text()
    not_below_static = 0
    for name, model in stored("own_models")["models"].items():
        case, arms = script.CASES[name], model["arms"]
        (host,) = set(arms["ungrown"]["parameters"])
        sizes = arms["grown"]["parameters"]
        assert len(sizes) == 10 and max(sizes) <= host + case.budget
        found: dict[str, tuple[float, float]] = {
            arm: script.compare(arms["grown"]["scores"], arms[arm]["scores"], case.by_loss) for arm in arms
        }
        score = fmean(arms["grown"]["scores"])
        parameters = f"{host:,} → {round(fmean(sizes)):,}"
        long = {arm: signed(*found[arm], 2) for arm in found}
        shown = f"loss {score:.3f}" if case.by_loss else f"{score:.1f} %"
        unit = "%" if case.by_loss else "points"
        ends = f"{long['ungrown']} {unit} | {long['static']} | {long['retrained']}"
        assert f"| {parameters} | {shown} | {ends} |" in page
        unit = f"{unit} of the loss" if case.by_loss else unit
        short = {arm: signed(*found[arm], 1) for arm in found}
        assert f"| {parameters} | {short['ungrown']} {unit} | {short['static']} {unit.split()[0]} |" in readme
        lowest = {arm: gain - half for arm, (gain, half) in found.items()}
        assert lowest["ungrown"] > -1
        not_below_static += lowest["static"] > -1
    assert not_below_static >= 2


def test_other_figures_of_own_models() -> None:
    """How seeds learn, and what a Grower costs that does nothing."""
    page = (ROOT / "docs" / "own-models.md").read_text().replace("**", "")
    ways = {"direct": "| acts from birth", "straight_through": "| straight-through,", "shadow": "| shadow row"}
    learned = stored("how_seeds_learn")
    for way, label in ways.items():
        cells = []
        for model in ("cnn", "mlp"):
            gains = [a - b for a, b in zip(learned[model][way], learned[model]["none"], strict=True)]
            cells.append(signed(fmean(gains), stdev(gains), 1))
        (row,) = (line for line in page.splitlines() if line.startswith(label))
        assert row.endswith(f"| {' | '.join(cells)} |")
    cost = stored("grower_cost")["high"] - 1
    assert cost <= 0.03 and f"at most {100 * cost:.2f} % of an epoch" in " ".join(page.split())
