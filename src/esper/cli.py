"""The command line: each subcommand is a frozen dataclass, its fields are the flags, their strings the help."""

import statistics
import sys
from dataclasses import dataclass, fields
from json import dumps
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.leyline import BadValueError, EsperError
from esper.simic.training.comparison import Comparison, run_comparison
from esper.simic.training.config import TrainConfig
from esper.simic.training.runs import read_config
from esper.simic.training.trainer import Trainer
from esper.tolaria import Task, TaskRegistry, get_task
from esper.tolaria.data import is_present
from esper.tolaria.gains import HostGains, published_gains


@dataclass(frozen=True)
class TasksCommand:
    """List the tasks, and what one seed was measured to add to their hosts."""

    names: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME")] = ()
    """Show only these, with every slot and blueprint."""
    data_dir: Path | None = None
    """Where data sets are looked for (default: $ESPER_DATA, else the user's cache)."""

    def run(self, console: Console) -> None:
        """Print a paragraph per task, or the whole tables of those that were named."""
        for task in [get_task(name) for name in self.names or TaskRegistry.names()]:
            _describe(console, task, self.data_dir)
            if self.names:
                for gains in published_gains(task.name):
                    console.print(_cells(task, gains))
        if not self.names:
            console.print(
                "Gains are points of validation accuracy over the host alone for one seed grown in mid-training, mean "
                "of several repeats; `esper tasks NAME` shows every slot and blueprint.",
                highlight=False,
            )


def _describe(console: Console, task: Task, data_dir: Path | None) -> None:
    missing = "" if is_present(task.dataset, data_dir) else " (not here yet: fetched on first use)"
    console.print(f"[bold]{task.name}[/bold]  {task.why}", highlight=False)
    host = f"host {task.host_parameters:,} parameters, {task.parameter_budget:,} may be grown"
    episode = f"{task.steps} steps × {task.batches_per_step} minibatches of {task.batch}"
    line = f"  {task.dataset}{missing} · {host} · {episode} · validation {task.validation_size:,}"
    console.print(line, highlight=False)
    kinds = published_gains(task.name)
    for kind in kinds:
        label = f" ({kind.defect})" if len(kinds) > 1 else ""
        bests = [kind.best(slot_id) for slot_id in task.slot_ids]
        seeds = ", ".join(f"{b.slot_id} {b.blueprint} {b.points:+.1f} ({b.parameters:,})" for b in bests)
        console.print(f"  host alone{label} {kind.host_accuracy:.1f} %; best seed per slot: {seeds}", highlight=False)
    if not kinds:
        console.print("  gains not measured: benchmarks/task_gains.py measures them", highlight=False)
    console.print()


def _cells(task: Task, kind: HostGains) -> Table:
    title = f"{task.name}: host {kind.host_accuracy:.1f} %" + (
        "" if kind.defect == "none" else f", defect {kind.defect}"
    )
    table = Table(title=f"{title}; gain in points, mean ± deviation of {kind.repeats} repeats (parameters)")
    table.add_column("blueprint")
    for slot_id in task.slot_ids:
        table.add_column(slot_id, justify="right")
    found = {(gain.slot_id, gain.blueprint): gain for gain in kind.gains}
    for name in task.slot_config.blueprint_names:
        cells = [found.get((slot_id, name)) for slot_id in task.slot_ids]
        table.add_row(
            name, *("-" if c is None else f"{c.points:+.1f} ± {c.deviation:.1f} ({c.parameters:,})" for c in cells)
        )
    return table


@dataclass(frozen=True)
class TrainCommand(TrainConfig):
    """Train a controller on fresh hosts, round after round; writes a run folder."""

    out: Path = Path("runs/train")
    """Folder of the run; it must not hold another."""
    resume: Path | None = None
    """Go on with this run instead, as it was configured, from its last complete round."""

    def run(self, console: Console) -> None:
        """Train, with a progress bar; Ctrl-C ends after the last complete round."""
        if self.resume is not None:
            trainer = Trainer(read_config(self.resume), self.resume, resume=True)
        else:
            config = TrainConfig(**{field.name: getattr(self, field.name) for field in fields(TrainConfig)})
            trainer = Trainer(config, self.out)
        trainer.run()
        console.print(
            f"{trainer.round} of {trainer.config.rounds} rounds are in {trainer.folder.path}", highlight=False
        )


@dataclass(frozen=True)
class EvaluateCommand:
    """Compare policies on hosts that none of them was trained on, the same for each."""

    task: str = "digits_blind"
    """Task whose hosts they grow."""
    policies: str = "heuristic,random,random-commit,wait"
    """Separated by commas: wait, random, random-commit, heuristic, heuristic:FILE, schedule:FILE, or a run folder;
    runs of one configuration, one per training seed, are joined by +."""
    hosts: int = 64
    """Hosts that each policy grows; their controls come on top."""
    seed: int = 7
    """Which hosts."""
    json: Path | None = None
    """Write everything here."""
    preset: str = "core"
    """Heads and ops of the policies: core or full, as the runs were trained."""
    final: bool = False
    """Take hosts of the final range and score them on test images: once, at the very end."""
    device: str = "cpu"
    data_dir: Path | None = None
    """Where data sets are looked for (default: $ESPER_DATA, else the user's cache)."""

    def run(self, console: Console) -> None:
        """Print a table of policies and one of differences."""
        torch.set_num_threads(1)
        if self.json is not None and not self.json.resolve().parent.is_dir():
            raise BadValueError(f"{self.json} cannot be written: there is no folder {self.json.parent}")
        found = run_comparison(
            self.task, [name.strip() for name in self.policies.split(",")], self.hosts, self.seed, final=self.final,
            preset=self.preset, data_dir=self.data_dir,
            device=self.device,
        )  # fmt: skip
        console.print(_policy_table(found))
        for compared in found.compared:
            d = compared.difference
            console.print(
                f"{compared.policy} − {compared.against}: {d.mean:+.2f} (95 % {d.low:+.2f} to {d.high:+.2f}, "
                f"adjusted p {compared.adjusted_p:.3g}, {d.seeds} training seed{'s' if d.seeds > 1 else ''})"
                + (" superior" if compared.superior else ""),
                highlight=False,
            )
        if self.json is not None:
            self.json.write_text(dumps(found.to_json(), indent=1, allow_nan=False) + "\n")


def _policy_table(found: Comparison) -> Table:
    table = Table(title=f"{found.task}, {found.hosts} hosts, {'test' if found.final else 'validation'} images")
    for column in ("policy", "objective", "accuracy %", "added parameters", "commits"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, results in found.policies.items():
        objective, accuracy, added = (
            statistics.fmean(value for result in results for value in getattr(result, part))
            for part in ("objective", "accuracy", "added_params")
        )
        commits = statistics.fmean(len(commit) for result in results for commit in result.commits)
        table.add_row(name, f"{objective:+.2f}", f"{accuracy:.1f}", f"{added:.0f}", f"{commits:.2f}")
    return table


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `esper`. A mistake of the user's ends in one line and exit code 2, not in a traceback."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"tasks": TasksCommand, "train": TrainCommand, "evaluate": EvaluateCommand},
        prog="esper",
        description="Grow a neural network while it trains.",
        args=arguments,
    )
    try:
        command.run(Console())
    except EsperError as error:
        print(f"esper: {error}", file=sys.stderr)
        raise SystemExit(2) from None
