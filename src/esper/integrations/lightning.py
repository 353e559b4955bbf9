"""Growth in Lightning: `Trainer(callbacks=[GrowCallback(budget=50_000)])`.

setup             empty slots wait in the model, so that it takes the checkpoint of a run that grew
on_load           seeds that were loaded are hidden until configure_optimizers has run, as it did the first time
on_fit_start      the Grower adopts the slots; after that Lightning restores the optimizers
on_validation_end a growth step, after averaged weights were swapped back and before ModelCheckpoint saves
on_train_end      growth ends, and the model is plain PyTorch again
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Unpack

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from esper.grower import Grower, GrowthRecord, expect_seeds, hidden_seeds
from esper.grower.container import CHILD
from esper.grower.scoring import Batch, Scorer, eval_mode
from esper.integrations.growth import GrowerOptions, metrics_of
from esper.leyline import BadValueError, MissingPackageError, StageError, UnknownNameError
from esper.leyline.numbers import require_whole

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise MissingPackageError("esper.integrations.lightning", "lightning", "esper-morph[lightning]") from error

SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class GrowCallback(pl.Callback):
    """Grows the model of a LightningModule, one step per validation."""

    def __init__(
        self,
        *,
        module: str | None = None,
        optimizer: int | None = None,
        every: int = 1,
        finish: bool | Literal["best"] = True,
        **options: Unpack[GrowerOptions],
    ) -> None:
        """The options are those of `esper.Grower`; `budget` is needed.

        `module` names the submodule that grows, such as `"model"`. By default it is the LightningModule if it defines
        `forward`, else its only child with parameters. `optimizer` is the index of the one that the seeds join; by
        default the one that holds the module's parameters. A step takes place at every `every`-th validation.
        `finish` ends growth with the training: `"best"` loads the best checkpoint of `ModelCheckpoint` before. With
        False, call `callback.grower.finish()` yourself.
        """
        require_whole("every", every, 1, remark=": it is the number of validations per step")
        if finish not in (True, False, "best"):
            raise BadValueError(f'finish is {finish!r}; pass True, False or "best"')
        if "budget" not in options:
            raise BadValueError("budget is missing: it is the number of parameters that may grow")
        self.module, self.optimizer, self.every, self.finish = module, optimizer, every, finish
        self.options = options
        self.grower: Grower | None = None
        """Exists once `fit` has built the optimizers"""
        self.record: GrowthRecord | None = None
        """Of the last step"""
        self._validations = 0
        self._stage = ""
        self._waiting: nn.Module | None = None
        self._hiding = ExitStack()
        self._modes: dict[nn.Module, bool] | None = None

    @property
    def state_key(self) -> str:
        """Tells callbacks of several modules apart in a checkpoint."""
        return self._generate_state_key(module=self.module)

    # -- beginning and resuming ---------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the model take checkpoints with seeds."""
        self._stage = stage
        if stage == "fit" and self.grower is not None:
            raise StageError(
                "this GrowCallback has grown a model already: pass a new one to grow further, or none to train on. To "
                "resume, build module, callback and trainer anew and pass ckpt_path="
            )
        if type(trainer.strategy).__name__ in SHARDED:
            raise BadValueError(
                f"{type(trainer.strategy).__name__} shards the parameters, so a seed cannot join them: use "
                'strategy="ddp", or grow on one device'
            )
        host = find_host(pl_module, self.module)
        if not hasattr(host, CHILD) and self.grower is None:
            expect_seeds(host)
        self._waiting = host

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs besides the model's own state dict."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called last, when all other state before the optimizers was loaded."""
        if self._stage == "fit" and self._waiting is not None:
            self._validations = int(state_dict["validations"])
            self._hiding.enter_context(hidden_seeds(self._waiting))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Build the Grower: the optimizers exist, and their state is not restored yet."""
        self._hiding.close()
        if not trainer.enable_validation:
            raise BadValueError(
                "growth is judged on validation data, and there is none: pass val_dataloaders= to fit(), and define "
                "validation_step"
            )
        host = self._waiting
        assert host is not None
        optimizer = choose_optimizer(trainer.optimizers, host, self.optimizer)
        options: dict[str, Any] = dict(self.options)
        if "steps" not in options and (steps := expected_validations(trainer)) is not None:
            options["steps"] = max(1, steps // self.every)
        if "seed_options" in options:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            options["scheduler"] = [each for each in schedulers if each.optimizer is optimizer]
        self.grower = Grower(host, optimizer, **options)
        if host is pl_module:  # strategies such as DDP run training_step through its forward
            self.grower.ignore_calls(lambda: _is_redirected(pl_module))

    # -- growing ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Remember which parts train, once per step: validations put all of them into eval mode."""
        if self._modes is None and self._waiting is not None:
            self._modes = {part: part.training for part in self._waiting.modules()}

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Try the loss in Lightning's sanity check, so that a wrong one does not cost an epoch."""
        if trainer.sanity_checking and batch_idx == dataloader_idx == 0 and self._waiting is not None:
            scorer = Scorer(self.options.get("loss"), self.options.get("forward"))
            with trainer.precision_plugin.forward_context(), eval_mode(self._waiting):
                scorer(self._waiting, batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Grow, unless this was the sanity check or `trainer.validate`."""
        if self.grower is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._validations += 1
        if self._validations % self.every:
            return
        with trainer.precision_plugin.forward_context(), self._as_in_training():
            self.record = self.grower.step(validation_batches(trainer))
        pl_module.print(str(self.record))
        numbers = metrics_of(self.record)
        trainer.callback_metrics.update({name: torch.tensor(float(value)) for name, value in numbers.items()})
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """Give every part its mode in training, and what is not new its present mode on exit."""
        modes, self._modes = self._modes or {}, None
        before = [(part, part.training) for part in modes]
        for part, mode in modes.items():
            part.training = mode
        try:
            yield
        finally:
            for part, mode in before:
                part.training = mode

    # -- ending -------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End growth, while the model is still on its device."""
        if self.grower is None or not self.finish:
            return
        if self.finish == "best":
            path = getattr(trainer.checkpoint_callback, "best_model_path", "")
            if not path:
                raise BadValueError(
                    'finish="best" needs a ModelCheckpoint that has saved: add one, or pass finish=True'
                )
            best = torch.load(path, map_location=trainer.strategy.root_device, weights_only=True)
            pl_module.load_state_dict(best["state_dict"])
        assert self._waiting is not None
        unknown = trainer.global_step > 0 and any(
            slot.blueprint is not None and slot.contribution is None for slot in self.grower.report().slots.values()
        )
        with trainer.precision_plugin.forward_context(), self._as_in_training():
            self.grower.finish(validation_batches(trainer) if unknown else None)
        self._waiting.register_load_state_dict_pre_hook(_refuse_seeds)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave no empty slots behind if the model was only validated or tested."""
        slots = getattr(self._waiting, CHILD, None)
        if stage != "fit" and slots is not None and slots.waiting and not any(slots.items()):
            slots.remove()


def find_host(pl_module: pl.LightningModule, name: str | None) -> nn.Module:
    """The module that grows."""
    children = {name: child for name, child in pl_module.named_children() if next(child.parameters(), None) is not None}
    if name is not None:
        try:
            return pl_module.get_submodule(name)
        except AttributeError:
            raise UnknownNameError("module", name, children) from None
    if type(pl_module).forward is not pl.LightningModule.forward:
        return pl_module
    if len(children) != 1:
        raise BadValueError(
            f"{type(pl_module).__name__} has no forward() and {len(children)} children with parameters: name the one "
            f'that grows, such as module="model" (children: {", ".join(children) or "none; build them in __init__"})'
        )
    return next(iter(children.values()))


def choose_optimizer(optimizers: list[Optimizer], host: nn.Module, index: int | None) -> Optimizer:
    """The optimizer that the seeds join."""
    if index is not None:
        if not 0 <= index < len(optimizers):
            raise BadValueError(f"optimizer is {index}, but configure_optimizers returns {len(optimizers)}")
        return optimizers[index]
    own = {id(parameter) for parameter in host.parameters()}
    holding = [
        number
        for number, each in enumerate(optimizers)
        if any(id(parameter) in own for group in each.param_groups for parameter in group["params"])
    ]
    if len(holding) != 1:
        raise BadValueError(
            f"{len(holding)} of {len(optimizers)} optimizers hold parameters of the module that grows: pass the index "
            "of the one that its seeds join, such as optimizer=0, or another module="
        )
    return optimizers[holding[0]]


def expected_validations(trainer: pl.Trainer) -> int | None:
    """How often `fit` will validate; None if that is open."""
    trainer.fit_loop.setup_data()
    epochs, steps, interval = trainer.max_epochs, trainer.max_steps, trainer.check_val_every_n_epoch
    per_epoch, between = trainer.num_training_batches, trainer.val_check_batch
    batches = math.inf if epochs in (None, -1) else epochs * per_epoch
    if steps != -1:
        batches = min(batches, steps * trainer.accumulate_grad_batches)
    if between is None or batches in (math.inf, 0):
        return None
    if interval is None:
        return int(batches // between)
    each = 1 if between == math.inf else int(per_epoch // between)
    return int(batches // per_epoch // interval) * each


def validation_batches(trainer: pl.Trainer) -> Iterator[Batch]:
    """The batches of all validation loaders, one loader after the other, as `validation_step` gets them."""
    for index, (loader, limit) in enumerate(
        zip(tree_leaves(trainer.val_dataloaders), trainer.num_val_batches, strict=True)
    ):
        for batch in itertools.islice(loader, None if limit == math.inf else int(limit)):
            converted = trainer.precision_plugin.convert_input(batch)
            passed = trainer.lightning_module._on_before_batch_transfer(converted, dataloader_idx=index)
            yield trainer.strategy.batch_to_device(passed, dataloader_idx=index)


def _is_redirected(pl_module: pl.LightningModule) -> bool:
    """Whether a strategy has put another method in the place of `forward`."""
    return "_ForwardRedirection" in getattr(pl_module.forward, "__qualname__", "")


def _refuse_seeds(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Explain why a finished model does not take a checkpoint from before. (Any: contents of a state dict.)"""
    if f"{prefix}{CHILD}._extra_state" in state:
        raise StageError(
            "the checkpoint was saved during growth, which has ended in this model: test the model as it is, pass "
            'finish="best" to end with the best checkpoint, or finish=False to load checkpoints after fit()'
        )
