"""How the blocks of an attached host are placed: as children of the submodules that they grew behind.

A submodule that is no Sequential gets a subclass that runs the block after the old `forward`. The subclass spells out
the arguments of that `forward` and calls it under another name, so that TorchScript can compile it.
"""

import inspect
import itertools
import json
from types import FunctionType
from typing import get_type_hints

from torch import Tensor, nn

from esper.kasmina.export.source import GeneratedFile, is_literal

PLACE = '''
def place(base: nn.Module, block: nn.Module, name: str, grown: Callable[..., Any] | None) -> None:
    """Let a block act behind a submodule, as a child of it. The submodule's own keys and parameters stay."""
    kind = type(base)
    base.add_module(name, block)
    if grown is not None:  # a Sequential runs its children in order anyway
        base.__class__ = grown(kind)
        base.__class__.__name__ = base.__class__.__qualname__ = f"Grown{kind.__name__}"
'''
RENAMED = '''
def renamed(function: FunctionType, name: str) -> FunctionType:
    """A copy of a function under another name."""
    code, outside = function.__code__, function.__globals__
    copy = FunctionType(code, outside, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
'''
SPELLED_OUT = '''
def {factory}(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with the child `{name}` behind its forward; its arguments are spelled out for TorchScript."""

    class Grown(kind):  # type: ignore[misc, valid-type]
        un{name} = renamed(kind.forward, "un{name}")

        def forward(self, {arguments}) -> Tensor:
            return self.{name}(self.un{name}({values}))

    return Grown
'''
ANY_ARGUMENTS = '''
def {factory}(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with the child `{name}` behind its forward, whatever the arguments are."""

    class Grown(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: object, **kwargs: object) -> Tensor:
            return self.{name}(kind.forward(self, *args, **kwargs))

    return Grown
'''
ANNOTATIONS = {Tensor: "Tensor", Tensor | None: "Tensor | None", int: "int", float: "float", bool: "bool"}
"""Types of arguments that both Python and TorchScript read"""


class Places:
    """Writes into one generated file how blocks are placed."""

    def __init__(self, file: GeneratedFile) -> None:
        self.file = file
        self._factories: dict[tuple[str, ...], str] = {}

    def behind(self, base: nn.Module) -> tuple[str, str]:
        """The child's name and the factory of the grown class, as expressions."""
        names = (f"grown{'_' * count}" for count in itertools.count())  # it may have grown before
        name = next(name for name in names if not hasattr(base, name) and not hasattr(base, f"un{name}"))
        if type(base).forward is nn.Sequential.forward:
            return json.dumps(name), "None"
        arguments = _spelled_out(type(base).forward)
        template = ANY_ARGUMENTS if arguments is None else SPELLED_OUT
        key = (name, template, *(arguments or ()))
        if key not in self._factories:
            if arguments is not None:
                self.file.import_as("FunctionType", "types", "FunctionType")
                self.file.define("renamed", RENAMED)
            factory = self._factories[key] = self.file.free_name("grown_class")
            values = ", ".join(argument.partition(":")[0] for argument in arguments or ())
            filled = template.format(factory=factory, name=name, arguments=", ".join(arguments or ()), values=values)
            self.file.define(factory, filled)
        return json.dumps(name), self._factories[key]


def _spelled_out(forward: object) -> list[str] | None:
    """The arguments of a `forward` without self, as text; None if it has some that TorchScript does not read."""
    if not isinstance(forward, FunctionType):
        return None
    try:
        hints = get_type_hints(forward)
    except (NameError, TypeError, AttributeError):
        return None
    written = []
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        annotation = ANNOTATIONS.get(hints.get(parameter.name, Tensor))
        needed = parameter.default is parameter.empty
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or annotation is None:
            return None
        if not needed and not is_literal(parameter.default):
            return None
        written.append(f"{parameter.name}: {annotation}" + ("" if needed else f" = {parameter.default!r}"))
    return written
