"""Many runs side by side."""

from collections.abc import Sequence

from rich.text import Text

from esper.karn.growth import GrowthRun
from esper.karn.overview import condition_of, open_alarms, pace_of
from esper.karn.terminal.drawing import duration, fitted, heading, number, safe, sparkline, styled
from esper.karn.terminal.moment import Watched

HEAD = 3
"""Lines above the first run"""


def run_lines(runs: Sequence[Watched], cursor: int, width: int, height: int) -> list[Text]:
    """A line per run, and below them the one at the cursor."""
    name = max(10, min(28, width - 77))
    spark = max(6, width - name - 65)
    head = f"  {'run':<{name}} {'state':<10} {'done':>9} {'left':>7} {'objective':>9} {'gain':>7} open alarms "
    lines = [
        heading("Runs", "enter opens one; done: rounds, or steps of a Grower; left: time"),
        styled(("last round, in points: objective, gain of committed seeds; a Grower: % or loss", "muted")),
        styled((head, "muted"), ("by round", "blue")),
    ]
    for index, run in enumerate(runs):
        lines.append(_line(run, index == cursor, name, spark))
    return lines


def _line(run: Watched, selected: bool, name: int, spark: int) -> Text:
    state = run.state
    left = duration(pace_of(state).seconds_left)
    condition = safe(condition_of(run.follower))
    mark = ("▸ ", "green") if selected else "  "
    start = [mark, (fitted(run.name, name), "bold" if selected else ""), f" {fitted(condition, 10)}"]
    if isinstance(state, GrowthRun):
        curve = [step.accuracy if step.accuracy is not None else step.loss for step in state.steps]
        at = f"{state.complete}/{state.config.whole('steps')}"
        unit = " %" if state.steps and state.steps[-1].accuracy is not None else ""
        now = number(curve[-1] if curve else None, ".3g") + unit
        return styled(*start, f" {at:>9} {left:>7} {now:>9} {'':>20}", (sparkline(curve, spark), "blue"))
    at = f"{state.complete + 1}/{safe(state.setting('rounds'))}"
    last = state.rounds[-1].columns if state.rounds else {}
    alarms = len(open_alarms(state.alarms))
    figures = f" {at:>9} {left:>7} {number(last.get('objective')):>9} {number(last.get('gain')):>7} "
    return styled(
        *start,
        figures,
        (f"{alarms:>11} ", "orange" if alarms else "muted"),
        (sparkline(state.series("objective"), spark), "blue"),
    )
