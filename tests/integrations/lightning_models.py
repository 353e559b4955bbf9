"""A LightningModule of the kind that users have, its data, and a run that can be cut."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from loops import BlindCNN, digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from esper.integrations.lightning import GrowCallback

EPOCHS = 5
CUT = 3


class Shuffled(torch.utils.data.Sampler[int]):
    """An order that depends on the epoch alone; Lightning calls `set_epoch`."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Any:  # Any: as torch types it
        return iter(torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return self.count


def data() -> tuple[Dataset[Any], Dataset[Any]]:
    """Training and validation images."""
    images, labels = digits(500)
    return TensorDataset(images[:300], labels[:300]), TensorDataset(images[300:], labels[300:])


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders as users pass them to fit()."""
    train, val = data()
    return DataLoader(train, batch_size=50, sampler=Shuffled(300)), DataLoader(val, batch_size=100)


class Digits(pl.LightningModule):
    """Classifies digits; holds its network as `self.model`."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model: Any = BlindCNN() if model is None else model  # with the children of either

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log the loss."""
        self.log("val_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def test_step(self, batch: list[Tensor], index: int) -> None:
        """Log the loss."""
        self.log("test_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:  # Any: one of the many forms that Lightning takes
        """SGD with momentum in two groups, and a schedule."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 1e-3}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS, eta_min=1e-3)]


class Whole(Digits):
    """Defines `forward`, so that it grows as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.model(x)
        return scores

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Through `forward`."""
        return F.cross_entropy(self(batch[0]), batch[1])


def trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:  # Any: options of Lightning
    """A quiet trainer on the CPU that checkpoints every epoch."""
    saving = pl.callbacks.ModelCheckpoint(
        folder, filename="{epoch}", save_top_k=-1, save_last=True, monitor="val_loss", mode="min"
    )
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "log_every_n_steps": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        **options,
    }
    return pl.Trainer(callbacks=[*callbacks, saving], **settings)


def grow(**options: Any) -> GrowCallback:
    """The callback of these tests."""
    settings: dict[str, Any] = {"budget": 3000, "finish": False, **options}
    return GrowCallback(**settings)


class Stop(pl.Callback):
    """Raises in the middle of an epoch, as a crash would."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Two batches of the epoch were trained."""
        if trainer.current_epoch == self.epoch and trainer.global_step % 6 == 2:
            raise RuntimeError("stopped")
