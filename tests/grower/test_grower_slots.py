"""Slots of torch's own transformers, slots by name, and why a submodule gets none."""

import pytest
import torch
from loops import digits, loader, make, train_epoch
from torch import Tensor, nn

from esper.grower.places import Places
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


class Padded(Encoder):
    """The same with a mask of empty rows. In eval mode, torch's encoder then packs its batch into a nested tensor."""

    def __init__(self, enable_nested_tensor: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=enable_nested_tensor)

    def forward(self, x: Tensor) -> Tensor:
        padding = x[:, 0].sum(-1) == 0
        padding[:, 0] = False
        logits: Tensor = self.head(self.encoder(self.embed(x[:, 0]), src_key_padding_mask=padding).mean(1))
        return logits


class TokensFirst(nn.Module):
    """Swaps its axes to (tokens, batch, channels), in front of blocks that do not say so or of an attention."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.mixed = nn.TransformerEncoderLayer(16, 2, 32) if attends else nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mixed(self.embed(x[:, 0].transpose(0, 1))).mean(0))
        return logits


class PositionsFirst(nn.Module):
    """Takes positions (tokens,) before its tokens (batch, tokens, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, positions: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.first(tokens + positions[:, None]).mean(1))
        return logits


class SecondName(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.alias = self.middle

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.alias(self.first(x.flatten(1)).relu()).relu())
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


def test_inputs_of_other_sizes() -> None:
    """If inputs differ on their first axis, as tokens and their positions do, none of them tells the batch."""
    model = PositionsFirst()
    places = Places(model, (torch.arange(8), torch.rand(5, 8, 16)), {})
    assert [spec.slot_id for spec, _ in places.named({"first": None})] == ["first"]


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("slots", ["auto", ["embed"]])
def test_tokens_first_anywhere(attends: bool, slots: str | list[str]) -> None:
    """The batch of 50 shows on the second axis, whether or not a module nearby has a `batch_first`."""
    model, optimizer, _grower = make(model=TokensFirst(attends), slots=slots)
    with pytest.raises((BadValueError, HostMismatchError), match=r"batch_first|second axis"):
        train_epoch(model, optimizer, DATA)
    assert model(DATA[0]).shape == (300, 10)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers that get them have no slot, unless the user turns them off."""
    model, optimizer, grower = make(model=Padded(), budget=4000)
    train_epoch(model, optimizer, DATA)
    grower.step(loader(VALIDATION))
    assert "slots behind embed (tokens, width 16)\n" in capsys.readouterr().out
    model, optimizer, _grower = make(model=Padded(), slots=["encoder.layers.0"])
    with pytest.raises(HostMismatchError, match="enable_nested_tensor=False"):
        train_epoch(model, optimizer, DATA)
    model, optimizer, grower = make(model=Padded(enable_nested_tensor=False), slots=["encoder.layers.0"], budget=4000)
    for epoch in range(2):
        train_epoch(model, optimizer, DATA, epoch)
        grower.step(loader(VALIDATION))
    assert grower.finish(keep=["encoder.layers.0"]) is model


@pytest.mark.parametrize("slots", [["alias"], ["middle", "alias"], {"alias": 16}])
def test_second_names(slots: list[str] | dict[str, int]) -> None:
    """A submodule has one slot, under its first name."""
    with pytest.raises(BadValueError, match="'alias' is 'middle' under a second name: use 'middle'"):
        make(model=SecondName(), slots=slots)


def test_slots_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A list of names does; the widths are seen in the first pass."""
    model, optimizer, _grower = make(slots=["stage2"])
    train_epoch(model, optimizer, DATA)
    assert "slots behind stage2 (image, width 16)\n" in capsys.readouterr().out
    with pytest.raises(BadValueError, match="pass a list"):
        make(slots="stage2")
