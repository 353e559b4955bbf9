"""Ctrl-C and SIGTERM, for programs that must finish something first."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends. If it ends with an error, only that is raised."""
    came: list[int] = []
    stops = STOPS if _in_main_thread() else ()
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in stops}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not set from Python, and cannot be set again from it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    for each in dict.fromkeys(came):
        signal.raise_signal(each)


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt inside the block, as Ctrl-C does. Other handlers stay."""
    replaced = _in_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if replaced:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if replaced:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def stops_noted() -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C or SIGTERM inside the block; yields whether one came. A second one raises."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, note) for number in (STOPS if _in_main_thread() else ())}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
