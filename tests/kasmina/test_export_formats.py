"""Hardened networks leave Python: TorchScript, traces, torch.export and ONNX, every blueprint and kind of host."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from export_formats import FORMATS, OwnGPT, OwnMLP, check, ids, vectors
from hardening import Foreign, attached, cnn, gpt, images, plant, tokens
from torch import Tensor, nn

from esper.kasmina import BlueprintRegistry, MorphogeneticModel
from esper.kasmina.attach import attach
from esper.leyline import BLEND_STYLES, TOPOLOGIES

Host = tuple[Callable[[], MorphogeneticModel], str, Callable[[int], Tensor]]  # model, slot, inputs


def own_gpt() -> MorphogeneticModel:
    """Slots behind an embedding, an attention with options and a layer."""
    torch.manual_seed(0)
    slots = {"embed": 8, "layers.0.attention": 8, "layers.1": 8}
    return attach(OwnGPT(), slots, example=ids(2)).eval()


def own_mlp() -> MorphogeneticModel:
    """Slots behind both hidden layers."""
    torch.manual_seed(0)
    return attach(OwnMLP(), {"first": 16, "second": 16}, example=vectors(4)).eval()


HOSTS: dict[str, Host] = {
    "cnn": (cnn, "r0c0", images),
    "attached_cnn": (attached, "stem.0", images),
    "gpt": (gpt, "r0c1", tokens),
    "attached_gpt": (own_gpt, "layers.0.attention", ids),
    "attached_mlp": (own_mlp, "second", vectors),
}
KINDS = {"image": ("cnn", "attached_cnn"), "tokens": ("gpt", "attached_gpt"), "vector": ("attached_mlp",)}


def cases() -> Iterator[Any]:  # Any: pytest's parameters
    """Every blueprint on every kind of host that has its topology, every style on each, in every format."""
    for topology in TOPOLOGIES:
        for host in KINDS[topology]:
            for way in FORMATS:
                for blueprint in BlueprintRegistry.names(topology):
                    yield pytest.param(host, blueprint, "add", way, id=f"{host}-{blueprint}-add-{way}")
                for style in BLEND_STYLES[1:]:
                    yield pytest.param(host, "norm", style, way, id=f"{host}-norm-{style}-{way}")


@pytest.mark.default_cases(
    "attached_cnn-depthwise-add-script",
    "cnn-norm-gate-script",
    "gpt-attention-add-script",
    "attached_gpt-norm-gate-script",
    "attached_mlp-norm-gate-script",
)
@pytest.mark.parametrize(("host", "blueprint", "style", "way"), list(cases()))
def test_every_blueprint_in_every_format(host: str, blueprint: str, style: str, way: str, tmp_path: Path) -> None:
    """The same outputs for other batch sizes than the one it was written with."""
    build, slot_id, inputs = HOSTS[host]
    model = build()
    plant(model, slot_id, blueprint, style)
    check(way, model.harden(), inputs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", FORMATS)
def test_several_seeds_one_inside_the_other(way: str, tmp_path: Path) -> None:
    """Behind a Sequential, a layer in it, and the head; and a model that is loaded from its folder."""
    model = attached()
    plant(model, "stem", "depthwise", "gate")
    plant(model, "stem.0", "conv_small", "multiply")
    plant(model, "head", "mlp_small")
    check(way, model.harden(tmp_path / "grown"), images, tmp_path)
    spec = importlib.util.spec_from_file_location("grown_blocks", tmp_path / "grown" / "grown_blocks.py")
    assert spec is not None and spec.loader is not None
    blocks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(blocks)
    check(way, blocks.grow(Foreign(), tmp_path / "grown"), images, tmp_path)


def test_a_submodule_that_grows_twice(tmp_path: Path) -> None:
    """What is hardened is attached and grown again: blocks behind blocks, and TorchScript still compiles them."""
    model = own_mlp()
    plant(model, "second", "lora")
    again = attach(model.harden(), {"second": 16}, example=vectors(4)).eval()
    plant(again, "second", "mlp_small")
    hardened = again.harden()
    torch.testing.assert_close(hardened(vectors(4)), again(vectors(4)))
    assert [name for name, _ in hardened.get_submodule("second").named_children()] == ["grown", "grown_"]
    check("script", hardened, vectors, tmp_path)


class Odd(nn.Module):
    """Arguments that TorchScript cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor, *others: Tensor, **options: bool) -> Tensor:
        y: Tensor = self.linear(x)
        return -y if options.get("negative") else y


class Around(nn.Module):
    """Calls it with an option."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.odd(x, negative=True)
        return y


def around() -> MorphogeneticModel:
    """A seed behind a submodule with arguments of any kind."""
    model = attach(Around(), {"odd": 12}, example=vectors(4)).eval()
    plant(model, "odd", "lora")
    return model


def test_any_arguments() -> None:
    """They are passed on."""
    model = around()
    torch.testing.assert_close(model.harden()(vectors(5)), model(vectors(5)))


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in FORMATS if way != "script"])
def test_any_arguments_leave_too(way: str, tmp_path: Path) -> None:
    """By everything that follows tensors; TorchScript could not compile the submodule before it grew."""
    check(way, around().harden(), vectors, tmp_path)


def test_arguments_keep_their_names_and_defaults() -> None:
    """A grown submodule is called as before: by position, by name, with fewer arguments."""
    model = own_gpt()
    attention = model.host.get_submodule("layers.0.attention")
    plant(model, "layers.0.attention", "norm", alpha=0.0)
    grown = model.harden().get_submodule("layers.0.attention")
    x, mask = torch.randn(2, 6, 8), torch.zeros(6, 6)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [  # Any: arguments of any kind
        *(((x,), {}), ((), {"x": x})),
        *(((x, mask, 0.5, False), {}), ((x,), {"scale": 2.0})),
    ]
    for arguments, options in calls:
        torch.testing.assert_close(grown(*arguments, **options), attention(*arguments, **options))
