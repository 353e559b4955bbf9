"""The table of alarms, and the page that shows it."""

from pathlib import Path

import pytest

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


def test_limits_are_in_it() -> None:
    """Changed limits, changed words."""
    table = alarm_catalogue(AlarmLimits(kl_spike=0.25, entropy=0.03))
    assert "exceeds 0.25, up to 0.5" in table
    assert "falls below 0.03, 3 rounds running" in table
