"""Progress on stderr: a bar on a terminal, otherwise a line every ten seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol


class Advance(Protocol):
    """Advances a bar by an amount and shows a short text."""

    def __call__(self, amount: int, words: str = "") -> None: ...


def ignore(amount: int, words: str = "") -> None:
    """Show nothing."""


LINE_S = 10.0
"""Seconds between two lines where there is no terminal. Short work prints none."""


def _lines(title: str, total: int, done: int) -> Advance:
    """Print a line now and then: logs of batch jobs should tell how far the work is."""
    last = time.monotonic()

    def advance(amount: int, words: str = "") -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last >= LINE_S:
            print(f"{title}: {done:,} of {total:,} {words}".rstrip(), file=sys.stderr, flush=True)
            last = time.monotonic()

    return advance


@contextmanager
def progress_bar(
    title: str, total: int, *, done: int = 0, in_bytes: bool = False, shown: bool = True
) -> Iterator[Advance]:
    """Show progress on stderr while the block runs, and yield the function that advances it. `done`: of the total,
    before the block."""
    if not shown or not sys.stderr.isatty() or find_spec("rich") is None:
        yield _lines(title, total, done) if shown else ignore
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn() if in_bytes else progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[words]}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, completed=done, words="")
        yield lambda amount, words="": bar.update(task, advance=amount, words=words)
