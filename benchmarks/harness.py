"""What all benchmarks share: one table on the screen, one JSON on disk, and the machine that both came from."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from esper.storage.files import replace_file

RESULTS = Path(__file__).parent / "results"
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


def describe_machine() -> dict[str, Json]:
    """Hardware and versions behind a figure."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def write_result(name: str, result: Mapping[str, Json], folder: Path = RESULTS) -> Path:
    """Write `<name>.json` with the machine beside the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": describe_machine(), **result}, indent=1, allow_nan=False) + "\n")
    return path


def stored(folder: Path | None, name: str, compute: Callable[[], Any]) -> Any:  # Any: JSON
    """What `compute` returned when it was first called under this name: a benchmark with --keep can be stopped."""
    if folder is None:
        return compute()
    path = folder / f"{name}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(compute()))
    return json.loads(path.read_text())


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A plain table; numbers with a fraction get one decimal."""
    text = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *text]) for column in range(len(header))]
    print(f"\n{title}")
    for line in [list(header), ["-" * width for width in widths], *text]:
        print(
            "  ".join(
                value.rjust(width) if i else value.ljust(width)
                for i, (value, width) in enumerate(zip(line, widths, strict=True))
            )
        )


def _cell(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.1f} ± {deviation:.1f}"
