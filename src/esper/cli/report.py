"""`esper report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from esper.karn import write_film, write_report
from esper.karn.timeline import Standing
from esper.leyline import BadValueError


@dataclass(frozen=True)
class ReportCommand:
    """Draw a run: one HTML page that needs nothing else, with timelines, films, curves and tables."""

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
    film: Path | None = None
    """Also write the growth of one host to this file: a film as .gif, its last step as .png."""
    host: int | Standing | None = None
    """The host of --film: its number, or best, median or worst (default: best)."""

    def run(self, console: Console) -> None:
        """Write the page, and the film if it is wanted, and say where they are."""
        if self.host is not None and self.film is None:
            raise BadValueError(f"--host {self.host} chooses the host of a film; add --film FILE.gif")
        written = write_report(
            self.folder, self.out, evaluations=self.evaluation or None, hosts=self.hosts, round=self.round
        )
        console.print(f"the report is in {written}", markup=False, soft_wrap=True)
        if self.film is not None:
            film = write_film(self.folder, self.film, host=self.host, round=self.round)
            console.print(f"the film is in {film}", markup=False, soft_wrap=True)
