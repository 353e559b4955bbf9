"""Decisions: how often each blueprint was germinated and committed in each slot, over rounds."""

from collections import Counter
from itertools import pairwise

from rich.text import Text

from esper.karn.growth import GrowthRun
from esper.karn.overview import entries_of
from esper.karn.panels import OTHERS, ops_of, rows_of, seed_counts
from esper.karn.state import RunState
from esper.karn.terminal.drawing import COLOURS, SHADES, fitted, heading, sparkline, styled
from esper.karn.terminal.moment import Watched

RAMP = ("#3d6478", "#37838f", "#35a08c", "#7fcf5f", "#fde725")
"""From seldom to often; the shade says the same without colour"""
NAME = 22


def decision_lines(watched: Watched, width: int, height: int) -> list[Text]:
    """The whole screen."""
    state = watched.state
    if isinstance(state, GrowthRun):
        return _of_one_model(state, width)
    if not state.rounds:
        return [styled(("no round is complete yet", "muted"))]
    lines = _maps(state, width)
    total = {op: sum(entry.ops.get(op, 0) for entry in state.rounds) for op in ops_of(state)}
    lines += [Text(end=""), heading("Ops", "share of the decisions of each round, in the last one and in all")]
    room = max(8, min(width - NAME - 18, len(state.rounds)))
    lines.append(styled((f"{'op':<{NAME}}{'':<{room}}   last   all", "muted")))
    for op in total:
        shares = [100 * entry.ops.get(op, 0) / max(1, sum(entry.ops.values())) for entry in state.rounds]
        everything = 100 * total[op] / max(1, sum(total.values()))
        lines.append(
            styled(
                fitted(op.lower(), NAME),
                (sparkline(shares, room, (0.0, 100.0)), "blue"),
                f" {shares[-1]:4.0f} % {everything:3.0f} %",
            )
        )
    if state.setting("preset") == "commit":
        rule = "preset commit: the policy waits or germinates; a rule advances, commits and cuts"
        lines.append(styled((rule, "muted")))
    return lines


def _maps(state: RunState, width: int) -> list[Text]:
    """Two maps of shades side by side: germinations and commits per host."""
    rows = rows_of(state)
    if not rows:
        return [styled(("no seed has been germinated", "muted"))]
    hosts = [max(1, len(state.episodes.get(entry.number, []))) for entry in state.rounds]
    room = max(4, min((width - NAME - 2) // 2 - 6, max(len("germinations") + 1, len(state.rounds))))
    names = list(seed_counts(state))
    first, last = state.rounds[0].number, state.rounds[-1].number
    lines = [
        heading("Seeds", f"per host, rounds {first} to {last} from left to right; last: in the last round"),
        styled((f"{'slot/blueprint':<{NAME}}{names[0].lower():<{room}} last {names[1].lower():<{room}} last", "muted")),
    ]
    maps = []
    for rounds in seed_counts(state).values():
        if rows[-1] == OTHERS:
            for counts in rounds:
                counts[OTHERS] = counts.total() - sum(counts[row] for row in rows[:-1])
        cells = {row: [counts[row] / n for counts, n in zip(rounds, hosts, strict=True)] for row in rows}
        maps.append((cells, max((value for values in cells.values() for value in values), default=0.0)))
    for row in rows:
        line = styled(fitted(row, NAME))
        for cells, most in maps:
            for share in _columns(cells[row], room):
                _shade(line, share / most if most else 0.0)
            line.append(f" {cells[row][-1]:4.2f} ")
        lines.append(line)
    key = styled()
    for index in range(1, len(SHADES)):
        _shade(key, index / (len(SHADES) - 1))
    ends = ", ".join(f"{most:.2f} {name.lower()}" for name, (_, most) in zip(names, maps, strict=True))
    return [*lines, key.append(f" yellow and full: up to {ends} per host; blank: 0", COLOURS["muted"])]


def _columns(values: list[float], width: int) -> list[float]:
    """Rounds as columns: the greatest of those that share one."""
    if len(values) <= width:
        return values + [0.0] * (width - len(values))
    edges = [column * len(values) // width for column in range(width + 1)]
    return [max(values[begin:end]) for begin, end in pairwise(edges)]


def _shade(line: Text, share: float) -> None:
    level = 0 if share <= 0 else 1 + min(len(SHADES) - 2, int(share * (len(SHADES) - 1) * 0.9999))
    line.append(SHADES[level], RAMP[min(len(RAMP) - 1, round(share * (len(RAMP) - 1)))])


def _of_one_model(state: GrowthRun, width: int) -> list[Text]:
    """Births, commits and cuts by slot and blueprint, and when."""
    entries = entries_of(0, state.histories())
    steps = max(1, state.config.whole("steps"))
    room = max(8, width - NAME - 2)
    lines = [heading("Seeds", f"of one model, over {steps} steps: ▲ birth, ★ commit, ✖ cut")]
    marks = {"birth": "▲", "commit": "★", "cut": "✖"}
    lanes: dict[str, list[str]] = {}
    for entry in entries:
        if entry.what in marks:
            lane = lanes.setdefault(f"{entry.slot}/{entry.blueprint}", [" "] * room)
            lane[min(room - 1, entry.at * room // (steps + 1))] = marks[entry.what]
    lines += [styled(fitted(name, NAME), ("".join(lane), "sky")) for name, lane in lanes.items()]
    counts = Counter(entry.what for entry in entries)
    told = ", ".join(
        f"{counts[what]} {what}{'' if counts[what] == 1 else 's'}" for what in ("birth", "commit", "cut", "panic")
    )
    return [*lines, Text(end=""), styled((told, "muted"))] if lanes else [*lines, styled(("none yet", "muted"))]
