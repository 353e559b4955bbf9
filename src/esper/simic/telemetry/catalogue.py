"""The alarms as a table for people."""

from esper.simic.telemetry.alarms import AlarmLimits
from esper.simic.telemetry.rules import RULES


def alarm_catalogue(limits: AlarmLimits | None = None) -> str:
    """A markdown table: kind, severity, when it is raised under these limits, what to do."""
    limits = limits if limits is not None else AlarmLimits()
    rows = [f"| `{rule.kind}` | {rule.severity} | {rule.describe(limits)} | {rule.remedy} |" for rule in RULES]
    return "\n".join(["| alarm | severity | when | what to do |", "|---|---|---|---|", *rows])
