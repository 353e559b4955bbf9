"""Checkpoints of a model that are refused: damaged ones, and those of another model."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from staged import MLPHost, build, states
from torch import Tensor, nn

from esper.kasmina import BlueprintRegistry, CNNHost, MorphogeneticModel, SeedState, checkpoint
from esper.leyline import CheckpointError, SeedStage

Json = dict[str, Any]  # Any: parsed JSON

# -- damage -----------------------------------------------------------------------------------------------------------


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
    "no slots": (in_model("slots", []), r"has slots \[\], the given model \['r0c0', 'r0c1'\]"),
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
    "spec unknown": (lambda f: rewrite(f, lambda d: d["model"]["slots"][0].update(spec=None)), "is not known"),
    "width": (
        lambda f: rewrite(f, lambda d: d["model"]["slots"][0]["spec"].update(width=16)),
        "vector of width 16, in the given model for vector of width 8",
    ),
    "width 0": (
        lambda f: rewrite(f, lambda d: d["model"]["slots"][0]["spec"].update(width=0)),
        "width 0 is not positive",
    ),
    "too narrow": (lambda f: rewrite(f, lambda d: d["model"]["slots"][0]["spec"].update(width=2)), "minimum of 3"),
    "topology": (lambda f: rewrite(f, lambda d: d["model"]["slots"][0]["spec"].update(topology="x")), "'x'; allowed"),
    "unknown blueprint": (in_state("blueprint", "x"), "unknown vector blueprint 'x'; allowed: norm"),
    "no blueprint": (in_state("blueprint", None), "blueprint None in BLENDING; only live stages have one"),
    "unknown stage": (in_state("stage", "ASLEEP"), "'ASLEEP'; allowed: .'DORMANT'"),
    "stage of another type": (in_state("stage", ["DORMANT"]), "allowed: .'DORMANT'"),
    "seed in DORMANT": (in_state("stage", "DORMANT"), "blueprint 'norm' in DORMANT; only live stages"),
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
    "done": (in_ramp("done", 4), "step 4 of 3 is not a step"),
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


@pytest.mark.invariant(15)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(pristine: dict[str, bytes], tmp_path: Path, damage: str) -> None:
    """The error names the value and what is allowed, and the model passed in stays unchanged."""
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
    offset = data.draw(st.integers(0, len(pristine[name]) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != pristine[name][offset]))
    folder = unpack(pristine, tmp_path_factory.mktemp("flip") / "model")
    spoil(folder, name, lambda raw: raw[:offset] + bytes([value]) + raw[offset + 1 :])
    if name == "model.json":
        try:
            if json.loads((folder / name).read_text()) == json.loads(pristine[name]):
                return
        except ValueError:
            pass
    with pytest.raises(CheckpointError):
        checkpoint.read(folder)


@pytest.mark.requirement(82)
@pytest.mark.parametrize("honest_digest", [False, True])
def test_pickle_is_refused_and_never_run(pristine: dict[str, bytes], tmp_path: Path, honest_digest: bool) -> None:
    """A pickle in place of the weights is never executed, whatever the JSON says."""
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


# -- another model ----------------------------------------------------------------------------------------------------


def test_foreign_host_must_be_handed_in(pristine: dict[str, bytes], tmp_path: Path) -> None:
    """The error names the host, the hosts that can be rebuilt, the slots, and what to do."""
    folder = unpack(pristine, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"MLPHost .*CNNHost, GPTHost.*slots \['r0c0', 'r0c1'\].* call load"):
        MorphogeneticModel.load(folder)


def test_missing_folder(tmp_path: Path) -> None:
    """Says which file is looked for."""
    with pytest.raises(CheckpointError, match=r"model\.json cannot be read \(No such file"):
        MorphogeneticModel.load(tmp_path / "nowhere")


@pytest.mark.parametrize("slots", [["r0c0"], ["r0c0", "r0c1", "r0c2"], ["r0c0", "r0c2"]])
def test_other_slots_are_refused(pristine: dict[str, bytes], tmp_path: Path, slots: list[str]) -> None:
    """The model handed in has the checkpoint's slots, no fewer and no more."""
    folder = unpack(pristine, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"has slots \['r0c0', 'r0c1'\], the given model"):
        MorphogeneticModel.load(folder, MorphogeneticModel(MLPHost(), slots))


def test_other_host_is_refused(tmp_path: Path) -> None:
    """A resolution shows in no weight; the configuration tells the hosts apart."""
    MorphogeneticModel(CNNHost((4,), classes=2, resolution=8)).save(tmp_path / "model")
    other = MorphogeneticModel(CNNHost((4,), classes=2, resolution=4))
    with pytest.raises(CheckpointError, match=r"'resolution': 8.* given model .*'resolution': 4"):
        MorphogeneticModel.load(tmp_path / "model", other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 3}, "unexpected keyword argument 'depth'"),
        ({"kernel_size": 2}, "kernel_size 2 must be odd"),
        ({"classes": -1}, "negative dimension"),
        ({"channels": "wide"}, "CNNHost of"),
        ({"channels": [4, 8], "pools": 0}, r"weights.safetensors lacks \['host.segments"),
        ({"channels": [8]}, r"conv.weight is \(4, 3, 3, 3\) .* needs \(8, 3, 3, 3\)"),
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


def test_a_forged_size_is_refused_before_the_host_is_built(tmp_path: Path) -> None:
    """Forty million channels would need terabytes; the stored weights show that they are not there."""
    MorphogeneticModel(CNNHost((4, 8), classes=3), slots=["r1c0"]).save(tmp_path / "model")
    rewrite(tmp_path / "model", lambda document: document["model"]["host"]["config"].update(channels=[4, 40_000_000]))
    with pytest.raises(CheckpointError, match=r"is \(8, 4, 3, 3\) of .*; the model needs \(40000000, 4, 3, 3\)"):
        MorphogeneticModel.load(tmp_path / "model")
