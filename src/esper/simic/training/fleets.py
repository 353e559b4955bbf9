"""The fleets that controllers are trained and compared on."""

from collections.abc import Sequence
from pathlib import Path

import torch

from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError
from esper.tolaria import HostFleet, Task
from esper.tolaria.batches import Batches


def check_device(device: torch.device | str) -> None:
    """Raise for a device that this machine does not have: torch says so late, and not by name."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    try:
        wanted = torch.device(device)
    except RuntimeError:  # no name of a device at all
        wanted = None
    if wanted is None or (wanted.type != "cpu" and (wanted.type != "cuda" or (wanted.index or 0) >= len(gpus))):
        raise BadValueError(f"device {str(device)!r} is not here; this machine has {', '.join(['cpu', *gpus])}")


def growth_fleet(
    task: Task,
    hosts: int,
    device: torch.device | str = "cpu",
    seeds: Sequence[int] | None = None,
    *,
    batches: Batches | None = None,
    data_dir: Path | str | None = None,
    isolation: Isolation = "shadow",
) -> HostFleet:
    """Hosts of a task; on CUDA their streams and products are in bfloat16, weights and statistics never."""
    check_device(device)
    compute = torch.bfloat16 if torch.device(device).type == "cuda" else None
    return HostFleet(
        task, hosts, device, seeds, batches=batches, data_dir=data_dir, compute=compute, isolation=isolation
    )
