"""Whole generated files: `network.py` for a host of segments, `grown_blocks.py` for an attached host."""

import copy
import json
import keyword
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from esper.kasmina.export.modules import Exporter
from esper.kasmina.export.placing import PLACE, Places
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
# Style → class name, formula, and the expression that forward returns.
STYLES = {
    "add": ("Added", "h + alpha · seed(h)", "h + self.alpha * self.seed(h)"),
    "multiply": ("Multiplied", "h · (1 + alpha · tanh(seed(h)))", "h * (1 + self.alpha * torch.tanh(self.seed(h)))"),
    "gate": ("Gated", "h + alpha · gate(h) · seed(h)", "h + self.alpha * self.gate(h) * self.seed(h)"),
}


class Growth(NamedTuple):
    """A seed that is built in."""

    slot_id: str
    blueprint: str
    style: str
    strength: float  # alpha times the conductance of its slot
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
def put_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Place every block behind the submodule that it grew behind, and return the blocks by its name."""
    like = next(model.parameters())
    blocks: dict[str, nn.Module] = {blocks}
    places: dict[str, tuple[str, Callable[..., Any] | None]] = {places}
    for name, block in blocks.items():
        place(model.get_submodule(name), block.to(like), *places[name])
    return blocks


def grow(model: nn.Module, folder: str | Path) -> nn.Module:
    """Grow a freshly built host and load its trained weights; in eval mode."""
    put_blocks(model)
    load_model(model, Path(folder) / "weights.safetensors")
    return model.eval()
'''


def blocks_source(host: nn.Module, growths: Sequence[Growth]) -> str:
    """The text of `grown_blocks.py`."""
    file = GeneratedFile("place", "put_blocks", "grow")
    exporter, places = Exporter(file), Places(file)
    innermost = sorted(growths, key=lambda growth: -growth.slot_id.count("."))
    entries = tuple((f"{json.dumps(growth.slot_id)}: ", growth.construct(exporter)) for growth in innermost)
    behind = [(growth.slot_id, *places.behind(host.get_submodule(growth.slot_id))) for growth in innermost]
    pairs = tuple((f"{json.dumps(slot_id)}: ", f"({child}, {factory})") for slot_id, child, factory in behind)
    header = _header(BLOCKS_HEADER, host, type(host).__name__, growths)
    blocks = BLOCKS.replace("{blocks}", render(Call("{", entries, "}"), 4, 32))
    return file.text(header, PLACE, blocks.replace("{places}", render(Call("{", pairs, "}"), 4, 64)))


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
