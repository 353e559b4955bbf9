"""Final evaluations are signed into the runs that they are about: test images are for once."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from esper.leyline import BadValueError
from esper.nissa.log import Json, JsonLines, read_lines

FINAL = "final.jsonl"


def sign_final(runs: Sequence[Path], entry: dict[str, Json], *, going_on: bool = False) -> list[str]:
    """Append the entry to every run's `final.jsonl`; returns a warning for each run that was signed before.

    Every file is opened before the first is written to: one that cannot be written stops all. `going_on`: the same
    evaluation, stopped and begun again, is not another look.
    """
    warnings = [warning for run in runs for warning in _earlier(run, entry if going_on else None)]
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(JsonLines(run / FINAL)) for run in runs]
        except OSError as error:
            raise BadValueError(f"a final evaluation must be signed, and this cannot be written: {error}") from error
        for file in files:
            file.write(**entry)
    return warnings


def _earlier(run: Path, same: dict[str, Json] | None) -> list[str]:
    found = list(read_lines(run / FINAL)) if (run / FINAL).is_file() else []
    if same is not None:
        found = [entry for entry in found if entry | {"when": ""} != same | {"when": ""}]
    if not found:
        return []
    first = found[0]
    times = f"{len(found)} times, first" if len(found) > 1 else "once"
    return [
        f"{run} has been in a final evaluation {times} at {first['when']} ({first['task']}, {first['hosts']} hosts, "
        f"seed {first['seed']}): its figures on test images are no longer those of a first look"
    ]
