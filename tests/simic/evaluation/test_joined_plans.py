"""Plans of several searches as one policy: one member per search seed, compared as a sample of searches."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from simic.training.tiny import NAME, tiny_task

from esper.cli import main
from esper.leyline import BadValueError
from esper.simic.evaluation.comparison import run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig, PolicySpec, check_same_search, check_specs, short_names
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.statistics import compare_all, compare_rows, crossed
from esper.simic.tuning import Tuned, write_tuned
from esper.tamiyo.policies import HeuristicConfig, Plan, PlannedSeed

FOUND = Tuned("schedule", NAME, Plan((PlannedSeed("r1c0", "depthwise", 0),)), 1.5, 16, 16, 0, (), "model")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files by short names, in an empty folder."""
    tiny_task()
    monkeypatch.chdir(tmp_path)


def write(name: str, **changes: object) -> str:
    write_tuned(Path(name), replace(FOUND, **changes))  # type: ignore[arg-type]  # by name
    return name


def test_one_member_per_search() -> None:
    """A spec of its own each, as if it were named alone; the shipped file can be one of them."""
    spec = PolicySpec.parse("schedule:x/plan0.json+plan1.json+shipped")
    assert spec == PolicySpec(spec.text, "schedule", tuned=("x/plan0.json", "plan1.json", "shipped"))
    assert spec.members == [PolicySpec.parse(f"schedule:{file}") for file in spec.tuned]
    assert PolicySpec.parse("heuristic:a+b").members == [PolicySpec.parse(f"heuristic:{file}") for file in "ab"]
    assert short_names(["schedule:x/plan0.json+y/plan1.json", "schedule:z/plan0.json", "schedule"]) == {
        "schedule:x/plan0.json+y/plan1.json": "schedule:plan (2 seeds)",
        "schedule:z/plan0.json": "schedule:plan0.json",
        "schedule": "schedule",
    }
    with pytest.raises(BadValueError, match="has an empty name"):
        PolicySpec.parse("schedule:a.json+")


def test_every_member_is_evaluated() -> None:
    """Each as it is alone; their means and `by_seed` are in the JSON."""
    files = [write("a"), write("b", rng_seed=1, best=Plan((PlannedSeed("r1c1", "conv_small", 3),)))]
    config = EvaluationConfig(NAME, 3, 7)
    joined = run_comparisons([NAME], ["schedule:a+b", "wait"], config, progress=False).tasks[NAME]
    alone = run_comparisons([NAME], [f"schedule:{file}" for file in files], config, progress=False).tasks[NAME]
    assert joined.policies["schedule:a+b"] == [alone.policies[f"schedule:{file}"][0] for file in files]
    figures = json.loads(json.dumps(joined.to_json()))["policies"]["schedule:a+b"]
    means = np.mean([seed["objective"] for seed in figures["by_seed"]], 0)
    assert figures["objective"] == pytest.approx(means.tolist())
    assert figures["by_seed"][0]["commits"] != figures["by_seed"][1]["commits"]
    (claim,) = joined.claims
    assert (claim.difference.seeds, claim.enough_seeds) == (2, False)


def test_searches_that_are_not_seeds_of_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the files and what differs; two searches may well find the same plan."""
    changes: dict[str, dict[str, object]] = {
        "a": {},
        "b": {"rng_seed": 1},
        "copy": {},
        "longer": {"rng_seed": 2, "budget": 32},
        "halved": {"rng_seed": 3, "method": "halving"},
        "other": {"rng_seed": 4, "task": "digits_blind"},
    }
    files = {name: Path(write(name, **each)) for name, each in changes.items()}
    check_same_search([files["a"], files["b"]])
    for name, message in (
        ("a", "a and a are one file, and so one search seed"),
        ("copy", "a and copy have the same search and search seed 0"),
        ("longer", "budget is 16 in the first and 32 in the second; put a comma"),
        ("halved", "method is 'model' in the first and 'halving' in the second"),
        ("other", f"task is '{NAME}' in the first and 'digits_blind' in the second"),
    ):
        with pytest.raises(BadValueError, match=message):
            check_same_search([files["a"], files[name]])
    with pytest.raises(SystemExit):
        main(["evaluate", "--task", NAME, "--hosts", "2", "--policies", "schedule:a+copy,wait"])
    assert "one is a copy of the other" in " ".join(capsys.readouterr().err.split())


def test_files_by_hand_and_thresholds_are_joined_too() -> None:
    for name in "ab":
        Path(name).write_text('{"seeds": []}')
        write(f"rules{name}", kind="heuristic", best=HeuristicConfig(), rng_seed=ord(name))
    specs = [PolicySpec.parse(text) for text in ("schedule:a+b", "heuristic:rulesa+rulesb")]
    check_specs(specs, EvaluationConfig(NAME, 2, 7))
    with pytest.raises(BadValueError, match="one file"):
        check_specs([PolicySpec.parse("schedule:a+./a")], EvaluationConfig(NAME, 2, 7))


# -- what may be claimed ----------------------------------------------------------------------------------------------


def results(rows: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> list[Result]:
    """One result per row of objectives."""
    hosts = rows.shape[1]
    return [Result(row.tolist(), [50.0] * hosts, [50.0] * hosts, [0] * hosts, [[]] * hosts) for row in rows]


def test_seeds_of_learner_and_searches_are_independent_samples() -> None:
    """By hand. Hosts agree, so seeds alone count. Learner: 1, 2, 3, 4, 5 over its mean of 13, variance of the mean
    2.5/5 = 0.5. Five searches: −2, −1, 0, 1, 2 about 10, also 0.5. Difference 3, error √(0.5 + 0.5) = 1; degrees of
    freedom 1² / (0.5²/4 + 0.5²/4) = 8, t = 2.306. As pairs, in this order, there would be no error at all."""
    learner = np.repeat(np.arange(11.0, 16.0)[:, None], 4, 1)
    searches = np.repeat(np.arange(8.0, 13.0)[:, None], 4, 1)
    found = {"a+b+c+d+e": results(learner), "schedule:1+2+3+4+5": results(searches)}
    (claim,) = compare_all(found)
    difference = claim.difference
    assert (difference.mean, difference.low, difference.high) == pytest.approx((3, 3 - 2.306, 3 + 2.306), abs=1e-3)
    assert (claim.enough_seeds, claim.superior) == (True, True)
    reverse = {"a+b+c+d+e": results(learner), "schedule:1+2+3+4+5": results(searches[::-1])}
    assert compare_all(reverse)[0].difference.low == pytest.approx(difference.low)
    single = {"a+b+c+d+e": results(learner), "schedule:1": results(searches[2:3])}
    assert compare_all(single)[0].difference.low > difference.low + 0.3, "a plan by itself has no spread over searches"


def test_a_claim_needs_five_searches_where_there_are_several() -> None:
    """One plan is a rule. Several are a sample, and four are too few; five may claim something by themselves."""
    dice = np.random.default_rng(0)
    rows = {name: (dice.normal(0, 0.1, (seeds, 8)) + worth).tolist() for name, seeds, worth in (
        ("a+b+c+d+e", 5, 9.0), ("schedule:1+2+3+4", 4, 5.0), ("schedule:1+2+3+4+5", 5, 5.0), ("schedule:1", 1, 5.0),
        ("wait", 1, 0.0),
    )}  # fmt: skip
    enough = {claim.against: claim.superior for claim in compare_rows(rows)}
    assert enough == {
        "schedule:1+2+3+4": False, "schedule:1+2+3+4+5": True, "schedule:1": True, "wait": True,
    }  # fmt: skip
    rules = {name: rows[name] for name in ("schedule:1+2+3+4+5", "schedule:1+2+3+4", "wait")}
    assert [(claim.against, claim.superior) for claim in compare_rows(rules)] == [
        ("schedule:1+2+3+4", False), ("wait", True),
    ]  # fmt: skip


@pytest.mark.parametrize("searches", [5, 8])
@pytest.mark.parametrize(("worth", "superior"), [((0.0, -0.5, -1.0), 3.0), ((0.0, -1.0, -4.0), 1.5)])
def test_verdicts_about_searches_are_rarely_wrong(worth: tuple[float, ...], superior: float, searches: int) -> None:
    """A search finds one of three plans, each of which suits some hosts, so rows repeat. The learner's mean is that of
    the searches. It is called superior in about 2.5 % (5,000 simulations: error 0.2). If a search sometimes fails
    badly, it is called so less often, because five searches rarely show how bad they can be."""
    dice, many, hosts = np.random.default_rng(4), 5000, 64
    points, odds = np.array(worth), np.array([0.5, 0.3, 0.2])
    suits = dice.normal(0, 3, (many, 3, hosts))
    plans = dice.choice(3, (many, searches), p=odds)
    right = points[plans][..., None] + np.take_along_axis(suits, plans[..., None], 1)
    right += dice.normal(0, 1, (many, searches, hosts))
    left = points @ odds + dice.normal(0, 1, (many, 5, 1)) + dice.normal(0, 3, (many, 5, hosts))
    both = dice.normal(0, 9, (many, 1, hosts))
    mean, error, freedom = crossed(left + both, right + both)
    half = stats.t.ppf(0.975, freedom) * error
    assert 100 * float((mean > half).mean()) < superior
    assert float((np.abs(mean) <= half).mean()) > (0.94 if superior == 3.0 else 0.92)
