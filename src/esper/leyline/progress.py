"""A progress bar where there is a terminal and rich; nothing otherwise."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Moves a bar on by an amount, with a few words beside it."""

    def __call__(self, amount: int, words: str = "") -> None: ...


def _ignore(amount: int, words: str = "") -> None:
    pass


@contextmanager
def progress_bar(title: str, total: int, *, in_bytes: bool = False, shown: bool = True) -> Iterator[Advance]:
    """Show a bar on stderr while the block runs; yields the function that moves it on."""
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
    if not shown or not sys.stderr.isatty():
        yield _ignore
        return
    counter = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counter, TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[words]}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, words="")

        def advance(amount: int, words: str = "") -> None:
            bar.update(task, advance=amount, words=words)

        yield advance
