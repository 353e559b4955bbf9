"""The table of alarms, and the page that shows it."""

from pathlib import Path

import pytest

from esper.nissa import find_metric
from esper.simic.agent import PPOConfig
from esper.simic.telemetry import AlarmLimits, alarm_catalogue
from esper.simic.telemetry.rules import RULES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "telemetry.md"


def test_page_contains_the_catalogue() -> None:
    """As the code has it; replace the table on the page by what `alarm_catalogue()` returns."""
    assert f"\n\n{alarm_catalogue()}\n\n" in PAGE.read_text()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_every_alarm_is_in_it(rule: object) -> None:
    """One line each, with nothing left to fill in."""
    (line,) = [line for line in alarm_catalogue().splitlines() if line.startswith(f"| `{rule.kind}` |")]  # type: ignore[attr-defined]  # a rule
    assert line.count("|") == 5
    assert "{" not in line


def test_metrics_are_healthy_up_to_where_alarms_begin() -> None:
    """Two catalogues, of which neither may import the other: their numbers agree, at the default clip norm."""
    limits, clip_norm = AlarmLimits(), PPOConfig().clip_norm
    ends = {
        "ppo/max_kl": (None, limits.kl_spike),
        "ppo/approx_kl": (None, limits.kl_spike),
        "ppo/joint_ratio_max": (None, limits.ratio_high),
        "ppo/joint_ratio_min": (limits.ratio_low, None),
        "ppo/value_loss": (None, limits.value_loss),
        "ppo/behaviour_gap": (None, limits.behaviour_gap),
        "ppo/pre_clip_grad_norm": (limits.gradient_low * clip_norm, limits.gradient_high * clip_norm),
        "ppo/slot/entropy": (limits.entropy, None),
        "ppo/slot/kl": (None, limits.kl_spike),
    }
    for name, (low, high) in ends.items():
        metric = find_metric(name)
        assert metric is not None
        assert (name, metric.low, metric.high) == (name, low, high)


def test_limits_are_in_it() -> None:
    """Changed limits, changed words."""
    table = alarm_catalogue(AlarmLimits(kl_spike=0.25, entropy_patience=7))
    assert "exceeds 0.25, up to 0.5" in table
    assert "falls below 0.02, 7 rounds running" in table
