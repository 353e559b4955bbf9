"""Python source as text: expressions, generated files, and functions of live classes.

Forward methods serve one network and rows alike, so they are copied verbatim, with two changes. Esper's errors become
the built-in errors that they derive from. And `forward(h, train) -> (h, statistics)` loses `train` and the statistics,
because torch's BatchNorm keeps its statistics itself.
"""

import ast
import builtins
import contextlib
import hashlib
import importlib
import inspect
import itertools
import linecache
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Union

from esper.kasmina.layers import max_pool
from esper.leyline import EsperError

LINE_WIDTH = 110

Expression = Union[str, "Call"]


class ExportError(EsperError, TypeError):
    """Something cannot be written as torch-only source; the message says what, and the remedy."""


# -- expressions and files --------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """`opening` argument, argument, … `closing`; each argument has a prefix, such as `width=`."""

    opening: str
    arguments: tuple[tuple[str, Expression], ...]
    closing: str = ")"


def call(name: str, *positional: object, **keywords: object) -> Call:
    """A call with plain values, as `repr` writes them."""
    arguments = [("", repr(value)) for value in positional]
    return Call(f"{name}(", (*arguments, *((f"{key}=", repr(value)) for key, value in keywords.items())))


def render(expression: Expression, indent: int = 0, used: int = 0) -> str:
    """The text, after `used` characters and before a comma on its line; one argument per line if it is long."""
    if isinstance(expression, str):
        return expression
    flat = expression.opening + ", ".join(prefix + render(value, -10_000) for prefix, value in expression.arguments)
    flat += expression.closing
    if indent + used + len(flat) < LINE_WIDTH or not expression.arguments:
        return flat
    inner = indent + 4
    lines = [f"{' ' * inner}{prefix}{render(value, inner, len(prefix))}," for prefix, value in expression.arguments]
    return "\n".join([expression.opening, *lines, " " * indent + expression.closing])


# What the generated parts of a file refer to. These names mean nothing else in it.
TEMPLATE_IMPORTS = {
    "torch": "import torch",
    "nn": "from torch import nn",
    "Tensor": "from torch import Tensor",
    "F": "from torch.nn import functional as F",
    "load_file": "from safetensors.torch import load_file",
    "load_model": "from safetensors.torch import load_model",
    "Any": "from typing import Any",
    "Callable": "from collections.abc import Callable",
    "OrderedDict": "from collections import OrderedDict",
    "Path": "from pathlib import Path",
}


class GeneratedFile:
    """Collects imports and top-level definitions with unique names."""

    def __init__(self, *reserved: str) -> None:
        self._names = dict.fromkeys(reserved, "") | TEMPLATE_IMPORTS

    def import_as(self, name: str, module: str, attribute: str | None = None) -> None:
        """Bind `name` to a module, or to an attribute of it."""
        if attribute is None and "." in module:
            module, _, attribute = module.rpartition(".")
        target = module if attribute is None else attribute
        alias = "" if name == target else f" as {name}"
        self.define(name, ("" if attribute is None else f"from {module} ") + f"import {target}{alias}")

    def define(self, name: str, text: str) -> None:
        """Add a definition after those that it needs. A name may come again only with the same text."""
        if self._names.setdefault(name, text) != text:
            raise ExportError(f"two different things are called {name!r} in what is exported; rename one of them")

    def free_name(self, wanted: str) -> str:
        """`wanted`, with a number if the name is in use."""
        candidates = itertools.chain([wanted], (f"{wanted}{number}" for number in itertools.count(2)))
        return next(name for name in candidates if name not in self._names)

    def text(self, header: str, *tail: str) -> str:
        """The whole file: docstring, imports, definitions, and the blocks of `tail`."""
        imports = {name: text for name, text in self._names.items() if text.startswith(("import ", "from "))}
        definitions = [text for name, text in self._names.items() if text and name not in imports]
        constants = [text for text in definitions if "\n" not in text]
        blocks = [text for text in (*definitions, *tail) if "\n" in text]
        nodes = ast.walk(ast.parse("\n".join([*constants, *blocks])))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        header = header.strip().replace("\\", "/").replace('"' * 3, "'" * 3)  # it stands between quotes
        parts = [
            f'"""{header}\n"""',
            "",
            "from __future__ import annotations",
            "",
            *_import_lines(line for name, line in imports.items() if name in used),
            *(["", *constants] if constants else []),
            *(f"\n\n{block.strip()}" for block in blocks),
        ]
        return "\n".join(parts) + "\n"


def _import_lines(imports: Iterable[str]) -> list[str]:
    """The standard library first; one line per module."""
    pairs = sorted(line.split("import ") for line in imports)
    lines = [f"import {target}" for origin, target in pairs if not origin]
    for origin, group in itertools.groupby((pair for pair in pairs if pair[0]), key=lambda pair: pair[0]):
        lines.append(f"{origin}import {', '.join(target for _, target in group)}")
    standard = [line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    foreign = [line for line in lines if line not in standard]
    return [*standard, "", *foreign] if standard else foreign


def execute(text: str, filename: str) -> ModuleType:
    """Run a generated file as a module that tracebacks, `inspect` and `torch.compile` can find.

    Its name derives from its text, so networks of the same architecture share it.
    """
    name = f"hardened_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        path, module = f"<{filename} of {name}>", ModuleType(name)
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        exec(compile(text, path, "exec"), vars(module))
        sys.modules[name] = module
    return sys.modules[name]


# -- what a torch-only file can refer to ------------------------------------------------------------------------------


def is_available(module: str) -> bool:
    """Whether torch or the standard library has that module."""
    top = module.partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


def find_import(value: object, *modules: str) -> tuple[str, str] | None:
    """(module, attribute) of a function or class of torch or the standard library; None for others."""
    name = getattr(value, "__name__", None)
    for module in (getattr(value, "__module__", None), *modules):
        if name is None or module is None or not is_available(module) or "._" in f".{module}":
            continue
        if getattr(importlib.import_module(module), name, None) is value:
            return module, name
    return None


def is_literal(value: object) -> bool:
    """Whether Python reads `repr(value)` back as the same value."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def unwrap(attribute: object) -> Callable[..., object] | None:
    """The function behind a method, property, static or class method; None for anything else."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    elif isinstance(attribute, staticmethod | classmethod):
        attribute = attribute.__func__
    return inspect.unwrap(attribute) if isinstance(attribute, FunctionType) else None


# -- functions --------------------------------------------------------------------------------------------------------

MAX_POOL = '''
def max_pool(x: Tensor, size: int = 2) -> Tensor:
    """Max pooling of images."""
    return F.max_pool2d(x, size)
'''


class Method:
    """A function with its syntax tree and its text."""

    def __init__(self, function: FunctionType, label: str) -> None:
        try:
            self._source = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError) as error:
            raise ExportError(f"{label} has no source to export ({error}); define it in a file") from error
        self.function, self.label = function, label
        self.tree = ast.parse(self._source)
        self._original = ast.dump(self.tree)

    @property
    def text(self) -> str:
        """The source, verbatim if nothing had to change."""
        return (self._source if ast.dump(self.tree) == self._original else ast.unparse(self.tree)).strip()

    def own_attributes(self) -> list[str]:
        """Attributes of `self` that it uses, in order."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)]
        return list(dict.fromkeys(n.attr for n in nodes if isinstance(n.value, ast.Name) and n.value.id == "self"))

    def drop_statistics(self) -> None:
        """Remove `train` and the returned statistics."""
        if "train" not in inspect.signature(self.function).parameters:
            return
        transformer = _WithoutStatistics(self.function.__globals__)
        transformer.visit(self.tree)
        _WithoutNames(transformer.dropped).visit(self.tree)
        names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        if used := sorted(names & transformer.dropped):
            problem = f"uses its batch statistics ({', '.join(used)}) for more than returning them"
            raise ExportError(f"{self.label} {problem}, so it has no plain counterpart; only collect and return them")
        ast.fix_missing_locations(self.tree)

    def bring_globals(self, file: GeneratedFile) -> None:
        """Put everything that it refers to into the file."""
        imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.Import)]
        modules = [alias.name for node in imports for alias in node.names]
        modules += [node.module or "." for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        if missing := [module for module in modules if not is_available(module)]:
            raise ExportError(f"{self.label} imports {missing[0]!r}, but a torch-only file has torch alone")
        known: dict[str, object] = {**self.function.__globals__, **inspect.getclosurevars(self.function).nonlocals}
        names, annotations = _free_names(self.tree)
        for name in sorted(names):
            if name in known:
                self._bring(name, known[name], file)
            elif name == "super" or not hasattr(builtins, name):
                raise ExportError(f"{self.label} refers to {name!r}, which cannot be exported; write it without")
        for name in sorted((annotations - names) & known.keys()):
            with contextlib.suppress(ExportError):  # annotations are not evaluated in the file
                self._bring(name, known[name], file)

    def _bring(self, name: str, value: object, file: GeneratedFile) -> None:
        if isinstance(value, type) and issubclass(value, EsperError):
            builtin = next(base.__name__ for base in value.__mro__ if base.__module__ == "builtins")
            for node in ast.walk(self.tree):
                if isinstance(node, ast.Name) and node.id == name:
                    node.id = builtin
        elif isinstance(value, ModuleType) and is_available(value.__name__):
            file.import_as(name, value.__name__)
        elif value is max_pool:  # it knows rows; the file needs it for one network
            file.define(name, MAX_POOL.replace("def max_pool(", f"def {name}("))
        elif source := find_import(value, "torch", "torch.nn.functional"):
            file.import_as(name, *source)
        elif isinstance(value, FunctionType) and value.__name__ == name:
            helper = Method(value, f"function {name}")
            helper.bring_globals(file)
            file.define(name, helper.text)
        elif is_literal(value):
            file.define(name, f"{name} = {value!r}")
        else:
            remedy = "a torch-only file cannot have; use torch, the standard library, plain constants and functions"
            raise ExportError(f"{self.label} refers to {name!r} ({type(value).__name__}), which {remedy}")


def _free_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Names that the body loads but does not bind, and the same for its annotations."""
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ExceptHandler) and node.name}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    roots = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation]
    roots += [node.returns for node in nodes if isinstance(node, ast.FunctionDef) and node.returns]
    annotations = {node for root in roots for node in ast.walk(root) if isinstance(node, ast.Name)}
    return {node.id for node in names if node not in annotations} - bound, {node.id for node in annotations} - bound


class _WithoutStatistics(ast.NodeTransformer):
    """`y, batch = layer(h, train)` → `y = layer(h)`;  `return y, statistics` → `return y`."""

    def __init__(self, outside: Collection[str]) -> None:
        """`outside` are global names. Calls on them, such as F.dropout, still need the mode."""
        self.outside = outside
        self.dropped: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        for arguments in (node.args.args, node.args.kwonlyargs):
            arguments[:] = [argument for argument in arguments if argument.arg != "train"]
        node.returns = ast.Name("Tensor", ast.Load())
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if self._passes_train(node.value):
            node.targets = [self._first(node.targets[0])]
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        node.value = node.value and self._first(node.value)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._passes_train(node):
            node.args = [value for value in node.args if not _is_train(value)]
            node.keywords = [keyword for keyword in node.keywords if not _is_train(keyword.value)]
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.parse("self.training", mode="eval").body if node.id == "train" else node

    def _passes_train(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call):
            return False
        root: ast.expr = node.func
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        return any(map(_is_train, arguments)) and isinstance(root, ast.Name) and root.id not in self.outside

    def _first(self, node: ast.expr) -> ast.expr:
        """The first of a pair; the name of the second is dropped."""
        if not (isinstance(node, ast.Tuple) and len(node.elts) == 2):
            return node
        if isinstance(node.elts[1], ast.Name):
            self.dropped.add(node.elts[1].id)
        return node.elts[0]


class _WithoutNames(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit(self, node: ast.AST) -> Any:  # Any: a node, or None to remove it
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            return self.generic_visit(node)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return None if all(isinstance(t, ast.Name) and t.id in self.names for t in targets) else node


def _is_train(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "train"
