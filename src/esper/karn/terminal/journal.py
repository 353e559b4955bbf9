"""The log: births, commits, cuts and panics of the round at the cursor, and the alarms of the run."""

from rich.text import Text

from esper.karn.growth import GrowthRun
from esper.karn.overview import Entry, entries_of
from esper.karn.terminal.drawing import heading, safe, styled
from esper.karn.terminal.moment import Watched

SYMBOLS = {"birth": ("▲", "sky"), "commit": ("★", "green"), "cut": ("✖", "vermilion"), "panic": ("!", "orange")}
MOST_ALARMS = 50


def journal_lines(watched: Watched, width: int, height: int) -> list[Text]:
    """The whole screen, the newest first."""
    state = watched.state
    number = 0 if isinstance(state, GrowthRun) else watched.number
    entries = entries_of(number, watched.hosts(), watched.trained)
    where = (
        f"step {watched.trained}" if isinstance(state, GrowthRun) else f"round {number}, up to step {watched.trained}"
    )
    lines = [heading("What happened", f"{where}; the newest first"), _legend(), *map(_line, reversed(entries))]
    if not entries:
        lines.append(styled(("nothing yet", "muted")))
    if isinstance(state, GrowthRun):
        return lines
    lines += [Text(end=""), heading("Alarms", "of the whole run, the newest first")]
    for alarm in sorted(state.alarms, key=lambda each: -each.round)[:MOST_ALARMS]:
        colour = "muted" if alarm.ended else {"critical": "vermilion", "warning": "orange"}.get(alarm.severity, "sky")
        verb = "ends" if alarm.ended else "begins"
        about = f"{alarm.alarm} {alarm.subject}".rstrip()
        lines.append(
            styled(
                (f"round {alarm.round:>5} ", "muted"),
                (f"{safe(alarm.severity)} ", colour),
                f"{safe(about)} {verb}: {safe(alarm.cause)}",
            )
        )
    if not state.alarms:
        lines.append(styled(("none", "muted")))
    return lines


def _line(entry: Entry) -> Text:
    symbol, colour = SYMBOLS[entry.what]
    names = f"{safe(entry.blueprint)} in {safe(entry.slot)}" if entry.slot else safe(entry.blueprint)
    return styled(
        (f"step {entry.at:>4} ", "muted"), (f"{symbol} {entry.what:<7}", colour), f"host {entry.env:>4}  {names}"
    )


def _legend() -> Text:
    parts = [part for what, (symbol, colour) in SYMBOLS.items() for part in ((f"{symbol} ", colour), f"{what}  ")]
    return styled(*parts)
