"""What hardening writes: files that load and train without Esper, in a folder that is replaced as a whole."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hardening import attached, cnn, count, gpt, images, plant, run_without_esper, tokens
from safetensors.torch import load_file
from user_blueprints import own_blueprints as own_blueprints

from esper.kasmina import MorphogeneticModel
from esper.leyline import BadValueError, CheckpointError

# -- without Esper ----------------------------------------------------------------------------------------------------


def test_an_image_network_loads_and_trains_without_esper(own_blueprints: None, tmp_path: Path) -> None:
    model = cnn()
    plant(model, "r0c0", "depthwise", "add")
    plant(model, "r1c0", "attention", "multiply")
    plant(model, "r0c1", "mixed", "gate")
    hardened = model.harden(tmp_path / "deep" / "inside")
    folder = tmp_path / "deep" / "inside"
    assert sorted(path.name for path in folder.iterdir()) == ["contents.json", "network.py", "weights.safetensors"]
    build = "network = load(folder)"
    targets = torch.arange(8) % 5
    assert run_without_esper(folder, "network", build, images(), model(images()), targets) == count(hardened)
    text = (folder / "network.py").read_text(encoding="utf-8")
    assert "import esper" not in text and "from esper" not in text
    assert "160 parameters" in text  # what grew, in the docstring: 64 + 12·8


@pytest.mark.slow
def test_a_language_network_loads_and_trains_without_esper(tmp_path: Path) -> None:
    model = gpt()
    plant(model, "r0c0", "attention", "gate")
    plant(model, "r0c1", "mlp")
    hardened = model.harden(tmp_path)
    y = model(tokens())
    assert run_without_esper(tmp_path, "network", "network = load('.')", tokens(), y, tokens()) == count(hardened)
    contents = json.loads((tmp_path / "contents.json").read_text())
    assert [(g["slot"], g["blueprint"], g["style"]) for g in contents["grown"]] == [
        ("r0c0", "attention", "gate"),
        ("r0c1", "mlp", "add"),
    ]


def test_the_generated_file_is_tidy(tmp_path: Path) -> None:
    model = cnn(masked=True)
    plant(model, "r0c0", "conv_heavy", "gate")
    model.harden(tmp_path)
    text = (tmp_path / "network.py").read_text(encoding="utf-8")
    compile(text, "network.py", "exec")
    assert max(map(len, text.splitlines())) <= 120
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert not any(a == b == c == "" for (a, b), (_, c) in pairwise(pairwise(text.splitlines())))
    assert "fold_rows" not in text and "statistics" not in text


def test_weights_on_disk_are_the_networks(tmp_path: Path) -> None:
    model = cnn()
    plant(model, "r0c0", "norm")
    hardened = model.harden(tmp_path)
    stored = load_file(tmp_path / "weights.safetensors")
    assert stored.keys() == hardened.state_dict().keys()
    assert all(torch.equal(value, hardened.state_dict()[name]) for name, value in stored.items())


# -- folders and frozen parameters ------------------------------------------------------------------------------------


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was hardened before is replaced, also where Python has left its cache; a crash leaves it as it was."""
    model = cnn()
    folder = tmp_path / "grown"
    model.harden(folder)
    (folder / "__pycache__").mkdir()
    plant(model, "r0c0", "norm")
    model.harden(folder)
    assert {path.name for path in folder.iterdir()} == {"network.py", "weights.safetensors", "contents.json"}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("esper.kasmina.harden.save_file", fail)
    with pytest.raises(OSError, match="disk is full"):
        model.harden(folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["grown"]


def test_other_files_are_never_written_over(tmp_path: Path) -> None:
    """A checkpoint has weights of the same name: they would be lost."""
    model = cnn()
    model.save(tmp_path / "checkpoint")
    with pytest.raises(BadValueError, match=r"holds \['model.json'\].*use a new folder"):
        model.harden(tmp_path / "checkpoint")
    MorphogeneticModel.load(tmp_path / "checkpoint")
    model.harden(tmp_path / "grown")
    with pytest.raises(CheckpointError, match=r"contents.json.*use a new folder"):
        model.save(tmp_path / "grown")


@pytest.mark.parametrize("attach_it", [False, True])
def test_frozen_parameters_stay_frozen(attach_it: bool, tmp_path: Path) -> None:
    """Those of the host and those of seeds; the written list names them."""
    model = attached() if attach_it else cnn()
    slot_id = "block" if attach_it else "r0c0"
    plant(model, slot_id, "norm")
    frozen = [next(model.host_parameters()), next(model.seed_parameters(slot_id))]
    for parameter in frozen:
        parameter.requires_grad_(False)
    network = model.harden(tmp_path / "grown")
    still = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    assert len(still) == 2
    assert json.loads((tmp_path / "grown" / "contents.json").read_text())["frozen"] == still
    shapes = sorted(tuple(network.get_parameter(name).shape) for name in still)
    assert shapes == sorted(tuple(parameter.shape) for parameter in frozen)
