"""A script with Lightning's Trainer, as users launch it: to be killed, resumed, or run on two ranks.

python lightning_script.py FOLDER plain|ddp|ddp-whole [EPOCH to be killed in, or CHECKPOINT to resume from]
"""

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from integrations.lightning_models import Digits, Whole, grow, loaders, trainer


class Kill(pl.Callback):
    """Kills the process in the middle of an epoch: nothing is flushed, no handler runs."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Two batches of the epoch were trained."""
        if trainer.current_epoch == self.epoch and trainer.global_step % 6 == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def check_equal(mine: torch.Tensor) -> None:
    """Compare with rank 0."""
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    assert torch.equal(mine, theirs), float((mine - theirs).abs().max())


class Compare(pl.Callback):
    """After each epoch, all ranks have the same weights and momenta."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last validation has passed."""
        parameters = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        check_equal(torch.cat([p.detach().flatten() for p in pl_module.parameters()]))
        state = trainer.optimizers[0].state
        check_equal(torch.cat([state[p]["momentum_buffer"].flatten() for p in parameters if p in state]))
        print(f"rank {trainer.global_rank} equal with {len(parameters)} tensors", flush=True)


def main(folder: Path, mode: str, more: str) -> None:
    """Train once, as the arguments say."""
    torch.manual_seed(0)
    callbacks: list[pl.Callback] = [grow(folder=folder / "log")]
    if more.isdigit():
        callbacks.append(Kill(int(more)))
    options: dict[str, Any] = {}  # Any: options of Lightning
    if mode != "plain":
        callbacks.append(Compare())
        options = {"devices": 2, "strategy": "ddp"}
    module = Whole() if mode == "ddp-whole" else Digits()
    resumed = str(folder / more) if more.endswith(".ckpt") else None
    trainer(folder, *callbacks, **options).fit(module, *loaders(), ckpt_path=resumed)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:]))
