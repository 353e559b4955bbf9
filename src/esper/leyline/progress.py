"""A progress bar, if stderr is a terminal and rich is installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Advances a bar by an amount and shows a short text."""

    def __call__(self, amount: int, words: str = "") -> None: ...


def ignore(amount: int, words: str = "") -> None:
    """Show nothing."""


@contextmanager
def progress_bar(title: str, total: int, *, in_bytes: bool = False, shown: bool = True) -> Iterator[Advance]:
    """Show a bar on stderr while the block runs, and yield the function that advances it."""
    if not shown or not sys.stderr.isatty():
        yield ignore
        return
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        yield ignore
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn() if in_bytes else progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[words]}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, words="")
        yield lambda amount, words="": bar.update(task, advance=amount, words=words)
