"""The provenance of figures: a command, the code and the machine."""

import os
import platform

import torch

from esper.leyline.records import Json
from esper.simic.training.run_folder import git_hash


def made_with(command: str, device: str = "cpu") -> dict[str, Json]:
    """What the figures of a command were made with."""
    return {
        "command": command,
        "git": git_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": {
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "accelerator": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        },
    }
