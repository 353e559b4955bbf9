"""Scripts in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_script(name: str, *arguments: object, killed: bool = False, ranks: int = 1) -> str:
    """What a script prints. With several ranks, torchrun starts them."""
    paths = [HERE.parent, HERE.parent / "grower", HERE.parents[1] / "src"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(HERE / name), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == (-9 if killed else 0), done.stderr[-3000:]
    return done.stdout
