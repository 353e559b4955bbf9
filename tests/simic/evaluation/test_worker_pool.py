"""Processes that share work: none outlives the one that began them."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from esper.simic.evaluation.workers import worker_pool

LONG = 120.0
PARENT = f"""
import os, time
from esper.simic.evaluation.workers import worker_pool

if __name__ == "__main__":
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, {LONG})
        time.sleep({LONG})
"""


def lives(process: int) -> bool:
    """Whether there is such a process, other than one that has ended and waits to be asked."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="this system does not tell of processes in /proc")
def test_workers_end_with_their_parent() -> None:
    """Also in the middle of something, and where it had no time to tell them."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert lives(worker)
        parent.kill()
        parent.wait(60)
    for _ in range(300):
        if not lives(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its parent")


@pytest.mark.slow
def test_an_error_does_not_wait_for_what_is_begun() -> None:
    """Nor does Ctrl-C, which is one too."""
    with pytest.raises(KeyboardInterrupt), worker_pool(1) as pool:
        pool.submit(os.getpid).result()
        begun = pool.submit(time.sleep, LONG)
        while not begun.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert isinstance(begun.exception(timeout=60), BrokenProcessPool)
