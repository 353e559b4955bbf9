"""`esper grow`."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console

from esper.cli.train import flag
from esper.grower.records import GrowthRecord
from esper.grower.task_growth import FINISHED, HOST, GrowthSettings, TaskGrowth
from esper.leyline import BadValueError
from esper.leyline.progress import progress_bar
from esper.leyline.records import Json
from esper.storage.interrupts import termination_interrupts
from esper.tolaria import get_task

OUT = Path("runs/grow")
DEFAULTS = {"task": "digits_blind", "policy": "heuristic", "seed": 0, "device": "cpu"}


@dataclass(frozen=True)
class GrowCommand:
    """Train and grow one host of a task, and write it as plain PyTorch. The run folder is one for `esper report`."""

    task: Annotated[str | None, flag(str, DEFAULTS["task"])] = None
    """Task of the host; `esper tasks` lists them."""
    budget: Annotated[int | None, flag(int)] = None
    """Parameters that may grow (default: the task's budget)."""
    steps: Annotated[int | None, flag(int)] = None
    """Steps of training; the policy acts after each (default: the task's)."""
    policy: Annotated[str | None, flag(str, DEFAULTS["policy"])] = None
    """heuristic, pretrained, random, wait, a run folder of `esper train`, or a policy file."""
    seed: Annotated[int | None, flag(int, DEFAULTS["seed"])] = None
    """Random seed of the host's weights, its data order and its seeds."""
    control: Annotated[bool | None, flag(bool)] = None
    """Also train a twin that does not grow, on the same minibatches."""
    out: Annotated[Path | None, flag(Path, OUT)] = None
    """Output folder. Must not already contain a run."""
    resume: Annotated[Path | None, flag(Path)] = None
    """Resume this run from its last complete step. Only --data-dir may differ."""
    device: Annotated[str | None, flag(str, DEFAULTS["device"])] = None
    """Device, such as cpu or cuda:0."""
    data_dir: Annotated[Path | None, flag(Path)] = None
    """Folder of the data sets (default: $ESPER_DATA, else the user's cache)."""

    def run(self, console: Console) -> None:
        """Grow with a line per step and a report at the end. Ctrl-C ends after the last complete step."""
        torch.set_num_threads(1)
        growth = self._begin()
        if growth.result is None:
            try:
                with termination_interrupts():
                    self._grow(growth, console)
            except KeyboardInterrupt:
                console.print(
                    f"stopped after step {growth.step}; continue with esper grow --resume {growth.folder}",
                    markup=False,
                    soft_wrap=True,
                )
                raise SystemExit(128 + signal.SIGINT) from None
        report(growth, growth.result, console)

    def _begin(self) -> TaskGrowth:
        if self.resume is not None:
            names = [name for name, value in vars(self).items() if value is not None]
            others = [f"--{name.replace('_', '-')}" for name in names if name not in ("resume", "data_dir")]
            if others:
                raise BadValueError(f"--resume continues {self.resume} with its own settings; omit {', '.join(others)}")
            return TaskGrowth.resume(self.resume, data_dir=self.data_dir)
        task = get_task(self.task or str(DEFAULTS["task"]))
        settings = GrowthSettings(
            task=task.name,
            budget=task.parameter_budget if self.budget is None else self.budget,
            steps=task.steps if self.steps is None else self.steps,
            policy=self.policy or str(DEFAULTS["policy"]),
            seed=self.seed or 0,
            control=bool(self.control),
            device=self.device or str(DEFAULTS["device"]),
        )
        return TaskGrowth(settings, self.out or OUT, data_dir=self.data_dir)

    def _grow(self, growth: TaskGrowth, console: Console) -> None:
        left = (growth.settings.steps - growth.step) * growth.task.batches_per_step * len(growth.learners)
        with progress_bar("minibatches", left, shown=sys.stderr.isatty()) as advance:
            while growth.step < growth.settings.steps:
                record = growth.run_step(lambda: advance(1))
                console.print(step_line(record, growth.settings.steps), markup=False, soft_wrap=True)
        growth.finish()


def step_line(record: GrowthRecord, steps: int) -> str:
    """A step with its scores."""
    scores = ([] if record.accuracy is None else [f"{record.accuracy:.1f} %"]) + [f"loss {record.loss:.3f}"]
    what = str(record).partition(": ")[2]
    return f"step {record.step} of {steps}: {', '.join(scores)}; {what}"


def report(growth: TaskGrowth, result: Json, console: Console) -> None:
    """Print what was kept, the scores on test data, and where the files are."""
    seeds = ", ".join(f"{each['blueprint']} behind {each['slot']} ({each['parameters']:,})" for each in result["kept"])
    dropped = len(result["dropped"])
    lines = [
        f"kept {seeds or 'no seed'}" + (f"; dropped {dropped} at the end" if dropped else ""),
        f"test data: {_scores(result['test'])}, {result['parameters']:,} parameters",
    ]
    if (control := result["control"]) is not None:
        lines.append(f"ungrown twin: {_scores(control)}, {result['host_parameters']:,} parameters")
    folder = growth.folder
    lines += [
        f"model: {folder / FINISHED}, grown from {folder / HOST}",
        f"log: {folder}; esper report {folder} draws it",
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _scores(scores: Json) -> str:
    return f"{scores['accuracy']:.1f} % correct, loss {scores['loss']:.3f}"
