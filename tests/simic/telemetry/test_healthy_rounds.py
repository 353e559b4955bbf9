"""Two real runs, in which nothing was wrong, through the detector."""

import pytest
from simic.telemetry.healthy import healthy_rounds

from esper.simic.telemetry import AlarmLimits, AnomalyDetector, rules
from esper.simic.telemetry import detector as detector_module


@pytest.mark.parametrize("run", ["blind1", "varied0"])
def test_no_alarm_in_healthy_training(run: str) -> None:
    """20 rounds of digits_blind and 23 of digits_varied: not even an info."""
    detector = AnomalyDetector()
    rounds = [row for row in healthy_rounds() if row.run == run]
    assert len(rounds) == {"blind1": 20, "varied0": 23}[run]
    assert [alarm for row in rounds for alarm in detector.look(row.number, row.metrics, row.facts)] == []


def test_with_room_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tightened by a factor of 2 in every quantity but the drift of the gradient norm (1.4)."""
    limits = AlarmLimits(
        ratio_high=20.0,
        ratio_low=2e-3,
        value_loss=5.0,
        explained_variance=-0.5,
        kl_spike=0.09,
        kl_extreme=0.25,
        entropy=0.04,
        gradient_high=100.0,
        drift=1.7,
        behaviour_gap=5e-4,
        commits=0.1,
        panics=0.05,
    )
    for module in (rules, detector_module):
        monkeypatch.setattr(module, "GRADIENT_LOW", 4e-3)
    monkeypatch.setattr(rules, "HEAD_GRADIENT_LOW", 4e-6)
    for run in ("blind1", "varied0"):
        detector = AnomalyDetector(limits)
        for row in healthy_rounds():
            if row.run == run:
                assert detector.look(row.number, row.metrics, row.facts) == ()


def test_the_rounds_can_alarm() -> None:
    """The same rounds under limits that they break."""
    detector = AnomalyDetector(AlarmLimits(kl_spike=0.04, entropy=0.3))
    kinds = [
        (alarm.kind, alarm.subject, alarm.ended)
        for row in healthy_rounds()[:20]
        for alarm in detector.look(row.number, row.metrics, row.facts)
    ]
    assert ("kl_spike", "", False) in kinds
    assert ("entropy_collapse", "slot", False) in kinds
