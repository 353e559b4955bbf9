"""A disk that is really full, and one that is really read-only: a small tmpfs in a mount namespace of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACE = ["unshare", "--map-root-user", "--mount"]
STORY = """
import json, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from smallest import config, results, resume
from esper.leyline import EsperError
from esper.simic.training.trainer import Trainer

disk, told = Path(sys.argv[1]) / "disk", []
mount = lambda *options: subprocess.run(["mount", "-o", *options, str(disk)], check=True)

def attempt(start):
    try:
        start().run(progress=False)
    except EsperError as error:
        told.append([type(error).__name__, str(error)])
        told.append(sorted(path.name for path in (disk / "run" / "checkpoints").iterdir()))

disk.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=True)
attempt(lambda: Trainer(config(), disk / "run", keep_checkpoints=9))
mount("remount,ro")
attempt(lambda: resume(disk / "run"))
mount("remount,rw,size=64m")
resume(disk / "run").run(progress=False)
Trainer(config(), disk / "whole", keep_checkpoints=9).run(progress=False)
print(json.dumps([*told, results(disk / "run") == results(disk / "whole")]))
"""


def can_mount() -> bool:
    """Whether this system gives a process a mount namespace of its own."""
    return shutil.which("unshare") is not None and subprocess.run([*NAMESPACE, "true"]).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="a small disk needs a mount namespace, which this system does not give")
def test_full_then_read_only_then_roomy(tmp_path: Path) -> None:
    """Two checkpoints fit. The third leaves no trace but an error; read-only, nothing starts; with room, the run ends
    as one that always had it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [*NAMESPACE, sys.executable, "-c", STORY, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    full, after_full, read_only, after_read_only, equal = json.loads(done.stdout.splitlines()[-1])
    run = tmp_path / "disk" / "run"
    assert full[0] == read_only[0] == "StorageError"
    assert f"{run}/checkpoints/round-00003 cannot be written (No space left on device)" in full[1]
    assert f"continue with --resume {run}" in full[1]
    assert f"{run}/events.jsonl cannot be written (Read-only file system)" in read_only[1]
    assert after_full == after_read_only == ["round-00001", "round-00002"]
    assert equal
