"""A progress bar where there is a terminal and rich; nothing otherwise."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _ignore(amount: int) -> None:
    pass


@contextmanager
def progress_bar(title: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr while the block runs; yields the function that moves it on by an amount."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield _ignore
        return
    if not sys.stderr.isatty():
        yield _ignore
        return
    counter = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counter, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)
