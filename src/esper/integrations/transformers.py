"""Growth in the Hugging Face Trainer: `trainer.add_callback(GrowCallback(trainer, budget=50_000))`.

The Trainer loads a checkpoint's weights, creates its optimizer, and loads the optimizer's state; no callback is called
between. So the callback puts waiting slots into the model at once, which take the weights, and builds the Grower as
part of `trainer.create_optimizer`. A step follows each evaluation, before the Trainer saves.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Unpack

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from esper.grower import Grower, GrowthRecord, expect_seeds, hidden_seeds, ranks
from esper.grower.container import CHILD
from esper.grower.scoring import Batch, Loss
from esper.integrations.growth import GrowerOptions, metrics_of, shape_of
from esper.kasmina.compare import IGNORED
from esper.leyline import BadValueError, MissingPackageError
from esper.leyline.numbers import require_whole

try:
    import transformers
except ImportError as error:
    raise MissingPackageError("esper.integrations.transformers", "transformers", "esper-morph[transformers]") from error

SHIFTED = ("ForCausalLM", "ForConditionalGeneration", None)
"""Loss types whose labels are the next tokens; None is what transformers treats so"""
IN_PLACE = ("ForMaskedLM", "ForTokenClassification")
PER_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")
SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
REMEDY = "pass loss=, a function of (output, batch) that returns one value per sample or token"


class GrowCallback(transformers.TrainerCallback):
    """Grows the model of a Trainer, one step per evaluation."""

    def __init__(
        self,
        trainer: transformers.Trainer,
        *,
        every: int = 1,
        finish: bool = True,
        **options: Unpack[GrowerOptions],
    ) -> None:
        """The options are those of `esper.Grower`; `budget` is needed. Add the callback before `trainer.train()`.

        By default the loss is that of the model's kind: cross-entropy of the next token, of masked tokens, or of
        classes. A step takes place at every `every`-th evaluation, on the evaluation data. `finish` ends growth with
        the training, after `load_best_model_at_end`; with False, call `callback.grower.finish()` yourself.
        """
        require_whole("every", every, 1, remark=": it is the number of evaluations per step")
        if "budget" not in options:
            raise BadValueError("budget is missing: it is the number of parameters that may grow")
        if not isinstance(trainer, transformers.Trainer):
            raise BadValueError(
                f"trainer is a {type(trainer).__name__}; build the Trainer first, then "
                "trainer.add_callback(GrowCallback(trainer, budget=...))"
            )
        host = _check_trainer(trainer)
        self.every, self.finish, self.options = every, finish, options
        self.loss = options["loss"] if "loss" in options else default_loss(host)
        self.grower: Grower | None = None
        """Exists once `train` has created the optimizer"""
        self.record: GrowthRecord | None = None
        """Of the last step"""
        self._trainer, self._host, self._grown_at = trainer, host, 0
        expect_seeds(host)
        # Not a subclass, so that a user's own Trainer with its own create_optimizer is followed too.
        create = partial(self._create_optimizer, trainer.create_optimizer)
        trainer.create_optimizer = create  # type: ignore[method-assign]  # of this one object

    # -- beginning and resuming ---------------------------------------------------------------------------------------

    def _create_optimizer(self, create: Any, *args: Any) -> Optimizer:  # Any: a method of the user's Trainer
        """Create the optimizer from the model without seeds, then let the Grower adopt those that were loaded."""
        if self.grower is not None:
            optimizer: Optimizer = create(*args)
            return optimizer
        if self._trainer.model is not self._host:
            raise BadValueError(
                "the Trainer trains another model than the callback was built for: build Trainer and callback anew"
            )
        if self not in self._trainer.callback_handler.callbacks:
            raise BadValueError("the Trainer does not call this GrowCallback: trainer.add_callback(callback)")
        with hidden_seeds(self._host):
            optimizer = create(*args)
        options: dict[str, Any] = {**self.options, "loss": self.loss}
        if "steps" not in options and (steps := expected_evaluations(self._trainer)) is not None:
            options["steps"] = max(1, steps // self.every)
        self.grower = Grower(self._host, optimizer, **options)
        return optimizer

    # -- growing ------------------------------------------------------------------------------------------------------

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # Any: as the Trainer calls
        """Grow on the evaluation data; of several data sets, on the first."""
        if not self._trainer.is_in_train or state.global_step in (0, self._grown_at):
            return
        self._grown_at = state.global_step
        if round(evaluations_until(args, state)) % self.every == 0:
            self._step(kwargs["eval_dataloader"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # Any: as the Trainer calls
        """Grow at the end of an epoch if the Trainer itself does not evaluate."""
        if args.eval_strategy == "no" and round(state.epoch) % self.every == 0:
            self._step(self._trainer.get_eval_dataloader())

    def _step(self, loader: Iterable[Batch]) -> None:
        assert self.grower is not None
        batches: Iterable[Batch] = map(self._trainer._prepare_inputs, loader)
        if ranks.world() > 1:
            batches = list(batches)  # only rank 0 measures, and a loader may synchronise ranks
        self.record = self.grower.step(batches)
        if self._trainer.is_world_process_zero():
            print(self.record, flush=True)
        self._trainer.log(metrics_of(self.record))

    # -- ending -------------------------------------------------------------------------------------------------------

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # Any: as the Trainer calls
        """End growth; by now the best model is loaded, if the Trainer should do that."""
        if self.finish and self.grower is not None and not self.grower.finished:
            slots = self.grower.report().slots.values()
            unknown = any(slot.blueprint is not None and slot.contribution is None for slot in slots)
            loader = self._trainer.get_eval_dataloader() if unknown else None
            self.grower.finish(None if loader is None else list(map(self._trainer._prepare_inputs, loader)))


def _check_trainer(trainer: transformers.Trainer) -> nn.Module:
    """The model of a Trainer that can grow it."""
    model = trainer.model
    if not isinstance(model, nn.Module) or getattr(trainer, "model_init", None) is not None:
        raise BadValueError("model_init builds a new model in every train(), without slots: pass the Trainer model=")
    if (kind := trainer.accelerator.distributed_type.name) in SHARDED:
        raise BadValueError(f"{kind} shards the parameters, so a seed cannot join them: use DDP")
    if trainer.args.n_gpu > 1:
        raise BadValueError(
            f"the Trainer would use nn.DataParallel on {trainer.args.n_gpu} GPUs, which copies the model for every "
            "batch: launch it with torchrun, or show it one GPU"
        )
    if trainer.eval_dataset is None:
        raise BadValueError("growth is judged on evaluation data, and there is none: pass the Trainer eval_dataset=")
    if hasattr(model, CHILD):
        raise BadValueError("the model has slots already: give a Trainer one GrowCallback, and a model one Trainer")
    return model


def evaluations_until(args: transformers.TrainingArguments, state: transformers.TrainerState) -> float:
    """How many evaluations there were up to the present step."""
    return float(state.global_step / state.eval_steps if args.eval_strategy == "steps" else state.epoch)


def expected_evaluations(trainer: transformers.Trainer) -> int | None:
    """How often the Trainer will evaluate."""
    state = trainer.state
    if trainer.args.eval_strategy == "steps":
        return int(state.max_steps // state.eval_steps)
    return int(state.num_train_epochs) or None


# -- losses -----------------------------------------------------------------------------------------------------------


def default_loss(model: nn.Module) -> Loss:
    """The loss of a model's kind, with one value per sample or token."""
    kind = getattr(model, "loss_type", "")
    if kind in SHIFTED and hasattr(model, "lm_head"):
        return next_token_loss
    if kind in IN_PLACE:
        return token_loss
    if kind in PER_SAMPLE:
        return class_loss
    raise BadValueError(f"the loss of {type(model).__name__} per sample is not known here: {REMEDY}")


def next_token_loss(output: Any, batch: Batch) -> Tensor:  # Any: a ModelOutput
    """Cross-entropy of every next token that counts (n,)."""
    logits, labels = _logits_and_labels(output, batch)
    return _cross_entropy(logits[:, :-1], labels[:, 1:])


def token_loss(output: Any, batch: Batch) -> Tensor:  # Any: a ModelOutput
    """Cross-entropy of every token that counts (n,)."""
    return _cross_entropy(*_logits_and_labels(output, batch))


def class_loss(output: Any, batch: Batch) -> Tensor:  # Any: a ModelOutput
    """Cross-entropy, binary cross-entropy of several labels, or the squared error of a number, per sample (n,)."""
    logits, labels = _logits_and_labels(output, batch)
    if not labels.is_floating_point():
        return _cross_entropy(logits, labels)
    if logits.shape[-1] == 1 or labels.dim() == 1:
        return F.mse_loss(logits.flatten(1), labels.reshape(len(labels), -1), reduction="none").mean(1)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    counts = labels.flatten() != IGNORED
    return F.cross_entropy(logits.flatten(0, -2)[counts].float(), labels.flatten()[counts], reduction="none")


def _logits_and_labels(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    logits = getattr(output, "logits", None)
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        raise BadValueError(
            f"the output has logits {shape_of(logits)} and the batch labels {shape_of(labels)}, two tensors are "
            f"needed: {REMEDY}"
        )
    return logits, labels
