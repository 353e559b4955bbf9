"""The log of final evaluations in each run folder: test images are meant to be used once."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

from esper.leyline import BadValueError, EsperError
from esper.leyline.records import Json
from esper.simic.evaluation.policies import PolicySpec, learned_runs
from esper.simic.training.run_folder import git_hash, read_config
from esper.storage.logs import JsonLines, read_lines

FINAL = "final.jsonl"


def sign_policies(
    specs: Sequence[PolicySpec], tasks: Sequence[str], hosts: int, rng_seed: int, *, resumed: bool = False
) -> list[str]:
    """Sign a final evaluation of these policies into their runs; see `sign_final`."""
    entry = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": ",".join(tasks),
        "hosts": hosts,
        "seed": rng_seed,
        "git": git_hash(),
        "policies": [spec.text for spec in specs],
    }
    return sign_final(learned_runs(specs), entry, resumed=resumed)


def sign_final(runs: Sequence[Path], entry: dict[str, Json], *, resumed: bool = False) -> list[str]:
    """Append the entry to every run's `final.jsonl`, or to none if one cannot be written. Returns a warning for each
    run that was signed before, or that started from one that was. `resumed`: equal entries do not count."""
    same = entry if resumed else None
    signed = [(run, str(run)) for run in runs]
    for run in runs:
        started = f"{run} started from the controller of"
        signed += [(ancestor, f"{started} {_relative(ancestor)}, which") for ancestor in _ancestors(run)]
    warnings = [warning for folder, subject in signed for warning in _earlier(folder, subject, same)]
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(JsonLines(_log_of(run))) for run in runs]
        except OSError as error:
            raise BadValueError(f"a final evaluation must be signed, and this cannot be written: {error}") from error
        for file in files:
            file.write(**entry)
    return warnings


def _ancestors(run: Path) -> Iterator[Path]:
    """The runs that a run started from, the nearest first, as far as their folders exist."""
    seen: set[Path] = set()
    with suppress(EsperError):  # an ancestor that cannot be read any more; runs that are evaluated were checked before
        while (start := read_config(run).start) is not None and start.exists():
            seen.add(run.resolve())
            if start.resolve() in seen:
                return
            yield start
            run = start


def _log_of(run: Path) -> Path:
    """In the folder of a run or policy; beside a policy file."""
    return run / FINAL if run.is_dir() else run.with_name(f"{run.name}.{FINAL}")


def _relative(path: Path) -> Path:
    # If it is below the working directory, because tables are for other machines too.
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _earlier(run: Path, subject: str, same: dict[str, Json] | None) -> list[str]:
    lines = read_lines(log) if (log := _log_of(run)).is_file() else ()
    entries = [line for line in lines if same is None or line | {"when": ""} != same | {"when": ""}]
    if not entries:
        return []
    first = entries[0]
    times = f"{len(entries)} times, first" if len(entries) > 1 else "once"
    return [
        f"{subject} has been in a final evaluation {times} at {first['when']} ({first['task']}, {first['hosts']} "
        f"hosts, seed {first['seed']}): its figures on test images are no longer those of a first look"
    ]
