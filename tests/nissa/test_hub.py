"""The hub: nothing that a sink does, or fails to do, reaches the loop that publishes."""

import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from nissa.watchers import Broken, Recorder, Slow, begun

from esper.leyline import BadValueError
from esper.nissa import Hub

TESTS = Path(__file__).resolve().parents[1]


def test_events_arrive_in_order_and_elsewhere() -> None:
    """All sinks see all events, from a thread that is not ours; leaving the hub waits for it."""
    one, other = Recorder(), Recorder()
    with Hub([one, other]) as hub:
        for number in range(500):
            hub.publish(begun(number))
    assert one.rounds == other.rounds == list(range(500))
    assert one.calls == other.calls == ["open", "close"]
    assert len(one.threads) == 1
    assert threading.get_ident() not in one.threads
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
        start = time.perf_counter()
        for number in range(1, 101):
            hub.publish(begun(number))
        took = time.perf_counter() - start
        assert hub.metrics() == {"dropped": 96, "failed": 0}
        sink.go_on.set()
    assert took < 5, "the sink waits up to 20 s"
    assert sink.rounds == [0, 1, 2, 3, 4]
    assert hub.losses() == "sinks were too slow for 96 events"


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
        f"training goes on without a sink: broken (OSError: no space to {where})"
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
        deadline = time.monotonic() + 20
        while not hub.failures and time.monotonic() < deadline:
            time.sleep(0.01)
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
    with pytest.warns(RuntimeWarning, match=r"one of slow did not end within 0\.05 s"):
        hub.close()
    assert hub.dropped == 2
    hub.close()
    hub.publish(begun(3))
    assert hub.dropped == 3, "after the end nobody sees anything"
    sink.go_on.set()


def test_room_and_patience_are_checked() -> None:
    with pytest.raises(BadValueError, match="capacity 0"):
        Hub([Recorder()], capacity=0)
    with pytest.raises(BadValueError, match="patience_s"):
        Hub([Recorder()], patience_s=0.0)


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
