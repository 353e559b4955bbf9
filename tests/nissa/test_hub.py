"""The hub: nothing that a sink does, or fails to do, reaches the loop that publishes."""

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event as Flag

import pytest
from nissa.watchers import Broken, Recorder, Slow, begun

from esper.nissa import Event, Hub
from esper.nissa import hub as hub_module

TESTS = Path(__file__).resolve().parents[1]


class Hanging(Recorder):
    """Stays in one of its methods until it is let go on."""

    def __init__(self, where: str, name: str = "hanging") -> None:
        super().__init__(name)
        self.where, self.arrived, self.go_on = where, Flag(), Flag()

    def open(self) -> None:
        self._stay("open")
        super().open()

    def write(self, event: Event) -> None:
        self._stay("write")
        super().write(event)

    def close(self) -> None:
        self._stay("close")
        super().close()

    def _stay(self, where: str) -> None:
        if where == self.where:
            self.arrived.set()
            assert self.go_on.wait(20)


def await_true(test: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 20
    while not test():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_events_arrive_in_order_and_elsewhere() -> None:
    """All sinks see all events, from a thread that is not ours; leaving the hub waits for it."""
    one, other = Recorder(), Recorder()
    with Hub([one, other]) as hub:
        for number in range(500):
            hub.publish(begun(number))
    assert one.rounds == other.rounds == list(range(500))
    assert one.calls == other.calls == ["open", "close"]
    assert len(one.threads) == len(other.threads) == 1
    assert threading.get_ident() not in one.threads | other.threads
    assert hub.metrics() == {"dropped": 0, "failed": 0}
    assert hub.losses() == ""


def test_without_sinks_there_is_nothing() -> None:
    """No thread, no metrics: a run that nobody watches is as it was."""
    before = threading.active_count()
    with Hub() as hub:
        hub.publish(begun(0))
        assert threading.active_count() == before
    assert hub.metrics() == {}


def test_a_slow_sink_never_holds_up_the_loop() -> None:
    """Room for four: the one in the sink's hands and four more are shown, the others counted."""
    sink = Slow()
    with Hub([sink], capacity=4) as hub:
        hub.publish(begun(0))
        assert sink.arrived.wait(20)
        for number in range(1, 101):
            hub.publish(begun(number))  # none of them waits: the sink goes on only after them
        assert hub.metrics() == {"dropped": 96, "failed": 0}
        sink.go_on.set()
    assert sink.rounds == [0, 1, 2, 3, 4]
    assert hub.losses() == "slow was too slow for 96 events"


@pytest.mark.parametrize(
    ("where", "seen", "calls"),
    [("open", 0, ["open"]), ("write", 1, ["open", "close"]), ("close", 3, ["open", "close"])],
)
def test_a_broken_sink_is_switched_off(where: str, seen: int, calls: list[str]) -> None:
    """One warning, to the thread that publishes; the other sinks go on."""
    broken, sound = Broken(where), Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Hub([broken, sound]) as hub:
            for number in range(3):
                hub.publish(begun(number))
    assert [str(warning.message) for warning in caught] == [
        f"training continues without a sink: broken (OSError: no space to {where})"
    ]
    assert (len(broken.events), broken.calls) == (seen, calls)
    assert sound.rounds == [0, 1, 2]
    assert sound.calls == ["open", "close"]
    assert hub.metrics() == {"dropped": 0, "failed": 1}
    assert hub.losses() == f"switched off: broken (OSError: no space to {where})"


def test_a_failure_is_told_while_training_goes_on() -> None:
    """Not only at the end: with the next event after it."""
    broken = Broken("write")
    with Hub([broken]) as hub:
        hub.publish(begun(0))
        await_true(lambda: bool(hub.failures))
        with pytest.warns(RuntimeWarning, match="without a sink: broken"):
            hub.publish(begun(1))
        hub.publish(begun(2))


def test_a_sink_that_hangs_is_given_up() -> None:
    """Closing waits for so long and no longer; what was not shown is counted."""
    sink = Slow()
    hub = Hub([sink], patience_s=0.05)
    for number in range(3):
        hub.publish(begun(number))
    assert sink.arrived.wait(20)
    with pytest.warns(RuntimeWarning, match=r"without a sink: slow did not end within 0\.05 s"):
        hub.close()
    assert hub.dropped == 3, "the one in its hand was not shown either"
    hub.close()
    hub.publish(begun(3))
    assert hub.dropped == 4, "after the end nobody sees anything"
    assert hub.losses() == "slow was too slow for 4 events; switched off: slow did not end within 0.05 s"
    sink.go_on.set()
    await_true(lambda: sink.calls == ["open", "close"])
    assert (sink.rounds, hub.dropped) == ([0], 4), "what was told as dropped is not shown later"


@pytest.mark.parametrize(("where", "dropped"), [("open", 2), ("write", 2), ("close", 0)])
def test_a_sink_that_hangs_does_so_alone(where: str, dropped: int) -> None:
    """The others see everything while it does, and are closed; what it misses is counted, and never less than none."""
    hanging, sound = Hanging(where), Recorder()
    hub = Hub([hanging, sound], patience_s=0.2)
    for number in range(2):
        hub.publish(begun(number))
    await_true(lambda: sound.rounds == [0, 1])
    assert hub.metrics() == {"dropped": 0, "failed": 0}
    if where == "close":
        await_true(lambda: hanging.rounds == [0, 1])
    with pytest.warns(RuntimeWarning, match=r"without a sink: hanging did not end within 0\.2 s"):
        hub.close()
    assert sound.calls == ["open", "close"]
    assert hub.metrics() == {"dropped": dropped, "failed": 1}
    slow = "hanging was too slow for 2 events; " if dropped else ""
    assert hub.losses() == f"{slow}switched off: hanging did not end within 0.2 s"
    hanging.go_on.set()


def test_a_full_queue_is_of_one_sink() -> None:
    """The other one misses nothing; what two miss counts twice."""
    one, other, sound = Hanging("write", "one"), Hanging("write", "other"), Recorder()
    with Hub([one, other, sound], capacity=1) as hub:
        for number in range(4):
            hub.publish(event := begun(number))
            await_true(partial(sound.events.__contains__, event))
            if number == 0:
                assert one.arrived.wait(20)
                assert other.arrived.wait(20)
        assert hub.dropped == 4
        one.go_on.set()
        other.go_on.set()
    assert (one.rounds, other.rounds, sound.rounds) == ([0, 1], [0, 1], [0, 1, 2, 3])
    assert hub.losses() == "one was too slow for 2 events; other was too slow for 2 events"


def test_patience_is_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several that hang are waited for as long as one: to one deadline."""
    deadlines = set[float]()
    join = hub_module._Worker.join

    def joined(worker: hub_module._Worker, deadline: float) -> bool:
        deadlines.add(deadline)
        return join(worker, deadline)

    monkeypatch.setattr(hub_module._Worker, "join", joined)
    sinks = [Hanging("close", f"sink {number}") for number in range(4)]
    hub = Hub(sinks, patience_s=0.5)
    with pytest.warns(RuntimeWarning) as told:
        hub.close()
    assert len(deadlines) == 1
    assert [str(each.message) for each in told] == [
        f"training continues without a sink: {sink.name} did not end within 0.5 s" for sink in sinks
    ]
    for sink in sinks:
        sink.go_on.set()


def test_a_sink_that_fails_and_then_hangs_is_told_once() -> None:
    """It raises where it writes; that it cannot be closed then changes nothing of that."""

    class Both(Hanging):
        def write(self, event: Event) -> None:
            raise SystemExit("quota")

    both = Both("close")
    hub = Hub([both], patience_s=0.05)
    hub.publish(begun(0))
    await_true(lambda: bool(hub.failures))
    with pytest.warns(RuntimeWarning) as told:
        hub.publish(begun(1))
        hub.close()
    assert [str(each.message) for each in told] == ["training continues without a sink: hanging (SystemExit: quota)"]
    assert hub.metrics() == {"dropped": 0, "failed": 1}
    both.go_on.set()


ENDS = {"nothing": "", "error": "raise SystemExit(3)", "interrupt": "import signal; signal.raise_signal(signal.SIGINT)"}
SCRIPT = """
import sys, time
from nissa.watchers import Recorder, begun
from esper.nissa import Hub

class Late(Recorder):
    def write(self, event):
        time.sleep(0.02)
        print(event.round, flush=True)
    def close(self):
        print("closed", flush=True)

hub = Hub([Late()])
for number in range(5):
    hub.publish(begun(number))
"""


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_the_interpreter(end: str) -> None:
    """A hub that nobody closed shows what is queued, whether the process ends, fails or is stopped by Ctrl-C."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + ENDS[end]], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout.split() == ["0", "1", "2", "3", "4", "closed"]
    assert ("KeyboardInterrupt" in done.stderr) == (end == "interrupt")
    assert done.returncode == {"nothing": 0, "error": 3}.get(end, done.returncode)
