"""`import esper`, `python -m esper` and the top level of the command line."""

import subprocess
import sys

import pytest

import esper


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with these arguments."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_every_public_name_is_there() -> None:
    """Each name of the list can be had, and is what its package exports."""
    for home, names in esper._HOMES.items():
        for name in names:
            assert getattr(esper, name) is getattr(sys.modules[home], name)
    assert sorted(name for names in esper._HOMES.values() for name in names) == sorted(esper.__all__)
    assert set(esper.__all__) <= set(dir(esper))


def test_an_unknown_name() -> None:
    """A slip is an AttributeError that names it."""
    with pytest.raises(AttributeError, match="'esper' has no attribute 'atach'"):
        _ = esper.atach


@pytest.mark.parametrize(
    "code",
    [
        "import esper; dir(esper)",
        "from esper.cli import main; main(['--version'])",
        "from esper.cli import main; main(['--help'])",
        "from esper.cli import main; main(['query', '--help'])",
        "from esper.cli import main; main(['report', '--help'])",
        "from esper.cli import main; main(['watch', '--help'])",
    ],
)
def test_help_does_not_import_torch(code: str) -> None:
    """Torch takes seconds, and help needs none of it. Nor does it need what draws."""
    heavy = "{'torch', 'textual', 'matplotlib', 'duckdb'}"
    done = run("-c", f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nassert not {heavy} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_attach_does_not_import_the_compiler() -> None:
    """The compiler takes longer to import than torch itself; it waits until somebody compiles."""
    code = "import esper, sys, torch\nesper.attach\nassert 'torch._dynamo' not in sys.modules"
    assert run("-c", code).stderr == ""


def test_python_m_esper() -> None:
    """The module is the command line."""
    done = run("-m", "esper", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"esper {esper.__version__}\n", "")


@pytest.mark.slow
def test_a_reader_that_leaves() -> None:
    """`esper train --help | head -1` prints no traceback."""
    command = f"{sys.executable} -m esper train --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("usage: esper train")
    assert done.stderr == ""


def test_an_unknown_command() -> None:
    """One line that names it and the nearest one."""
    done = run("-m", "esper", "trian")
    assert (done.returncode, done.stderr) == (2, "esper: unknown command 'trian'; did you mean 'train'?\n")
