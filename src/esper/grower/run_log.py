"""The run folder of a Grower: its settings in `config.json`, what happened in `events.jsonl`, numbers in
`metrics.jsonl`.

A step is complete when `metrics.jsonl` has its line. Steps count from 1, as they are printed.
"""

import gc
import json
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from esper.grower.growing_model import GrowingModel
from esper.grower.policies import OwnPolicy
from esper.grower.records import GrowthRecord
from esper.kasmina import SeedState
from esper.leyline import BadValueError, CheckpointError, SeedStage, StageChange
from esper.leyline.records import Json, config_checksum, encode
from esper.nissa import LiveFile, events
from esper.simic.training.live import finite, measured_seeds, seed_rows
from esper.simic.training.run_folder import CONFIG, EVENTS, METRICS, git_hash
from esper.storage.files import folder_lock, remove_leftovers, replace_file, storage_errors
from esper.storage.logs import JsonLines

KIND = "grower"  # in config.json; runs of `esper train` have no kind
BIRTH = (SeedStage.DORMANT, SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING)
"""Stages that a newborn passes at once, because it acts from birth"""


class RunLog:
    """Writes one run folder. It is locked until `close`, or until this object is gone."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise BadValueError(f"folder {path} is a file; name a folder")
        self.path, self._host = path, ""
        self._closing: weakref.finalize[..., RunLog] | None = None

    @property
    def is_open(self) -> bool:
        """Whether steps can be written."""
        return self._closing is not None

    def create(self, settings: Mapping[str, Json]) -> None:
        """Begin a new run. A folder that holds one is refused."""
        with self._locked() as stack:
            self.check_free()
            self._begin(stack, settings, 0)

    def check_free(self) -> None:
        """Raise if the folder holds a run with complete steps."""
        if self._read_config() is not None and _end_of(self.path / METRICS, 0)[2]:
            raise BadValueError(
                f"{self.path} already holds a run; name another folder, or resume the run: load the model's and the "
                "optimizer's state dicts before you train"
            )

    def resume(self, settings: Mapping[str, Json], step: int) -> None:
        """Continue after a step. Later lines are moved aside; in an empty folder, the log begins here."""
        self.close()
        with self._locked() as stack:
            config = self._read_config()
            if config is None:
                self._begin(stack, settings, step)
                return
            own = config["config"]
            names = [name for name in {**own, **settings} if own.get(name) != settings.get(name)]
            if names:
                differences = "; ".join(
                    f"{name} {settings.get(name)!r}, begun with {own.get(name)!r}" for name in names
                )
                raise BadValueError(f"{self.path} was begun by another Grower ({differences}); name another folder")
            offset, last, _ = _end_of(self.path / METRICS, step)
            if max(last, config["begins_after"]) != step:
                raise CheckpointError(
                    f"{self.path / METRICS} has steps up to {last}, but the state dict was saved after step {step}: it "
                    "is of another run, or lines are lost; name another folder"
                )
            self._open(stack, settings, (_end_of(self.path / EVENTS, step)[0], offset))

    def write(
        self,
        record: GrowthRecord,
        blueprints: Mapping[str, str | None],
        states: Mapping[str, SeedState],
        steps: int,
        seconds: float,
    ) -> None:
        """Log a step, and wait until it is on the disk. `blueprints`: of the seeds that it concerned, by slot.

        `states` are those of the slots after the step, of `steps` steps in all.
        """
        where = (0, self._host, record.step, 0)  # the one host of the one round
        if record.panic is not None:
            self._events.write(**events.as_line(events.Panicked(*where, [record.panic])))
        for change in record.changes:
            for source, target in _passed(change):
                seed = change.slot_id, blueprints[change.slot_id]
                moved = events.StageChanged(*where, *seed, source.name, target.name, change.cause)
                self._events.write(**events.as_line(moved))
        if record.choices:
            self._events.write(
                **events.as_line(events.HostFollowed(*where, [record.choices], [measured_seeds(states)]))
            )
        self._events.flush()  # first, so that a step with a line of metrics has all its events
        contributions = {
            slot_id: {"value": each.value, "error": each.error} for slot_id, each in record.contributions.items()
        }
        values = {
            "step": record.step,
            "accuracy": record.accuracy,
            "loss": record.loss,
            "grown": record.grown,
            "contributions": contributions,
            "remarks": record.remarks,
            "timing": {"step_s": round(seconds, 6)},
        }
        self._metrics.write(**encode(values))
        self._metrics.flush()
        self._live.write(lambda: _step_taken(self._host, record, blueprints, states, steps))

    def finish(self, step: int, kept: list[str], dropped: list[str]) -> None:
        """Log which seeds stay, and close."""
        self._events.write(**events.as_line(events.GrowthFinished(0, self._host, step, 0, kept, dropped)))
        self.close()

    def close(self) -> None:
        """Close the files and release the lock."""
        if self._closing is not None:
            closing, self._closing = self._closing, None
            closing()

    # -- files --------------------------------------------------------------------------------------------------------

    def _locked(self) -> ExitStack:
        """A stack that holds the lock of the folder."""
        gc.collect()  # a Grower that was dropped, such as that of a notebook's last run, may hold it in a cycle
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(folder_lock(self.path))
            remove_leftovers(self.path)
            return stack.pop_all()

    def _read_config(self) -> Json | None:
        """The checked content of `config.json`; None if the folder holds no run."""
        path = self.path / CONFIG
        if not path.exists():
            if present := [name for name in (EVENTS, METRICS) if (self.path / name).exists()]:
                raise BadValueError(f"{self.path} has {present[0]} but no {CONFIG}; name another folder")
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            stated, actual = content["checksum"], config_checksum(content)
            kind, _ = content.get("kind"), content["config"]
        except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise BadValueError(f"{path} is damaged ({error}); restore it, or name another folder") from error
        if stated != actual:
            raise CheckpointError(f"{path} was changed after the run began; restore it, or name another folder")
        if kind != KIND or type(content.get("begins_after")) is not int:
            raise BadValueError(f"{self.path} holds a run of another kind; name another folder")
        return content

    def _begin(self, stack: ExitStack, settings: Mapping[str, Json], step: int) -> None:
        content = {
            "kind": KIND,
            "config": encode(dict(settings)),
            "begins_after": step,
            "git": git_hash(),
            "torch": torch.__version__,
        }
        content["checksum"] = config_checksum(content)
        replace_file(self.path / CONFIG, json.dumps(content, indent=1, allow_nan=False) + "\n")
        self._open(stack, settings, (0, 0))

    def _open(self, stack: ExitStack, settings: Mapping[str, Json], offsets: tuple[int, int]) -> None:
        self._host = settings["host"]
        self._events = stack.enter_context(JsonLines(self.path / EVENTS, offsets[0]))
        self._metrics = stack.enter_context(JsonLines(self.path / METRICS, offsets[1]))
        self._live = stack.enter_context(LiveFile(self.path))
        self._live.begin(0)
        self._closing = weakref.finalize(self, stack.pop_all().close)


def describe_run(
    growing: GrowingModel,
    steps: int,
    policy: str | Path | OwnPolicy,
    seed_options: Mapping[str, Any] | None,
    *,
    own_loss: bool,
) -> dict[str, Json]:
    """What a Grower was built with. (Any: options of an optimizer)"""
    slots = growing.slots.values()
    return {
        "host": type(growing.host).__name__,
        "host_parameters": growing.host_parameters,
        "budget": growing.budget,
        "steps": steps,
        "slots": {spec.slot_id: {"topology": spec.topology, "width": spec.width} for spec in slots},
        "policy": policy_name(policy),
        "own_loss": own_loss,
        "rng_seed": growing.rng_seed,
        "seed_options": encode(None if seed_options is None else dict(seed_options)),
    }


def policy_name(policy: str | Path | OwnPolicy) -> str:
    """The name of a rule, the folder of a learned policy, or the name of a function."""
    return getattr(policy, "__qualname__", type(policy).__name__) if callable(policy) else str(policy)


def _step_taken(
    host: str,
    record: GrowthRecord,
    blueprints: Mapping[str, str | None],
    states: Mapping[str, SeedState],
    steps: int,
) -> events.StepTaken:
    """The step for those who watch. There is no control."""
    changes: list[events.ChangeRow] = [
        (0, change.slot_id, blueprints[change.slot_id], source.name, target.name, change.cause)
        for change in record.changes
        for source, target in _passed(change)
    ]
    return events.StepTaken(
        time=round(time.time(), 3),
        round=0,
        task=host,
        step=record.step,
        steps=steps,
        first_env=0,
        slots=list(states),
        accuracies=[None if record.accuracy is None else finite([record.accuracy])[0]],
        control_accuracies=[None],
        gains=[None],
        losses=[None if record.loss is None else finite([record.loss], 4)[0]],
        seeds=seed_rows(0, states, [state.alpha for state in states.values()]),
        actions=[(0, each.op.upper(), each.slot, each.blueprint or None) for each in record.actions],
        probabilities=[],
        choices=[record.choices] if record.choices else [],
        changes=changes,
        panics=[] if record.panic is None else [(0, [record.panic])],
    )


def _passed(change: StageChange) -> list[tuple[SeedStage, SeedStage]]:
    """The transitions behind a change; a birth is several."""
    if change.source is SeedStage.DORMANT:
        return list(pairwise(BIRTH[: BIRTH.index(change.target) + 1]))
    return [(change.source, change.target)]


def _end_of(path: Path, step: int) -> tuple[int, int, bool]:
    """Where the lines up to a step end, the last step among them, and whether complete lines follow."""
    offset = last = 0
    if not path.exists():
        return offset, last, False
    with storage_errors(path), path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                break  # a killed process may have left part of a line
            try:
                line = json.loads(raw)
                own, ended = int(line["step"]), line.get("kind") == events.GrowthFinished.kind
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise BadValueError(f"{path}, line {number} is damaged ({error}); name another folder") from error
            if own > step or ended:
                return offset, last, True
            offset, last = offset + len(raw), own
    return offset, last, False
