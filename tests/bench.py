"""The scripts of benchmarks/: where they are, and how they run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run_script(name: str, folder: Path, *arguments: str, warn: str = "error") -> str:
    """What a script prints, run in an empty folder."""
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", warn, str(BENCHMARKS / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
