"""Growth in the Hugging Face Trainer: steps, checkpoints, losses, and the end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.trainer_models import CUT, Stop, gpt, grow, samples, trainer
from loops import equal
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, GPT2Model, Trainer

from esper.grower.container import CHILD
from esper.integrations.transformers import GrowCallback, class_loss, default_loss, token_loss
from esper.leyline import BadValueError


def train(
    folder: Path, *, stop: int | None = None, resume: bool | None = None, **options: Any
) -> tuple[Any, GrowCallback]:
    """Train fresh objects, perhaps from the last checkpoint, perhaps until an epoch.

    (Any: options of the callback, and a Trainer, which types its parts as optional.)
    """
    training = trainer(folder, *([] if stop is None else [Stop(stop)]))
    callback = grow(training, **options)
    if stop is None:
        training.train(resume_from_checkpoint=resume)
    else:
        with pytest.raises(RuntimeError, match="stopped"):
            training.train()
    return training, callback


def test_resumed_to_the_bit(tmp_path: Path) -> None:
    """Stopped in mid-growth and resumed from the Trainer's checkpoint: weights, structure, momenta, rates."""
    whole, grown = train(tmp_path / "whole")
    train(tmp_path / "cut", stop=CUT)
    resumed, again = train(tmp_path / "cut", resume=True)
    assert grown.record == again.record and grown.record is not None and grown.record.grown > 0
    assert equal(whole.model.state_dict().items(), resumed.model.state_dict().items())
    assert str(whole.optimizer.state_dict()) == str(resumed.optimizer.state_dict())
    assert whole.lr_scheduler.state_dict() == resumed.lr_scheduler.state_dict()
    logged = [line for line in whole.state.log_history if "esper/step" in line]
    assert [line["esper/step"] for line in logged] == [1, 2, 3, 4, 5]
    assert all(line["esper/loss"] > 0 for line in logged)


def test_growth_ends_with_the_best_model(tmp_path: Path) -> None:
    """The best checkpoint is loaded with its seeds, then the model becomes plain; older checkpoints are deleted."""
    settings: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "save_total_limit": 2,
    }
    training: Any = trainer(tmp_path, **settings)
    callback = grow(training, finish=True)
    training.train()
    best = training.state.best_model_checkpoint
    assert best is not None and len(list(tmp_path.glob("checkpoint-*"))) <= 2
    assert callback.grower is not None and callback.grower.finished
    assert not hasattr(training.model, CHILD)
    assert any("grown" in name for name, _ in training.model.named_parameters())
    assert training.evaluate()["eval_loss"] == pytest.approx(training.state.best_metric, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "every", "steps"),
    [
        ({"num_train_epochs": 4}, 2, 2),
        ({"eval_strategy": "steps", "eval_steps": 3, "max_steps": 9, "eval_on_start": True}, 1, 3),
        ({"eval_strategy": "no", "num_train_epochs": 2, "gradient_accumulation_steps": 2}, 1, 2),
    ],
)
def test_steps_follow_the_evaluations(
    options: dict[str, Any], every: int, steps: int, tmp_path: Path
) -> None:  # Any: options of transformers
    """Growth is timed for as many steps as there will be; an evaluation before the training is none."""
    training = trainer(tmp_path, save_strategy="no", **options)
    callback = grow(training, policy="wait", every=every)
    training.train()
    assert callback.grower is not None and callback.record is not None
    assert (callback.grower.steps, callback.record.step) == (steps, steps)
    training.evaluate()
    assert callback.record.step == steps, "an evaluation after the training is none"


class OwnOptimizer(Trainer):
    """With an optimizer of its own, as users write it."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:  # Any: as transformers types it
        """One group of all parameters."""
        assert self.model is not None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer


def bert() -> BertForSequenceClassification:
    """One layer, four classes."""
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config.num_labels = 4
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


def texts(first: int, last: int) -> list[dict[str, torch.Tensor]]:
    """Texts with the class of their first token."""
    return [{**each, "labels": each["input_ids"][0] % 4} for each in samples(first, last)]


def test_a_classifier_with_an_optimizer_of_its_own(tmp_path: Path) -> None:
    """A subclass of Trainer, in mixed precision, with the group for seeds; resumed to the bit."""

    def run(folder: Path, stop: bool, resume: bool | None = None) -> Any:  # Any: a Trainer
        training = trainer(folder, *([Stop(1)] if stop else []), kind=OwnOptimizer, model=bert(), data=texts, bf16=True)
        grow(training, seed_options={"lr": 0.05}, budget=6000)
        if stop:
            with pytest.raises(RuntimeError, match="stopped"):
                training.train()
        else:
            training.train(resume_from_checkpoint=resume)
        return training

    whole = run(tmp_path / "whole", stop=False)
    run(tmp_path / "cut", stop=True)
    resumed = run(tmp_path / "cut", stop=False, resume=True)
    own, seeds = whole.optimizer.param_groups
    assert seeds["params"] and (seeds["initial_lr"], own["initial_lr"]) == (0.05, 0.1)
    assert equal(whole.model.state_dict().items(), resumed.model.state_dict().items())


@torch.no_grad()
def test_losses_of_every_kind() -> None:
    """Per sample or token, they average to the model's own loss; padding does not count."""
    batch = {key: torch.stack([each[key] for each in samples(0, 4)]) for key in ("input_ids", "labels")}
    model = gpt().train(False)
    output = model(**batch)
    losses = default_loss(model)(output, batch)
    assert losses.shape == (4 * 13,)  # the first label is no target, and two more are masked
    assert float(losses.mean()) == pytest.approx(float(output.loss), rel=1e-5)
    assert len(token_loss(output, batch)) == 4 * 13
    classes = {key: torch.stack([each[key] for each in texts(0, 4)]) for key in ("input_ids", "labels")}
    output = bert().train(False)(**classes)
    assert float(default_loss(bert())(output, classes).mean()) == pytest.approx(float(output.loss), rel=1e-5)
    several = torch.rand(4, 4)
    wanted = F.binary_cross_entropy_with_logits(output.logits, several)
    assert float(class_loss(output, {"labels": several}).mean()) == pytest.approx(float(wanted), rel=1e-5)
    output.logits = output.logits[:, :1]
    wanted = F.mse_loss(output.logits[:, 0], several[:, 0])
    assert float(class_loss(output, {"labels": several[:, 0]}).mean()) == pytest.approx(float(wanted), rel=1e-5)


def test_bad_input(tmp_path: Path) -> None:
    """Every message names the remedy."""
    with pytest.raises(BadValueError, match="budget is missing"):
        GrowCallback(trainer(tmp_path))  # type: ignore[call-arg]  # what users may try
    with pytest.raises(BadValueError, match=r"trainer is a NoneType; .*add_callback\(GrowCallback\(trainer, budget"):
        GrowCallback(None, budget=100)  # type: ignore[arg-type]  # what users may try
    with pytest.raises(BadValueError, match="the loss of GPT2Model per sample is not known here: pass loss="):
        grow(trainer(tmp_path, model=GPT2Model(gpt().config)))
    with pytest.raises(BadValueError, match="pass the Trainer model="):
        grow(trainer(tmp_path, model=None, model_init=gpt))
    training = trainer(tmp_path)
    training.eval_dataset = None
    with pytest.raises(BadValueError, match="pass the Trainer eval_dataset="):
        grow(training)
    training = trainer(tmp_path)
    grow(training)
    with pytest.raises(BadValueError, match="the model has slots already: give a Trainer one GrowCallback"):
        grow(training)
    training.model = gpt()
    with pytest.raises(BadValueError, match="another model than the callback was built for"):
        training.train()
    training = trainer(tmp_path)
    GrowCallback(training, budget=4000)
    with pytest.raises(BadValueError, match=r"does not call this GrowCallback: trainer.add_callback\(callback\)"):
        training.train()


def test_labels_that_are_missing() -> None:
    """The error shows what there is."""
    with pytest.raises(BadValueError, match=r"logits NoneType and the batch labels \(2,\) of torch.int64"):
        token_loss(object(), {"labels": torch.zeros(2, dtype=torch.long)})
