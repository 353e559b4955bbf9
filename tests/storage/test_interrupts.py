"""Signals that wait, and the one that becomes another."""

import signal
import threading

import pytest

from esper.storage.interrupts import interrupts_held, termination_interrupts


def test_ctrl_c_waits() -> None:
    """Until the block is over, however often it is pressed."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("the block")
        done.append("what follows")
    assert done == ["the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_came() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with interrupts_held():
        pass
    assert {number: signal.getsignal(number) for number in before} == before


def test_an_error_inside_comes_first() -> None:
    """Whoever is told that a run was stopped by hand would not look for a full disk."""
    with pytest.raises(OSError, match="full"), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        raise OSError("full")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_termination_becomes_an_interrupt() -> None:
    """Inside the block, also where it was held back; behind it, it means again what it meant."""
    with pytest.raises(KeyboardInterrupt), termination_interrupts(), interrupts_held():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_ones_own_is_left_alone() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with termination_interrupts():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


def test_other_threads_have_no_signals() -> None:
    """There, both do nothing: handlers can be set in the main thread alone."""
    passed = []

    def work() -> None:
        with termination_interrupts(), interrupts_held():
            passed.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert passed == [True]
