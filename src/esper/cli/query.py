"""`esper query`."""

import os
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Column, Table

from esper.karn.queries import STDOUT, TIMEOUT_S, Answer, Cell, as_json, ask, columns_of, views_of
from esper.leyline import BadValueError
from esper.leyline.numbers import require_positive, require_whole
from esper.leyline.records import printable


@dataclass(frozen=True)
class QueryCommand:
    """Ask a run with SQL (DuckDB): rounds, episodes, decisions, rewards, seeds, stages, panics, alarms.

    The run of a Grower has steps, contributions, seeds, stages and panics.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run; it may still be training."""
    statement: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="SQL")] = None
    """One SELECT (default: show the views and their columns)."""
    csv: Path | None = None
    """Write all rows to this file as CSV; - is the standard output."""
    json: Path | None = None
    """Write all rows to this file as JSON; - is the standard output."""
    rows: int = 50
    """Rows that are shown on the screen."""
    timeout: float = TIMEOUT_S
    """Seconds that the statement may take."""

    def run(self, console: Console) -> None:
        """Show or write the answer, or the views."""
        targets = [path for path in (self.csv, self.json) if path is not None]
        require_whole("rows", self.rows, 1)
        require_positive("timeout", self.timeout)
        if len(targets) > 1 or (targets and self.statement is None):
            raise BadValueError("--csv and --json take the answer of a statement, one of them at a time")
        for path in targets:
            if path != STDOUT and _belongs_to(path, self.folder):
                raise BadValueError(f"{path} belongs to the run {self.folder}; write to a file elsewhere")
        if self.statement is None:
            _show_views(console, self.folder)
            return
        with ask(self.folder, self.statement, self.timeout) as answer:
            if targets:
                self._write(answer, targets[0], console)
            else:
                _show(console, answer, self.rows)

    def _write(self, answer: Answer, target: Path, console: Console) -> None:
        try:
            count = answer.write_csv(target) if self.csv else answer.write_json(target)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        if target != STDOUT:
            rows = "1 row" if count == 1 else f"{count:,} rows"
            console.print(f"{rows} in {target}", markup=False, soft_wrap=True)


def _belongs_to(path: Path, run: Path) -> bool:
    """Whether a path is inside a run's folder or the target of a link there, as written or resolved."""
    own = {each.resolve() for each in (run, *(run.iterdir() if run.is_dir() else ()))}
    routes = (Path(os.path.abspath(path)), path.resolve())
    return any(each.resolve() in own for route in routes for each in (route, *route.parents))


def _show(console: Console, answer: Answer, limit: int) -> None:
    rows = list(islice(answer.rows, limit + 1))
    table = Table()
    for index, name in enumerate(answer.columns):
        numbers = all(row[index] is None or isinstance(row[index], int | float) for row in rows)
        table.add_column(printable(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows[:limit]:
        table.add_row(*map(_cell, row))
    _print(console, table)
    if len(rows) > limit:
        console.print(f"only the first {limit}; --rows shows more, --csv writes all")
    elif not rows:
        console.print("no rows")


def _show_views(console: Console, folder: Path) -> None:
    views = views_of(folder)
    for name, columns in columns_of(folder).items():
        console.print(f"\n[bold]{name}[/bold]")
        console.print(views[name].meaning, markup=False)
        table = Table(*(Column(header, overflow="fold") for header in ("column", "type", "meaning")))
        for column in columns:
            if column.meaning:
                table.add_row(column.name, column.type, column.meaning)
        _print(console, table)
        if others := [column.name for column in columns if not column.meaning]:
            console.print(f"and, all {columns[-1].type}: {', '.join(others)}", markup=False)


def _print(console: Console, table: Table) -> None:
    """Print a table as wide as the terminal, or as wide as it needs if there is none."""
    if not console.is_terminal:
        wanted = console.measure(table, options=console.options.update(width=10_000)).maximum
        console.width = max(console.width, wanted)
    console.print(table, markup=False)


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(as_json(value) if isinstance(value, list | dict) else str(value))
