"""One host: its curve against the control, its slots over time, its seeds, and what the policy considered."""

from bisect import bisect_left
from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from esper.karn.histories import HostHistory
from esper.karn.lines import Action, Choices
from esper.karn.terminal.drawing import (
    AXIS,
    COLOURS,
    bar,
    chart,
    fitted,
    heading,
    legend,
    measured,
    number,
    safe,
    sparkline,
    stage_cell,
    styled,
)
from esper.karn.terminal.moment import Watched
from esper.leyline import SeedStage

BORDER = Style.parse(f"reverse {COLOURS['ink']}")
MARKS = {SeedStage.GERMINATED: "▲", SeedStage.FOSSILIZED: "★", SeedStage.PRUNED: "✖"}
MOST_CHOICES = 6
LAST_DECISIONS = 4


def host_lines(watched: Watched, width: int, height: int) -> list[Text]:
    """The whole screen."""
    host, trained = watched.host(), watched.trained
    if host is None:
        return [styled(("no host is known yet: the round has no complete step", "muted"))]
    return [
        *_curve(host, trained, width, 4 if height < 30 else 8),
        *_lanes(host, watched.state.slots, trained, width),
        *_seeds(host, trained, width),
        *_considered(host, trained, width),
    ]


def _curve(host: HostHistory, trained: int, width: int, rows: int) -> list[Text]:
    gains = host.value(host.gains, trained)
    has_accuracy = any(value is not None for value in host.accuracies)
    curve, what, form = (host.accuracies, "accuracy", ".1f") if has_accuracy else (host.losses, "loss", ".3g")
    control = host.control_accuracies if any(value is not None for value in host.control_accuracies) else []
    unit = " %" if has_accuracy else ""
    title = styled((f"host {host.env}", "bold"), f"  {what} {number(host.value(curve, trained), form)}{unit}")
    if control:
        title.append(f", control {number(host.value(control, trained), form)}{unit}, live gain {number(gains)}")
    if host.outcome is not None:
        title.append(f"; objective {host.outcome.objective:+.2f} at the end", COLOURS["green"])
    moments = _moments(host, 2 * max(1, width - AXIS))
    own, other = ([host.value(values, at) for at in moments] for values in (curve, control))
    lines = [title, *chart(own, width, rows, dashed=other, form=form)]
    others = [("⠒ ⠒ its control ", "muted")] if control else []
    span = f" from step {host.begins_after} to {host.steps}"
    return [
        *lines,
        styled(f"{'':{AXIS}}", (f"⠒⠒ {what} of the host{' in %' if unit else ''} ", "blue"), *others, (span, "muted")),
    ]


def _moments(host: HostHistory, columns: int) -> list[int]:
    """The steps trained at each column, the axis of charts and lanes. A column shows the state after them."""
    count = max(1, host.steps - host.begins_after + 1)
    return [host.begins_after + column * count // columns for column in range(columns)]


def _ending(slot: str) -> str:
    """The name of a slot in front of its lane: its end, for names of one model begin alike."""
    plain = safe(slot)
    return fitted(plain if len(plain) < AXIS else f"…{plain[2 - AXIS :]}", AXIS - 1)


def _lanes(host: HostHistory, order: Sequence[str], trained: int, width: int) -> list[Text]:
    """A lane per slot: the stage of every step, and alpha below where the seed has acted."""
    used = {change.slot for change in host.changes} | set(host.alphas)
    slots = [slot for slot in order if slot in used]
    moments, last = _moments(host, max(1, width - AXIS)), host.trained
    cursor = min(len(moments) - 1, bisect_left(moments, trained))
    lines = [heading("Slots", "▲ birth ★ commit ✖ cut ! panic; alpha from 0 to 1; inverted: this step"), *legend(width)]
    marks = {(change.slot, change.at): MARKS[change.target] for change in host.changes if change.target in MARKS}
    panics = {panic.step + 1 for panic in host.panics}
    known = {at: host.at(at) for at in dict.fromkeys(moments) if at <= last}
    for slot in slots:
        lane = styled(f"{_ending(slot)} ")
        seeds = [known.get(at, {}).get(slot) for at in moments]
        for column, (at, seed) in enumerate(zip(moments, seeds, strict=True)):
            first = column == 0 or moments[column - 1] != at
            text, style = stage_cell(SeedStage.DORMANT if seed is None else seed.stage)
            text = marks.get((slot, at), "!" if at in panics else text) if first else text
            if at > last:
                text, style = " ", Style.null()
            lane.append(text, BORDER if column == cursor else style)
        lines.append(lane)
        if any(host.alphas.get(slot, [])):
            shown = [seed.alpha if seed is not None and seed.alpha > 0 else None for seed in seeds]
            bars = sparkline(shown, len(shown), (0.0, 1.0))
            lines.append(styled((f"{'alpha':>{AXIS - 1}} ", "muted"), (bars, "sky")))
    if not slots:
        lines.append(styled(("no seed has been germinated", "muted")))
    return lines


def _seeds(host: HostHistory, trained: int, width: int) -> list[Text]:
    """The seeds at the cursor, with what was measured of them."""
    seeds = host.at(trained)
    lines = [heading("Seeds", "audition: gain if it acts; contribution: loss without it; points ± error")]
    if not seeds:
        return [*lines, styled(("every slot is empty", "muted"))]
    name = max(6, width - 69)
    lines.append(
        styled((f"{'slot':<{name}} blueprint    stage        age alpha {'audition':>14} {'contribution':>14}", "muted"))
    )
    for slot, seed in seeds.items():
        line = styled(fitted(slot, name), " ", fitted(seed.blueprint or "–", 12), " ")
        line.append(*stage_cell(seed.stage))
        line.append(f" {seed.stage.name.lower():<10} {trained - seed.born:>3}  {seed.alpha:.2f}")
        line.append(f" {measured(seed.audition):>14} {measured(seed.contribution):>14}")
        lines.append(line)
    return lines


def _considered(host: HostHistory, trained: int, width: int) -> list[Text]:
    """What the policy chose among, and its last decisions."""
    at = max((step for step in host.choices if step <= trained), default=None)
    lines = [
        heading(
            "The policy", "" if at is None else f"what it considered at step {at}, with probabilities; ▸ was chosen"
        )
    ]
    if at is None:
        why = "no probabilities: they are of the first eight hosts, and of a learned policy"
        lines.append(styled((why, "muted")))
    else:
        lines += _options(host.choices[at], host.actions.get(at), width)
    done = sorted((step, action) for step, action in host.actions.items() if step <= trained)[-LAST_DECISIONS:]
    for step, action in reversed(done):
        chance = host.chances.get(step)
        likely = "" if chance is None else f"  ({100 * chance:.1f} % likely, all its choices together)"
        what = " ".join(part for part in (action.op.lower(), action.blueprint, action.slot) if part)
        lines.append(styled((f"step {step:>4}: ", "muted"), safe(what), (likely, "muted")))
    return lines


def _options(choices: Choices, chosen: Action | None, width: int) -> list[Text]:
    """The choices of every head with their probabilities; the one that was drawn is marked."""
    taken = {"op": "WAIT"} if chosen is None else {"op": chosen.op, "slot": chosen.slot, "blueprint": chosen.blueprint}
    room, lines = min(30, max(5, width - 42)), []
    for head, options in choices.items():
        for index, (name, chance) in enumerate(list(options.items())[:MOST_CHOICES]):
            label = fitted(head if index == 0 else "", 10)
            mark = "▸" if taken.get(head) == name else " "
            figures = f"{fitted(name, 18)} {100 * chance:5.1f} % "
            lines.append(styled((label, "muted"), (mark, "green"), figures, (bar(chance, room), "blue")))
    return lines
