"""Running hosts: data, tasks, and the loop that trains one of them."""

from esper.tolaria.engine import HostTrainer
from esper.tolaria.fleet import HostFleet
from esper.tolaria.governor import Governor, GovernorConfig, Panic, Symptom
from esper.tolaria.tasks import OptimiserConfig, Task, TaskRegistry, get_task

__all__ = [
    "Governor",
    "GovernorConfig",
    "HostFleet",
    "HostTrainer",
    "OptimiserConfig",
    "Panic",
    "Symptom",
    "Task",
    "TaskRegistry",
    "get_task",
]
