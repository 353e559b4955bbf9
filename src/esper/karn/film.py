"""The film of a network's growth as values: what every slot held after each step, and how good the network was.

`film_layout` says where things stand in a picture; `film_page` and `film_files` draw them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from esper.karn.growth import GrowthRun
from esper.karn.histories import HostHistory
from esper.karn.lines import PanicEvent, StageEvent
from esper.karn.state import RunState
from esper.karn.timeline import MARKS, marks_of
from esper.leyline import LIVE_STAGES, BadValueError, SeedStage

MOST_FRAMES = 400
"""A longer run shows every so many steps, and each step in which a stage changed as far as there is room"""
_VERBS = {"birth": "germinated", "commit": "committed", "cut": "pruned"}


class SlotState(NamedTuple):
    """A slot at one moment."""

    stage: SeedStage = SeedStage.DORMANT
    alpha: float = 0.0
    blueprint: str | None = None


EMPTY = SlotState()


class Frame(NamedTuple):
    """A network after so many steps."""

    step: float
    """Whole, except between two frames"""
    slots: tuple[SlotState, ...]
    score: float | None
    control: float | None
    note: str
    """What happened at this moment"""


@dataclass(frozen=True)
class Film:
    """The growth of one network."""

    title: str
    blocks: tuple[str, ...]
    """Parts of the host: one before each slot, and one behind the last"""
    slots: tuple[str, ...]
    frames: tuple[Frame, ...]
    measure: str = "accuracy"
    unit: str = " %"

    @property
    def first(self) -> float:
        """The step of the first frame."""
        return self.frames[0].step

    @property
    def last(self) -> float:
        """The step of the last frame."""
        return self.frames[-1].step

    @property
    def stages(self) -> list[SeedStage]:
        """Stages that occur, in the order of a life."""
        return sorted({state.stage for frame in self.frames for state in frame.slots})

    @property
    def has_control(self) -> bool:
        """Whether there is a curve of the control."""
        return any(frame.control is not None for frame in self.frames)


def film_of(history: HostHistory, title: str, slots: Sequence[str]) -> Film:
    """One host after each step that it was trained, in its slots from the input on."""
    curve, measure = history.accuracies, "accuracy"
    if all(value is None for value in curve):
        curve, measure = history.losses, "loss"
    control = history.control_accuracies if measure == "accuracy" else []
    notes = _notes(history.changes, history.panics)
    frames = list[Frame]()
    for step in range(history.begins_after, history.trained + 1):
        seeds = {slot: SlotState(seed.stage, seed.alpha, seed.blueprint) for slot, seed in history.at(step).items()}
        score, other = (history.value(values, step) for values in (curve, control))
        frames.append(Frame(step, tuple(seeds.get(slot, EMPTY) for slot in slots), score, other, notes.get(step, "")))
    unit = " %" if measure == "accuracy" else ""
    return thin(Film(title, blocks_of(slots), tuple(slots), tuple(frames), measure, unit))


def film_of_host(run: RunState, env: int) -> Film:
    """A host of the shown round."""
    history = _host(run.histories(), env)
    return film_of(history, f"{history.task or run.config['task']}, round {run.shown}, host {env}", run.slots)


def film_of_playing(run: RunState, env: int) -> Film:
    """A host of the round that is being played, up to now."""
    playing = run.playing
    if playing is None:
        raise BadValueError("no round is being played")
    history = _host(list(playing.hosts.values()), env)
    return film_of(history, f"{history.task}, round {playing.number}, host {env}, playing", run.slots)


def film_of_growth(run: GrowthRun) -> Film:
    """The one model of a Grower."""
    film = film_of(run.histories()[0], str(run.config["host"]), run.slots)
    grown, budget = {step.number: step.grown for step in run.steps}, run.config.whole("budget")
    frames = list[Frame]()
    for frame in film.frames:
        parts = [f"{grown[int(frame.step)]:,} of {budget:,} parameters grown"] if frame.step in grown else []
        frames.append(frame._replace(note="; ".join([*filter(None, [frame.note]), *parts])))
    return replace(film, frames=tuple(frames))


def _host(histories: Sequence[HostHistory], env: int) -> HostHistory:
    for history in histories:
        if history.env == env:
            return history
    known = ", ".join(str(history.env) for history in histories)
    raise BadValueError(f"there is no host {env} in this round; its hosts are {known}")


def _notes(changes: Sequence[StageEvent], panics: Sequence[PanicEvent]) -> dict[int, str]:
    """Births, commits, cuts and panics in words, by the moment."""
    found: dict[int, list[str]] = {}
    for mark in marks_of(changes):
        verb = _VERBS[MARKS[mark.target][0]]
        found.setdefault(mark.at, []).append(f"{mark.blueprint or 'a seed'} {verb} in {mark.slot}")
    for panic in panics:
        found.setdefault(panic.step + 1, []).append("panic: the network went back to its snapshot")
    return {moment: "; ".join(parts) for moment, parts in found.items()}


def blocks_of(slots: Sequence[str]) -> tuple[str, ...]:
    """Names of the parts of a host: one before each slot, and one behind the last.

    `r1c0` of a built-in host lies behind the pooling of block 0. A slot of a user's model has the name of the module
    before it.
    """
    names, before = list[str](), -1
    for slot in slots:
        match = re.fullmatch(r"r(\d+)c(\d+)", slot)
        if match is None:
            names.append(slot)
            continue
        column = int(match[2])
        if column == before:
            names.append(f"pool {column}")
        else:
            names.append(f"block {column}" if column == before + 1 else f"blocks {before + 1}-{column}")
        before = column
    return (*names, "output")


def thin(film: Film, most: int = MOST_FRAMES) -> Film:
    """A film of at most `most` frames: the first, the last, those with a change of stage, and others evenly."""
    count = len(film.frames)
    if count <= most:
        return film
    wanted = dict.fromkeys((0, count - 1))
    stages = [[state.stage for state in frame.slots] for frame in film.frames]
    changed = [index + 1 for index, (one, two) in enumerate(pairwise(stages)) if one != two]
    evenly = [round(index * (count - 1) / (most - 1)) for index in range(most)]
    changed = changed if len(changed) <= most // 2 else changed[:: -(-len(changed) // (most // 2))]
    spread = evenly[:: -(-most // max(1, most - len(changed) - 2))]
    wanted |= dict.fromkeys((*changed, *spread))
    return replace(film, frames=tuple(film.frames[index] for index in sorted(wanted)))


def between(one: Frame, two: Frame, share: float) -> Frame:
    """A moment between two frames, for smooth films: alphas and scores change evenly, stages at the end."""

    def mix(old: float | None, new: float | None) -> float | None:
        return old if old is None or new is None else old + share * (new - old)

    slots = tuple(
        old._replace(alpha=old.alpha + share * (new.alpha - old.alpha))
        if {old.stage, new.stage} <= LIVE_STAGES
        else old
        for old, new in zip(one.slots, two.slots, strict=True)
    )
    step = one.step + share * (two.step - one.step)
    return Frame(step, slots, mix(one.score, two.score), mix(one.control, two.control), one.note)
