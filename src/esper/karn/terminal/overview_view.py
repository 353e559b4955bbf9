"""The overview: how the run does against its control and rules, its curves, health, alarms and pace."""

from rich.text import Text

from esper.karn.growth import GrowthRun
from esper.karn.overview import RECENT, condition_of, health_of, open_alarms, pace_of, recent_objective
from esper.karn.state import RunState
from esper.karn.terminal.drawing import (
    chart,
    compressed,
    duration,
    fitted,
    heading,
    number,
    safe,
    sparkline,
    styled,
)
from esper.karn.terminal.moment import Watched
from esper.nissa import find_metric

CHART_ROWS = 5
MOST_POLICIES = 5
SHORTEST_SPARK = 10
HEALTH_CURVES = ("ppo/max_kl", "ppo/entropy", "ppo/explained_variance", "ppo/value_loss", "timing/collect_s")


def overview_lines(watched: Watched, width: int, height: int) -> list[Text]:
    """The whole screen."""
    state = watched.state
    if isinstance(state, GrowthRun):
        return [*_growth_lines(watched, state, width), *_problems(watched)]
    return [*_standing(watched, state, width), *_curves(state, width), *_health(state, width), *_problems(watched)]


def _standing(watched: Watched, state: RunState, width: int) -> list[Text]:
    """The objective beside the control's and those of other policies; pace."""
    pace = pace_of(state)
    own = recent_objective(state)
    rounds = state.setting("rounds")
    per_hour = "–" if pace.episodes_per_hour is None else f"{pace.episodes_per_hour:,.0f}"
    left = f", {duration(pace.seconds_left)} left" if pace.seconds_left else ""
    counted = f"  {state.complete + 1} of {safe(rounds)} rounds complete, {per_hour} episodes per hour{left}"
    lines = [
        styled((safe(condition_of(watched.follower)), "bold"), counted),
        Text(end=""),
        heading("Objective", "points of accuracy: gain over the control minus rent"),
    ]
    last = min(RECENT, len(state.rounds))
    rows = [
        (f"in training, last {f'{last} rounds' if last > 1 else 'round'} (other hosts)", own, "green"),
        ("control (never grows)", 0.0, "muted"),
    ]
    rows += [
        (f"{name}{' (this run)' if watched.is_named(name) else ''}, evaluated", value, "sky")
        for name, value in watched.policies[:MOST_POLICIES]
    ]
    greatest = max((abs(value) for _, value, _ in rows if value is not None), default=1.0) or 1.0
    name_width = min(40, max(len(name) for name, _, _ in rows) + 1)
    room = max(4, width - name_width - 10)
    for name, value, colour in rows:
        length = 0 if value is None else round(abs(value) / greatest * room)
        mark = "█" if value is None or value >= 0 else "░"
        lines.append(styled(fitted(name, name_width), f"{number(value):>8} ", (mark * length, colour)))
    if not watched.policies:
        lines.append(
            styled(("rules: esper evaluate --policies RUN,heuristic,schedule --json RUN/evaluation.json", "muted"))
        )
    return lines


def _curves(state: RunState, width: int) -> list[Text]:
    """Learning curves over rounds, two side by side where there is room."""
    if not state.rounds:
        return [Text(end=""), styled(("no round is complete yet; see the fleet", "muted"))]
    wide = width >= 78
    own = (width - 2) // 2 if wide else width
    panels = [("objective", "objective", "points", True), ("gain", "gain", "of committed seeds", True),
              ("added_parameters", "added parameters", "per host", False),
              ("committed", "hosts with a commit", "share", True)]  # fmt: skip
    blocks = []
    for name, words, unit, zero in panels:
        values = state.series(name)
        form = ".2f" if name == "committed" else ".0f" if name == "added_parameters" else "+.1f"
        title = heading(words, f"{unit}; now {number(values[-1], form)}")
        blocks.append([title, *chart(compressed(values, 2 * own), own, CHART_ROWS, form=form, zero=zero)])
    lines = [Text(end="")]
    if not wide:
        return lines + [line for block in blocks for line in block]
    for left, right in (blocks[:2], blocks[2:]):
        lines += [_beside(one, other, own) for one, other in zip(left, right, strict=True)]
    first, last = state.rounds[0].number, state.rounds[-1].number
    return [*lines, styled((f"{'':8}rounds {first} to {last}, from left to right", "muted"))]


def _beside(left: Text, right: Text, width: int) -> Text:
    line = left.copy()
    line.truncate(width, pad=True)
    return line.append("  ").append_text(right)


def _health(state: RunState, width: int) -> list[Text]:
    """Numbers that are out of their range, open alarms, and a few curves of the learner."""
    counted, wrong = health_of(state)
    lines = [
        Text(end=""),
        heading(
            "Health", f"{counted - len(wrong)} of {counted} numbers are healthy; value: last round; bars: all rounds"
        ),
    ]
    lines += [
        styled(("! ", "orange"), f"{safe(each.name)} = {each.value:.4g}", (f"  healthy: {each.healthy}", "muted"))
        for each in wrong[:6]
    ]
    spark = max(SHORTEST_SPARK, min(30, width - 70))
    room = max(1, width - spark - 36)
    for name in HEALTH_CURVES:
        values = state.series(name)
        if any(value is not None for value in values):
            metric = find_metric(name)
            remark = "" if metric is None or not metric.healthy else f"healthy: {metric.healthy}"
            lines.append(
                styled(
                    fitted(name, 24),
                    f"{number(values[-1], '.4g'):>9} ",
                    (f"{sparkline(values, spark)} ", "blue"),
                    (fitted(remark, room), "muted"),
                )
            )
    alarms = open_alarms(state.alarms)
    lines += [Text(end=""), heading("Alarms", "none is open" if not alarms else f"{len(alarms)} open")]
    for alarm in alarms:
        colour = {"critical": "vermilion", "warning": "orange"}.get(alarm.severity, "muted")
        about = f"{alarm.alarm} {alarm.subject}".rstrip()
        lines.append(styled((f"{safe(alarm.severity)}: ", colour), f"{safe(about)}, since round {alarm.round}"))
        lines += [styled(f"  {safe(text)}") for text in (alarm.cause, alarm.remedy) if text]
    return lines


def _growth_lines(watched: Watched, state: GrowthRun, width: int) -> list[Text]:
    """One model: its curve, its parameters and its budget."""
    steps, budget, own = (state.config.whole(name) for name in ("steps", "budget", "host_parameters"))
    grown = state.steps[-1].grown if state.steps else 0
    pace = pace_of(state)
    lines = [
        styled(
            (safe(condition_of(watched.follower)), "bold"),
            f"  step {state.complete} of {steps}"
            + (f", {duration(pace.seconds_left)} left" if pace.seconds_left else ""),
        ),
        styled(
            f"{safe(state.config.text('host'))}: {own:,} parameters, and {grown:,} of a budget of {budget:,} grown; "
            f"policy {safe(state.config.get('policy'))}"
        ),
        Text(end=""),
    ]
    accuracies, losses = [step.accuracy for step in state.steps], [step.loss for step in state.steps]
    if any(value is not None for value in accuracies):
        lines += [heading("Accuracy", f"percent, on validation data; now {number(accuracies[-1], '.2f')}"),
                  *chart(accuracies, width, CHART_ROWS + 1, form=".1f")]  # fmt: skip
    if any(value is not None for value in losses):
        lines += [heading("Loss", f"on validation data; now {number(losses[-1], '.4g')}"),
                  *chart(losses, width, CHART_ROWS, form=".3g")]  # fmt: skip
    lines += [heading("Grown parameters", f"of {budget:,}"),
              *chart([float(step.grown) for step in state.steps], width, 3, form=",.0f", zero=True)]  # fmt: skip
    if state.finish is not None:
        kept, dropped = (safe(", ".join(slots)) or "none" for slots in state.finish)
        lines.append(styled(("finished: ", "green"), f"kept behind {kept}; dropped behind {dropped}"))
    remarks = [(step.number, remark) for step in state.steps for remark in step.remarks][-4:]
    return lines + [styled((f"step {step}: {safe(remark)}", "muted")) for step, remark in remarks]


def _problems(watched: Watched) -> list[Text]:
    """What could not be read."""
    problems = [*watched.follower.problems, *watched.remarks]
    if not problems:
        return []
    lines = [Text(end=""), heading("Not read", "these lines are skipped")]
    return lines + [styled(("! ", "vermilion"), safe(problem)) for problem in problems]
