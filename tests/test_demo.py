"""`make demo`: what it tells and what it leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from esper.cli.demo import RULES
from esper.storage.files import free_path

ROOT = Path(__file__).resolve().parents[1]


def test_the_makefile_runs_it() -> None:
    """The README promises it."""
    assert "$(BIN)/esper demo" in (ROOT / "Makefile").read_text()


def test_a_folder_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    """A second demo does not stop at the first one's folder."""
    wanted = tmp_path / "demo"
    assert free_path(wanted, "-", 2) == wanted
    wanted.mkdir()
    assert free_path(wanted, "-", 2) == tmp_path / "demo-2"
    (tmp_path / "demo-2").mkdir()
    assert free_path(wanted, "-", 2) == tmp_path / "demo-3"


@pytest.mark.slow
def test_the_demo_at_its_smallest(tmp_path: Path) -> None:
    """It trains, compares on unseen hosts, tells, and writes an evaluation and a report."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    code = "from esper.cli import main; main()"
    flags = ["demo", "--teach", "48", "--rounds", "1", "--hosts", "8", "--unseen", "2", "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "demo"
    found = json.loads((folder / "evaluation.json").read_text())
    assert list(found["policies"]) == ["learned", *RULES]
    assert all(len(figures["objective"]) == 2 for figures in found["policies"].values())
    assert found["policies"]["wait"]["objective"] == [0.0, 0.0]
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "growth.gif").read_bytes().startswith(b"GIF89a")
    for word in ("learned", "schedule", "heuristic", "report.html", "unseen hosts", "minutes in all"):
        assert word in done.stdout
