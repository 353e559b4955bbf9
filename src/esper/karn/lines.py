"""Lines of `events.jsonl` as values."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from esper.karn.fields import Fields, is_number
from esper.leyline import BadValueError, Measurement, SeedStage, UnknownNameError
from esper.leyline.records import Json

Choices = Mapping[str, Mapping[str, float]]
"""By head of a policy: what it could choose, with probabilities, the likeliest first"""
_NOTHING: Mapping[str, Sequence[float]] = MappingProxyType({})


class StageEvent(NamedTuple):
    """A seed went from one stage to another."""

    step: int
    env: int
    slot: str
    blueprint: str | None
    source: SeedStage
    target: SeedStage
    cause: str

    @property
    def at(self) -> int:
        """Steps trained before it. Ops act before their step's training, ticks and panics after it."""
        return self.step + (self.cause in ("tick", "panic"))


class PanicEvent(NamedTuple):
    """The governor restored a host's snapshot."""

    step: int
    env: int
    symptoms: list[str]


class Action(NamedTuple):
    """A decision other than WAIT."""

    step: int
    op: str
    slot: str | None
    blueprint: str | None


class SeedScores(NamedTuple):
    """What was measured of a seed, in points."""

    audition: Measurement | None
    contribution: Measurement | None


class Followed(NamedTuple):
    """What is known of one host only if it is followed closely, by step."""

    choices: list[Choices]
    measured: list[dict[str, SeedScores]]


class Episode(NamedTuple):
    """One host from its first step to its last."""

    env: int
    objective: float
    gain: float
    accuracy: float
    added_parameters: float
    accuracies: Sequence[float] = ()
    """After every step; curves are empty in rounds whose details are not stored"""
    control_accuracies: Sequence[float] = ()
    alphas: Mapping[str, Sequence[float]] = _NOTHING
    task: str = ""
    actions: Sequence[Action] = ()

    def without_curves(self) -> "Episode":
        """The figures alone."""
        return Episode(*self[:5])


class Commit(NamedTuple):
    """A committed seed."""

    slot: str
    blueprint: str
    germinated: int
    """Steps trained before it was germinated"""
    committed: int


class Alarm(NamedTuple):
    """An alarm that began or ended."""

    round: int
    alarm: str
    severity: str
    subject: str
    ended: bool
    cause: str
    remedy: str


def change_of(line: Fields, env: int) -> StageEvent:
    """The change of stage in a Grower's line."""
    return StageEvent(
        line.whole("step"),
        env,
        line.text("slot"),
        line.optional_text("blueprint"),
        stage_named(line.text("source"), f"{line.where}, source"),
        stage_named(line.text("target"), f"{line.where}, target"),
        line.text("cause"),
    )


def commits_of(changes: Iterable[StageEvent]) -> list[Commit]:
    """The seeds that an episode committed. A panic may undo a commit."""
    births = dict[str, int]()
    commits = dict[str, Commit]()
    for change in changes:
        if change.target is SeedStage.GERMINATED and change.cause != "panic":
            births[change.slot] = change.at
        elif change.target is SeedStage.FOSSILIZED:
            born = births.get(change.slot, change.at)
            commits[change.slot] = Commit(change.slot, change.blueprint or "unnamed", born, change.at)
        elif change.source is SeedStage.FOSSILIZED:
            commits.pop(change.slot, None)
    return list(commits.values())


def stage_named(name: str, where: str) -> SeedStage:
    """The stage of this name."""
    if name not in SeedStage.__members__:
        raise UnknownNameError(f"stage ({where})", name, SeedStage.__members__)
    return SeedStage[name]


def panic_of(line: Fields, env: int) -> PanicEvent:
    """The panic in a line."""
    return PanicEvent(line.whole("step"), env, texts(line.get("symptoms", [])))


def texts(values: Json) -> list[str]:
    """A list of texts; what is no list is one text."""
    return [str(value) for value in values] if isinstance(values, list) else [str(values)]


def episode_of(line: Fields, env: int, *, curves: bool) -> Episode:
    """The episode in a line, perhaps with its curves and decisions."""
    objective, gain, accuracy, added = map(line.number, ("objective", "gain", "accuracy", "added_parameters"))
    if not curves:
        return Episode(env, objective, gain, accuracy, added)
    accuracies, control, alphas = line.numbers("accuracies"), line.numbers("control_accuracies"), line.inside("alphas")
    if len(accuracies) != len(control):
        raise BadValueError(f"{line.where}: {len(accuracies)} accuracies, but {len(control)} of the control")
    by_slot = {slot: alphas.numbers(slot) for slot in alphas}
    task = line.optional_text("task") or ""
    return Episode(env, objective, gain, accuracy, added, accuracies, control, by_slot, task, _actions(line))


def _actions(line: Fields) -> list[Action]:
    """The decisions of an episode. Logs may lack them, and presets some of the heads."""
    if "decisions" not in line:
        return []
    columns = line.inside("decisions")
    steps = columns.numbers("step")
    lists = {name: columns.get(name, [None] * len(steps)) for name in ("op", "slot", "blueprint")}
    if not all(isinstance(values, list) and len(values) == len(steps) for values in lists.values()):
        raise BadValueError(f"{columns.where}: its columns differ in length")
    named = zip(*lists.values(), strict=True)
    return [
        Action(int(step), str(op), optional_name(slot), optional_name(blueprint))
        for step, (op, slot, blueprint) in zip(steps, named, strict=True)
    ]


def optional_name(value: Json) -> str | None:
    """A name, or None."""
    return None if value is None else str(value)


def followed_of(line: Fields) -> Followed:
    """What was followed of a host."""
    measured = line.get("measured", [])
    if not isinstance(measured, list):
        raise BadValueError(f"{line.where}: 'measured' is no list")
    choices = line.get("choices", [])
    if not isinstance(choices, list):
        raise BadValueError(f"{line.where}: 'choices' is no list")
    return Followed(
        [choices_of(each) for each in choices],
        [{str(row[0]): scores_of(row[1:], line.where) for row in rows_of(step, 5, line.where)} for step in measured],
    )


def choices_of(value: Json) -> Choices:
    """Probabilities by head and choice; what is none is left out."""
    heads = value.items() if isinstance(value, dict) else ()
    return {
        str(head): {str(name): float(chance) for name, chance in options.items() if is_number(chance)}
        for head, options in heads
        if isinstance(options, dict)
    }


def rows_of(value: Json, width: int, where: str) -> list[list[Json]]:
    """Rows of so many values."""
    if not isinstance(value, list) or not all(isinstance(row, list) and len(row) == width for row in value):
        raise BadValueError(f"{where}: rows of {width} values are expected")
    return value


def scores_of(row: list[Json], where: str) -> SeedScores:
    """Audition, its error, contribution, its error."""
    if not all(value is None or is_number(value) for value in row):
        raise BadValueError(f"{where}: what was measured of a seed should be numbers or null")
    return SeedScores(_measurement(*row[:2]), _measurement(*row[2:]))


def _measurement(value: float | None, error: float | None) -> Measurement | None:
    return None if value is None or error is None else Measurement(float(value), max(0.0, float(error)))


def alarm_of(line: Fields) -> Alarm:
    """The alarm in a line."""
    severity, subject, cause, remedy = (
        line.optional_text(key) or "" for key in ("severity", "subject", "cause", "remedy")
    )
    return Alarm(line.whole("round"), line.text("alarm"), severity, subject, line.get("ended") is True, cause, remedy)
