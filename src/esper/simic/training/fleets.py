"""The fleets that controllers are trained and compared on."""

from pathlib import Path

import torch

from esper.kasmina.slot import Isolation
from esper.tolaria import HostFleet, Task


def growth_fleet(
    task: Task, hosts: int, device: str = "cpu", *, data_dir: Path | None = None, isolation: Isolation = "shadow"
) -> HostFleet:
    """Hosts of a task; on CUDA their streams and products are in bfloat16, weights and statistics never."""
    compute = torch.bfloat16 if torch.device(device).type == "cuda" else None
    return HostFleet(task, hosts, device, data_dir=data_dir, compute=compute, isolation=isolation)
