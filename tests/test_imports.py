"""Who imports whom: read from the source, without running it."""

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
CORE = ("leyline", "storage", "kasmina", "tolaria", "simic")
CORE_PACKAGES = {"torch", "numpy", "safetensors", "esper"}
FAMILIES = sorted(path.stem for path in (SOURCE / "esper" / "kasmina" / "kernels").glob("[!_]*.py"))
KERNELS = tuple(f"esper.kasmina.kernels.{family}" for family in FAMILIES)
"""Written in triton, which only CUDA builds of torch bring along."""

BELOW = {
    "leyline": set[str](),
    "storage": {"leyline"},
    "kasmina": {"leyline", "storage"},
    "tolaria": {"leyline", "storage", "kasmina"},
    "tamiyo": {"leyline"},
    "nissa": {"leyline", "storage"},
    "simic": {"leyline", "storage", "kasmina", "tolaria", "tamiyo", "nissa"},
    "karn": {"leyline", "storage", "nissa"},
    "integrations": {"leyline", "storage", "kasmina", "tolaria", "tamiyo", "nissa", "simic", "config", "grower"},
    "grower": {"leyline", "storage", "kasmina", "tolaria", "tamiyo", "nissa", "simic"},
    "config": {"leyline", "storage", "kasmina", "tolaria", "tamiyo", "nissa", "simic"},
    "__main__": {"cli"},
    "cli": {
        "",
        "leyline",
        "storage",
        "kasmina",
        "tolaria",
        "tamiyo",
        "nissa",
        "simic",
        "config",
        "integrations",
        "grower",
        "karn",
    },
}
"""Each subsystem, and those that it may import."""


class Import(NamedTuple):
    """One imported module, or one name out of it."""

    target: str
    """The module."""
    name: str | None
    """What was taken from it; None for the module itself."""
    inside_function: bool
    type_checking: bool
    line: int


class Module(NamedTuple):
    """One file."""

    name: str
    path: Path
    tree: ast.Module
    imports: list[Import]

    @property
    def subsystem(self) -> str:
        """`kasmina` of esper.kasmina.slot; empty for the package itself."""
        return subsystem(self.name)


def subsystem(name: str) -> str:
    """The second part of a dotted name."""
    return [*name.split("."), ""][1]


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports(node: ast.AST, names: set[str], inside: bool = False, checking: bool = False) -> list[Import]:
    """All imports below a node; `names` are the modules of Esper."""
    if isinstance(node, ast.Import):
        return [Import(alias.name, None, inside, checking, node.lineno) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, "imports are absolute"
        found = []
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            # `from package import module` imports the module; anything else is a name out of the first.
            target, name = (inner, None) if inner in names else (node.module, alias.name)
            found.append(Import(target, name, inside, checking, node.lineno))
        return found
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    checking = checking or (isinstance(node, ast.If) and _is_type_checking(node.test))
    return [found for child in ast.iter_child_nodes(node) for found in _imports(child, names, inside, checking)]


def read_modules() -> dict[str, Module]:
    """Every module of Esper by its dotted name."""
    paths = {}
    for path in sorted((SOURCE / "esper").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    trees = {name: ast.parse(path.read_text(), str(path)) for name, path in paths.items()}
    return {name: Module(name, paths[name], tree, _imports(tree, set(paths))) for name, tree in trees.items()}


MODULES = read_modules()
EDGES = [(module, found) for module in MODULES.values() for found in module.imports if found.target in MODULES]


def test_the_source_was_read() -> None:
    """These tests would pass on an empty folder."""
    assert {"esper.leyline.slots", "esper.kasmina", "esper.tolaria.data.cifar", "esper.cli"} <= set(MODULES)
    assert len(EDGES) > 50
    gates = MODULES["esper.kasmina.gates"]
    assert [found.target for found in gates.imports if found.type_checking] == ["esper.kasmina.lifecycle"]
    digits = MODULES["esper.tolaria.data.readers"]
    assert [found.target for found in digits.imports if found.inside_function] == ["sklearn.datasets"]


def test_every_subsystem_has_a_place() -> None:
    """A new folder has to say what it may see."""
    assert {module.subsystem for module in MODULES.values()} <= {"", *BELOW}


def test_imports_exist() -> None:
    """Nothing of Esper's is imported that is not there."""
    wanted = {found.target for module in MODULES.values() for found in module.imports}
    assert {name for name in wanted if name.split(".")[0] == "esper"} <= set(MODULES)


@pytest.mark.requirement(61)
def test_the_rule_has_no_cycle() -> None:
    """The table above is an order."""
    order = list(TopologicalSorter(BELOW).static_order())
    assert order.index("leyline") < order.index("kasmina") < order.index("tolaria") < order.index("simic")
    assert order[-1] == "__main__"


@pytest.mark.requirement(61)
def test_imports_point_one_way() -> None:
    """Each subsystem imports only those below it, in type checking and function bodies too."""
    wrong = [
        f"{module.name}:{found.line} imports {found.target}"
        for module, found in EDGES
        if module.subsystem
        and subsystem(found.target) != module.subsystem
        and subsystem(found.target) not in BELOW[module.subsystem]
    ]
    assert wrong == []


@pytest.mark.requirement(61)
def test_no_cycle_between_modules() -> None:
    """The modules can be ordered. (Imports for the type checker alone do not count.)"""
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for module, found in EDGES:
        if not found.type_checking:
            graph[module.name].add(found.target)
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


@pytest.mark.requirement(61)
def test_no_import_inside_a_function() -> None:
    """No function body hides an import cycle. Only kernels are imported there, for CUDA."""
    hidden = [(module, found) for module, found in EDGES if found.inside_function]
    assert [f"{module.name}:{found.line}" for module, found in hidden if found.target not in KERNELS] == []


IMPORTERS = {"import_module", "__import__", "find_spec", "spec_from_file_location", "exec", "eval"}
"""Calls that can load a module whose name is only known when they run."""


@pytest.mark.requirement(61)
def test_no_import_by_name() -> None:
    """No module of Esper is imported by a name in a string, which no other test would see."""
    named, found = [], 0
    for module in MODULES.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in IMPORTERS:
                found += 1
                texts = (leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant))
                if any(isinstance(text, str) and "esper" in text for text in texts):
                    named.append(f"{module.name}:{node.lineno}")
    assert found > 0, "the exporter looks names up in their modules"
    assert named == []


def _defined(module: Module) -> set[str]:
    """Names that a module makes itself, at its top level."""
    names: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return names


@pytest.mark.requirement(61)
def test_only_doors_reexport() -> None:
    """A name is imported from its module or from the `__init__` of its own package."""
    doors = {name for name, module in MODULES.items() if module.path.name == "__init__.py"}
    wrong = [
        f"{module.name}:{found.line} takes {found.name} from {found.target}"
        for module, found in EDGES
        if found.name is not None and found.target not in doors and found.name not in _defined(MODULES[found.target])
    ]
    assert wrong == []
    for door in doors:
        foreign = [
            found.target
            for found in MODULES[door].imports
            if found.target.startswith("esper") and not found.target.startswith(f"{door}.")
        ]
        assert foreign == [], f"{door} re-exports from elsewhere"


FOR_USERS = {"EpisodeOutcome", "RELEVANCE", "alarm_catalogue"}
"""Exported for users and tests; Esper itself does not call them."""


@pytest.mark.requirement(57)
def test_exported_names_are_used() -> None:
    """Each name of a public list exists once in it, and the source, the docs or an example uses it."""
    leaves = [leaf for module in MODULES.values() for leaf in ast.walk(module.tree)]
    used = {leaf.id for leaf in leaves if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Load)}
    used |= {leaf.attr for leaf in leaves if isinstance(leaf, ast.Attribute)}
    root = SOURCE.parent
    for path in (root / "README.md", *root.glob("docs/*.md"), *root.glob("examples/*.py")):
        used |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    exported = 0
    for name, module in MODULES.items():
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                public = ast.literal_eval(node.value)
                taken = {found.name for found in module.imports} | {
                    found.target.rsplit(".", 1)[-1] for found in module.imports if found.name is None
                }
                assert len(public) == len(set(public)), name
                assert set(public) <= taken | _defined(module), name
                assert set(public) - used - FOR_USERS == set(), f"{name} exports what nobody uses"
                exported += len(public)
    assert exported > 100


@pytest.mark.requirement(61)
def test_the_core_needs_three_packages() -> None:
    """Training imports torch, numpy and safetensors; other packages are imported where they are used."""
    allowed = CORE_PACKAGES | set(sys.stdlib_module_names)
    wrong = [
        f"{module.name}:{found.line} imports {found.target}"
        for module in MODULES.values()
        for found in module.imports
        if module.subsystem in CORE
        and not found.inside_function
        and not found.type_checking
        and found.target.split(".")[0] not in allowed
        and not (module.name in KERNELS and found.target.startswith("triton"))
    ]
    assert wrong == []


def test_leyline_has_no_modules() -> None:
    """What crosses borders is values: leyline does not import torch.nn."""
    for module in MODULES.values():
        if module.subsystem == "leyline":
            for found in module.imports:
                full = found.target if found.name is None else f"{found.target}.{found.name}"
                assert full != "torch.nn" and not full.startswith("torch.nn."), f"{module.name}:{found.line}"


# -- torch is a hard dependency ---------------------------------------------------------------------------------------


def _catches_import_errors(node: ast.Try) -> bool:
    caught = {leaf.id for handler in node.handlers for leaf in ast.walk(handler) if isinstance(leaf, ast.Name)}
    bare = any(handler.type is None for handler in node.handlers)
    return bare or bool(caught & {"ImportError", "ModuleNotFoundError", "Exception"})


@pytest.mark.requirement(85)
def test_no_stubs_for_torch() -> None:
    """torch is imported unconditionally, and nothing stands in for it."""
    for module in MODULES.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Try) and _catches_import_errors(node):
                tried = {found.target.split(".")[0] for found in _imports(node, set(MODULES))}
                assert not tried & CORE_PACKAGES, f"{module.name}:{node.lineno}"
            if isinstance(node, ast.Assign):
                names = {leaf.id for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
                assert not names & {"torch", "nn", "F", "Tensor", "np"}, f"{module.name}:{node.lineno}"


def _suppresses_import_errors(node: ast.With) -> bool:
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    caught = {
        ast.unparse(argument).split(".")[-1]
        for call in calls
        if ast.unparse(call.func).split(".")[-1] == "suppress"
        for argument in call.args
    }
    return bool(caught & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


@pytest.mark.requirement(85)
def test_no_import_of_torch_is_suppressed() -> None:
    """`with suppress(ImportError)` would be such a net too."""
    suppressing = 0
    for module in MODULES.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.With):
                suppressing += "suppress" in ast.unparse(node.items[0])
                if _suppresses_import_errors(node):
                    tried = {found.target.split(".")[0] for found in _imports(node, set(MODULES))}
                    assert not tried & CORE_PACKAGES, f"{module.name}:{node.lineno}"
    assert suppressing > 3, "there are others"


def _run(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.requirement(85)
@pytest.mark.parametrize("package", ["esper.kasmina", "esper.tolaria", "esper.simic.contracts"])
def test_without_torch(package: str) -> None:
    """Without torch the import fails at once, with an ImportError that names it."""
    done = _run(f"import sys; sys.modules['torch'] = None\nimport {package}")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(("ImportError", "ModuleNotFoundError"))
    assert "torch" in last


def test_values_and_files_need_no_torch() -> None:
    """The command line answers --help without the seconds that torch takes to import."""
    modules = "esper.leyline, esper.leyline.records, esper.storage.logs, esper.storage.files, esper.storage.series"
    done = _run(f"import sys, {modules}\nprint(sorted({{'torch', 'numpy'}} & set(sys.modules)))")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.requirement(61)
def test_the_core_runs_without_the_other_packages() -> None:
    """Without the optional packages, the whole core imports and a host runs."""
    names = sorted(name for name, module in MODULES.items() if module.subsystem in CORE and name not in KERNELS)
    code = (
        "import importlib, sys\n"
        "others = ('sklearn', 'PIL', 'matplotlib', 'rich', 'tyro', 'scipy', 'duckdb', 'pytest')\n"
        "for name in others: sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "import torch\n"
        "from esper.tolaria import get_task\n"
        "print(get_task('digits_blind').make_host(0)(torch.zeros(2, 1, 8, 8)).shape[-1])\n"
    )
    done = _run(code)
    assert done.stderr == ""
    assert done.stdout.strip() == "10"
