"""`esper tasks`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Column, Table

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
                "Gains are points of validation accuracy over the host alone (of tasks scored by loss, percent of its "
                "loss) for one seed grown in mid-training, mean of several repeats; `esper tasks NAME` shows every "
                "slot and blueprint."
            )


def _describe(console: Console, task: Task, data_dir: Path | None) -> None:
    missing = "" if is_present(task.dataset, data_dir) else " (not here yet: fetched on first use)"
    console.print(f"[bold]{task.name}[/bold]  {task.why}")
    host = f"host {task.host_parameters:,} parameters, {task.parameter_budget:,} may be grown"
    episode = f"{task.steps} steps × {task.batches_per_step} minibatches of {task.batch}"
    line = f"  {task.dataset}{missing} · {host} · {episode} · validation {task.validation_size:,}"
    console.print(line)
    kinds = published_gains(task.name)
    for kind in kinds:
        label = f" ({kind.defect})" if len(kinds) > 1 else ""
        bests = [kind.best(slot_id) for slot_id in task.slot_ids]
        seeds = ", ".join(f"{b.slot_id} {b.blueprint} {b.points:+.1f} ({b.parameters:,})" for b in bests)
        console.print(f"  host alone{label} {kind.host_accuracy:.1f} %; best seed per slot: {seeds}")
    if not kinds:
        console.print("  gains not measured: benchmarks/task_gains.py measures them")
    console.print()


def _cells(task: Task, kind: HostGains) -> Table:
    defect = "" if kind.defect == "none" else f", defect {kind.defect}"
    title = f"{task.name}: host {kind.host_accuracy:.1f} %{defect}"
    columns = (Column(slot_id, justify="right") for slot_id in task.slot_ids)
    caption = f"{title}; gain in points, mean ± deviation of {kind.repeats} repeats (parameters)"
    table = Table("blueprint", *columns, title=caption)
    gains = {(gain.slot_id, gain.blueprint): gain for gain in kind.gains}
    for name in task.slot_config.blueprint_names:
        cells = [gains.get((slot_id, name)) for slot_id in task.slot_ids]
        table.add_row(
            name, *("-" if c is None else f"{c.points:+.1f} ± {c.deviation:.1f} ({c.parameters:,})" for c in cells)
        )
    return table
