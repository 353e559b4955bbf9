"""Everything that a run writes and shows: logs, alarms, checkpoints, sinks and progress."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import CAUSES, HEADS, BadValueError, LifecycleOp, SlotConfig, StorageError
from esper.leyline.progress import Advance, ignore, progress_bar
from esper.leyline.records import Json, encode
from esper.nissa import SinkSettings, events
from esper.simic.agent import PPOAgent, PPOUpdateMetrics, TamiyoRolloutBuffer
from esper.simic.rewards import Suspicion
from esper.simic.telemetry import (
    AnomalyDetector,
    DetailReport,
    Examination,
    RoundFacts,
    Spans,
    SpanTotal,
    operator_trace,
    worst_health,
)
from esper.simic.training.episode import SeedChange, choices_of
from esper.simic.training.rollouts import RoundRecord
from esper.simic.training.run_folder import SESSIONS, Restored, RunFolder, TelemetryState, git_hash
from esper.storage.interrupts import termination_interrupts
from esper.storage.logs import JsonLines, end_of_lines
from esper.storage.stored import Machine

Choice = str | int | float
Column = list[int] | list[Choice | None]
_HEADS = {head.name: head for head in HEADS}


class Recorder:
    """Writes a run to its folder and shows it: on the console, in sinks, in the progress bar."""

    def __init__(
        self, folder: RunFolder, restored: Restored, sinks: SinkSettings, profile: Path | None = None, ranks: int = 1
    ) -> None:
        """`profile`: folder for a trace of every operator of one round. `ranks`: number of processes that train."""
        self._ranks = {"ranks": ranks} if ranks > 1 else {}
        self.folder, self.rounds, config = folder, folder.config.rounds, folder.config
        self.hub = sinks.open(folder.path, encode(config), restored.rounds)
        self.detector = AnomalyDetector(config.alarms, restored.telemetry.detector, restored.agent.config)
        self.detail = restored.telemetry.detail
        self.alarms: tuple[events.AlarmRaised, ...] = ()  # of the last round
        self._remarks, self._profile, self._console = restored.remarks, profile, sinks.console
        # The first round of a process is not typical; it is traced only if no other is left.
        self._traced = min(restored.rounds + 1, self.rounds - 1)
        self._advance: Advance = ignore

    @contextmanager
    def session(self, done: Callable[[], int], *, progress: bool = True) -> Iterator[None]:
        """Open the run's files and sinks, note begin and end. Signals end the block; `done` counts complete rounds."""
        path = self.folder.path
        bar = progress_bar("rounds", self.rounds, done=done(), shown=progress)
        with bar as self._advance, self.folder, self.hub, termination_interrupts():
            if self._profile is not None and done() == self.rounds:
                raise BadValueError(f"{path} has no round left to trace; omit --profile")
            try:
                with self._noted(done):
                    yield
            except KeyboardInterrupt:
                print(f"stopped after round {done()}; continue with --resume {path}")
            except StorageError as error:
                remedy = f"the run is complete up to its last checkpoint; continue with --resume {path}"
                raise StorageError(f"{error}; {remedy}") from error
        if losses := self.hub.losses():
            print(f"{losses}; the log in {path} has everything")

    @contextmanager
    def _noted(self, done: Callable[[], int]) -> Iterator[None]:
        """Write the begin and end of the block to `sessions.jsonl`, and send them to the sinks."""
        begin = (_now(), done(), self.rounds, encode(Machine.here()) | self._ranks, git_hash())
        self._note(events.RunBegun(*begin) if self._remarks is None else events.RunResumed(*begin, list(self._remarks)))
        try:
            yield
        except BaseException as error:
            why = "stopped" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            with suppress(OSError):  # a full disk is often the cause; this second error must not hide it
                self._note(events.RunEnded(_now(), done(), why, self.hub.dropped))
            raise
        self._note(events.RunEnded(_now(), done(), "complete", self.hub.dropped))

    def _note(self, event: events.Event) -> None:
        path = self.folder.path / SESSIONS
        with JsonLines(path, end_of_lines(path)) as log:
            log.write(**events.as_line(event))
        self.hub.publish(event)

    def note_failed_compile(self, agent: PPOAgent, round_index: int) -> None:
        """Log that the compiler failed in this round, if it did: in `sessions.jsonl`, for it depends on the machine."""
        if agent.compile_error:
            self._note(events.CompileFailed(_now(), round_index, agent.compile_error))
            agent.compile_error = ""

    def note_straggler(self, round_index: int, rank: int, why: str) -> None:
        """Log and print that all other ranks wait for this one."""
        self._note(events.RankStraggled(_now(), round_index, rank, why))
        print(f"warning: round {round_index}: {why}", flush=True)

    @contextmanager
    def tracing(self, round_index: int, spans: Spans) -> Iterator[None]:
        """Trace the block if it is the round to profile, with the spans as ranges in the trace."""
        spans.marked = self._profile is not None and round_index == self._traced
        if self._profile is None or not spans.marked:
            yield
            return
        with operator_trace(self._profile / f"round-{round_index:05d}.json.gz", self.folder.config.device) as path:
            yield
        print(f"round {round_index} was traced: {path}", flush=True)

    def examination(self, agent: PPOAgent, buffer: TamiyoRolloutBuffer) -> Examination | None:
        """An observer of the coming update, in rounds that an alarm marked for a closer look."""
        return Examination(buffer, agent.layout) if self.detail.left else None

    def write_events(
        self, round_index: int, records: Sequence[RoundRecord], update: PPOUpdateMetrics, look: Examination | None
    ) -> None:
        """Log what happened to each host, the details of the update, and alarms that begin or end."""
        log, report = self.folder.events, None
        for record in records:
            write_record(log, round_index, record)
        if look is not None:
            report = look.report({record.task: record.lstm for record in records})
            log.write(**events.as_line(events.RoundExamined(round_index, **_short(encode(report)))))
        self.alarms = self.detector.look(round_index, update, round_facts(records, report))
        self.detail = self.detail.after(self.alarms)
        for alarm in self.alarms:
            log.write(**events.as_line(alarm))

    def write_metrics(
        self,
        round_index: int,
        records: Sequence[RoundRecord],
        update: PPOUpdateMetrics,
        spans: Mapping[str, SpanTotal],
        ranks: Mapping[str, Json] | None = None,
    ) -> events.RoundMeasured:
        """Log the line of a round. What depends on the clock or the machine is under `timing`; so do `ranks`."""
        seconds, lost = {name: round(total.wall_s, 6) for name, total in spans.items()}, self.hub.metrics()
        timing = {"collect_s": seconds["collect"], "update_s": seconds["update"], "spans": seconds}
        values = round_values(records, update, timing | ({"hub": lost} if lost else {}) | dict(ranks or {}))
        self.folder.metrics.write(round=round_index, **values)
        return events.RoundMeasured(round_index, values)

    def save(self, agent: PPOAgent, rounds: int) -> None:
        """Write the checkpoint after `rounds` rounds."""
        self.folder.save(agent, rounds, TelemetryState(self.detector.state, self.detail))

    def show(self, measured: events.RoundMeasured, records: Sequence[RoundRecord]) -> None:
        """Send a complete round to the sinks, and print its alarms unless the console sink does."""
        self.hub.publish(measured)
        for alarm in self.alarms:
            self.hub.publish(alarm)
            if alarm.severity != "info" and not self._console:
                print(alarm, flush=True)
        self._advance(1, "" if self._console else summary(records))


def decided(actions: Sequence[Sequence[int]], heads: Sequence[str], slots: SlotConfig) -> dict[str, Column]:
    """The decisions of one episode, without WAIT, by column: `step` and every head, null where it does not matter."""
    op = list(heads).index("op")
    acted = [(step, action) for step, action in enumerate(actions) if action[op] != LifecycleOp.WAIT]
    columns: dict[str, Column] = {"step": [step for step, _ in acted]}
    for index, head in enumerate(_HEADS[name] for name in heads):
        values = [v.name if isinstance(v, LifecycleOp) else v for v in choices_of(head, slots)]
        columns[head.name] = [values[action[index]] if action[op] in head.ops else None for _, action in acted]
    return columns


def stage_columns(changes: Sequence[tuple[int, SeedChange]]) -> dict[str, Json]:
    """The changes of stage of one episode, by column; `source`, `target` and `cause` have a letter per change."""
    return {
        "step": [step for step, _ in changes],
        "slot": [each.change.slot_id for _, each in changes],
        "blueprint": [each.blueprint for _, each in changes],
        "source": "".join(each.change.source.letter for _, each in changes),
        "target": "".join(each.change.target.letter for _, each in changes),
        "cause": "".join(CAUSES[each.change.cause] for _, each in changes),
    }


def summary(records: Sequence[RoundRecord]) -> str:
    """A round in a few words, for the progress bar."""
    return "; ".join(
        f"{record.task + ' ' if len(records) > 1 else ''}objective {float(record.objective.mean()):+.2f}, committed "
        f"{100 * float((record.added_parameters > 0).float().mean()):.0f} %"
        for record in records
    )


def write_record(log: JsonLines, round_index: int, record: RoundRecord) -> None:
    """Log what happened to each host of a task. Envs are numbered over all tasks."""
    first, task = record.first_env, record.task
    for step, env, symptoms in record.symptoms:
        log.write(**events.as_line(events.Panicked(round_index, task, step, first + env, symptoms)))
    for suspect in record.suspects:
        seed = (round_index, task, suspect.step, first + suspect.env, suspect.slot)
        figures = round(suspect.contribution, 4), round(suspect.gain, 4)
        log.write(**events.as_line(events.SeedSuspected(*seed, suspect.suspicion, suspect.severity, *figures)))
    write_followed(log, round_index, record)
    changes = defaultdict[int, list[tuple[int, SeedChange]]](list)
    for step, change in record.changes:
        changes[change.env].append((step, change))
    actions, rewards = record.actions.transpose(0, 1).tolist(), record.rewards.T.tolist()
    parts = {name: part.sum(0).tolist() for name, part in record.parts.items()}
    for env in range(len(record.objective)):
        ended = events.EpisodeEnded(
            round=round_index,
            task=task,
            env=first + env,
            objective=round(float(record.objective[env]), 4),
            gain=round(float(record.gain[env]), 4),
            accuracy=round(float(record.accuracy[env]), 4),
            added_parameters=int(record.added_parameters[env]),
            stages=stage_columns(changes[env]),
            accuracies=_rounded(record.accuracies[:, env]),
            control_accuracies=_rounded(record.control_accuracies[:, env]),
            alphas={
                slot_id: [int(alpha) if alpha.is_integer() else alpha for alpha in _rounded(alphas)]
                for slot_id, alphas in zip(record.slots.slot_ids, record.alphas[:, env].T, strict=True)
                if bool(alphas.any())
            },
            decisions=decided(actions[env], record.heads, record.slots),
            rewards=encode([round(reward, 3) for reward in rewards[env]]),
            reward_parts=encode({name: round(total[env], 4) for name, total in parts.items()}),
        )
        log.write(**events.as_line(ended))


def write_followed(log: JsonLines, round_index: int, record: RoundRecord) -> None:
    """Log what the policy considered for the hosts that are followed."""
    for env, host in enumerate(record.followed):
        log.write(**events.as_line(events.HostFollowed(round_index, record.task, 0, record.first_env + env, *host)))


def round_facts(records: Sequence[RoundRecord], report: DetailReport | None = None) -> RoundFacts:
    """What the anomaly detector reads of a round. Device sync: a few."""
    acting, hacking, ransomware = torch.stack([record.suspect_counts for record in records]).sum(0).tolist()
    return RoundFacts(
        episodes=sum(len(record.objective) for record in records),
        committed=sum(int((record.added_parameters > 0).sum()) for record in records),
        germinated=_germinated(records).total(),
        panics=sum(len(record.symptoms) for record in records),
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
    suspects = [(suspect, r.first_env) for r in records for suspect in r.suspects if suspect.suspicion == suspicion]
    if not suspects:
        return ""
    worst, first = max(suspects, key=lambda pair: pair[0].contribution)
    position = f"env {first + worst.env}, slot {worst.slot}, step {worst.step}"
    return f"{position}: a contribution of {worst.contribution:.3g} in a gain of {worst.gain:.3g}"


def round_values(
    records: Sequence[RoundRecord], update: PPOUpdateMetrics, timing: Mapping[str, Json]
) -> dict[str, Json]:
    """The metrics of a round: all tasks together, each of several tasks, the update, and `timing`."""
    ops = [op for record in records for op in record.actions[..., 0].flatten().tolist()]
    return {
        **_growth(records),
        **({"tasks": {record.task: _growth([record]) for record in records}} if len(records) > 1 else {}),
        "ops": dict(Counter(LifecycleOp(op).name for op in ops)),
        "germinated": dict(_germinated(records)),
        **encode(update.flat()),  # numbers that are not finite become words
        "timing": timing,
    }


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
        "panics": sum(len(record.symptoms) for record in records),
        "reward": {
            name: float(torch.cat([record.parts[name].sum(0) for record in records]).mean())
            for name in records[0].parts
        },
    }


def _germinated(records: Sequence[RoundRecord]) -> Counter[str]:
    """Number of germinations by `slot/blueprint`."""
    return Counter(
        f"{record.slots.slot_ids[slot]}/{record.slots.blueprint_names[blueprint]}"
        for record in records
        for op, slot, blueprint, *_ in record.actions.flatten(0, 1).tolist()
        if op == LifecycleOp.GERMINATE
    )


def _short(value: Json) -> Json:
    """JSON with floats of five significant digits."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _rounded(curve: Tensor) -> list[float]:
    return [round(value, 2) for value in curve.tolist()]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
