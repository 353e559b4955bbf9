"""When an alarm begins, stays quiet, and ends."""

import json
import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from simic.telemetry.healthy import ORDINARY, metrics_with, metrics_with_head

from esper.leyline import BadValueError
from esper.leyline.records import decode, encode
from esper.simic.agent import PPOConfig, PPOUpdateMetrics
from esper.simic.telemetry import Alarm, AlarmLimits, AnomalyDetector, DetectorState
from esper.simic.telemetry.rules import RULES

Seen = list[tuple[int, str, str, str]]


def look(detector: AnomalyDetector, rounds: list[PPOUpdateMetrics], start: int = 0) -> Seen:
    """(round, kind, subject, severity) of every alarm; ends are infos."""
    return [
        (alarm.round, alarm.kind, alarm.subject, alarm.severity)
        for index, metrics in enumerate(rounds, start)
        for alarm in detector.look(index, metrics)
    ]


QUIET = metrics_with()
COLLAPSED = metrics_with_head("slot", entropy=0.01)


def with_norm(norm: float, metrics: PPOUpdateMetrics = QUIET, **changes: Any) -> PPOUpdateMetrics:
    """A round whose heads' gradients have this norm, all together."""
    factor = norm / math.hypot(*(head.grad_norm for head in metrics.heads.values()))
    heads = {name: replace(head, grad_norm=head.grad_norm * factor) for name, head in metrics.heads.items()}
    return replace(metrics, heads=heads, **changes)


@pytest.mark.requirement(8)
def test_entropy_collapse_on_the_nth_round() -> None:
    """One head at 0.01 raises one alarm, in the third round in a row; the others raise none."""
    assert look(AnomalyDetector(), [COLLAPSED] * 7) == [(2, "entropy_collapse", "slot", "warning")]


@pytest.mark.requirement(8)
def test_entropy_limit_is_respected() -> None:
    """A lower limit is quiet, a higher one is about every head, and minus infinity disables the alarm."""
    assert look(AnomalyDetector(AlarmLimits(entropy=0.005)), [COLLAPSED] * 4) == []
    seen = look(AnomalyDetector(AlarmLimits(entropy=0.999)), [COLLAPSED] * 4)
    assert [(kind, subject) for _, kind, subject, _ in seen] == [("entropy_collapse", head) for head in QUIET.heads]
    never = AlarmLimits(entropy=-math.inf)
    assert look(AnomalyDetector(never), [metrics_with_head("slot", entropy=0.0)] * 4) == []


@pytest.mark.requirement(8)
def test_entropy_that_recovers_starts_anew() -> None:
    """A healthy round between two bad pairs resets the count."""
    assert look(AnomalyDetector(), [COLLAPSED, COLLAPSED, QUIET, COLLAPSED, COLLAPSED]) == []


@pytest.mark.requirement(8)
def test_a_head_without_a_choice_changes_nothing() -> None:
    """A round without a choice for the head neither counts nor resets the count."""
    unused = metrics_with_head("slot", entropy=None)
    assert look(AnomalyDetector(), [COLLAPSED, COLLAPSED, unused, unused, COLLAPSED]) == [
        (4, "entropy_collapse", "slot", "warning")
    ]


@pytest.mark.requirement(8)
def test_exploration_does_not_hide_a_collapse() -> None:
    """With ε = 0.1, even a collapsed head's mixture has an entropy of at least 0.1."""
    hidden = replace(metrics_with_head("slot", entropy=0.115), epsilon=0.1)
    assert look(AnomalyDetector(), [hidden] * 3) == [(2, "entropy_collapse", "slot", "warning")]
    assert look(AnomalyDetector(), [replace(hidden, epsilon=0.0)] * 3) == []


@pytest.mark.requirement(9)
@pytest.mark.parametrize("field", ["max_kl", "approx_kl"])
def test_kl(field: str) -> None:
    """A KL of 0.2 is a spike and 0.6 is extreme, each at once and without another alarm."""
    assert look(AnomalyDetector(), [metrics_with(**{field: 0.2})]) == [(0, "kl_spike", "", "warning")]
    assert look(AnomalyDetector(), [metrics_with(**{field: 0.6})]) == [(0, "kl_extreme", "", "critical")]
    assert look(AnomalyDetector(), [metrics_with(**{field: 0.14})]) == []


@pytest.mark.requirement(9)
def test_kl_gets_worse_and_better() -> None:
    """A spike that becomes extreme is a new alarm, and the spike ends only when both do."""
    kls = [0.2, 0.2, 0.6, 0.7, 0.2, 0.01, 0.01, 0.01, 0.01]
    assert look(AnomalyDetector(), [metrics_with(max_kl=kl, approx_kl=kl) for kl in kls]) == [
        (0, "kl_spike", "", "warning"),
        (2, "kl_extreme", "", "critical"),
        (6, "kl_extreme", "", "info"),
        (7, "kl_spike", "", "info"),
    ]


def test_hysteresis() -> None:
    """Between 0.18 / 1.5 = 0.12 and 0.18 it is neither bad nor healthy: nothing ends, and it does not begin again."""
    kls = [0.2, 0.01, 0.01, 0.15, 0.2, 0.01, 0.01, 0.01, 0.01, 0.2]
    assert look(AnomalyDetector(), [metrics_with(max_kl=kl) for kl in kls]) == [
        (0, "kl_spike", "", "warning"),
        (7, "kl_spike", "", "info"),
        (9, "kl_spike", "", "warning"),
    ]


def test_hysteresis_from_below() -> None:
    """Entropy under 0.02 · 1.5 = 0.03, or an explained variance under −1 / 1.5 = −0.67, is no proof of health."""
    detector = AnomalyDetector()
    begins = [replace(metrics_with_head("slot", entropy=0.01), explained_variance=-2.0)] * 3
    between = [replace(metrics_with_head("slot", entropy=0.025), explained_variance=-0.8)] * 5
    healthy = [replace(metrics_with_head("slot", entropy=0.031), explained_variance=-0.6)] * 3
    assert look(detector, begins + between + healthy) == [
        (2, "entropy_collapse", "slot", "warning"),
        (2, "value_misleads", "", "warning"),
        (10, "entropy_collapse", "slot", "info"),
        (10, "value_misleads", "", "info"),
    ]


@pytest.mark.requirement(9)
def test_a_kl_that_is_no_number() -> None:
    """A NaN in either KL is a numerical fault and nothing else."""
    for kls in ({"max_kl": math.nan, "approx_kl": 0.6}, {"max_kl": 0.6, "approx_kl": math.nan}):
        assert look(AnomalyDetector(), [metrics_with(**kls)]) == [(0, "numerical_fault", "", "critical")]


@pytest.mark.requirement(42)
@pytest.mark.parametrize("before", [5, 8, 40])
@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("norm", [0.05, 2.0])
def test_drift(norm: float, factor: float, before: int) -> None:
    """A norm three times larger or smaller raises an alarm in its third round; two rounds are noise."""
    usual, drifted = with_norm(norm), with_norm(norm * factor)
    assert look(AnomalyDetector(), [usual] * before + [drifted] * 2 + [usual] * 3) == []
    detector = AnomalyDetector()
    rounds = [usual] * before + [drifted] * 5
    [alarm] = [alarm for index, metrics in enumerate(rounds) for alarm in detector.look(index, metrics)]
    assert (alarm.round, alarm.kind, alarm.severity) == (before + 2, "gradient_drift", "warning")
    assert alarm.value == pytest.approx(3 ** (0.95**2))


@pytest.mark.requirement(42)
@pytest.mark.parametrize(("factor", "burst"), [(2.0, 10.0), (1 / 2, 1 / 10)])
def test_less_is_no_drift(factor: float, burst: float) -> None:
    """Twice the usual norm for any time, or ten times for one round, raises nothing."""
    usual = with_norm(0.3)
    assert look(AnomalyDetector(), [usual] * 5 + [with_norm(0.3 * factor)] * 10) == []
    assert look(AnomalyDetector(), [usual] * 5 + [with_norm(0.3 * burst)] + [usual] * 9) == []


@pytest.mark.requirement(42)
def test_bursts_of_single_minibatches_are_no_drift() -> None:
    """In this healthy run only the largest norms would have counted as drift."""
    largest = [0.9, 1.42, 1.22, 0.65, 2.35, 1.41, 1.32, 1.78, 1.68, 4.68, 3.95, 7.22]
    largest += [6.76, 5.68, 4.0, 4.79, 5.49, 3.17, 3.15, 1.58, 3.17, 1.5, 3.13, 2.44]
    heads = [0.11, 0.37, 0.4, 0.26, 0.43, 0.5, 0.53, 0.53, 0.58, 0.87, 0.9, 1.23]
    heads += [0.9, 1.21, 0.89, 1.1, 0.91, 0.66, 0.9, 0.45, 0.75, 0.6, 0.69, 0.43]
    rounds = [with_norm(norm, pre_clip_grad_norm=large) for large, norm in zip(largest, heads, strict=True)]
    assert look(AnomalyDetector(), rounds) == []
    assert {kind for _, kind, _, _ in look(AnomalyDetector(), [with_norm(norm) for norm in largest])} == {
        "gradient_drift"
    }


@pytest.mark.requirement(42)
def test_a_policy_that_begins_to_earn_does_not_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms of the healthy run in which they rose most raise no alarm."""
    norms = [0.16, 0.2, 0.39, 0.28, 0.12, 0.35, 0.26, 0.17, 0.17, 0.3, 0.31, 0.4]
    norms += [0.36, 0.53, 0.58, 0.68, 0.65, 0.62, 0.7, 0.75, 0.62, 0.62, 0.92, 1.01]
    assert look(AnomalyDetector(), [with_norm(norm) for norm in norms]) == []
    impatient = [replace(rule, patience=min(rule.patience, 2)) for rule in RULES]
    monkeypatch.setattr("esper.simic.telemetry.detector.RULES", impatient)
    assert look(AnomalyDetector(), [with_norm(norm) for norm in norms]) != []


@pytest.mark.requirement(20)
def test_limits_of_gradients_are_in_units_of_their_clip_norm() -> None:
    """Another clip norm in the agent's settings moves every limit with it."""
    for clip_norm, norm, kinds in ((0.5, 120.0, ["gradient_exploding"]), (5.0, 120.0, []), (5.0, 1200.0, None)):
        ppo = PPOConfig(clip_norm=clip_norm)
        detector = AnomalyDetector(ppo=ppo)
        assert detector.ppo is ppo
        seen = [kind for _, kind, _, _ in look(detector, [metrics_with(pre_clip_grad_norm=norm)])]
        assert seen == (["gradient_exploding"] if kinds is None else kinds)
    for clip_norm, kinds in ((0.5, []), (500.0, ["gradient_vanishing"])):
        detector = AnomalyDetector(ppo=PPOConfig(clip_norm=clip_norm))
        seen = [kind for _, kind, _, _ in look(detector, [metrics_with(pre_clip_grad_norm=0.5)] * 2)]
        assert seen == kinds


@pytest.mark.requirement(42)
def test_drift_forgets_what_other_alarms_are_about() -> None:
    """After exploded, vanished, zero and NaN norms, ordinary ones are still ordinary."""
    usual, kinds = with_norm(2.0), {"gradient_exploding", "gradient_vanishing", "gradient_not_finite"}
    norms = (200.0, 200.0, 200.0, 1e-4, 0.0, math.nan)
    bursts = [with_norm(norm, pre_clip_grad_norm=norm) for norm in norms]
    bursts += [with_norm(norm) for norm in (0.0, math.nan, math.inf)] + [with_norm(20.0, minibatches_not_finite=1)] * 3
    detector = AnomalyDetector()
    assert look(detector, [usual] * 8) == []
    past = detector.state.drift
    assert {kind for _, kind, _, _ in look(detector, bursts, 8)} == kinds
    assert detector.state.drift == past
    assert {severity for *_, severity in look(detector, [usual] * 5, 8 + len(bursts))} == {"info"}


@pytest.mark.requirement(42)
def test_drift_needs_a_past() -> None:
    """The first rounds raise no drift, because no usual norm exists yet."""
    norms = [1.0, 5.0, 5.0, 25.0, 25.0]
    assert look(AnomalyDetector(), [with_norm(norm) for norm in norms]) == []


def test_words() -> None:
    """An alarm says what, how much, against what limit, and what to do; its end says since when."""
    detector = AnomalyDetector()
    (begun,) = detector.look(4, metrics_with(behaviour_gap=2e-3))
    assert begun.cause == "the behaviour gap is 0.002 (limit 0.001)"
    assert "stored observations, masks or hidden states" in begun.remedy
    assert str(begun) == f"round 4: behaviour_gap: {begun.cause}; {begun.remedy}"
    assert (begun.value, begun.limit, begun.ended) == (2e-3, 1e-3, False)
    (ended,) = (alarm for number in (5, 6, 7) for alarm in detector.look(number, QUIET))
    assert ended.ended
    assert ended.severity == "info"
    assert ended.cause.endswith("healthy for 3 rounds; it began in round 4")
    with pytest.raises(FrozenInstanceError):
        begun.round = 3  # type: ignore[misc]  # frozen


def test_patience_is_in_the_words() -> None:
    """How long it has lasted."""
    detector = AnomalyDetector()
    alarms = [alarm for index in range(3) for alarm in detector.look(index, COLLAPSED)]
    assert [alarm.cause for alarm in alarms] == ["the entropy of head slot is 0.01 (limit 0.02), 3 rounds running"]


def test_rounds_in_order() -> None:
    """A round that was looked at is not looked at again: counts would be wrong."""
    detector = AnomalyDetector()
    detector.look(3, QUIET)
    with pytest.raises(BadValueError, match="round 3 after round 3"):
        detector.look(3, QUIET)


def scripted() -> list[PPOUpdateMetrics]:
    """Rounds in which several alarms begin and end."""
    norms = [1.0 + 0.05 * index for index in range(8)] + [6.0, 7.0, 7.0, 1.0, 1.0]
    kls = {8: {"max_kl": 0.3}, 9: {"max_kl": 0.12}}
    collapsed = metrics_with_head("op", entropy=0.0)
    return [
        with_norm(norm, collapsed if 2 < index < 9 else QUIET, **kls.get(index, {})) for index, norm in enumerate(norms)
    ]


@pytest.mark.parametrize("cut", range(1, 13))
def test_goes_on_from_its_state(cut: int) -> None:
    """Stopped after any round, stored as JSON and resumed: the same alarms as never stopped."""
    rounds = scripted()
    never_stopped = AnomalyDetector()
    expected = look(never_stopped, rounds)
    assert {kind for _, kind, _, _ in expected} == {"entropy_collapse", "kl_spike", "gradient_drift"}
    first = AnomalyDetector()
    before = look(first, rounds[:cut])
    stored = json.loads(json.dumps(encode(first.state)))
    second = AnomalyDetector(state=decode(DetectorState, stored, "detector"))
    assert before + look(second, rounds[cut:], cut) == expected
    assert second.state == never_stopped.state


def test_looking_changes_nothing() -> None:
    """The metrics are as they were."""
    metrics, facts = metrics_with(), replace(ORDINARY.facts)
    AnomalyDetector().look(0, metrics, facts)
    assert (metrics, facts) == (ORDINARY.metrics, ORDINARY.facts)


def test_alarms_are_json() -> None:
    """Also of numbers that JSON does not have."""
    (alarm,) = AnomalyDetector().look(0, metrics_with(joint_ratio_max=math.inf))
    assert json.loads(json.dumps(encode(alarm)))["value"] == "inf"
    assert decode(Alarm, encode(replace(alarm, value=1.0, limit=2.0)), "alarm") == replace(alarm, value=1.0, limit=2.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"kl_spike": 0.6},
        {"ratio_low": 50.0},
        {"drift": 0.9},
        {"explained_variance": 0.0},
        {"commits": True},
        {"value_loss": math.nan},
    ],
)
def test_limits_that_make_no_sense(bad: dict[str, Any]) -> None:
    """Refused, with the name of the limit."""
    with pytest.raises(BadValueError, match=next(iter(bad)).split("_")[0]):
        AlarmLimits(**bad)
