"""Checkpoints of a model: what comes back, and how they are written."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from staged import CONFIG, HOSTS, SLOTS, MLPHost, bring, build, inputs, rest_of_training, states
from torch import nn

from esper.kasmina import (
    CNNHost,
    GPTHost,
    GrowingOptimizer,
    MorphogeneticModel,
    SeedSlot,
    SeedState,
    checkpoint,
    lifecycle,
)
from esper.kasmina.attach import attach
from esper.leyline import BLEND_STYLES, CheckpointError, EsperError, Measurement, SeedStage

# -- what comes back --------------------------------------------------------------------------------------------------

STAGES = tuple(SeedStage)
CASES: dict[str, tuple[str, dict[str, SeedStage], str]] = {
    f"{kind}-{stage.name}-{style}": (kind, {SLOTS[kind][0]: stage}, style)
    for kind in HOSTS
    for stage in STAGES
    for style in BLEND_STYLES
} | {
    f"{kind}-three{turn}-{style}": (kind, dict(zip(SLOTS[kind], STAGES[3 * turn : 3 * turn + 3], strict=True)), style)
    for kind in HOSTS
    for turn in range(3)
    for style in BLEND_STYLES
}

FRESH_PROCESS = """
import json, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from test_checkpoint import CASES, HOSTS, MorphogeneticModel, inputs, rest_of_training, states
torch.set_num_threads(int(sys.argv[3]))
for folder in [path for path in Path(sys.argv[2]).iterdir() if path.is_dir()]:
    kind, stages, _ = CASES[folder.name]
    empty = MorphogeneticModel(HOSTS[kind](), list(stages)) if kind == "mlp" else None
    model = MorphogeneticModel.load(folder, empty).eval()
    found = {"output": model(inputs(kind)).tolist(), "states": repr(states(model))}
    found["alpha"] = {slot_id: float(slot.alpha) for slot_id, slot in model.seed_slots.items()}
    found["settings"] = repr((model.isolation, model.config, model.budget, model.rng_seed))
    found["losses"] = rest_of_training(model, kind)
    folder.with_name(f"{folder.name}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def travelled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The selected cases, saved here, then loaded, run and trained on in one fresh process."""
    root = tmp_path_factory.mktemp("journey")
    selected = {item.nodeid.partition("test_fresh_process[")[2] for item in request.session.items}
    for name, (kind, stages, style) in CASES.items():
        if f"{name}]" in selected:
            build(kind, stages, style).save(root / name)
    arguments = [str(Path(__file__).parent), str(root), str(torch.get_num_threads())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, *arguments], check=True, env=environment)
    return root


@pytest.mark.invariant(9)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.default_cases("cnn-*-gate", "gpt-*-multiply", "mlp-*-add")
def test_fresh_process(travelled: Path, name: str) -> None:
    """In every stage and style, outputs, states, alphas and later losses are equal after loading."""
    kind, stages, style = CASES[name]
    model = build(kind, stages, style)
    result = json.loads((travelled / f"{name}.json").read_text())
    assert result["output"] == model(inputs(kind)).tolist()  # bit for bit: JSON keeps every float exactly
    assert result["states"] == repr(states(model))
    assert result["alpha"] == {slot_id: float(slot.alpha) for slot_id, slot in model.seed_slots.items()}
    assert result["settings"] == repr((model.isolation, model.config, model.budget, model.rng_seed))
    assert result["losses"] == rest_of_training(model, kind)


@pytest.mark.invariant(9)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_seeds_take_the_mode_of_the_model(tmp_path: Path, training: bool) -> None:
    """Loaded into `eval()` no part of a seed is left in training mode, nor the other way round."""
    stages = dict(zip(SLOTS["cnn"], (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.FOSSILIZED), strict=True))
    build("cnn", stages, "gate").train(not training).save(tmp_path / "model")
    loaded = MorphogeneticModel.load(
        tmp_path / "model", MorphogeneticModel(HOSTS["cnn"](), SLOTS["cnn"]).train(training)
    )
    assert sum(len(list(slot.modules())) for slot in loaded.seed_slots.values()) > 9
    assert {part.training for part in loaded.modules()} == {training}


def test_attached_host(tmp_path: Path) -> None:
    """Slot ids with dots, on a foreign host with running statistics; probed or not yet, it becomes what was saved."""

    def foreign() -> nn.Module:
        inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(nn.Sequential(inner), nn.Flatten(), nn.Linear(64, 2))

    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    slots = {"0.0.0": 4, "0.0": 4}
    model = attach(foreign(), slots, example=x, config=CONFIG)
    bring(model, "0.0", SeedStage.BLENDING, "norm", "gate")
    bring(model, "0.0.0", SeedStage.TRAINING, "depthwise", "add")
    model.train()(x)
    model.save(tmp_path / "model")
    for fresh in (attach(foreign(), slots, example=x), attach(foreign(), slots)):
        assert MorphogeneticModel.load(tmp_path / "model", fresh) is fresh
        assert states(fresh) == states(model)
        assert fresh.seed_slots["0.0"].spec == model.seed_slots["0.0"].spec
        assert torch.equal(fresh.eval()(x), model.eval()(x))


def test_attached_host_before_its_first_input(tmp_path: Path) -> None:
    """A slot of which nothing is known yet is saved as such."""
    model = attach(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), {"0": 4})
    model.save(tmp_path / "model")
    fresh = attach(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), {"0": 4})
    MorphogeneticModel.load(tmp_path / "model", fresh)
    assert torch.equal(fresh(torch.ones(2, 3)), model(torch.ones(2, 3)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """The dtype of host, seeds and alpha comes back."""
    host = CNNHost((4,), classes=2, resolution=4).to(dtype)
    model = MorphogeneticModel(host)
    model.germinate_seed("r0c0", "norm", style="gate")
    model.save(tmp_path / "model")
    loaded = MorphogeneticModel.load(tmp_path / "model")
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {dtype}
    x = torch.ones(1, 3, 4, 4, dtype=dtype)
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_frozen_and_shared_weights(tmp_path: Path) -> None:
    """What does not train stays so, and tied weights stay tied."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    model = attach(nn.Sequential(first, second), {"0": 4}, example=torch.ones(1, 4))
    model.save(tmp_path / "model")
    other = nn.Linear(4, 4)
    tied = nn.Linear(4, 4)
    tied.weight = other.weight
    fresh = attach(nn.Sequential(other, tied), {"0": 4}, example=torch.ones(1, 4))
    MorphogeneticModel.load(tmp_path / "model", fresh)
    assert torch.equal(other.weight, first.weight) and tied.weight is other.weight
    assert not other.bias.requires_grad and tied.bias.requires_grad


def test_host_without_slots(tmp_path: Path) -> None:
    """The smallest model: nothing can grow, an empty tensor is stored."""
    model = MorphogeneticModel(GPTHost(layers=1, width=4, heads=1, block=3, vocab=5))
    model.save(tmp_path / "model")
    loaded = MorphogeneticModel.load(tmp_path / "model")
    ids = torch.tensor([[0, 4, 2]])
    assert torch.equal(loaded(ids), model(ids)) and loaded.seed_slots == {}


def test_straight_through_comes_back(tmp_path: Path) -> None:
    """The isolation of the model and of every slot, also into a model that was built with the other."""
    model = build("mlp", {"r0c0": SeedStage.TRAINING}, isolation="straight_through")
    model.save(tmp_path / "model")
    loaded = MorphogeneticModel.load(tmp_path / "model", MorphogeneticModel(MLPHost(), ["r0c0"]))
    assert loaded.isolation == loaded.seed_slots["r0c0"].isolation == "straight_through"
    assert rest_of_training(loaded, "mlp") == rest_of_training(model, "mlp")


def test_optimiser_learns_of_it(tmp_path: Path) -> None:
    """An optimiser that follows the model handed in has the seeds' parameters afterwards, and no others."""
    build("mlp", {"r0c0": SeedStage.BLENDING, "r0c1": SeedStage.DORMANT}).save(tmp_path / "model")
    model = build("mlp", {"r0c0": SeedStage.DORMANT, "r0c1": SeedStage.TRAINING})
    optimiser = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
    MorphogeneticModel.load(tmp_path / "model", model)
    assert [group["name"] for group in optimiser.wrapped.param_groups] == ["host", "r0c0"]


def test_random_stream_is_left_alone(tmp_path: Path) -> None:
    """Loading draws weights that are overwritten; the caller's random numbers are those of a run without it."""
    build("cnn", {"r0c0": SeedStage.TRAINING}).save(tmp_path / "model")
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    MorphogeneticModel.load(tmp_path / "model")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.invariant(9)
@settings(max_examples=60, deadline=None)
@given(
    verbs=st.lists(
        st.sampled_from(["germinate", "advance", "retarget", "prune", "fade", "tick", "measure"]), max_size=30
    )
)
def test_every_reachable_state_is_accepted(tmp_path_factory: pytest.TempPathFactory, verbs: list[str]) -> None:
    """Every state that the verbs can reach survives a checkpoint."""
    model = MorphogeneticModel(MLPHost(), ["r0c0"], config=CONFIG)
    slot = model.seed_slots["r0c0"]
    deeds: dict[str, Callable[[], object]] = {
        "germinate": lambda: model.germinate_seed("r0c0", "norm", tempo=2, alpha_target=0.5),
        "advance": lambda: model.advance("r0c0"),
        "retarget": lambda: model.set_alpha_target("r0c0", 0.9, steps=3, curve="sigmoid12"),
        "prune": lambda: model.prune_seed("r0c0"),
        "fade": lambda: model.prune_seed("r0c0", steps=3, curve="cosine"),
        "tick": model.tick,
        "measure": lambda: measure(slot),
    }
    for verb in verbs:
        try:
            deeds[verb]()
        except EsperError:
            continue
    folder = tmp_path_factory.mktemp("walk") / "model"
    model.save(folder)
    loaded = MorphogeneticModel.load(folder, MorphogeneticModel(MLPHost(), ["r0c0"]))
    assert states(loaded) == states(model)


def measure(slot: SeedSlot) -> None:
    """Note a gradient and a contribution."""
    slot.settle(lifecycle.record_gradient(slot.state, math.nan))
    slot.settle(lifecycle.record_gradient(slot.state, 2.0))
    slot.settle(lifecycle.record_contribution(slot.state, Measurement(-1.25, 0.5)))


# -- writing ----------------------------------------------------------------------------------------------------------


def test_replaces_a_checkpoint(tmp_path: Path) -> None:
    """The second save wins and leaves nothing behind."""
    build("mlp", {"r0c0": SeedStage.BLENDING}).save(tmp_path / "model")
    build("mlp", {"r0c0": SeedStage.TRAINING}).save(tmp_path / "model")
    assert checkpoint.read(tmp_path / "model").model.slots[0].state.stage is SeedStage.TRAINING
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("moment", ["weights", "json", "rename"])
def test_interrupted_save_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Whatever fails while a checkpoint is written, the one that was there is whole, and nothing else is left."""
    build("mlp", {"r0c0": SeedStage.BLENDING}).save(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    rename = Path.rename

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    def fail_for_new(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError("disk full")
        return rename(self, target)

    if moment == "weights":
        monkeypatch.setattr(Path, "write_bytes", fail)
    elif moment == "json":
        monkeypatch.setattr(Path, "write_text", fail)
    else:
        monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(OSError, match="disk full"):
        build("mlp", {"r0c0": SeedStage.TRAINING}).save(tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_does_not_replace_what_is_no_checkpoint(tmp_path: Path) -> None:
    """A folder with other files, or a file, is not deleted for a checkpoint."""
    (tmp_path / "notes.txt").write_text("mine")
    model = build("mlp", {"r0c0": SeedStage.DORMANT})
    for target in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(CheckpointError, match="use a new folder"):
            model.save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_impossible_state_is_not_saved(tmp_path: Path) -> None:
    """What could not be loaded is refused when it is saved."""
    model = build("mlp", {"r0c0": SeedStage.DORMANT})
    model.seed_slots["r0c0"].settle(SeedState("r0c0", SeedStage.DORMANT, cooldown=2))
    with pytest.raises(CheckpointError, match="cooldown 2 in DORMANT"):
        model.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
