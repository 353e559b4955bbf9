"""A host of segments as `network.py`: classes, the whole network, and how to load it."""

import keyword
from collections.abc import Sequence

from torch import nn

from esper.kasmina.export.functions import import_usual
from esper.kasmina.export.growth import Growth, summary
from esper.kasmina.export.modules import Exporter
from esper.kasmina.export.source import GeneratedFile, render
from esper.kasmina.hosts import Host

HEADER = """A network that Esper grew, as plain PyTorch: it needs torch and safetensors, and can be trained on.

    from network import load
    network = load(".")  # the folder of weights.safetensors; in eval mode

{summary}
"""
LOAD = '''
def load(folder: str | Path, device: str = "cpu") -> Network:
    """The network with its trained weights, in eval mode."""
    with torch.device("meta"):  # draws no weights: all of them are in the file
        network = Network()
    network.load_state_dict(load_file(Path(folder) / "weights.safetensors", device=device), assign=True)
    return network.eval()
'''


def network_source(host: Host, growths: Sequence[Growth]) -> tuple[str, dict[str, nn.Module]]:
    """The text of `network.py`, and for each part of its network the live module that has the weights."""
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
        if index in grown:
            growth = grown[index]
            name = _attribute(growth.slot_id, index)
            built.append(f"self.{name} = {render(growth.construct(exporter), 8, len(name) + 8)}")
            steps.append(f"h = self.{name}(h)  # grown: {growth.label}")
            sources |= {f"{name}.{part}": module for part, module in growth.parts.items()}
    import_usual(file, "torch", "nn", "Tensor", "Path")
    file.import_as("load_file", "safetensors.torch", "load_file")
    config = host.config() or {}
    arguments = ", ".join(f"{key}={value!r}" for key, value in config.items())
    host_parameters = sum(parameter.numel() for parameter in host.parameters())
    header = HEADER.format(summary=summary(f"{type(host).__name__}({arguments})", host_parameters, growths))
    return file.text(header, _network_class(built, steps), LOAD), sources


def _attribute(slot_id: str, index: int) -> str:
    """The slot's id where it can be an attribute."""
    usable = slot_id.isidentifier() and not keyword.iskeyword(slot_id) and not hasattr(nn.Module, slot_id)
    return slot_id if usable and not slot_id.startswith(("_", "segment")) else f"grown{index}"


def _network_class(built: Sequence[str], steps: Sequence[str]) -> str:
    lines = ["class Network(nn.Module):", '    """The host with everything that grew in it."""', ""]
    lines += [
        "    def __init__(self) -> None:",
        "        super().__init__()",
        *(f"        {line}" for line in built),
        "",
    ]
    # The last step is what forward returns.
    *before, last = steps
    lines += ["    def forward(self, x: Tensor) -> Tensor:", *(f"        {step}" for step in before)]
    return "\n".join([*lines, f"        return {last.removeprefix('h = ')}"])
