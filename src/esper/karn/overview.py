"""What the first look at a run tells: pace, health, alarms, how it compares, and what happened to its hosts."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from esper.karn.evaluations import read_evaluations
from esper.karn.follower import RunFollower
from esper.karn.growth import GrowthRun
from esper.karn.histories import HostHistory, LiveRound
from esper.karn.lines import Alarm
from esper.karn.state import RunState
from esper.leyline import BadValueError, SeedStage
from esper.nissa import find_metric

RECENT = 5
"""Rounds over which a pace or an objective is averaged"""
HEALTH = ("ppo/", "committed")
"""Prefixes of the metrics whose ranges tell of the learner's health"""


class Pace(NamedTuple):
    """How fast a run is; None where that is not known yet."""

    episodes_per_hour: float | None
    seconds_left: float | None


class Unhealthy(NamedTuple):
    """A number of the last round that is out of its range."""

    name: str
    value: float
    healthy: str


class Entry(NamedTuple):
    """Something that happened to a host: a birth, commit, cut or panic."""

    round: int
    at: int
    """Steps trained"""
    env: int
    what: str
    slot: str
    blueprint: str


def pace_of(state: RunState | GrowthRun) -> Pace:
    """From the seconds of the last rounds, or from the times of steps."""
    if isinstance(state, GrowthRun):
        per_step = _step_seconds(state.live)
        steps_left = max(0, state.config.whole("steps") - state.complete)
        return Pace(None, None if per_step is None else steps_left * per_step)
    playing, recent = state.playing, state.rounds[-RECENT:]
    timed = [
        entry.columns["timing/collect_s"] + entry.columns.get("timing/update_s", 0.0)
        for entry in recent
        if "timing/collect_s" in entry.columns
    ]
    per_step, share = _step_seconds(playing), 0.0
    if playing is not None and playing.steps:
        share = playing.trained / playing.steps
        if not timed and per_step is not None:
            timed = [per_step * playing.steps]
    rounds = state.setting("rounds")
    if not timed or statistics.fmean(timed) <= 0:
        return Pace(None, None)
    seconds = statistics.fmean(timed)
    hosts = len(playing.hosts) if playing is not None else len(state.episodes.get(state.complete, []))
    left = None if not isinstance(rounds, int) else max(0.0, rounds - 1 - state.complete - share) * seconds
    return Pace(3600 * hosts / seconds if hosts else None, left)


def _step_seconds(live: LiveRound | None) -> float | None:
    """Mean time between steps; None before the second."""
    if live is None or len(live.times) < 2:
        return None
    return max(0.0, live.times[-1] - live.times[0]) / (len(live.times) - 1)


def condition_of(follower: RunFollower) -> str:
    """What the run is doing, in a word or a few."""
    state = follower.state
    if follower.gone:
        return "deleted"
    if isinstance(state, GrowthRun):
        return "finished" if state.finish is not None else "growing"
    if follower.sessions and (last := follower.sessions[-1]).kind == "ended":
        return {"complete": "complete", "stopped": "stopped"}.get(last.why, f"failed: {last.why}")
    return "training" if follower.sessions else "beginning"


def health_of(state: RunState) -> tuple[int, list[Unhealthy]]:
    """How many numbers of the last round have a healthy range, and those that are out of it."""
    if not state.rounds:
        return 0, []
    found, counted = [], 0
    for name, value in state.rounds[-1].columns.items():
        metric = find_metric(name) if name.startswith(HEALTH) else None
        if metric is not None and (metric.low is not None or metric.high is not None):
            counted += 1
            if not metric.is_healthy(value):
                found.append(Unhealthy(name, value, metric.healthy))
    return counted, found


def open_alarms(alarms: Iterable[Alarm]) -> list[Alarm]:
    """Alarms that have begun and not ended, the newest first."""
    found: dict[tuple[str, str], Alarm] = {}
    for alarm in sorted(alarms, key=lambda each: each.round):
        found.pop((alarm.alarm, alarm.subject), None)
        if not alarm.ended:
            found[alarm.alarm, alarm.subject] = alarm
    return list(found.values())[::-1]


def recent_objective(state: RunState) -> float | None:
    """Mean objective of the last few rounds."""
    values = [entry.columns["objective"] for entry in state.rounds[-RECENT:]]
    return statistics.fmean(values) if values else None


def compared(path: Path) -> tuple[list[tuple[str, float]], list[str]]:
    """Policies of the run's evaluations by mean objective, the best first, and what could not be read."""
    means: dict[str, float] = {}
    problems = []
    for file in sorted(path.glob("evaluation*.json")):
        try:
            for evaluation in read_evaluations(file):
                means |= {each.name: statistics.fmean(each.objective) for each in evaluation.policies if each.objective}
        except BadValueError as error:
            problems.append(str(error))
    return sorted(means.items(), key=lambda pair: -pair[1]), problems


WORDS = {SeedStage.GERMINATED: "birth", SeedStage.FOSSILIZED: "commit", SeedStage.PRUNED: "cut"}
"""Stage that a seed entered → what is said of it"""


def entries_of(number: int, histories: Sequence[HostHistory], until: int | None = None) -> list[Entry]:
    """Births, commits, cuts and panics of a round, in order, up to so many steps trained."""
    found = []
    for host in histories:
        for change in host.changes:
            if change.target in WORDS and change.cause != "panic":
                names = change.slot, change.blueprint or ""
                found.append(Entry(number, change.at, host.env, WORDS[change.target], *names))
        found += [Entry(number, each.step + 1, host.env, "panic", "", ", ".join(each.symptoms)) for each in host.panics]
    return sorted((each for each in found if until is None or each.at <= until), key=lambda each: (each.at, each.env))
