"""Whole generated files: `network.py` for a host of segments, `grown_blocks.py` for an attached host."""

import copy
import json
import keyword
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from esper.kasmina.export.modules import Exporter
from esper.kasmina.export.source import LINE_WIDTH, Call, GeneratedFile, call, render
from esper.kasmina.hosts import Host
from esper.kasmina.layers import count_parameters
from esper.kasmina.slot import Body

BLOCK = '''
class {name}(nn.Module):
    """{formula}."""

    def __init__(self, {arguments}) -> None:
        super().__init__()
        {assignments}

    def forward(self, h: Tensor) -> Tensor:
        return {expression}
'''
STYLES = {
    "add": ("Added", "h + alpha · seed(h)", "h + self.alpha * self.seed(h)"),
    "multiply": ("Multiplied", "h · (1 + alpha · tanh(seed(h)))", "h * (1 + self.alpha * torch.tanh(self.seed(h)))"),
    "gate": ("Gated", "h + alpha · gate(h) · seed(h)", "h + self.alpha * self.gate(h) * self.seed(h)"),
}
"""Style → class name, formula, and the expression that forward returns."""


class Growth(NamedTuple):
    """A seed that is built in."""

    slot_id: str
    blueprint: str
    style: str
    strength: float
    """Alpha times the conductance of its slot."""
    seed: nn.Module
    gate: nn.Module | None

    @property
    def parts(self) -> dict[str, nn.Module]:
        """Modules by their name in the block."""
        return {"seed": self.seed} | ({} if self.gate is None else {"gate": self.gate})

    @property
    def parameters(self) -> int:
        """Parameters of seed and gate."""
        return sum(map(count_parameters, self.parts.values()))

    @property
    def label(self) -> str:
        """The blueprint's name on one line."""
        return " ".join(self.blueprint.split())

    def construct(self, exporter: Exporter) -> Call:
        """The expression that builds the block."""
        name, formula, expression = STYLES[self.style]
        parts = tuple(
            (f"{part}=", exporter.construct(module, f"the {part} in slot {self.slot_id!r}"))
            for part, module in self.parts.items()
        )
        text = BLOCK.format(
            name=name,
            formula=formula,
            arguments=", ".join([*(f"{part}: nn.Module" for part in self.parts), "alpha: float"]),
            assignments="\n        ".join(f"self.{part} = {part}" for part in (*self.parts, "alpha")),
            expression=expression,
        )
        return Call(f"{exporter.twin(name, text)}(", (*parts, *call("", alpha=self.strength).arguments))


def _header(header: str, host: nn.Module, label: str, growths: Sequence[Growth]) -> str:
    """The docstring of a file, with a summary of the network."""
    total = count_parameters(host) + sum(growth.parameters for growth in growths)
    line = f"Host: {label}, {count_parameters(host):,} parameters."
    lines = textwrap.wrap(line, LINE_WIDTH, subsequent_indent="    ")
    lines += [
        "Grown:" if growths else "Grown: nothing.",
        *(
            f"    {growth.slot_id}: {growth.label}, {growth.style}, alpha {growth.strength:g}, "
            f"{growth.parameters:,} parameters"
            for growth in growths
        ),
        f"Together: {total:,} parameters.",
    ]
    return "\n".join([header, *lines])


# -- hosts of segments ------------------------------------------------------------------------------------------------

NETWORK_HEADER = """A network that Esper grew, as plain PyTorch. It needs torch and safetensors, and can be trained.

    from network import load
    network = load(".")  # the folder of weights.safetensors; in eval mode
"""
NETWORK = '''
class Network(nn.Module):
    """The host with everything that grew in it."""

    def __init__(self) -> None:
        super().__init__()
        {built}

    def forward(self, x: Tensor) -> Tensor:
        {steps}
'''
LOAD = '''
def load(folder: str | Path, device: str = "cpu") -> Network:
    """The network with its trained weights, in eval mode."""
    with torch.device("meta"):  # draws no weights: the file has them all
        network = Network()
    network.load_state_dict(load_file(Path(folder) / "weights.safetensors", device=device), assign=True)
    return network.eval()
'''


def network_source(host: Host, growths: Sequence[Growth]) -> tuple[str, dict[str, nn.Module]]:
    """The text of `network.py`, and the live module for each part of its network."""
    file = GeneratedFile("Network", "load")
    exporter = Exporter(file)
    grown = {host.slot_index(growth.slot_id): growth for growth in growths}
    sources: dict[str, nn.Module] = {}
    built, steps = [], []
    for index, segment in enumerate(host.segments):
        name = f"segment{index}"
        built.append(f"self.{name} = {render(exporter.construct(segment, f'segment {index}'), 8, len(name) + 8)}")
        steps.append(f"h = self.{name}({'h' if index else 'x'})")
        sources[name] = segment
        if growth := grown.get(index):
            name = _attribute(growth.slot_id, index)
            built.append(f"self.{name} = {render(growth.construct(exporter), 8, len(name) + 8)}")
            steps.append(f"h = self.{name}(h)  # grown: {growth.label}")
            sources |= {f"{name}.{part}": module for part, module in growth.parts.items()}
    steps[-1] = f"return {steps[-1].removeprefix('h = ')}"
    file.import_usual("torch", "nn", "Tensor", "Path")
    file.import_as("load_file", "safetensors.torch", "load_file")
    arguments = ", ".join(f"{key}={value!r}" for key, value in (host.config() or {}).items())
    header = _header(NETWORK_HEADER, host, f"{type(host).__name__}({arguments})", growths)
    indent = "\n        "
    network = NETWORK.replace("{built}", indent.join(built)).replace("{steps}", indent.join(steps))
    return file.text(header, network, LOAD), sources


def _attribute(slot_id: str, index: int) -> str:
    """The slot's id, if it can be an attribute."""
    usable = slot_id.isidentifier() and not keyword.iskeyword(slot_id) and not hasattr(nn.Module, slot_id)
    return slot_id if usable and not slot_id.startswith(("_", "segment")) else f"grown{index}"


# -- attached hosts ---------------------------------------------------------------------------------------------------

BLOCKS_HEADER = """Blocks that Esper grew, as plain PyTorch. They need torch and safetensors, and can be trained.

    from grown_blocks import grow
    model = grow(build_the_host(), ".")  # the folder of weights.safetensors; in eval mode
"""
BLOCKS = '''
class Grown(nn.Module):
    """A submodule of the host, and the block that grew behind it."""

    def __init__(self, base: nn.Module, block: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.block = block

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return self.block(self.base(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # the host may read attributes of its submodule
            if name.startswith("__"):
                raise
            return getattr(super().__getattr__("base"), name)


def put_blocks(model: nn.Module) -> nn.Module:
    """Place every block behind the submodule that it grew behind."""
    like = next(model.parameters())
    blocks: dict[str, nn.Module] = {blocks}
    for name, block in blocks.items():  # inner submodules come before those that hold them
        base = model.get_submodule(name)
        grown = Grown(base, block.to(like))
        for parent in list(model.modules()):
            for key, child in list(parent._modules.items()):
                if child is base:
                    setattr(parent, key, grown)
    return model


def grow(model: nn.Module, folder: str | Path) -> nn.Module:
    """Grow a freshly built host and load its trained weights; in eval mode."""
    load_model(put_blocks(model), Path(folder) / "weights.safetensors")
    return model.eval()
'''


def blocks_source(host: nn.Module, growths: Sequence[Growth]) -> str:
    """The text of `grown_blocks.py`."""
    file = GeneratedFile("Grown", "put_blocks", "grow")
    exporter = Exporter(file)
    innermost = sorted(growths, key=lambda growth: -growth.slot_id.count("."))
    entries = tuple((f"{json.dumps(growth.slot_id)}: ", growth.construct(exporter)) for growth in innermost)
    file.import_usual("nn", "Tensor", "Path")
    file.import_as("Any", "typing", "Any")
    file.import_as("load_model", "safetensors.torch", "load_model")
    header = _header(BLOCKS_HEADER, host, type(host).__name__, growths)
    return file.text(header, BLOCKS.replace("{blocks}", render(Call("{", entries, "}"), 4, 32)))


def bare_copy(body: Body) -> nn.Module:
    """A copy of the host without the hooks of its slots; the user's own hooks stay."""
    hosted = set(body.host.modules())
    owners = [module for module in body.modules() if module not in hosted]
    # In the memo, so that the hooks of the copy belong to the live slots, and these are not copied.
    bare = copy.deepcopy(body.host, {id(owner): owner for owner in owners})
    for module in bare.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__self__", None) in owners:
                del module._forward_hooks[key]
    bare.zero_grad()
    return bare
