"""`esper evaluate`."""

import statistics
from dataclasses import dataclass
from json import dumps
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from esper.leyline import BadValueError
from esper.simic.training.comparison import Comparison, run_comparison


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
