"""Final evaluations are signed into the runs that they are about: test images are for once."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from esper.leyline import BadValueError, EsperError
from esper.leyline.records import Json
from esper.simic.evaluation.workers import learned_runs
from esper.simic.training.run_folder import git_hash, read_config
from esper.storage.logs import JsonLines, read_lines

FINAL = "final.jsonl"


def sign_policies(
    specs: Sequence[str], tasks: Sequence[str], hosts: int, rng_seed: int, *, going_on: bool = False
) -> list[str]:
    """Sign a final evaluation of these policies into the runs among them; see `sign_final`."""
    entry = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": ",".join(tasks),
        "hosts": hosts,
        "seed": rng_seed,
        "git": git_hash(),
        "policies": list(specs),
    }
    return sign_final(learned_runs(specs), entry, going_on=going_on)


def sign_final(runs: Sequence[Path], entry: dict[str, Json], *, going_on: bool = False) -> list[str]:
    """Append the entry to every run's `final.jsonl`; returns a warning for each run that was signed before, or that
    began with the controller of one that was.

    Every file is opened before the first is written to: one that cannot be written stops all. `going_on`: the same
    evaluation, stopped and begun again, is not another look.
    """
    same = entry if going_on else None
    warnings = [warning for run in runs for warning in _earlier(run, str(run), same)]
    warnings += [
        warning
        for run in runs
        for ancestor in _ancestors(run)
        for warning in _earlier(ancestor, f"{run} began with the controller of {_shown(ancestor)}, which", same)
    ]
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(JsonLines(run / FINAL)) for run in runs]
        except OSError as error:
            raise BadValueError(f"a final evaluation must be signed, and this cannot be written: {error}") from error
        for file in files:
            file.write(**entry)
    return warnings


def _ancestors(run: Path) -> Iterator[Path]:
    """The runs whose controllers a run goes back to, the nearest first, as far as their folders are still there."""
    seen = {run.resolve()}
    while (start := _start(run)) is not None and start.is_dir() and start.resolve() not in seen:
        seen.add(start.resolve())
        yield start
        run = start


def _shown(path: Path) -> Path:
    """Below the working folder without it: a configuration knows whole paths, tables are for other machines too."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _start(run: Path) -> Path | None:
    try:
        return read_config(run).start
    except EsperError:  # nobody can tell any more; whether a run can be evaluated is not asked here
        return None


def _earlier(run: Path, who: str, same: dict[str, Json] | None) -> list[str]:
    found = list(read_lines(run / FINAL)) if (run / FINAL).is_file() else []
    if same is not None:
        found = [entry for entry in found if entry | {"when": ""} != same | {"when": ""}]
    if not found:
        return []
    first = found[0]
    times = f"{len(found)} times, first" if len(found) > 1 else "once"
    return [
        f"{who} has been in a final evaluation {times} at {first['when']} ({first['task']}, {first['hosts']} hosts, "
        f"seed {first['seed']}): its figures on test images are no longer those of a first look"
    ]
