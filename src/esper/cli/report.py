"""`esper report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from esper.karn import write_report


@dataclass(frozen=True)
class ReportCommand:
    """Draw a run: one HTML page that needs nothing else, with timelines, curves and tables."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    evaluation: tuple[Path, ...] = ()
    """Files that `esper evaluate --json` wrote (default: RUN/evaluation*.json)."""
    out: Path | None = None
    """Where to write the page (default: RUN/report.html)."""
    hosts: int = 4
    """Hosts whose growth is drawn: the best, the median, the worst, then those between."""
    round: int | None = None
    """The round that they are of, counted from 0 (default: the last)."""

    def run(self, console: Console) -> None:
        """Write the page and say where it is."""
        written = write_report(
            self.folder, self.out, evaluations=self.evaluation or None, hosts=self.hosts, round=self.round
        )
        console.print(f"the report is in {written}", markup=False, soft_wrap=True)
