"""Slots of torch's own transformers, slots by name, and why a submodule gets none."""

import pytest
from loops import digits, loader, make, train_epoch
from torch import Tensor, nn

from esper.leyline import BadValueError, HostMismatchError

IMAGES, LABELS = digits(400)
DATA, VALIDATION = (IMAGES[:300], LABELS[:300]), (IMAGES[300:], LABELS[300:])


class Encoder(nn.Module):
    """A transformer of torch's own layers over the rows of an image."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(x[:, 0])).mean(1))
        return logits


class OverPositions(nn.Module):
    """A Conv1d, whose output no seed fits, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 8, 3), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(x.flatten(2)).mean(2))
        return logits


def test_slots_of_a_torch_transformer(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks whose inner modules cannot have a slot keep their own."""
    model, optimizer, grower = make(model=Encoder())
    train_epoch(model, optimizer, DATA)
    grower.step(loader(VALIDATION))
    assert "slots behind encoder.layers.0 (tokens, width 16), encoder.layers.1" in capsys.readouterr().out


def test_no_slot_says_why() -> None:
    """The message names the layout, not only that nothing was found."""
    model, optimizer, _grower = make(model=OverPositions())
    with pytest.raises(BadValueError, match=r"name the slots yourself.*Submodule 'conv' returns \(batch, channels"):
        train_epoch(model, optimizer, DATA)


def test_layers_beside_attention_with_tokens_first() -> None:
    """A norm next to an attention with batch_first=False sees (tokens, batch, channels) too."""
    for slots in ("auto", ["encoder.layers.0.norm1"]):
        model, optimizer, _grower = make(model=Encoder(batch_first=False), slots=slots)
        with pytest.raises((BadValueError, HostMismatchError), match="batch_first is False"):
            train_epoch(model, optimizer, DATA)


def test_slots_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A list of names does; the widths are seen in the first pass."""
    model, optimizer, _grower = make(slots=["stage2"])
    train_epoch(model, optimizer, DATA)
    assert "slots behind stage2 (image, width 16)\n" in capsys.readouterr().out
    with pytest.raises(BadValueError, match="pass a list"):
        make(slots="stage2")
