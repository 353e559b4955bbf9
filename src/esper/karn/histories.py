"""The growth of one host over its steps, of a complete round or of one that is being played.

Everything is numbered by steps trained: the decision of step s is taken at s, its training fills s to s + 1, and what
is measured then stands at s + 1. So a view at a time t needs what stands at t or before it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from esper.karn.fields import Fields, is_number
from esper.karn.lines import (
    Action,
    Choices,
    Episode,
    Followed,
    PanicEvent,
    SeedScores,
    StageEvent,
    choices_of,
    optional_name,
    rows_of,
    scores_of,
    stage_named,
    texts,
)
from esper.leyline import BadValueError, Measurement, SeedStage
from esper.leyline.records import Json

Curve = list[float | None]
"""Values after every step; None where there is none"""
E_ = TypeVar("E_", StageEvent, PanicEvent)


class SeedNow(NamedTuple):
    """A slot that is not empty, at some time."""

    stage: SeedStage
    blueprint: str | None
    alpha: float
    since: int
    """Steps trained when it entered this stage"""
    born: int
    """Steps trained when the seed was germinated"""
    audition: Measurement | None = None
    """The last one"""
    contribution: Measurement | None = None


@dataclass
class HostHistory:
    """One host from the beginning of its episode, as far as it is known."""

    env: int
    task: str
    steps: int
    """Of the whole episode"""
    begins_after: int = 0
    """Steps trained before the curves begin"""
    accuracies: Curve = field(default_factory=list)
    control_accuracies: Curve = field(default_factory=list)
    """Empty if there is no control"""
    gains: Curve = field(default_factory=list)
    """Points over the control. Of a complete round they are differences, also where the task is scored by loss"""
    losses: Curve = field(default_factory=list)
    alphas: dict[str, list[float]] = field(default_factory=dict)
    """By slot: what each step was trained with"""
    changes: list[StageEvent] = field(default_factory=list)
    panics: list[PanicEvent] = field(default_factory=list)
    actions: dict[int, Action] = field(default_factory=dict)
    """By steps trained; without WAIT. Rules may act several times in a step: then the last one"""
    choices: dict[int, Choices] = field(default_factory=dict)
    """What the policy chose among; of hosts that are followed closely"""
    chances: dict[int, float] = field(default_factory=dict)
    """Probability of what was decided; of a round that is being played"""
    measured: dict[int, dict[str, SeedScores]] = field(default_factory=dict)
    """Auditions and contributions by slot; of hosts that are followed closely, or in a round that is being played"""
    outcome: Episode | None = None
    """Of a complete episode"""

    @property
    def trained(self) -> int:
        """Steps trained so far."""
        return self.begins_after + max(len(self.accuracies), len(self.losses))

    def value(self, curve: Curve, trained: int) -> float | None:
        """The value of one of its curves after so many steps."""
        index = trained - self.begins_after - 1
        return curve[index] if 0 <= index < len(curve) else None

    def stages(self, trained: int) -> dict[str, SeedStage]:
        """The stage of every slot that was ever used, after so many steps."""
        return {change.slot: change.target for change in self.changes if change.at <= trained}

    def at(self, trained: int | None = None) -> dict[str, SeedNow]:
        """The slots that are not empty after so many steps (default: now)."""
        trained = self.trained if trained is None else trained
        seeds: dict[str, SeedNow] = {}
        for change in self.changes:
            if change.at > trained:
                continue
            before = seeds.get(change.slot)
            born = change.at if before is None or change.source is SeedStage.DORMANT else before.born
            blueprint = change.blueprint or (None if before is None else before.blueprint)
            seeds[change.slot] = SeedNow(change.target, blueprint, 0.0, change.at, born)
        return {
            slot: self._measured(slot, seed, trained)
            for slot, seed in seeds.items()
            if seed.stage is not SeedStage.DORMANT
        }

    def _measured(self, slot: str, seed: SeedNow, trained: int) -> SeedNow:
        """With alpha, and the last audition and contribution since its birth."""
        curve = self.alphas.get(slot, [])
        index = min(trained - self.begins_after, len(curve)) - 1
        alpha = curve[index] if index >= 0 else 0.0
        audition = contribution = None
        for at in range(trained, seed.born, -1):
            scores = self.measured.get(at, {}).get(slot)
            if scores is not None:
                audition, contribution = audition or scores.audition, contribution or scores.contribution
            if audition is not None and contribution is not None:
                break
        return seed._replace(alpha=alpha, audition=audition, contribution=contribution)


def by_env(events: Iterable[E_]) -> dict[int, list[E_]]:
    """Events by host, in order."""
    found: dict[int, list[E_]] = defaultdict(list)
    for event in events:
        found[event.env].append(event)
    return found


def history_of(
    episode: Episode, changes: list[StageEvent], panics: list[PanicEvent], followed: Mapping[int, Followed]
) -> HostHistory:
    """The history of a complete episode."""
    choices, measured = followed.get(episode.env, Followed([], []))
    return HostHistory(
        env=episode.env,
        task=episode.task,
        steps=len(episode.accuracies),
        accuracies=list(episode.accuracies),
        control_accuracies=list(episode.control_accuracies),
        gains=[own - other for own, other in zip(episode.accuracies, episode.control_accuracies, strict=True)],
        alphas={slot: list(values) for slot, values in episode.alphas.items()},
        changes=changes,
        panics=panics,
        actions={action.step: action for action in episode.actions},
        choices={step: each for step, each in enumerate(choices) if each},
        measured={step + 1: each for step, each in enumerate(measured) if each},
        outcome=episode,
    )


# -- a round that is being played -------------------------------------------------------------------------------------


@dataclass
class LiveRound:
    """A round that is being played, folded from the lines of `live.jsonl`."""

    number: int
    slots: list[str] = field(default_factory=list)
    """Of all tasks, in the order in which data pass them"""
    hosts: dict[int, HostHistory] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    """When each step ended, in seconds since 1970"""

    def add(self, line: Fields, *, ahead: int = 0) -> None:
        """Add a step. `ahead`: 1 where steps are counted when they are decided, as those of a Grower are."""
        step, steps, first, task = line.whole("step"), line.whole("steps"), line.whole("first_env"), line.text("task")
        curves = {name: _curve(line, name) for name in ("accuracies", "control_accuracies", "gains", "losses")}
        count = len(curves["accuracies"])
        if any(len(values) != count for values in curves.values()):
            raise BadValueError(f"{line.where}: its curves are of different numbers of hosts")
        slots = texts(line.get("slots", []))
        self.slots += [slot for slot in slots if slot not in self.slots]
        self.times.append(line.number("time"))
        for index in range(count):
            host = self.hosts.setdefault(first + index, HostHistory(first + index, task, steps, step - ahead))
            host.steps = steps
            for name, values in curves.items():
                getattr(host, name).append(values[index])
        own = range(first, first + count)
        self._add_seeds(line, step + 1 - ahead, slots, own)
        self._add_decisions(line, step, own, ahead)

    def _add_seeds(self, line: Fields, trained: int, slots: Sequence[str], own: range) -> None:
        acting: dict[tuple[int, str], float] = {}
        for row in rows_of(line.get("seeds", []), 9, line.where):
            env, slot, alpha = row[0], str(row[1]), row[4]
            if env not in own or not is_number(alpha):
                raise BadValueError(f"{line.where}: 'seeds' has a row of no host of this line, or without alpha")
            acting[env, slot] = float(alpha)
            self.hosts[env].measured.setdefault(trained, {})[slot] = scores_of(row[5:], line.where)
        for env in own:
            host = self.hosts[env]
            for slot in slots:
                alpha, known = acting.get((env, slot), 0.0), host.alphas.get(slot)
                if known is not None or alpha > 0:
                    before = [0.0] * (trained - host.begins_after - 1)
                    host.alphas.setdefault(slot, before).append(alpha)

    def _add_decisions(self, line: Fields, step: int, own: range, ahead: int) -> None:
        for env, op, slot, blueprint in rows_of(line.get("actions", []), 4, line.where):
            self._host(env, own, line).actions[step] = Action(step, str(op), *map(optional_name, (slot, blueprint)))
        for env, chance in zip(own, _curve(line, "probabilities"), strict=False):
            if chance is not None:
                self.hosts[env].chances[step] = chance
        for env, choices in zip(own, _list(line, "choices"), strict=False):
            if choices:
                self.hosts[env].choices[step] = choices_of(choices)
        for env, slot, blueprint, source, target, cause in rows_of(line.get("changes", []), 6, line.where):
            before, after = (stage_named(str(name), line.where) for name in (source, target))
            change = StageEvent(step, int(env), str(slot), optional_name(blueprint), before, after, str(cause))
            # A Grower's step is counted when it is trained; see `StageEvent.at`.
            moved = change._replace(step=step - (change.at - step) * ahead)
            self._host(env, own, line).changes.append(moved)
        for env, symptoms in rows_of(line.get("panics", []), 2, line.where):
            self._host(env, own, line).panics.append(PanicEvent(step - ahead, int(env), texts(symptoms)))

    def _host(self, env: Json, own: range, line: Fields) -> HostHistory:
        if env not in own:
            raise BadValueError(f"{line.where}: env {env!r} is none of its hosts, {own.start} to {own.stop - 1}")
        return self.hosts[env]

    @property
    def trained(self) -> int:
        """Steps that every host has been trained."""
        return min((host.trained for host in self.hosts.values()), default=0)

    @property
    def steps(self) -> int:
        """Of the longest episode."""
        return max((host.steps for host in self.hosts.values()), default=0)


def _list(line: Fields, key: str) -> list[Json]:
    values = line.get(key, [])
    if not isinstance(values, list):
        raise BadValueError(f"{line.where}: {key!r} is no list")
    return values


def _curve(line: Fields, key: str) -> Curve:
    """One value per host; None where there is no number."""
    return [float(value) if is_number(value) else None for value in _list(line, key)]
