"""Tasks other than classification of one tensor: the user's loss says what counts."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loops import MLP, BlindCNN, digits, loader, make, plan, sgd, train_epoch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower import Grower
from esper.leyline import BadValueError

IMAGES, LABELS = digits(300)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], loss: Any, forward: Any = None) -> None:
    """One pass over batches."""
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        output = model(*batch[:-1]) if forward is None else forward(model, batch)
        loss(output, batch).mean().backward()
        optimizer.step()


def grown_by_loss(model: nn.Module, batches: list[Any], loss: Any, forward: Any = None, slot: str = "first") -> Grower:
    """Two steps of growth, measured by loss."""
    optimizer = sgd(model)
    grower = Grower(
        model, optimizer, budget=5000, steps=8, loss=loss, forward=forward, policy=plan((1, slot, "mlp_small"))
    )
    for _ in range(3):
        fit(model, optimizer, batches, loss, forward)
        record = grower.step(batches)
    assert record.accuracy is None and record.loss is not None
    assert set(record.contributions) == {slot}
    assert grower.finish(keep=[slot]) is model
    return grower


def test_regression() -> None:
    """The lower half of a digit from its upper half."""
    torch.manual_seed(0)
    upper, lower = IMAGES[:, :, :4].flatten(1), IMAGES[:, :, 4:].flatten(1)
    batches = list(zip(upper.split(50), lower.split(50), strict=True))
    grown_by_loss(MLP(32, 32), batches, lambda out, batch: F.mse_loss(out, batch[1], reduction="none").mean(1))


def test_several_labels() -> None:
    """One loss per sample, from several targets."""
    torch.manual_seed(0)
    targets = torch.stack([LABELS % 2, LABELS > 4], 1).float()
    batches = list(zip(IMAGES.split(50), targets.split(50), strict=True))
    loss = nn.BCEWithLogitsLoss(reduction="none")
    grown_by_loss(MLP(64, 2), batches, lambda out, batch: loss(out, batch[1]).mean(1))


@dataclass
class Output:
    """What models of a well-known library return."""

    logits: Tensor
    loss: Tensor | None = None


class Sentences(nn.Module):
    """Reads a dict of tokens and a mask, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.head = nn.Embedding(12, 16), nn.Linear(16, 16), nn.Linear(16, 12)

    def forward(self, tokens: Tensor, mask: Tensor) -> Output:
        h = F.relu(self.first(self.embedding(tokens))) * mask[..., None]
        return Output(self.head(h.cumsum(1)))


def test_language_with_padding() -> None:
    """A value per token that counts; padding returns none."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 12, (60, 9))
    mask = (torch.arange(9) < torch.randint(3, 10, (60, 1))).float()
    batches = [{"tokens": t, "mask": m} for t, m in zip(tokens.split(20), mask.split(20), strict=True)]

    def loss(output: Output, batch: dict[str, Tensor]) -> Tensor:
        counts = batch["mask"][:, 1:].bool()
        return F.cross_entropy(output.logits[:, :-1][counts], batch["tokens"][:, 1:][counts], reduction="none")

    grown_by_loss(Sentences(), batches, loss, lambda model, batch: model(**batch))


class TwoInputs(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 16), nn.Linear(48, 10)

    def forward(self, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.first(upper))
        return self.head(torch.cat([h, lower], 1)), h


def test_several_inputs_and_outputs() -> None:
    """All items of a batch but the last are inputs; the loss takes what it needs of a tuple."""
    torch.manual_seed(0)
    upper, lower = IMAGES[:, :, :4].flatten(1), IMAGES[:, :, 4:].flatten(1)
    batches = list(zip(upper.split(50), lower.split(50), LABELS.split(50), strict=True))
    grown_by_loss(TwoInputs(), batches, lambda out, batch: F.cross_entropy(out[0], batch[2], reduction="none"))


def test_gain_by_loss() -> None:
    """100 · (loss without − loss with) / loss without."""
    torch.manual_seed(0)
    upper, lower = IMAGES[:, :, :4].flatten(1), IMAGES[:, :, 4:].flatten(1)
    model = MLP(32, 32)
    optimizer = sgd(model)
    batches = list(zip(upper.split(50), lower.split(50), strict=True))

    def loss(out: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(out, batch[1], reduction="none").mean(1)

    grower = Grower(model, optimizer, budget=5000, steps=8, loss=loss, policy=plan((1, "first", "mlp_small")))
    for _ in range(3):
        for _ in range(20):
            fit(model, optimizer, batches, loss)
        record = grower.step(batches)
    model.eval()
    with torch.no_grad():
        grown = float(F.mse_loss(model(upper), lower))
        grower.finish(drop=["first"])
        alone = float(F.mse_loss(model(upper), lower))
    assert record.contributions["first"].value == pytest.approx(100 * (alone - grown) / alone, rel=1e-2)


@pytest.mark.parametrize(
    ("output", "targets"),
    [
        (torch.zeros(4, 10), torch.zeros(4)),
        (torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(4, 3, 5), torch.zeros(4, 5, dtype=torch.int64)),
    ],
)
def test_what_is_unclear_is_asked_for(output: Tensor, targets: Tensor) -> None:
    """Never guessed from dtypes."""
    model = BlindCNN()
    grower = Grower(model, sgd(model), budget=1000, steps=8, forward=lambda model, batch: output)
    model(IMAGES[:2])
    with pytest.raises(BadValueError, match="do not say what the loss is"):
        grower.step([(IMAGES[:4], targets)])


def test_losses_of_the_wrong_shape() -> None:
    """A mean is no value per sample."""
    model, optimizer, grower = make(loss=lambda out, batch: F.cross_entropy(out, batch[1]))
    train_epoch(model, optimizer, (IMAGES, LABELS))
    with pytest.raises(BadValueError, match="one floating-point value per sample"):
        grower.step(loader((IMAGES, LABELS)))
