"""Running hosts: tasks and their data, the fleet, the governor, and the loop that trains a single host."""

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
