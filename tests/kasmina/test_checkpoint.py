"""Checkpoints of a model: what comes back, and what is refused."""

import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.kasmina import (
    BlueprintRegistry,
    CNNHost,
    GateThresholds,
    GPTHost,
    GrowingOptimizer,
    Host,
    LifecycleConfig,
    MorphogeneticModel,
    SeedSlot,
    SeedState,
    Segment,
    checkpoint,
    lifecycle,
)
from esper.kasmina.attach import attach
from esper.kasmina.layers import Linear, Statistics, reset_parameters
from esper.leyline import BLEND_STYLES, CheckpointError, EsperError, Measurement, SeedStage, SlotSpec

Json = dict[str, Any]  # Any: parsed JSON

CONFIG = LifecycleConfig(cooldown=4, thresholds=GateThresholds(min_training_steps=1))
CLASSES = 3


class DenseSegment(Segment):
    """Linear, then a tanh."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return torch.tanh(self.linear(h)), {}


class MLPHost(Host):
    """A host that no checkpoint can rebuild by itself: three vector slots."""

    def __init__(self) -> None:
        widths = (5, 8, 8, 8, CLASSES)
        segments = [DenseSegment(i, o) for i, o in pairwise(widths)]
        super().__init__(segments, [SlotSpec(f"r0c{i}", 8, "vector", (i + 1) / 4) for i in range(3)])


HOSTS: dict[str, Callable[[], Host]] = {
    "cnn": lambda: CNNHost((4, 4), pools=1, classes=CLASSES, resolution=6),
    "gpt": lambda: GPTHost(layers=4, width=8, heads=2, block=5, vocab=CLASSES),
    "mlp": MLPHost,
}
SLOTS = {"cnn": ("r0c0", "r1c0", "r0c1"), "gpt": ("r0c0", "r0c1", "r0c2"), "mlp": ("r0c0", "r0c1", "r0c2")}
BLUEPRINTS = {
    "cnn": ("depthwise", "norm", "attention"),
    "gpt": ("attention", "mlp", "lora"),
    "mlp": ("norm", "mlp", "lora"),
}


def inputs(kind: str) -> Tensor:
    """A small batch for a host."""
    generator = torch.Generator().manual_seed(7)
    if kind == "gpt":
        return torch.randint(0, CLASSES, (4, 5), generator=generator)
    return torch.randn((4, 3, 6, 6) if kind == "cnn" else (4, 5), generator=generator)


def targets(kind: str) -> Tensor:
    """Classes for that batch."""
    return torch.arange(20).reshape(4, 5) % CLASSES if kind == "gpt" else torch.arange(4) % CLASSES


def bring(model: MorphogeneticModel, slot_id: str, stage: SeedStage, blueprint: str, style: str) -> None:
    """Grow a seed with weights that act, up to a stage, by the lifecycle's own verbs."""
    if stage is SeedStage.DORMANT:
        return
    model.germinate_seed(slot_id, blueprint, style=style, tempo=3, alpha_target=0.7)
    slot = model.seed_slots[slot_id]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in slot.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))

    def tick(times: int) -> None:
        for _ in range(times):
            slot.settle(lifecycle.tick(slot.state, model.config)[0])

    if stage is SeedStage.GERMINATED:
        return
    tick(2)
    slot.settle(lifecycle.record_gradient(slot.state, math.inf))
    slot.settle(lifecycle.record_audition(slot.state, Measurement(1.5, 0.1)))
    if stage is SeedStage.TRAINING:
        return
    slot.settle(lifecycle.record_gradient(slot.state, 0.1 + 0.2))
    model.advance(slot_id)
    if stage is SeedStage.BLENDING:
        return
    tick(4)
    slot.settle(lifecycle.record_contribution(slot.state, Measurement(1 / 3, math.inf)))
    if stage is SeedStage.FOSSILIZED:
        model.fossilize(slot_id)
    elif stage is not SeedStage.HOLDING:
        model.prune_seed(slot_id)
        # cooldown 4: PRUNED at 4, EMBARGOED at 3 and 2, RESETTING at 1
        tick({SeedStage.PRUNED: 0, SeedStage.EMBARGOED: 1, SeedStage.RESETTING: 3}[stage])
    assert slot.state.stage is stage


def build(kind: str, stages: dict[str, SeedStage], style: str = "add", isolation: str = "shadow") -> MorphogeneticModel:
    """A model whose seeds stand at these stages."""
    host = HOSTS[kind]()
    reset_parameters(host, 11)
    wanted: Any = isolation  # Any: tests name it as a plain string
    model = MorphogeneticModel(host, list(stages), config=CONFIG, isolation=wanted, budget=10_000, rng_seed=5)
    for slot_id, blueprint in zip(SLOTS[kind], BLUEPRINTS[kind], strict=True):
        if slot_id in stages:
            bring(model, slot_id, stages[slot_id], blueprint, style)
    return model.eval()


def rest_of_training(model: MorphogeneticModel, kind: str) -> list[float]:
    """All losses of two more steps of training."""
    optimiser = GrowingOptimizer(model.train(), lambda p: torch.optim.Adam(p, lr=0.01), clip_norm=1.0)
    found: list[float] = []
    for _ in range(2):
        losses = model.losses(inputs(kind), targets(kind))
        found += [float(loss.detach()) for loss in losses.values()]
        optimiser.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        optimiser.step()
        model.tick()
    model.eval()
    return found


def states(model: MorphogeneticModel) -> dict[str, SeedState]:
    """The state of every slot."""
    return {slot_id: slot.state for slot_id, slot in model.seed_slots.items()}


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
for name, (kind, stages, _) in CASES.items():
    folder = Path(sys.argv[2]) / name
    empty = MorphogeneticModel(HOSTS[kind](), list(stages)) if kind == "mlp" else None
    model = MorphogeneticModel.load(folder, empty).eval()
    found = {"output": model(inputs(kind)).tolist(), "states": repr(states(model))}
    found["alpha"] = {slot_id: float(slot.alpha) for slot_id, slot in model.seed_slots.items()}
    found["settings"] = repr((model.isolation, model.config, model.budget, model.rng_seed))
    found["losses"] = rest_of_training(model, kind)
    (Path(sys.argv[2]) / f"{name}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case saved here, then loaded, run and trained on in one fresh process."""
    root = tmp_path_factory.mktemp("journey")
    for name, (kind, stages, style) in CASES.items():
        build(kind, stages, style).save(root / name)
    arguments = [str(Path(__file__).parent), str(root), str(torch.get_num_threads())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, *arguments], check=True, env=environment)
    return root


@pytest.mark.parametrize("name", CASES)
def test_fresh_process(travelled: Path, name: str) -> None:
    """Invariant 9: any stage and style, one slot and three: equal outputs, states, alphas and further losses."""
    kind, stages, style = CASES[name]
    model = build(kind, stages, style)
    found = json.loads((travelled / f"{name}.json").read_text())
    assert found["output"] == model(inputs(kind)).tolist()  # bit for bit: JSON keeps every float exactly
    assert found["states"] == repr(states(model))
    assert found["alpha"] == {slot_id: float(slot.alpha) for slot_id, slot in model.seed_slots.items()}
    assert found["settings"] == repr((model.isolation, model.config, model.budget, model.rng_seed))
    assert found["losses"] == rest_of_training(model, kind)


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


@settings(max_examples=60, deadline=None)
@given(
    verbs=st.lists(
        st.sampled_from(["germinate", "advance", "retarget", "prune", "fade", "tick", "measure"]), max_size=30
    )
)
def test_every_reachable_state_is_accepted(tmp_path_factory: pytest.TempPathFactory, verbs: list[str]) -> None:
    """Invariant 9: whatever the verbs lead to, the checkpoint takes and gives back."""
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
        with pytest.raises(CheckpointError, match="one of its own"):
            model.save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_impossible_state_is_not_saved(tmp_path: Path) -> None:
    """What could not be loaded is refused when it is saved."""
    model = build("mlp", {"r0c0": SeedStage.DORMANT})
    model.seed_slots["r0c0"].settle(SeedState("r0c0", SeedStage.DORMANT, cooldown=2))
    with pytest.raises(CheckpointError, match="cooldown 2 in DORMANT"):
        model.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# -- what is refused --------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[Json], object]) -> None:
    """Change the JSON and make its checksum right again."""
    path = folder / "model.json"
    document = json.loads(path.read_text())
    change(document)
    document.pop("checksum", None)
    plain = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps(document | {"checksum": hashlib.sha256(plain).hexdigest()}))


def replace_weights(folder: Path, raw: bytes) -> None:
    """Other weights, with size and digest made right."""
    (folder / "weights.safetensors").write_bytes(raw)
    stored = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    rewrite(folder, lambda document: document.update(weights=stored))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors, with size and digest made right."""
    tensors = safetensors.torch.load((folder / "weights.safetensors").read_bytes())
    change(tensors)
    replace_weights(folder, safetensors.torch.save(tensors))


def spoil(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file."""
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


class Bomb:
    """Executes on unpickling."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.target),)


def in_state(key: str, value: object) -> Callable[[Path], None]:
    """Damage one key of the state of the first slot, a BLENDING seed."""
    return lambda folder: rewrite(folder, lambda d: d["model"]["slots"][0]["state"].update({key: value}))


def in_model(key: str, value: object) -> Callable[[Path], None]:
    """Damage one key of the model."""
    return lambda folder: rewrite(folder, lambda d: d["model"].update({key: value}))


def in_ramp(key: str, value: object) -> Callable[[Path], None]:
    """Damage one key of the first slot's alpha controller."""
    return lambda folder: rewrite(folder, lambda d: d["model"]["slots"][0]["state"]["controller"].update({key: value}))


WEIGHT = "slots.r0c0.seed.scale.weight"

DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no json": (lambda f: (f / "model.json").unlink(), "model.json cannot be read"),
    "no weights": (lambda f: (f / "weights.safetensors").unlink(), "weights.safetensors cannot be read"),
    "empty json": (lambda f: spoil(f, "model.json", lambda raw: b""), "truncated or damaged"),
    "half json": (lambda f: spoil(f, "model.json", lambda raw: raw[: len(raw) // 2]), "truncated or damaged"),
    "binary json": (lambda f: spoil(f, "model.json", lambda raw: b"\xff\x00" + raw), "truncated or damaged"),
    "deep json": (lambda f: spoil(f, "model.json", lambda raw: b"[" * 100_000), "truncated or damaged"),
    "a list": (lambda f: spoil(f, "model.json", lambda raw: b"[]"), "format is None; allowed: 'esper-model'"),
    "NaN": (
        lambda f: spoil(f, "model.json", lambda raw: raw.replace(b'"budget": 10000', b'"budget": NaN')),
        "NaN is no",
    ),
    "edited json": (lambda f: spoil(f, "model.json", lambda raw: raw.replace(b"0.7", b"0.8")), "was changed"),
    "other format": (lambda f: rewrite(f, lambda d: d.update(format="x")), "format is 'x'; allowed: 'esper-model'"),
    "other version": (lambda f: rewrite(f, lambda d: d.update(version=2)), "version is 2; this Esper reads version 1"),
    "unknown key": (lambda f: rewrite(f, lambda d: d.update(note=1)), "'note'.*allowed"),
    "unknown key inside": (in_model("note", 1), r"unknown keys \['note'\]"),
    "missing key": (lambda f: rewrite(f, lambda d: d["model"].pop("budget")), r"lacks \['budget'\]"),
    "half weights": (lambda f: spoil(f, "weights.safetensors", lambda raw: raw[: len(raw) // 2]), "truncated"),
    "flipped bit": (
        lambda f: spoil(f, "weights.safetensors", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])),
        "was changed",
    ),
    "no safetensors": (lambda f: replace_weights(f, b"12345678"), "no safetensors file"),
    "missing tensor": (lambda f: change_tensors(f, lambda t: t.pop(WEIGHT)), "lacks .*scale.weight"),
    "extra tensor": (lambda f: change_tensors(f, lambda t: t.update(x=torch.ones(1))), r"holds \['x'\]"),
    "other shape": (lambda f: change_tensors(f, lambda t: t.update({WEIGHT: torch.ones(9)})), r"\(9,\).* needs \(8,\)"),
    "other dtype": (
        lambda f: change_tensors(f, lambda t: t.update({WEIGHT: t[WEIGHT].double()})),
        "float64; .*float32",
    ),
    "dtype": (in_model("dtype", "int8"), "unknown dtype 'int8'; allowed: float16"),
    "isolation": (in_model("isolation", "x"), "isolation is 'x'; allowed: .'shadow'"),
    "budget": (in_model("budget", 1.5), "budget is 1.5; allowed: int"),
    "rng_seed": (in_model("rng_seed", True), "rng_seed is True; allowed: int"),
    "config": (
        lambda f: rewrite(f, lambda d: d["model"]["config"].update(cooldown=1)),
        "cooldown 1 is not an integer of 3",
    ),
    "frozen": (in_model("frozen", ["x"]), r"frozen parameters \['x'\] do not exist"),
    "host kind": (
        lambda f: rewrite(f, lambda d: d["model"]["host"].update(kind="X", config={})),
        "kind 'X'; allowed: CNNHost",
    ),
    "host kind alone": (lambda f: rewrite(f, lambda d: d["model"]["host"].update(kind="CNNHost")), "both or neither"),
    "no slots": (in_model("slots", []), r"has slots \[\], the model handed in \['r0c0', 'r0c1'\]"),
    "slot twice": (
        lambda f: rewrite(f, lambda d: d["model"]["slots"].append(d["model"]["slots"][0])),
        "must be unique",
    ),
    "foreign slot": (
        lambda f: rewrite(
            f, lambda d: [d["model"]["slots"][1][part].update(slot_id="r9c9") for part in ("spec", "state")]
        ),
        r"has slots \['r0c0', 'r9c9'\]",
    ),
    "spec of another": (in_state("slot_id", "r9c9"), "its spec is that of slot 'r0c0'"),
    "spec unknown": (lambda f: rewrite(f, lambda d: d["model"]["slots"][0].update(spec=None)), "nothing is known"),
    "width": (
        lambda f: rewrite(f, lambda d: d["model"]["slots"][0]["spec"].update(width=16)),
        "vector of width 16, in the model handed in for vector of width 8",
    ),
    "width 0": (
        lambda f: rewrite(f, lambda d: d["model"]["slots"][0]["spec"].update(width=0)),
        "width 0 is not positive",
    ),
    "too narrow": (lambda f: rewrite(f, lambda d: d["model"]["slots"][0]["spec"].update(width=2)), "minimum of 3"),
    "topology": (lambda f: rewrite(f, lambda d: d["model"]["slots"][0]["spec"].update(topology="x")), "'x'; allowed"),
    "unknown blueprint": (in_state("blueprint", "x"), "unknown vector blueprint 'x'; allowed: norm"),
    "no blueprint": (in_state("blueprint", None), "blueprint None in BLENDING; just the live stages have one"),
    "unknown stage": (in_state("stage", "ASLEEP"), "'ASLEEP'; allowed: .'DORMANT'"),
    "stage of another type": (in_state("stage", ["DORMANT"]), "allowed: .'DORMANT'"),
    "seed in DORMANT": (in_state("stage", "DORMANT"), "blueprint 'norm' in DORMANT; just the live stages"),
    "fossil in mid-ramp": (in_state("stage", "FOSSILIZED"), "a ramp in FOSSILIZED; only BLENDING"),
    "alpha in TRAINING": (in_state("stage", "TRAINING"), "alpha goes to 0.7 in TRAINING; it must go to 0.0"),
    "pruning upwards": (in_state("pruning", True), "alpha goes to 0.7 in BLENDING; it must go to 0.0"),
    "cooldown": (in_state("cooldown", 2), "cooldown 2 in BLENDING; allowed: 0 to 0"),
    "style": (in_state("style", "x"), "style 'x' is none of .'add'"),
    "tempo": (in_state("tempo", -1), "must be 0 or more"),
    "germinations": (in_state("germinations", 0), "0 germinations, but a seed in BLENDING"),
    "target": (in_state("alpha_target", 0.9), "alpha goes to 0.7 in BLENDING; it must go to 0.9"),
    "gradient": (in_state("gradient_norm", "large"), "'large'; allowed: float"),
    "measurement": (in_state("auditions", [[1.0]]), "allowed: Measurement"),
    "measurements": (in_state("auditions", [[1.0, 1.0]] * 3), "more than 2 measurements"),
    "alpha": (in_ramp("alpha", 1.5), r"alpha 1.5 is not in \[0, 1\]"),
    "alpha beyond its ramp": (in_ramp("alpha", 0.9), "alpha 0.9 is not between 0.0 and 0.7"),
    "infinite alpha": (in_ramp("alpha", "inf"), r"alpha inf is not in \[0, 1\]"),
    "curve": (in_ramp("curve", "x"), "unknown alpha curve 'x'; allowed: linear"),
    "done": (in_ramp("done", 4), "step 4 of 3 is not a place"),
}


def frame(model: MorphogeneticModel) -> tuple[dict[str, bytes], dict[str, SeedState], dict[str, int], str]:
    """Everything of a model that a load could change."""
    tensors = {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}
    modules = {name: id(module) for name, module in model.named_modules()}
    return tensors, states(model), modules, repr((model.isolation, model.config, model.budget, model.rng_seed))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a checkpoint of an MLP with a BLENDING and a DORMANT slot."""
    folder = tmp_path_factory.mktemp("pristine") / "model"
    build("mlp", {"r0c0": SeedStage.BLENDING, "r0c1": SeedStage.DORMANT}).save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def unpack(pristine: dict[str, bytes], folder: Path) -> Path:
    """Write these files."""
    folder.mkdir()
    for name, raw in pristine.items():
        (folder / name).write_bytes(raw)
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(pristine: dict[str, bytes], tmp_path: Path, damage: str) -> None:
    """Invariant 15: an error that says what was given and what is allowed; the model handed in is untouched."""
    folder = unpack(pristine, tmp_path / "model")
    change, message = DAMAGE[damage]
    change(folder)
    victim = build("mlp", {"r0c0": SeedStage.TRAINING, "r0c1": SeedStage.HOLDING})
    before = frame(victim)
    with pytest.raises(CheckpointError, match=message):
        MorphogeneticModel.load(folder, victim)
    assert frame(victim) == before


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_is_refused(
    pristine: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """No byte of either file can change unnoticed, but for the layout of the JSON."""
    name = data.draw(st.sampled_from(sorted(pristine)))
    place = data.draw(st.integers(0, len(pristine[name]) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != pristine[name][place]))
    folder = unpack(pristine, tmp_path_factory.mktemp("flip") / "model")
    spoil(folder, name, lambda raw: raw[:place] + bytes([value]) + raw[place + 1 :])
    if name == "model.json":
        try:
            if json.loads((folder / name).read_text()) == json.loads(pristine[name]):
                return
        except ValueError:
            pass
    with pytest.raises(CheckpointError):
        checkpoint.read(folder)


@pytest.mark.parametrize("honest_digest", [False, True])
def test_pickle_is_refused_and_never_run(pristine: dict[str, bytes], tmp_path: Path, honest_digest: bool) -> None:
    """Requirement 82: a pickle in the place of the weights executes nothing, whatever the JSON says of it."""
    folder, proof = unpack(pristine, tmp_path / "model"), tmp_path / "executed"
    for raw in (pickle.dumps(Bomb(proof)), _torch_pickle(Bomb(proof), tmp_path)):
        if honest_digest:
            replace_weights(folder, raw)
        else:
            (folder / "weights.safetensors").write_bytes(raw)
        with pytest.raises(CheckpointError):
            MorphogeneticModel.load(folder, build("mlp", {"r0c0": SeedStage.DORMANT, "r0c1": SeedStage.DORMANT}))
    assert not proof.exists()


def _torch_pickle(bomb: Bomb, folder: Path) -> bytes:
    torch.save({"weights": bomb}, folder / "bomb.pt")
    return (folder / "bomb.pt").read_bytes()


def test_foreign_host_must_be_handed_in(pristine: dict[str, bytes], tmp_path: Path) -> None:
    """The error names the host, the hosts that can be rebuilt, the slots, and what to do."""
    folder = unpack(pristine, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"MLPHost .*CNNHost, GPTHost.*slots \['r0c0', 'r0c1'\].* hand it in"):
        MorphogeneticModel.load(folder)


def test_missing_folder(tmp_path: Path) -> None:
    """Says which file is looked for."""
    with pytest.raises(CheckpointError, match=r"model\.json cannot be read \(No such file"):
        MorphogeneticModel.load(tmp_path / "nowhere")


@pytest.mark.parametrize("slots", [["r0c0"], ["r0c0", "r0c1", "r0c2"], ["r0c0", "r0c2"]])
def test_other_slots_are_refused(pristine: dict[str, bytes], tmp_path: Path, slots: list[str]) -> None:
    """The model handed in has the checkpoint's slots, no fewer and no more."""
    folder = unpack(pristine, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"has slots \['r0c0', 'r0c1'\], the model handed in"):
        MorphogeneticModel.load(folder, MorphogeneticModel(MLPHost(), slots))


def test_other_host_is_refused(tmp_path: Path) -> None:
    """A resolution shows in no weight; the configuration tells the hosts apart."""
    MorphogeneticModel(CNNHost((4,), classes=2, resolution=8)).save(tmp_path / "model")
    other = MorphogeneticModel(CNNHost((4,), classes=2, resolution=4))
    with pytest.raises(CheckpointError, match=r"'resolution': 8.* handed in .*'resolution': 4"):
        MorphogeneticModel.load(tmp_path / "model", other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 3}, "unexpected keyword argument 'depth'"),
        ({"kernel_size": 2}, "kernel_size 2 must be odd"),
        ({"classes": -1}, "negative dimension"),
        ({"channels": "wide"}, "CNNHost of"),
        ({"channels": [4, 8], "pools": 0}, "unknown slot 'r1c0'; allowed: r0c0, r0c1"),
        ({"channels": [8]}, "slot 'r0c0' is for image of width 4, in the model handed in for image of width 8"),
        ({"classes": 5}, r"linear.weight is \(2, 4\) .* needs \(5, 4\)"),
    ],
)
def test_bad_host_configuration(tmp_path: Path, change: Json, message: str) -> None:
    """A host that cannot be built from what the JSON says, or that does not fit its weights."""
    MorphogeneticModel(CNNHost((4,), classes=2, resolution=8)).save(tmp_path / "model")
    rewrite(tmp_path / "model", lambda document: document["model"]["host"]["config"].update(change))
    with pytest.raises(CheckpointError, match=message):
        MorphogeneticModel.load(tmp_path / "model")


def test_blueprint_that_is_not_registered_here(tmp_path: Path) -> None:
    """A blueprint of the user's own must be registered before loading."""

    @BlueprintRegistry.register("vector", "own", lambda width: width)
    class Own(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(width))

        def forward(self, h: Tensor) -> Tensor:
            return self.weight * h

    try:
        model = MorphogeneticModel(MLPHost(), ["r0c0"])
        model.germinate_seed("r0c0", "own")
        model.save(tmp_path / "model")
        MorphogeneticModel.load(tmp_path / "model", MorphogeneticModel(MLPHost(), ["r0c0"]))
    finally:
        BlueprintRegistry.unregister("vector", "own")
    with pytest.raises(CheckpointError, match="unknown vector blueprint 'own'; allowed: norm"):
        MorphogeneticModel.load(tmp_path / "model", MorphogeneticModel(MLPHost(), ["r0c0"]))
