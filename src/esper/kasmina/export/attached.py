"""An attached host as the user's own module, with what grew in it from `grown_blocks.py`."""

import copy
import json
from collections.abc import Sequence

from torch import nn

from esper.kasmina.body import Body
from esper.kasmina.export.functions import import_usual
from esper.kasmina.export.growth import Growth, summary
from esper.kasmina.export.modules import Exporter
from esper.kasmina.export.source import Call, GeneratedFile, render

HEADER = """Blocks that Esper grew in a network, as plain PyTorch: they need torch and safetensors, and can be trained.

    from grown_blocks import grow
    model = grow(build_the_host(), ".")  # the folder of weights.safetensors; in eval mode

{summary}
"""
GROWN = '''
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
        except AttributeError:  # the host may look at attributes of its submodule
            if name.startswith("__"):
                raise
            return getattr(super().__getattr__("base"), name)
'''
PUT_BLOCKS = '''
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
'''
GROW = '''
def grow(model: nn.Module, folder: str | Path) -> nn.Module:
    """A freshly built host, grown and with its trained weights, in eval mode."""
    load_model(put_blocks(model), Path(folder) / "weights.safetensors")
    return model.eval()
'''


def blocks_source(host: nn.Module, growths: Sequence[Growth]) -> str:
    """The text of `grown_blocks.py`."""
    file = GeneratedFile("Grown", "put_blocks", "grow")
    exporter = Exporter(file)
    innermost = sorted(growths, key=lambda growth: -growth.slot_id.count("."))
    blocks = Call(
        "{", tuple((f"{json.dumps(growth.slot_id)}: ", growth.construct(exporter)) for growth in innermost), "}"
    )
    import_usual(file, "nn", "Tensor", "Path")
    file.import_as("Any", "typing", "Any")
    file.import_as("load_model", "safetensors.torch", "load_model")
    host_parameters = sum(parameter.numel() for parameter in host.parameters())
    header = HEADER.format(summary=summary(type(host).__name__, host_parameters, growths))
    return file.text(header, GROWN, PUT_BLOCKS.replace("{blocks}", render(blocks, 4, 32)), GROW)


def bare_copy(body: Body) -> nn.Module:
    """A copy of the host without the hooks of its slots; hooks of the user's own stay."""
    hosted = set(body.host.modules())
    owners = [module for module in body.modules() if module not in hosted]
    # In the memo, so that the hooks of the copy belong to the live slots, and these are not copied along.
    bare = copy.deepcopy(body.host, {id(owner): owner for owner in owners})
    for module in bare.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__self__", None) in owners:
                del module._forward_hooks[key]
    bare.zero_grad()
    return bare
