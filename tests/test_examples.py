"""The examples, run as a reader would run them."""

import importlib.util
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
GROW_BY_HAND = ROOT / "examples" / "grow_by_hand.py"
STAGES = ("DORMANT", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder that the example wrote, and the lines that it printed."""
    folder = tmp_path_factory.mktemp("example")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(GROW_BY_HAND), "--out", str(folder / "out")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["out"], "it writes where it was told, and nowhere else"
    return folder / "out", done.stdout.splitlines()


def load_example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("grow_by_hand", GROW_BY_HAND)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_per_step_and_every_stage(finished: tuple[Path, list[str]]) -> None:
    """Twenty steps, through all stages in their order."""
    _, lines = finished
    steps = [line for line in lines if line.startswith("step ")]
    assert [int(line.split()[1]) for line in steps] == list(range(20))
    stages = [line.split()[2] for line in steps]
    assert [stage for stage in dict.fromkeys(stages) if stage in STAGES] == list(STAGES)
    assert stages.index("GERMINATED") == 5


def test_the_last_lines_sum_up(finished: tuple[Path, list[str]]) -> None:
    """Test accuracy, and the parameters: 390 of the host and 652 that grew."""
    _, lines = finished
    found = re.search(r"test accuracy (\d+\.\d) %.* ([\d,]+) parameters, ([\d,]+) of them grown", "\n".join(lines[-3:]))
    assert found is not None
    assert float(found[1]) > 50
    assert (found[2], found[3]) == ("1,042", "652")


def test_the_picture(finished: tuple[Path, list[str]]) -> None:
    """A PNG of some size."""
    picture = (finished[0] / "timeline.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.endswith(b"IEND\xaeB`\x82")
    assert len(picture) > 5_000


@pytest.mark.slow
def test_the_network_loads_without_esper(finished: tuple[Path, list[str]]) -> None:
    """A process that cannot import Esper loads the hardened network, with all its parameters, and runs it."""
    folder = finished[0] / "network"
    code = (
        "import sys; sys.modules['esper'] = None; sys.path.insert(0, sys.argv[1])\n"
        "import torch, network\n"
        "loaded = network.load(sys.argv[1])\n"
        "scores = loaded(torch.rand(3, 1, 8, 8))\n"
        "print(sum(p.numel() for p in loaded.parameters()), *scores.shape, bool(scores.isfinite().all()))\n"
    )
    # -I: neither PYTHONPATH nor the current folder.
    done = subprocess.run([sys.executable, "-I", "-c", code, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1042", "3", "10", "True"]


@pytest.mark.slow
def test_what_the_example_promises() -> None:
    """Over five seeds the median test accuracy is at least 70 %, with at most 800 parameters grown."""
    example = load_example()
    accuracies = []
    for rng_seed in range(5):
        _, trainer = example.grow(rng_seed, quiet=True)
        accuracies.append(example.test_accuracy(trainer.model.harden(), trainer))
        assert trainer.model.grown_parameter_count <= 800
    assert statistics.median(accuracies) >= 70, accuracies


# -- memory_cartpole --------------------------------------------------------------------------------------------------


def run_cartpole(folder: Path, *arguments: str) -> str:
    """What the example prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "memory_cartpole.py"), "--out", "out", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_pole_without_velocities(tmp_path: Path) -> None:
    """A short training, saved and loaded again."""
    printed = run_cartpole(tmp_path, "--steps", "2048", "--episodes", "3")
    assert re.search(r"memory on: mean return \d+\.\d over 3 episodes", printed)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["agent.json", "agent.safetensors"]


@pytest.mark.slow
def test_memory_balances_the_pole(tmp_path: Path) -> None:
    """At full length: with memory nearly the best return, without it nowhere near."""
    for flag, low, high in (("", 450, 500), ("--no-memory", 0, 150)):
        printed = run_cartpole(tmp_path, *([flag] if flag else []))
        mean = re.search(r"mean return (\d+\.\d)", printed)
        assert mean is not None
        assert low <= float(mean[1]) <= high


# -- adaptation -------------------------------------------------------------------------------------------------------


def run_example(name: str, folder: Path, *arguments: str, warn: str = "error") -> str:
    """What an example prints, run in an empty folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", warn, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_resnet_is_adapted(tmp_path: Path) -> None:
    """At reduced size: seeds are born, and the merged copy is as good as the adapted network."""
    data = Path(os.environ.get("ESPER_DATA", "data"))
    if not (data / "resnet_cifar10").is_dir():
        pytest.skip("no pretrained ResNet-20 in the folder of ESPER_DATA")
    printed = run_example("adapt_resnet.py", tmp_path, "--images", "100", "100", "200", "--epochs", "5")
    assert "germinated affine behind bn1 and 18 others" in printed
    accuracies = re.findall(r"(?:adapted|copy): (\d+\.\d) %", printed)
    assert len(accuracies) == 2 and accuracies[0] == accuracies[1]
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == ["adapter.json", "adapter.safetensors"]


@pytest.mark.slow
def test_a_language_model_is_adapted(tmp_path: Path) -> None:
    """SmolLM2 on a few windows: the merged model is better on Shakespeare than the pretrained one."""
    folder = os.environ.get("ESPER_SMOLLM2")
    if folder is None or importlib.util.find_spec("transformers") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs transformers, gguf and the folder of SmolLM2 in ESPER_SMOLLM2")
    sizes = ["--steps", "5", "--batches", "2", "--length", "64", "--evaluated", "2"]
    printed = run_example("adapt_language_model.py", tmp_path, *sizes, warn="ignore")
    before, after = (float(loss) for loss in re.findall(r"loss (\d+\.\d+) on Shakespeare", printed))
    assert after < before
    assert "germinated scale behind" in printed
