"""What numbers may depend on beside the seed: recorded in checkpoints, told where it has changed."""

import warnings
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Machine:
    """What numbers may depend on beside the seed."""

    torch: str
    threads: int
    cpu: str
    """The instructions that kernels may use"""

    @classmethod
    def here(cls) -> "Machine":
        """Of this process."""
        return cls(torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())

    def differences(self) -> str:
        """What is otherwise in this process, in words; empty where nothing is."""
        now = Machine.here()
        names = [each.name for each in fields(Machine) if getattr(self, each.name) != getattr(now, each.name)]
        return ", ".join(f"{name} {getattr(self, name)} → {getattr(now, name)}" for name in names)

    def warn_of_differences(self) -> None:
        """Say so where a run of this machine goes on under other conditions."""
        if changed := self.differences():
            warnings.warn(f"the run goes on, but not bit for bit: {changed}", RuntimeWarning, stacklevel=3)
