"""Python source as text: expressions, and files that collect imports and definitions."""

import hashlib
import importlib
import itertools
import linecache
import sys
from types import ModuleType
from typing import NamedTuple, Union

from esper.leyline import EsperError

LINE_WIDTH = 110

Expression = Union[str, "Call"]


class Call(NamedTuple):
    """`opening` argument, argument, … `closing`; every argument comes with its prefix, such as `width=`."""

    opening: str
    arguments: tuple[tuple[str, Expression], ...]
    closing: str = ")"


def call(name: str, *positional: object, **keywords: object) -> Call:
    """A call with plain values, written as `repr` writes them."""
    arguments = [("", repr(value)) for value in positional]
    return Call(f"{name}(", (*arguments, *((f"{key}=", repr(value)) for key, value in keywords.items())))


def render(expression: Expression, indent: int = 0, used: int = 0) -> str:
    """The text, with `used` characters before and one comma behind it on its line: one argument per line if it must."""
    if isinstance(expression, str):
        return expression
    flat = expression.opening + ", ".join(prefix + render(value, -10_000) for prefix, value in expression.arguments)
    flat += expression.closing
    if indent + used + len(flat) < LINE_WIDTH or not expression.arguments:
        return flat
    inner = indent + 4
    lines = [f"{' ' * inner}{prefix}{render(value, inner, len(prefix))}," for prefix, value in expression.arguments]
    return "\n".join([expression.opening, *lines, " " * indent + expression.closing])


class ExportError(EsperError, TypeError):
    """Something in the network cannot be written as torch-only source; the message says what, and the remedy."""


class GeneratedFile:
    """Collects imports and top-level definitions, each under a name of its own."""

    def __init__(self, *reserved: str) -> None:
        self.reserved = frozenset(reserved)
        self._imports: dict[str, str] = {}
        self._definitions: dict[str, str] = {}

    def import_as(self, name: str, module: str, attribute: str | None = None) -> None:
        """Bind `name` to a module, or to an attribute of it."""
        if attribute is None and "." in module:
            module, _, attribute = module.rpartition(".")
        target = module if attribute is None else attribute
        alias = "" if name == target else f" as {name}"
        self._bind(name, f"import {target}{alias}" if attribute is None else f"from {module} import {target}{alias}")

    def _bind(self, name: str, line: str) -> None:
        if name in self._definitions or name in self.reserved or self._imports.get(name, line) != line:
            raise ExportError(f"two different things are called {name!r} in what is exported; rename one of them")
        self._imports[name] = line

    def define(self, name: str, text: str) -> None:
        """Add a definition behind those it needs. The same text may come again, another one may not."""
        if name in self._imports or name in self.reserved or self._definitions.get(name, text) != text:
            raise ExportError(f"two different things are called {name!r} in what is exported; rename one of them")
        self._definitions.setdefault(name, text)

    def free_name(self, wanted: str) -> str:
        """`wanted`, or with a number where that is taken."""
        candidates = itertools.chain([wanted], (f"{wanted}{number}" for number in itertools.count(2)))
        taken = self._imports.keys() | self._definitions.keys() | self.reserved
        return next(name for name in candidates if name not in taken)

    def text(self, header: str, *tail: str) -> str:
        """The whole file: docstring, imports, definitions, and what it all was for."""
        # Constants and short functions stand close together, classes apart, as a formatter would have it.
        constants = [text for text in self._definitions.values() if "\n" not in text]
        blocks = [text for text in self._definitions.values() if "\n" in text]
        header = header.strip().replace("\\", "/").replace('"' * 3, "'" * 3)  # it stands between quotes
        parts = [
            f'"""{header}\n"""',
            "",
            "from __future__ import annotations",
            "",
            *self._import_lines(),
            *(["", *constants] if constants else []),
            *(f"\n\n{block.strip()}" for block in (*blocks, *tail)),
        ]
        return "\n".join(parts) + "\n"

    def _import_lines(self) -> list[str]:
        """The standard library first; one line per module."""
        plain = sorted(line for line in self._imports.values() if line.startswith("import"))
        grouped: dict[str, list[str]] = {}
        for line in self._imports.values():
            if line.startswith("from"):
                module, _, target = line.partition(" import ")
                grouped.setdefault(module, []).append(target)
        lines = plain + [f"{module} import {', '.join(sorted(grouped[module]))}" for module in sorted(grouped)]
        standard = [line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names]
        foreign = [line for line in lines if line not in standard]
        return [*standard, "", *foreign] if standard else foreign


def execute(text: str, filename: str) -> ModuleType:
    """The file as a module, which tracebacks, `inspect` and `torch.compile` find though it may not be on disk.

    Its name is made from its text, so networks of the same architecture share it.
    """
    name = f"hardened_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    place = f"<{filename} of {name}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    module = ModuleType(name)
    exec(compile(text, place, "exec"), vars(module))
    sys.modules[name] = module
    return module


def find_import(value: object, *modules: str | None) -> tuple[str, str] | None:
    """(module, attribute) under which torch or the standard library has a function or class, or None."""
    name = getattr(value, "__name__", None)
    for module in modules:
        public = module is not None and not any(part.startswith("_") for part in module.split("."))
        if module is None or name is None or not public or not is_available(module):
            continue
        if getattr(importlib.import_module(module), name, None) is value:
            return module, name
    return None


def is_available(module: str) -> bool:
    """Whether a process that has torch has that module too."""
    top = module.partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names
