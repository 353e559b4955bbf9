"""A script with the Hugging Face Trainer, as users launch it: to be killed, resumed, or run on two ranks.

python trainer_script.py FOLDER [EPOCH to be killed in, or "resume"]
"""

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integrations.trainer_models import grow, trainer
from safetensors.torch import save_file
from transformers import TrainerCallback


class Kill(TrainerCallback):
    """Kills the process in the middle of an epoch: nothing is flushed, no handler runs."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # Any: as the Trainer calls
        """A third of the epoch was trained."""
        if state.epoch > self.epoch + 0.3:
            os.kill(os.getpid(), signal.SIGKILL)


def check_equal(mine: torch.Tensor) -> None:
    """Compare with rank 0."""
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    assert torch.equal(mine, theirs), float((mine - theirs).abs().max())


class Compare(TrainerCallback):
    """At each save, all ranks have the same weights."""

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """An evaluation has passed. (Any: as the Trainer calls)"""
        if dist.is_initialized():
            check_equal(torch.cat([p.detach().flatten() for p in model.parameters()]))
            print(f"rank {dist.get_rank()} equal with {len(list(model.parameters()))} tensors", flush=True)


def main(folder: Path, more: str) -> None:
    """Train once, as the arguments say, and write the last weights."""
    training = trainer(folder, Compare(), *([Kill(int(more))] if more.isdigit() else []))
    grow(training, folder=folder / "log")
    training.train(resume_from_checkpoint=more == "resume")
    assert training.model is not None and training.optimizer is not None
    if training.is_world_process_zero():
        weights = {name: value.clone() for name, value in training.model.state_dict().items()}
        save_file(weights, folder / "end.safetensors")
        torch.save(training.optimizer.state_dict(), folder / "end.optimizer")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), "".join(sys.argv[2:]))
