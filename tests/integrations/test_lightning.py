"""Growth in Lightning, with its real Trainer: steps, checkpoints, and the end."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from integrations.lightning_models import CUT, Digits, Stop, grow, loaders, trainer
from loops import MLP, equal
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower.container import CHILD
from esper.integrations.lightning import GrowCallback
from esper.leyline import BadValueError, StageError, UnknownNameError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own, with torch 2.13
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
]


def fit(
    folder: Path, *, stop: int | None = None, ckpt: str | None = None, **options: Any
) -> tuple[Digits, GrowCallback, pl.Trainer]:
    """Train fresh objects, perhaps from a checkpoint, perhaps until an epoch. (Any: options of the callback)"""
    torch.manual_seed(0)
    module, callback = Digits(), grow(**options)
    stopping: list[pl.Callback] = [] if stop is None else [Stop(stop)]
    fitting = trainer(folder, callback, *stopping)
    if stop is None:
        fitting.fit(module, *loaders(), ckpt_path=ckpt)
    else:
        with pytest.raises(RuntimeError, match="stopped"):
            fitting.fit(module, *loaders(), ckpt_path=ckpt)
    return module, callback, fitting


def test_resumed_to_the_bit(tmp_path: Path) -> None:
    """Stopped in mid-growth and resumed from Lightning's checkpoint: weights, structure, momenta, rates."""
    whole, grown, ended = fit(tmp_path / "whole")
    fit(tmp_path / "cut", stop=CUT)
    resumed, again, _ = fit(tmp_path / "cut", ckpt=str(tmp_path / "cut" / "last.ckpt"))
    assert grown.record == again.record and grown.record is not None and grown.record.grown > 0
    assert equal(whole.state_dict().items(), resumed.state_dict().items())
    wanted, found = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "cut"))
    assert str(wanted["optimizer_states"]) == str(found["optimizer_states"])
    assert wanted["lr_schedulers"] == found["lr_schedulers"]
    assert ended.callback_metrics["esper/grown_parameters"] == grown.record.grown


def test_growth_ends_with_the_training(tmp_path: Path) -> None:
    """By default the model is plain PyTorch after fit(), and says so to a checkpoint from before."""
    module, callback, fitting = fit(tmp_path, finish=True)
    assert not hasattr(module.model, CHILD) and not module.model._forward_pre_hooks
    kept = [name for name, _ in module.named_parameters() if "grown" in name]
    assert callback.grower is not None and callback.grower.finished
    assert bool(kept) == (sum(p.numel() for p in module.parameters()) > 378)
    fitting.validate(module, loaders()[1], verbose=False)
    with pytest.raises(StageError, match="saved during growth, which has ended"):
        fitting.test(module, loaders()[1], ckpt_path=str(tmp_path / "last.ckpt"), verbose=False)
    with pytest.raises(StageError, match="pass a new one to grow further, or none"):
        fitting.fit(module, *loaders())


class Spoil(pl.Callback):
    """Makes the last two epochs useless."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After the training of an epoch, whose checkpoint is then bad too."""
        if trainer.current_epoch >= CUT and isinstance(pl_module, Digits):
            nn.init.zeros_(pl_module.model.head.weight)


def test_ending_with_the_best_checkpoint(tmp_path: Path) -> None:
    """The finished model has the validation loss of the best checkpoint, not of the last step."""
    acts = {1: [("germinate", "first", "mlp")], 3: [("fossilize", "first")]}
    callback = grow(finish="best", policy=lambda report: acts.get(report.step, []))
    module, fitting = Digits(MLP()), trainer(tmp_path, callback, Spoil())
    fitting.fit(module, *loaders())
    saving = fitting.checkpoint_callback
    assert isinstance(saving, pl.callbacks.ModelCheckpoint) and saving.best_model_score is not None
    assert saving.best_model_path.endswith("epoch=2.ckpt")
    assert "model.first.grown.seed.up.weight" in module.state_dict() and not hasattr(module.model, CHILD)
    (measured,) = trainer(tmp_path).validate(module, loaders()[1], verbose=False)
    assert measured["val_loss"] == pytest.approx(float(saving.best_model_score), rel=1e-5)


def births(step: int, slot: str, name: str) -> Any:  # Any: a policy
    """Germinate one seed."""
    return lambda report: [("germinate", slot, name)] if report.step == step else []


def test_a_growing_checkpoint_is_tested_elsewhere(tmp_path: Path) -> None:
    """A fresh module with the callback takes it, and computes what the growing model computed."""
    _, _, fitting = fit(tmp_path)
    module = Digits()
    (measured,) = trainer(tmp_path, grow()).test(
        module, loaders()[1], ckpt_path=str(tmp_path / "last.ckpt"), verbose=False
    )
    assert measured["test_loss"] == pytest.approx(float(fitting.callback_metrics["val_loss"]), rel=1e-5)
    bare = Digits()
    trainer(tmp_path, grow()).test(bare, loaders()[1], verbose=False)
    assert not hasattr(bare.model, CHILD), "without a checkpoint nothing stays"


@pytest.mark.parametrize(
    ("options", "every", "steps"),
    [
        ({"max_epochs": 4}, 1, 4),
        ({"max_epochs": 4, "check_val_every_n_epoch": 2}, 1, 2),
        ({"max_epochs": 2, "val_check_interval": 0.5}, 2, 2),
        ({"max_epochs": 2, "val_check_interval": 4, "check_val_every_n_epoch": None}, 1, 3),
        ({"max_epochs": -1, "max_steps": 9, "accumulate_grad_batches": 2}, 1, 3),
    ],
)
def test_steps_follow_the_validations(
    options: dict[str, Any], every: int, steps: int, tmp_path: Path
) -> None:  # Any: options of Lightning
    """Growth is timed for as many steps as there will be; the sanity check is none."""
    module, callback = Digits(), grow(policy="wait", every=every)
    trainer(tmp_path, callback, enable_checkpointing=True, **options).fit(module, *loaders())
    assert callback.grower is not None and callback.record is not None
    assert (callback.grower.steps, callback.record.step) == (steps, steps)


class Frozen(Digits):
    """Keeps a norm in eval mode while it trains."""

    def on_train_epoch_start(self) -> None:
        """As fine-tuning recipes do."""
        self.train()
        self.model.stage1[1].eval()


def test_modes_of_training(tmp_path: Path) -> None:
    """A seed that is born in a validation trains after it, and a frozen norm stays frozen."""
    module, callback = Frozen(), grow(policy=births(1, "stage2", "bottleneck"))
    trainer(tmp_path, callback, max_epochs=2).fit(module, *loaders())
    seed = getattr(module.model, CHILD)["stage2"].seed
    assert seed is not None and all(part.training for part in seed.modules())
    assert not module.model.stage1[1].training and module.model.stage2[1].training


class Tutorial(pl.LightningModule):
    """The style of the tutorials: layers on the LightningModule itself, which defines `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.automatic_optimization = False

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(F.relu(self.second(F.relu(self.first(x.flatten(1))))))
        return scores

    def training_step(self, batch: list[Tensor], index: int) -> None:
        """Manual optimisation: two optimizers, one step each."""
        one, two = self.optimizers()  # type: ignore[attr-defined]  # Lightning types it for one optimizer
        one.zero_grad(), two.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        one.step(), two.step()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log the loss."""
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:  # Any: one of the many forms that Lightning takes
        """One for the body, one for the head."""
        body = [*self.first.parameters(), *self.second.parameters()]
        return torch.optim.AdamW(body, lr=0.01), torch.optim.SGD(self.head.parameters(), lr=0.1)


def test_manual_optimisation_of_a_whole_module(tmp_path: Path) -> None:
    """The seeds join the optimizer that was named, and learn in mixed precision too."""
    module, callback = Tutorial(), grow(optimizer=0, policy=births(1, "second", "mlp"), seed_options={"lr": 0.02})
    trainer(tmp_path, callback, max_epochs=3, precision="bf16-mixed").fit(module, *loaders())
    assert callback.record is not None and callback.record.grown > 0
    assert callback.grower is not None
    (seeds,) = callback.grower.optimizer.param_groups[1:]
    assert seeds["lr"] == 0.02
    assert all(bool(callback.grower.optimizer.state[p]) for p in seeds["params"])


@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`.*")
def test_bad_input(tmp_path: Path) -> None:
    """Every message names the remedy."""
    with pytest.raises(BadValueError, match="budget is missing"):
        GrowCallback()  # type: ignore[call-arg]  # what users may try
    with pytest.raises(BadValueError, match='pass True, False or "best"'):
        grow(finish="worst")
    with pytest.raises(BadValueError, match="every 0 is not an integer of 1 or more"):
        grow(every=0)
    fitting = trainer(tmp_path, grow(module="net"))
    with pytest.raises(UnknownNameError, match="unknown module 'net'; allowed: model"):
        fitting.fit(Digits(), *loaders())
    with pytest.raises(BadValueError, match=r"2 of 2 optimizers hold .* such as optimizer=0"):
        trainer(tmp_path, grow()).fit(Tutorial(), *loaders())
    with pytest.raises(BadValueError, match="optimizer is 2, but configure_optimizers returns 2"):
        trainer(tmp_path, grow(optimizer=2)).fit(Tutorial(), *loaders())
    with pytest.raises(BadValueError, match="pass val_dataloaders= to fit"):
        trainer(tmp_path, grow()).fit(Digits(), loaders()[0])
    with pytest.raises(BadValueError, match="needs a ModelCheckpoint that has saved"):
        fitting = pl.Trainer(
            callbacks=[grow(finish="best")], fast_dev_run=True, enable_progress_bar=False, accelerator="cpu"
        )
        fitting.fit(Digits(), *loaders())


class Regression(Digits):
    """Its outputs and targets do not say what the loss is."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """No batch is trained before the loss was tried."""
        raise AssertionError("training began")

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Another loss than the default."""
        self.log("val_loss", F.mse_loss(self.model(batch[0]), batch[1]))


def test_a_loss_that_does_not_fit(tmp_path: Path) -> None:
    """It is refused in the sanity check, before the training begins."""
    images = loaders()[1].dataset[:][0]
    pairs = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, torch.rand(len(images), 10)), batch_size=100
    )
    with pytest.raises(BadValueError, match=r"do not say what the loss is.*Pass your own, one value per sample"):
        trainer(tmp_path, grow()).fit(Regression(), pairs, pairs)
    with pytest.raises(BadValueError, match=r"loss\(\) returned shape \(\); return one floating-point value per"):
        trainer(tmp_path, grow(loss=lambda output, batch: F.mse_loss(output, batch[1]))).fit(Regression(), pairs, pairs)


@pytest.mark.slow
def test_averaged_weights_follow_and_resume(tmp_path: Path) -> None:
    """Lightning's averaging callback, built before ours and after it, gets the seeds and resumes to the bit."""

    def run(folder: Path, first: bool, stop: int | None = None, ckpt: str | None = None) -> Digits:
        torch.manual_seed(0)
        module, callbacks = Digits(), [pl.callbacks.EMAWeightAveraging(decay=0.8), grow()]
        stopping: list[pl.Callback] = [] if stop is None else [Stop(stop)]
        fitting = trainer(folder, *(callbacks if first else callbacks[::-1]), *stopping)
        if stop is None:
            fitting.fit(module, *loaders(), ckpt_path=ckpt)
        else:
            with pytest.raises(RuntimeError, match="stopped"):
                fitting.fit(module, *loaders())
        return module

    for first in (True, False):
        whole = run(tmp_path / f"whole {first}", first)
        run(tmp_path / f"cut {first}", first, stop=CUT)
        resumed = run(tmp_path / f"cut {first}", first, ckpt=str(tmp_path / f"cut {first}" / "last.ckpt"))
        wanted, found = whole.state_dict(), resumed.state_dict()
        assert any(f"{CHILD}.stage" in name for name in wanted)
        assert equal(wanted.items(), found.items())
        saved = torch.load(tmp_path / f"whole {first}" / "last.ckpt", weights_only=True)
        assert saved["state_dict"].keys() == saved["current_model_state"].keys()
