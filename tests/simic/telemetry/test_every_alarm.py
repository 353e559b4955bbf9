"""Each kind of alarm: provoked by what it is about, alone, in its round; and healthy figures beside it raise none."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from simic.telemetry.healthy import ORDINARY, metrics_with, metrics_with_head

from esper.simic.agent import PPOUpdateMetrics
from esper.simic.telemetry import (
    Alarm,
    AnomalyDetector,
    RatioExplosionDiagnostic,
    RoundFacts,
    collect_gradients,
    compute_lstm_health,
)
from esper.simic.telemetry.rules import RULES


class Case(NamedTuple):
    """What provokes an alarm, and what must not."""

    kind: str
    metrics: PPOUpdateMetrics
    facts: RoundFacts
    words: str
    """In the cause"""
    rounds: int = 1
    """That raise it"""
    subject: str = ""


def with_metrics(kind: str, words: str, rounds: int = 1, **changes: Any) -> Case:
    """Changed metrics, ordinary facts."""
    return Case(kind, metrics_with(**changes), ORDINARY.facts, words, rounds)


def with_facts(kind: str, words: str, rounds: int = 1, subject: str = "", **changes: Any) -> Case:
    """Ordinary metrics, changed facts."""
    return Case(kind, metrics_with(), replace(ORDINARY.facts, **changes), words, rounds, subject)


def hidden_state(hidden: float = 0.3, cell: float = 1.5, dead: int = 0) -> Any:
    """The health of a memory of equal numbers, with some dead units."""
    state = torch.full((6, 8), hidden)
    state[:, :dead] = 0.0
    return compute_lstm_health((state, torch.full((6, 8), cell)))


GRADIENTS = collect_gradients({"lstm.weight": torch.tensor([1.0]), "critic.weight": torch.tensor([torch.nan])})
RATIOS = RatioExplosionDiagnostic()(torch.tensor([[1.0, 50.0, 50.0, 1e-4]]))
CASES = [
    with_metrics(
        "numerical_fault",
        "is 2 (limit 0): ppo/policy_loss, ppo/return_mean",
        policy_loss=math.nan,
        return_mean=math.inf,
    ),
    with_metrics("numerical_fault", "ppo/max_kl", max_kl=math.nan),
    with_metrics("numerical_fault", "ppo/joint_ratio_max", joint_ratio_max=math.nan),
    Case("numerical_fault", metrics_with_head("op", entropy=math.nan), ORDINARY.facts, "ppo/op/entropy"),
    with_metrics(
        "gradient_not_finite",
        "is 1 (limit 0)",
        minibatches_not_finite=1,
        pre_clip_grad_norm=math.nan,
        clip_factor=math.nan,
    ),
    with_metrics("gradient_not_finite", "is 3 (limit 0)", minibatches_not_finite=3, pre_clip_grad_norm=math.inf),
    with_facts("gradient_not_finite", "in critic", gradients=GRADIENTS),
    with_metrics("ratio_exploded", "is 45 (limit 40)", joint_ratio_max=45.0),
    with_metrics("ratio_exploded", "is inf (limit 40)", joint_ratio_max=math.inf),
    Case(
        "ratio_exploded", metrics_with(joint_ratio_max=50.0), RoundFacts(ratios=RATIOS), "is 50 (limit 40); 2 exploded"
    ),
    with_metrics("ratio_vanished", "is 0.0001 (limit 0.001)", joint_ratio_min=1e-4),
    with_metrics("kl_spike", "is 0.2 (limit 0.18)", max_kl=0.2),
    with_metrics("kl_extreme", "is 0.6 (limit 0.5)", max_kl=0.6),
    Case("entropy_collapse", metrics_with_head("op", entropy=0.01), ORDINARY.facts, "head op is 0.01", 3, "op"),
    with_metrics("value_collapse", "is 12 (limit 10)", value_loss=12.0),
    with_metrics("value_misleads", "is -1.5 (limit -1)", 3, explained_variance=-1.5),
    with_metrics(
        "advantage_floor",
        "deviation of the advantages is 0.5 under its floor",
        advantage_floored=True,
        advantage_std=0.5,
    ),
    with_metrics("gradient_vanishing", "is 0.0005 (limit 0.001)", 2, pre_clip_grad_norm=5e-4),
    with_metrics("gradient_vanishing", "is 0 (limit 0.001)", 2, pre_clip_grad_norm=0.0),
    Case(
        "gradient_vanishing", metrics_with_head("slot", grad_norm=1e-8), ORDINARY.facts, "head slot is 1e-08", 2, "slot"
    ),
    with_metrics("gradient_exploding", "is 200 (limit 100)", pre_clip_grad_norm=200.0),
    with_facts("lstm_not_finite", "is 48", lstm=hidden_state(cell=math.nan)),
    with_facts(
        "lstm_extreme", "root mean square of the LSTM's cells is 12", subject="cell", lstm=hidden_state(cell=12.0)
    ),
    with_facts("lstm_extreme", "saturated hidden values is 1", subject="hidden", lstm=hidden_state(hidden=0.99)),
    with_facts("lstm_dead", "silent LSTM units is 0.625", lstm=hidden_state(dead=5)),
    with_metrics("behaviour_gap", "is 0.002 (limit 0.001)", behaviour_gap=2e-3),
    with_facts("too_few_commits", "is 0.0417 (limit 0.05), of 4 seeds per episode", 3, committed=1, germinated=96),
    with_facts("no_growth", "number of seeds per episode is 0.125", 3, committed=0, germinated=3),
    with_facts("reward_hacking", "is 0.3 (limit 0.25) (60 of 200)", acting=200, hacking=60, ransomware=0),
    with_facts("ransomware", "is 0.3 (limit 0.25) (60 of 200)", acting=200, hacking=0, ransomware=60),
    with_facts("ransomware", "(5 of 5; the worst is x", acting=5, hacking=0, ransomware=5, worst_ransomware="x"),
    with_facts("panics", "panics per episode is 0.167 (limit 0.1)", panics=4),
]
"""`gradient_drift` needs a past: see test_anomaly_detector."""


def name_of(case: Case) -> str:
    """As a test's id."""
    return f"{case.kind}: {case.words}"


def provoke(case: Case, warmup: int = 6) -> Iterator[tuple[int, Alarm]]:
    """Ordinary rounds, then bad ones, then ordinary ones."""
    detector = AnomalyDetector()
    ordinary = replace(ORDINARY.facts, acting=200, hacking=4, ransomware=4, lstm=hidden_state())
    for index in range(warmup + case.rounds + 8):
        bad = warmup <= index < warmup + case.rounds + 2
        metrics, facts = (case.metrics, case.facts) if bad else (metrics_with(), ordinary)
        for alarm in detector.look(index, metrics, facts):
            yield index, alarm


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_alarm(case: Case) -> None:
    """Once, in the round in which it has lasted long enough, with its cause; and once when it is over."""
    severity = {rule.kind: rule.severity for rule in RULES}[case.kind]
    begins, ends = provoke(case)
    assert begins[0] == 6 + case.rounds - 1
    alarm = begins[1]
    assert (alarm.kind, alarm.severity, alarm.subject, alarm.ended) == (case.kind, severity, case.subject, False)
    assert case.words in alarm.cause
    assert alarm.remedy
    assert ends[0] == 6 + case.rounds + 2 + 2
    assert (ends[1].kind, ends[1].severity, ends[1].subject, ends[1].ended) == (case.kind, "info", case.subject, True)


def test_every_rule_is_provoked() -> None:
    """A rule without a case here would go untested."""
    kinds = [rule.kind for rule in RULES]
    assert {case.kind for case in CASES} | {"gradient_drift"} == set(kinds)
    assert len(kinds) == len(set(kinds))


HARMLESS = [
    pytest.param({}, {"hacking": 4, "acting": 4}, id="too few seeds to judge"),
    pytest.param({}, {"committed": 0, "germinated": 0, "episodes": 0, "panics": 3}, id="no episodes"),
    pytest.param({}, {"lstm": None}, id="no memory measured"),
    pytest.param({"explained_variance": -5.0, "return_std": 0.0}, {}, id="returns that do not vary"),
    pytest.param({"stopped_by_kl": True, "minibatches_taken": 2}, {}, id="an update that stopped in time"),
    pytest.param({"joint_ratio_max": 12.8, "joint_ratio_min": 0.0083}, {}, id="the widest ratios of healthy rounds"),
    pytest.param({"max_kl": 0.116}, {}, id="the largest KL of healthy rounds"),
    pytest.param({"value_loss": 3.8}, {}, id="a critic that is surprised by success"),
]


@pytest.mark.parametrize(("metrics", "facts"), HARMLESS)
def test_harmless(metrics: dict[str, Any], facts: dict[str, Any]) -> None:
    """What looks odd and is not wrong."""
    detector = AnomalyDetector()
    for index in range(6):
        assert detector.look(index, metrics_with(**metrics), replace(ORDINARY.facts, **facts)) == ()


def test_a_head_with_nothing_to_learn_may_have_no_gradient() -> None:
    """Its weights were not used."""
    idle = metrics_with_head("blueprint", grad_norm=0.0, learnable_fraction=0.0, entropy=None)
    detector = AnomalyDetector()
    assert [alarm for index in range(5) for alarm in detector.look(index, idle)] == []


def test_a_policy_that_stops_growing_is_not_one_that_fails_to_commit() -> None:
    """Waiting is an answer: an info, and no warning."""
    detector = AnomalyDetector()
    facts = RoundFacts(episodes=24, committed=0, germinated=2, panics=0)
    alarms = [alarm for index in range(6) for alarm in detector.look(index, metrics_with(), facts)]
    assert [(alarm.kind, alarm.severity) for alarm in alarms] == [("no_growth", "info")]
