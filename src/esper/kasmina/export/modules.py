"""Live modules as constructor expressions, with the classes that these need.

Row-aware layers become torch.nn layers. Any other class becomes a class of the same name with its own forward, whose
constructor takes its parts. The classes say what is computed, the expression says from what and how large.
"""

import inspect
import json
import keyword
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina import layers, norms
from esper.kasmina.export.source import (
    Call,
    ExportError,
    Expression,
    GeneratedFile,
    Method,
    call,
    find_import,
    is_literal,
    render,
    unwrap,
)

SCALE = '''
class Scale(nn.Module):
    """A learned factor per channel: axis 1 of images, the last axis of tokens and vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight[:, None, None] if x.dim() == 4 else self.weight)
'''
MASKED_CONV = '''
class MaskedConv2d(nn.Conv2d):
    """A convolution without bias, with a fixed mask over the taps of its kernel."""

    mask: Tensor

    def __init__(self, inputs: int, outputs: int, kernel_size: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel_size, padding=kernel_size // 2, groups=groups, bias=False)
        self.register_buffer("mask", torch.ones(kernel_size, kernel_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, padding=self.padding, groups=self.groups)
'''


class Exporter:
    """Writes modules into one generated file."""

    def __init__(self, file: GeneratedFile) -> None:
        self.file = file
        self._classes: dict[object, str] = {}

    def construct(self, module: nn.Module, path: str) -> Expression:
        """The expression that builds a module like this one; `path` names it in errors."""
        kind = type(module)
        if kind in LAYERS:
            return LAYERS[kind](module, self)
        if kind in CONTAINERS:
            return self._container(module, path)
        if getattr(nn, kind.__name__, None) is kind:
            return torch_constructor(module, path)
        return self._of_own_class(module, path)

    def twin(self, name: str, text: str) -> str:
        """Define a class whose text is given, and return its name in the file."""
        if text not in self._classes:
            self._classes[text] = self.file.free_name(name)
            self.file.define(self._classes[text], text.replace(f"class {name}(", f"class {self._classes[text]}("))
        return self._classes[text]

    def _container(self, module: nn.Module, path: str) -> Call:
        opening, closing = CONTAINERS[type(module)]
        named = isinstance(module, nn.ModuleDict)
        if isinstance(module, nn.Sequential) and any(not key.isdigit() for key, _ in module.named_children()):
            opening, closing, named = "nn.Sequential(OrderedDict({", "}))", True
        children = ((key, self.construct(child, f"{path}.{key}")) for key, child in module.named_children())
        return Call(
            opening, tuple((f"{json.dumps(key)}: " if named else "", child) for key, child in children), closing
        )

    def _of_own_class(self, module: nn.Module, path: str) -> Call:
        kind = type(module)
        bases = [base for base in kind.__mro__ if base.__module__.startswith("torch.") and base is not nn.Module]
        if bases:
            raise ExportError(f"{path}: {kind.__name__} extends torch's {bases[0].__name__}; make that its child")
        methods, attributes = self._methods(module, path)
        parts: dict[str, tuple[str, Expression]] = {}  # name → (annotation, value)
        for name, child in module._modules.items():  # named_children() omits shared ones
            if child is not None:
                annotation = type(child).__name__ if type(child) in CONTAINERS else "Module"
                parts[name] = f"nn.{annotation}", self.construct(child, f"{path}.{name}")
        tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for name, tensor in tensors.items():
            learns = isinstance(tensor, nn.Parameter)
            parts[name] = ("nn.Parameter", f"nn.Parameter({_blank(tensor)})") if learns else ("Tensor", _blank(tensor))
        parts |= {name: part for name, part in attributes.items() if name not in parts}
        for name in parts:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ExportError(f"{path}: {name!r} is no Python name; give that part of {kind.__name__} another one")
        annotations = {name: annotation for name, (annotation, _) in parts.items()}
        signature = (kind, *annotations.items())
        if signature not in self._classes:
            self._classes[signature] = self.file.free_name(kind.__name__)
            text = _class_text(self._classes[signature], kind, annotations, methods)
            self.file.define(self._classes[signature], text)
        opening = f"{self._classes[signature]}("
        return Call(opening, tuple((f"{name}=", value) for name, (_, value) in parts.items()))

    def _methods(self, module: nn.Module, path: str) -> tuple[list[str], dict[str, tuple[str, str]]]:
        """The text of forward and of the methods that it calls, and the plain attributes that they use."""
        kind, label = type(module), f"{path}: {type(module).__name__}"
        registered = module._modules | module._parameters | module._buffers
        waiting, texts, attributes = ["forward"], dict[str, str](), dict[str, tuple[str, str]]()
        while waiting:
            name = waiting.pop(0)
            function = unwrap(inspect.getattr_static(kind, name))
            if not isinstance(function, FunctionType):
                raise ExportError(f"{label}.{name} is not a function in Python, so it cannot be exported")
            method = Method(function, f"{label}.{name}")
            method.drop_statistics()
            method.bring_globals(self.file)
            texts[name] = method.text
            for used in method.own_attributes():
                if used in texts or used in waiting or used == "training" or registered.get(used) is not None:
                    continue
                if used not in vars(module) and unwrap(inspect.getattr_static(kind, used, None)) is not None:
                    waiting += [] if hasattr(nn.Module, used) else [used]
                else:
                    attributes[used] = self._value(getattr(module, used, None), f"{label}.{used}")
        return list(texts.values()), attributes

    def _value(self, value: object, label: str) -> tuple[str, str]:
        """Annotation and expression of an attribute: a plain value, or a function of torch."""
        if is_literal(value):
            return ("None" if value is None else type(value).__name__), repr(value)
        source = find_import(value, "torch.nn.functional", "torch")
        if source is None or not callable(value):
            allowed = "layers, parameters, buffers, plain values or functions of torch"
            raise ExportError(f"{label} is {value!r}; forward may only use attributes that are {allowed}")
        self.file.import_as(source[1], *source)
        return "Callable[..., Tensor]", source[1]


CONTAINERS: dict[type[nn.Module], tuple[str, str]] = {
    nn.Sequential: ("nn.Sequential(", ")"),
    nn.ModuleList: ("nn.ModuleList([", "])"),
    nn.ModuleDict: ("nn.ModuleDict({", "})"),
}


def _convolution(layer: layers.Conv2d, exporter: Exporter) -> Call:
    if layer.mask is not None and not bool((layer.mask == 1).all()):
        name = exporter.twin("MaskedConv2d", MASKED_CONV)
        return call(name, layer.inputs, layer.outputs, layer.kernel_size, **_unless(groups=(layer.groups, 1)))
    options = _unless(padding=(layer.kernel_size // 2, 0), groups=(layer.groups, 1))
    return call("nn.Conv2d", layer.inputs, layer.outputs, layer.kernel_size, **options, bias=False)


def _norm(name: str, layer: Any, *sizes: int) -> Call:  # Any: one of our norms
    return call(f"nn.{name}", *sizes, **_unless(eps=(layer.eps, 1e-5)))


# Row-aware layers → their counterparts in torch.nn, with the same names for their weights.
LAYERS: dict[type[nn.Module], Callable[[Any, Exporter], Call]] = {  # Any: a layer of that type
    layers.Conv2d: _convolution,
    layers.Linear: lambda layer, exporter: call(
        "nn.Linear", layer.inputs, layer.outputs, **_unless(bias=(layer.bias is not None, True))
    ),
    norms.BatchNorm2d: lambda layer, exporter: _norm("BatchNorm2d", layer, layer.width),
    norms.GroupNorm: lambda layer, exporter: _norm("GroupNorm", layer, layer.groups, layer.width),
    norms.LayerNorm: lambda layer, exporter: _norm("LayerNorm", layer, layer.width),
    layers.Embedding: lambda layer, exporter: call("nn.Embedding", layer.entries, layer.width),
    layers.Scale: lambda layer, exporter: call(exporter.twin("Scale", SCALE), layer.weight.numel()),
}


def torch_constructor(layer: nn.Module, path: str) -> Call:
    """The constructor call of a torch.nn layer, read from its attributes and checked by building it again."""
    kind, positional, keywords = type(layer), list[object](), dict[str, object]()
    refusal = f"{path}: nn.{kind.__name__} cannot be exported, because its constructor is not readable from it"
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in ("device", "dtype"):
            continue
        value = getattr(layer, name, parameter.default)
        if name == "bias" and not isinstance(value, bool):
            value = value is not None
        if value is parameter.empty or not is_literal(value):
            raise ExportError(f"{refusal}: {name} is {value!r}. {_REMEDY}")
        if parameter.default is parameter.empty:
            positional.append(value)
        # Torch stores a number, such as `stride=1`, as a tuple, such as `(1, 1)`.
        elif value != parameter.default and not (isinstance(value, tuple) and set(value) == {parameter.default}):
            keywords[name] = value
    without_bias = {name: value for name, value in keywords.items() if name != "bias"}
    try:
        shape = _shape(layer)
        for options in (without_bias, keywords):  # a norm without weights has no bias anyway
            with torch.device("meta"):  # draws nothing from the generator
                again = kind(*positional, **options)
            if _shape(again) == shape:
                return call(f"nn.{kind.__name__}", *positional, **options)
    except Exception as error:  # a constructor may refuse in any way
        raise ExportError(f"{refusal}: {error}. {_REMEDY}") from error
    raise ExportError(f"{refusal}: built again it is another layer. {_REMEDY}")


_REMEDY = "Compose the block from simpler layers, such as nn.Conv2d, nn.Linear and norms, in a module of your own"


def _shape(layer: nn.Module) -> tuple[object, ...]:
    """Everything about a layer except the values of its weights."""
    attributes = {name: value for name, value in vars(layer).items() if name != "training" and is_literal(value)}
    public = {name: value for name, value in attributes.items() if not name.startswith("_")}
    tensors = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    children = {name: type(child) for name, child in layer.named_modules()}
    return public, tensors, children


def _unless(**options: tuple[object, object]) -> dict[str, object]:
    """The options that differ from torch's default."""
    return {name: value for name, (value, default) in options.items() if value != default}


def _blank(tensor: Tensor) -> str:
    dtype = "" if tensor.dtype.is_floating_point else f", dtype={tensor.dtype}"
    return f"torch.zeros({', '.join(map(str, tensor.shape)) or '()'}{dtype})"


def _class_text(name: str, kind: type[nn.Module], annotations: dict[str, str], methods: list[str]) -> str:
    doc = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
    blocks = [repr(doc) if '"""' in doc or "\\" in doc else f'"""{doc}"""'] if doc else []
    if annotations:
        arguments = ("self", *(f"{key}: {annotation}" for key, annotation in annotations.items()))
        opening = render(Call("def __init__(", tuple(("", argument) for argument in arguments), ") -> None:"), 0, 4)
        assignments = [
            f'self.register_buffer("{key}", {key})' if annotation == "Tensor" else f"self.{key} = {key}"
            for key, annotation in annotations.items()
        ]
        blocks.append("\n    ".join([opening, "super().__init__()", *assignments]))
    indented = [textwrap.indent(block, "    ") for block in (*blocks, *methods)]
    return "\n".join([f"class {name}(nn.Module):", "\n\n".join(indented)])
