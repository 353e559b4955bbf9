"""What a policy chose, in words: indices of heads become ops, slots, blueprints and values."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import HEADS, Head, LifecycleOp, SlotConfig
from esper.leyline.records import Json, encode
from esper.nissa import (
    AlarmRaised,
    EpisodeEnded,
    Event,
    Hub,
    Panicked,
    RoundExamined,
    RoundMeasured,
    RunBegun,
    RunEnded,
    RunResumed,
    SeedSuspected,
    StageChanged,
    as_line,
)
from esper.simic.agent import PPOUpdateMetrics
from esper.simic.rewards import Suspicion
from esper.simic.telemetry import Alarm, DetailReport, RoundFacts, SpanTotal, worst_health
from esper.simic.training.collect import RoundRecord
from esper.simic.training.run_folder import SESSIONS, git_hash
from esper.storage.logs import JsonLines, end_of_lines
from esper.storage.stored import Machine

Choice = str | int | float
Column = list[int] | list[Choice | None]


def decided(actions: Sequence[Sequence[int]], heads: Sequence[str], slots: SlotConfig) -> dict[str, Column]:
    """The decisions of one episode, column by column: `step` and every head, null where it says nothing about the op.

    Steps that waited are left out, because most do: a day of a large run writes a hundred thousand of these.
    """
    where, table = list(heads).index("op"), {head.name: head for head in HEADS}
    acted = [(step, action) for step, action in enumerate(actions) if action[where] != LifecycleOp.WAIT]
    columns: dict[str, Column] = {"step": [step for step, _ in acted]}
    for place, name in enumerate(heads):
        head = table[name]
        columns[name] = [
            _choice(head, action[place], slots) if action[where] in head.ops else None for _, action in acted
        ]
    return columns


def _choice(head: Head, index: int, slots: SlotConfig) -> Choice:
    """What an index of a head stands for."""
    if head.choices == "slots":
        return slots.slot_ids[index]
    if head.choices == "blueprints":
        return slots.blueprint_names[index]
    chosen = head.choices[index]
    return chosen.name if isinstance(chosen, LifecycleOp) else chosen


def summary(records: Sequence[RoundRecord]) -> str:
    """What the progress bar says about a round."""
    many = len(records) > 1
    parts = [
        f"{record.task + ' ' if many else ''}objective {float(record.objective.mean()):+.2f}, committed "
        f"{100 * float((record.added_parameters > 0).float().mean()):.0f} %"
        for record in records
    ]
    return "; ".join(parts)


def write_events(events: JsonLines, round_index: int, record: RoundRecord, slots: SlotConfig) -> None:
    """What happened to each host of a task. Envs are numbered over all tasks."""
    first, task = record.first_env, record.task
    for step, (env, change, blueprint) in record.changes:
        source, target = change.source.name, change.target.name
        moved = StageChanged(
            round_index, task, step, first + env, change.slot_id, blueprint, source, target, change.cause
        )
        events.write(**as_line(moved))
    for step, env, why in record.symptoms:
        events.write(**as_line(Panicked(round_index, task, step, first + env, why)))
    for found in record.suspects:
        suspected = SeedSuspected(
            *(round_index, task, found.step, first + found.env, found.slot, found.suspicion, found.severity),
            *(round(found.contribution, 4), round(found.gain, 4)),
        )
        events.write(**as_line(suspected))
    actions, rewards = record.actions.transpose(0, 1).tolist(), record.rewards.T.tolist()
    parts = {name: part.sum(0).tolist() for name, part in record.parts.items()}
    for env in range(len(record.objective)):
        ended = EpisodeEnded(
            round=round_index,
            task=task,
            env=first + env,
            objective=round(float(record.objective[env]), 4),
            gain=round(float(record.gain[env]), 4),
            accuracy=round(float(record.accuracy[env]), 4),
            added_parameters=int(record.added_parameters[env]),
            accuracies=_rounded(record.accuracies[:, env]),
            control_accuracies=_rounded(record.control_accuracies[:, env]),
            alphas={
                slot_id: _rounded(record.alphas[:, env, place])
                for place, slot_id in enumerate(slots.slot_ids)
                if bool(record.alphas[:, env, place].any())
            },
            decisions=decided(actions[env], record.heads, slots),
            rewards=encode([round(reward, 3) for reward in rewards[env]]),
            reward_parts=encode({name: round(total[env], 4) for name, total in parts.items()}),
        )
        events.write(**as_line(ended))


def round_facts(records: Sequence[RoundRecord], report: DetailReport | None = None) -> RoundFacts:
    """What the detector of anomalies is told of a round. Host sync: a few."""
    acting, hacking, ransomware = torch.stack([record.suspect_counts for record in records]).sum(0).tolist()
    return RoundFacts(
        episodes=sum(len(record.objective) for record in records),
        committed=sum(int((record.added_parameters > 0).sum()) for record in records),
        germinated=sum(_germinated(records).values()),
        panics=sum(record.panics for record in records),
        acting=acting,
        hacking=hacking,
        ransomware=ransomware,
        worst_hacking=_worst(records, "hacking"),
        worst_ransomware=_worst(records, "ransomware"),
        lstm=worst_health(record.lstm for record in records),
        gradients=None if report is None else report.gradients,
        ratios=None if report is None else report.ratios,
    )


def _worst(records: Sequence[RoundRecord], suspicion: Suspicion) -> str:
    """The suspect that a host leans on most, in words."""
    found = [(suspect, r.first_env) for r in records for suspect in r.suspects if suspect.suspicion == suspicion]
    if not found:
        return ""
    worst, first = max(found, key=lambda pair: pair[0].contribution)
    place = f"env {first + worst.env}, slot {worst.slot}, step {worst.step}"
    return f"{place}: a contribution of {worst.contribution:.3g} in a gain of {worst.gain:.3g}"


def write_alarms(events: JsonLines, alarms: Sequence[Alarm]) -> list[AlarmRaised]:
    """What began to be wrong, or ended."""
    raised = []
    for alarm in alarms:
        content = asdict(alarm)
        raised.append(AlarmRaised(alarm=content.pop("kind"), **content))
        events.write(**as_line(raised[-1]))
    return raised


def write_detail(events: JsonLines, round_index: int, report: DetailReport) -> None:
    """A round looked at closely."""
    events.write(**as_line(RoundExamined(round_index, **_short(encode(report)))))


def timing_of(spans: Mapping[str, SpanTotal], lost: Mapping[str, int]) -> dict[str, Json]:
    """Seconds of the two halves of a round, and of everything inside them by span; what sinks lost, where there are
    any."""
    seconds = {name: round(total.wall_s, 6) for name, total in spans.items()}
    halves = {"collect_s": seconds["collect"], "update_s": seconds["update"]}
    return {**halves, "spans": seconds, **({"hub": dict(lost)} if lost else {})}


def write_metrics(
    metrics: JsonLines,
    round_index: int,
    records: Sequence[RoundRecord],
    slots: SlotConfig,
    update: PPOUpdateMetrics,
    timing: dict[str, Json],
) -> RoundMeasured:
    """The line of a round: over all tasks, each task where there are several, the update; what the clock or the machine
    has a say in is under `timing`."""
    several = {record.task: _growth([record]) for record in records} if len(records) > 1 else {}
    values = {
        **_growth(records),
        **({"tasks": several} if several else {}),
        "ops": _ops(records),
        "germinated": {
            f"{slots.slot_ids[slot]}/{slots.blueprint_names[blueprint]}": number
            for (slot, blueprint), number in _germinated(records).items()
        },
        **encode(update.flat()),  # what is not finite becomes words: an update that failed is written down too
        "timing": timing,
    }
    metrics.write(round=round_index, **values)
    return RoundMeasured(round_index, values)


def _growth(records: Sequence[RoundRecord]) -> dict[str, object]:
    objective, gain, accuracy, added = (
        torch.cat([getattr(record, name) for record in records]).tolist()
        for name in ("objective", "gain", "accuracy", "added_parameters")
    )
    return {
        "objective": statistics.fmean(objective),
        "objective_std": statistics.pstdev(objective),
        "gain": statistics.fmean(gain),
        "accuracy": statistics.fmean(accuracy),
        "added_parameters": statistics.fmean(added),
        "committed": statistics.fmean(float(count > 0) for count in added),
        "panics": sum(record.panics for record in records),
        "reward": {
            name: float(torch.cat([record.parts[name].sum(0) for record in records]).mean())
            for name in records[0].parts
        },
    }


def _ops(records: Sequence[RoundRecord]) -> dict[str, int]:
    return dict(Counter(LifecycleOp(op).name for record in records for op in record.actions[..., 0].flatten().tolist()))


def _germinated(records: Sequence[RoundRecord]) -> Counter[tuple[int, int]]:
    """How often each blueprint was germinated in each slot, both by number."""
    chosen: Counter[tuple[int, int]] = Counter()
    for record in records:
        germinated = record.actions[record.actions[..., 0] == int(LifecycleOp.GERMINATE)]
        chosen.update((slot, blueprint) for _, slot, blueprint, *_ in germinated.tolist())
    return chosen


def _short(value: Json) -> Json:
    """Numbers as long as anybody reads them: five digits."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _rounded(curve: Tensor) -> list[float]:
    """As short as it is read: two digits."""
    return [round(value, 2) for value in curve.tolist()]


@contextmanager
def session(
    folder: Path, hub: Hub, rounds: int, done: Callable[[], int], remarks: tuple[str, ...] | None
) -> Iterator[None]:
    """Tell the run's `sessions.jsonl` and the sinks of the block's begin and end. `done` counts complete rounds;
    `remarks` are those of a run that was resumed, None of a new one."""
    place = (_now(), done(), rounds, encode(Machine.here()), git_hash())
    _tell(folder, hub, RunBegun(*place) if remarks is None else RunResumed(*place, list(remarks)))
    try:
        yield
    except BaseException as error:
        why = "stopped" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # a full disk is often what the error is about; it must not hide behind this one
            _tell(folder, hub, RunEnded(_now(), done(), why, hub.dropped))
        raise
    _tell(folder, hub, RunEnded(_now(), done(), "complete", hub.dropped))


def _tell(folder: Path, hub: Hub, event: Event) -> None:
    path = folder / SESSIONS
    with JsonLines(path, end_of_lines(path)) as log:
        log.write(**as_line(event))
    hub.publish(event)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
