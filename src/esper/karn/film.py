"""The film of a network's growth as values: what every slot held after each step, and how good the network was.

`film_layout` says where things stand in a picture; `film_page` and `film_files` draw them.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from esper.karn.growth import GrowthRun
from esper.karn.state import Episode, PanicEvent, RunState, StageEvent
from esper.karn.timeline import MARKS, marks_of
from esper.leyline import ACTIVE_STAGES, LIVE_STAGES, BadValueError, SeedStage

MOST_FRAMES = 400
"""A longer run shows every so many steps, and each step in which a stage changed as far as there is room"""
_VERBS = {"birth": "germinated", "commit": "committed", "cut": "pruned"}


class SlotState(NamedTuple):
    """A slot at one moment."""

    stage: SeedStage = SeedStage.DORMANT
    alpha: float | None = 0.0
    """None: not recorded"""
    blueprint: str | None = None

    @property
    def size(self) -> float:
        """How large the seed is drawn, 0 to 1: its alpha. Unrecorded, half while it blends in and 1 afterwards."""
        if self.alpha is not None:
            return min(1.0, max(0.0, self.alpha))
        return (0.5 if self.stage is SeedStage.BLENDING else 1.0) if self.stage in ACTIVE_STAGES else 0.0


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


def film_of_host(run: RunState, episode: Episode, slots: Sequence[str] = ()) -> Film:
    """One host of the shown round, after each of its steps. `slots`: all of the host, if more are known than used."""
    names = list(slots) or run.slots
    own = [change for change in run.changes if change.env == episode.env]
    steps = len(episode.accuracies)
    moments = range(steps + 1)

    def alpha(slot: str, step: int) -> float:
        trained_with = episode.alphas.get(slot, ())
        return trained_with[min(step, len(trained_with) - 1)] if trained_with else 0.0

    states = {slot: _states(slot, own, moments, alpha) for slot in names}
    notes = _notes(own, [panic for panic in run.panics if panic.env == episode.env])
    frames = tuple(
        Frame(
            step,
            tuple(states[slot][index] for slot in names),
            episode.accuracies[step - 1] if step else None,
            episode.control_accuracies[step - 1] if step else None,
            notes.get(step, ""),
        )
        for index, step in enumerate(moments)
    )
    title = f"{run.config['task']}, round {run.shown}, host {episode.env}"
    return thin(Film(title, blocks_of(names), tuple(names), frames))


def film_of_growth(run: GrowthRun) -> Film:
    """The one model of a Grower, after each of its steps."""
    names, numbers = run.slots, [step.number for step in run.steps]
    moments = [run.begins_after, *numbers]
    by_accuracy = any(step.accuracy is not None for step in run.steps)
    scores = [step.accuracy if by_accuracy else step.loss for step in run.steps]
    states = {slot: _states(slot, run.changes, moments, lambda *_: None) for slot in names}
    notes, budget = _notes(run.changes, run.panics), run.config.whole("budget")
    for step in run.steps:
        grown = f"{step.grown:,} of {budget:,} parameters grown"
        notes[step.number] = f"{notes[step.number]}; {grown}" if step.number in notes else grown
    frames = tuple(
        Frame(step, tuple(states[slot][index] for slot in names), score, None, notes.get(step, ""))
        for index, (step, score) in enumerate(zip(moments, [None, *scores], strict=True))
    )
    measure, unit = ("accuracy", " %") if by_accuracy else ("loss", "")
    # A slot of a user's model has the name of the module before it.
    return thin(Film(str(run.config["host"]), (*names, "output"), tuple(names), frames, measure, unit))


def _states(
    slot: str, changes: Sequence[StageEvent], moments: Iterable[int], alpha: Callable[[str, int], float | None]
) -> list[SlotState]:
    """A slot at each moment, all changes up to it made."""
    own = sorted((change for change in changes if change.slot == slot), key=lambda change: change.at)
    states, index = list[SlotState](), 0
    stage, blueprint = SeedStage.DORMANT, None
    for moment in moments:
        while index < len(own) and own[index].at <= moment:
            stage = own[index].target
            blueprint = own[index].blueprint if stage is not SeedStage.DORMANT else None
            index += 1
        states.append(SlotState(stage, alpha(slot, moment) if stage in ACTIVE_STAGES else 0.0, blueprint))
    return states


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
    """Names of the parts between the slots of a built-in host; `r1c0` lies behind the pooling of block 0."""
    names, before = list[str](), -1
    for slot in slots:
        match = re.fullmatch(r"r(\d+)c(\d+)", slot)
        if match is None:
            names.append(f"up to {slot}")
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
        old._replace(alpha=mix(old.alpha, new.alpha)) if old.stage in LIVE_STAGES and new.stage in LIVE_STAGES else old
        for old, new in zip(one.slots, two.slots, strict=True)
    )
    step = one.step + share * (two.step - one.step)
    return Frame(step, slots, mix(one.score, two.score), mix(one.control, two.control), one.note)


def host_of(episodes: Sequence[Episode], env: int) -> Episode:
    """The episode of a host by its number."""
    for episode in episodes:
        if episode.env == env:
            return episode
    known = ", ".join(str(number) for number in sorted(episode.env for episode in episodes))
    raise BadValueError(f"there is no host {env} in this round; its hosts are {known}")
