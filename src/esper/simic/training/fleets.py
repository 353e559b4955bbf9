"""The fleets that controllers are trained and compared on."""

from collections.abc import Sequence
from pathlib import Path

import torch

from esper.kasmina.slot import Isolation
from esper.tolaria import HostFleet, Task
from esper.tolaria.batches import Batches


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
    compute = torch.bfloat16 if torch.device(device).type == "cuda" else None
    return HostFleet(
        task, hosts, device, seeds, batches=batches, data_dir=data_dir, compute=compute, isolation=isolation
    )
