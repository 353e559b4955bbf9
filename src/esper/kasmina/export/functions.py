"""Functions and methods of live classes as source for the generated file.

Forwards are written once, for one network and for rows alike, so they are taken verbatim. Two things change: Esper's
errors become the built-in errors that they also are, and where a module returns its batch statistics to the caller
(`forward(h, train) -> (h, statistics)`), that traffic goes, because torch's BatchNorm keeps its statistics itself.
"""

import ast
import builtins
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Collection
from types import FunctionType, ModuleType
from typing import Any

from esper.kasmina.export.source import ExportError, GeneratedFile, find_import, is_available
from esper.kasmina.layers import max_pool
from esper.leyline import EsperError

MAX_POOL = '''
def max_pool(x: Tensor, size: int = 2) -> Tensor:
    """Max pooling of images."""
    return F.max_pool2d(x, size)
'''
TWINS: dict[object, tuple[str, tuple[str, ...]]] = {max_pool: (MAX_POOL, ("F", "Tensor"))}
"""Functions with rows in them → the same for one network, and the names it uses."""

USUAL_IMPORTS = {
    "torch": ("torch", None),
    "nn": ("torch", "nn"),
    "Tensor": ("torch", "Tensor"),
    "F": ("torch.nn", "functional"),
    "Path": ("pathlib", "Path"),
}


def import_usual(file: GeneratedFile, *names: str) -> None:
    """Import names that everyone knows."""
    for name in names:
        file.import_as(name, *USUAL_IMPORTS[name])


class Method:
    """A function, its syntax tree and its text, once what it refers to is in the file."""

    def __init__(self, function: FunctionType, label: str) -> None:
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError) as error:
            raise ExportError(
                f"{label} has no source to export ({error}); define it in a file rather than in a prompt"
            ) from error
        self.function, self.label = function, label
        self.tree = ast.parse(source)
        self._source, self._before = source, ast.dump(self.tree)

    @property
    def text(self) -> str:
        """Verbatim if nothing had to change."""
        unchanged = ast.dump(self.tree) == self._before
        return (self._source if unchanged else ast.unparse(self.tree)).strip()

    def own_attributes(self) -> list[str]:
        """What it asks of `self`, in order of appearance."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute))
        return list(
            dict.fromkeys(node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self")
        )

    def keep_statistics(self) -> None:
        """Without `train` and the statistics that are handed up."""
        if "train" in inspect.signature(self.function).parameters:
            _drop_statistics(self.tree, self.function.__globals__, self.label)

    def bring_globals(self, file: GeneratedFile) -> None:
        """Put everything that it refers to into the file."""
        for module in _local_imports(self.tree):
            if not is_available(module):
                raise ExportError(f"{self.label} imports {module!r}, but a torch-only file has torch alone")
        scope = inspect.getclosurevars(self.function)
        known: dict[str, object] = dict(self.function.__globals__) | dict(scope.nonlocals)
        needed, annotations = _free_names(self.tree)
        for name in sorted(needed):
            if name in known:
                self._bring(name, known[name], file)
            elif name == "super" or not hasattr(builtins, name):
                raise ExportError(f"{self.label} refers to {name!r}, which cannot be exported; write it without")
        for name in sorted(annotations - needed):
            # Annotations are not evaluated in the file: those that cannot be followed do no harm.
            with contextlib.suppress(ExportError):
                if name in known:
                    self._bring(name, known[name], file)

    def _bring(self, name: str, value: object, file: GeneratedFile) -> None:
        if isinstance(value, type) and issubclass(value, EsperError):
            _rename(self.tree, name, _builtin_error(value).__name__)
        elif isinstance(value, ModuleType) and is_available(value.__name__):
            file.import_as(name, value.__name__)
        elif isinstance(value, FunctionType) and value in TWINS:
            text, uses = TWINS[value]
            import_usual(file, *uses)
            file.define(name, text.replace(f"def {value.__name__}(", f"def {name}("))
        elif place := find_import(value, getattr(value, "__module__", None), "torch", "torch.nn.functional"):
            file.import_as(name, *place)
        elif isinstance(value, FunctionType) and value.__name__ == name:
            helper = Method(value, f"function {name}")
            helper.bring_globals(file)
            file.define(name, helper.text)
        elif is_literal(value):
            file.define(name, f"{name} = {value!r}")
        else:
            raise ExportError(
                f"{self.label} refers to {name!r} ({type(value).__name__}), which "
                "a torch-only file cannot have; use torch, the standard library, plain constants and functions"
            )


def is_literal(value: object) -> bool:
    """Whether `repr` writes a value that Python reads back as the same one."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _builtin_error(error: type[EsperError]) -> type:
    return next(kind for kind in error.__mro__ if kind.__module__ == "builtins")


def _rename(tree: ast.AST, name: str, new: str) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = new


def _local_imports(tree: ast.Module) -> list[str]:
    plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return plain + [node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def _free_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Names that the body loads but does not bind, and the same for its annotations."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ExceptHandler) and node.name
    }
    bound |= {(node.asname or node.name).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.alias)}
    found: list[ast.expr | None] = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg)]
    found += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found += [node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    in_annotations = [node for root in found if root is not None for node in ast.walk(root)]
    annotations = {node.id for node in in_annotations if isinstance(node, ast.Name)}
    places = {id(node) for node in in_annotations}
    return {node.id for node in names if id(node) not in places} - bound, annotations - bound


class _WithoutStatistics(ast.NodeTransformer):
    """`y, found = layer(h, train)` → `y = layer(h)`;  `return y, statistics` → `return y`."""

    def __init__(self, outside: Collection[str]) -> None:
        """`outside` are global names: what is called on them, such as F.dropout, still needs to know the mode."""
        self.outside = outside
        self.dropped: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        for arguments in (node.args.args, node.args.kwonlyargs):
            arguments[:] = [argument for argument in arguments if argument.arg != "train"]
        node.returns = ast.Name("Tensor", ast.Load())
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and len(target.elts) == 2 and self._hands_down(node.value):
            node.targets = [target.elts[0]]
            self._drop(target.elts[1])
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            self._drop(node.value.elts[1])
            node.value = node.value.elts[0]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._hands_down(node):
            node.args = [value for value in node.args if not _is_train(value)]
            node.keywords = [keyword for keyword in node.keywords if not _is_train(keyword.value)]
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.parse("self.training", mode="eval").body if node.id == "train" else node

    def _hands_down(self, node: ast.expr) -> bool:
        """Whether this calls a layer or a method with `train`."""
        if not isinstance(node, ast.Call):
            return False
        root: ast.expr = node.func
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return any(map(_is_train, given)) and isinstance(root, ast.Name) and root.id not in self.outside

    def _drop(self, node: ast.expr) -> None:
        if isinstance(node, ast.Name):
            self.dropped.add(node.id)


class _WithoutNames(ast.NodeTransformer):
    """Assignments to certain names are left out."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit(self, node: ast.AST) -> Any:  # Any: a node, or None to remove it
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            return self.generic_visit(node)
        return None if all(isinstance(t, ast.Name) and t.id in self.names for t in targets) else node


def _is_train(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "train"


def _drop_statistics(tree: ast.Module, outside: Collection[str], label: str) -> None:
    traffic = _WithoutStatistics(outside)
    traffic.visit(tree)
    _WithoutNames(traffic.dropped).visit(tree)
    left = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & traffic.dropped
    if left:
        raise ExportError(
            f"{label} uses its batch statistics ({', '.join(sorted(left))}) for more than returning them, "
            "so it has no plain counterpart; only collect and return them"
        )
    ast.fix_missing_locations(tree)


def unwrap(attribute: object) -> Callable[..., object] | None:
    """The function behind a method, property, static or class method; None for anything else."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    elif isinstance(attribute, staticmethod | classmethod):
        attribute = attribute.__func__
    return inspect.unwrap(attribute) if isinstance(attribute, FunctionType) else None
