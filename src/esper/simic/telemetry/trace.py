"""A trace of every operator, on request: what `torch.profiler` sees, in a file that browsers can show."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from esper.leyline import BadValueError, UnknownNameError

ACTIVITIES = {"cpu": (ProfilerActivity.CPU,), "cuda": (ProfilerActivity.CPU, ProfilerActivity.CUDA)}
"""Device type → what is recorded."""


@contextmanager
def operator_trace(path: Path | str, device: torch.device | str = "cpu", *, stacks: bool = False) -> Iterator[Path]:
    """Record what runs inside; on leaving, write it to `path` (.json or .json.gz: chrome://tracing, Perfetto).

    It slows everything down several times and keeps every operator in memory: for a round, not for a run. What was
    recorded up to an error is written too. An unknown device, or a path that cannot be written, is refused on entering.
    """
    activities, file = check_trace(path, device)
    # Events of one cycle or of all, there is only one; but torch 2.11 warns of every cycle that is not kept.
    profiler = profile(activities=activities, with_stack=stacks, acc_events=True)
    profiler.start()
    try:
        yield file
    finally:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        profiler.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))


def check_trace(path: Path | str, device: torch.device | str = "cpu") -> tuple[tuple[ProfilerActivity, ...], Path]:
    """What would be recorded, and where to; raises where a trace could not be taken or written."""
    return _activities(torch.device(device)), _writable(Path(path))


def _activities(device: torch.device) -> tuple[ProfilerActivity, ...]:
    if device.type not in ACTIVITIES:
        raise UnknownNameError("device type for an operator trace", device.type, ACTIVITIES)
    wanted = ACTIVITIES[device.type]
    if device.type == "cuda" and (not torch.cuda.is_available() or ProfilerActivity.CUDA not in supported_activities()):
        raise BadValueError(
            f"this build of torch ({torch.__version__}) cannot trace {device}: it has no CUDA device or no CUPTI; "
            "trace on 'cpu' instead"
        )
    return wanted


def _writable(path: Path) -> Path:
    if not path.name.endswith((".json", ".json.gz")):
        raise BadValueError(f"a trace called {path.name!r}; its name must end in .json or .json.gz")
    made = [folder for folder in path.parents if not folder.exists()]  # the innermost first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise BadValueError(f"a trace cannot be written to {path}: {error.strerror}; give another path") from error
    finally:
        for folder in made:  # nothing stays where nothing is written yet: a new run must find its folder free
            with suppress(OSError):
                folder.rmdir()
    return path
