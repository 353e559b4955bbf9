"""Folders of tensors and JSON: what comes back, what is refused, and what a crash leaves."""

import gc
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import BadValueError, CheckpointError
from esper.storage.stored import StoredFormat, checkpoint_errors, read_stored, write_stored

Json = Any  # Any: parsed JSON

KIND = StoredFormat("esper-test", 3, "thing.json", "thing.safetensors")
CONTENT: dict[str, Json] = {"thing": {"rate": 0.1 + 0.2, "names": ["a", "é"], "none": None}, "extra": 7}
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)


def tensors() -> dict[str, Tensor]:
    """Of two dimensions, of one and of none."""
    return {"weight": torch.arange(6.0).reshape(2, 3) / 7, "bias": torch.ones(3), "step": torch.tensor(5)}


def files(folder: Path) -> dict[str, bytes]:
    """What lies in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as it was written."""
    write_stored(tmp_path / "thing", KIND, CONTENT, tensors())
    return tmp_path / "thing"


# -- what comes back --------------------------------------------------------------------------------------------------


def test_round_trip(folder: Path) -> None:
    """The content without what the format adds, and the tensors, bit for bit."""
    content, found = read_stored(folder, KIND)
    assert content == CONTENT
    assert set(found) == set(tensors())
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_the_files(folder: Path) -> None:
    """Two files; the JSON has format and version first, the weights and its own checksum last."""
    assert set(files(folder)) == {"thing.json", "thing.safetensors"}
    document = json.loads((folder / "thing.json").read_text())
    assert list(document) == ["format", "version", "thing", "extra", "weights", "checksum"]
    assert (document["format"], document["version"]) == ("esper-test", 3)
    raw = (folder / "thing.safetensors").read_bytes()
    assert document["weights"] == {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def test_nothing_is_enough(tmp_path: Path) -> None:
    """No content and no tensors."""
    write_stored(tmp_path / "thing", KIND, {}, {})
    assert read_stored(tmp_path / "thing", KIND) == ({}, {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every bit pattern of a dtype, a scalar and an empty tensor."""
    values = torch.arange(16, dtype=torch.uint8) % 2 if dtype == torch.bool else torch.arange(16, dtype=torch.uint8)
    given = {"values": values.view(dtype), "scalar": values.view(dtype)[0], "empty": values.view(dtype)[:0]}
    write_stored(tmp_path / "thing", KIND, {}, given)
    found = read_stored(tmp_path / "thing", KIND)[1]
    for name, tensor in given.items():
        assert (found[name].dtype, found[name].shape) == (dtype, tensor.shape)
    assert torch.equal(found["values"].view(torch.uint8), values)


def test_generator_state(tmp_path: Path) -> None:
    """A stream of random numbers goes on where it was."""
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    write_stored(tmp_path / "thing", KIND, {}, {"generator": generator.get_state()})
    expected = torch.rand(4, generator=generator)
    fresh = torch.Generator()
    fresh.set_state(read_stored(tmp_path / "thing", KIND)[1]["generator"])
    assert torch.equal(torch.rand(4, generator=fresh), expected)


def test_any_tensor_is_made_storable(tmp_path: Path) -> None:
    """Transposed, tied, overlapping, expanded, with a gradient, lazily conjugated or negated: what counts is values."""
    base = torch.arange(12.0).reshape(3, 4)
    turning = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    given = {
        "base": base,
        "tied": base,
        "transposed": base.T,
        "part": base[1:],
        "column": base[:, 2],
        "expanded": torch.ones(1).expand(4),
        "trained": torch.ones(2, requires_grad=True) * 2,
        "conjugate": turning.conj(),
        "negated": turning[:1].conj().imag,  # of one number, so contiguous as it is
    }
    write_stored(tmp_path / "thing", KIND, {}, given)
    found = read_stored(tmp_path / "thing", KIND)[1]
    assert set(found) == set(given)
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor.detach()), name


@pytest.mark.gpu
def test_from_the_gpu(tmp_path: Path) -> None:
    """Tensors come back on the CPU."""
    write_stored(tmp_path / "thing", KIND, {}, {"x": torch.arange(3.0, device="cuda")})
    assert torch.equal(read_stored(tmp_path / "thing", KIND)[1]["x"], torch.arange(3.0))


def test_tensors_have_memory_of_their_own(folder: Path) -> None:
    """Each can be changed in place; neither the file, nor another tensor, nor a second reading notices."""
    before = files(folder)
    found, again = read_stored(folder, KIND)[1], read_stored(folder, KIND)[1]
    gc.collect()
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*found.values(), *again.values())}) == 6
    for tensor in found.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.untyped_storage().resizable()  # torch's own memory; a foreign buffer is not
        tensor.zero_()
    assert files(folder) == before
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors().items())


def test_writing_leaves_the_tensors_alone(tmp_path: Path) -> None:
    """What was stored still shares its memory, and trains on."""
    weight = torch.ones(3, requires_grad=True)
    given = {"one": weight, "two": weight}
    write_stored(tmp_path / "thing", KIND, {}, given)
    assert given["one"] is given["two"] is weight and weight.requires_grad


# -- what cannot be stored --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"version": 1}, r"the format itself uses the keys \['version'\]"),
        ({"weights": 1, "checksum": 2}, r"uses the keys \['checksum', 'weights'\]; rename"),
        ({"thing": {1: "a", 10: "b"}}, "keys of JSON objects are strings"),
        ({"thing": object()}, "not JSON serializable"),
    ],
)
def test_content_that_would_not_come_back(tmp_path: Path, content: dict[str, Json], message: str) -> None:
    """Refused before anything is written."""
    with pytest.raises(CheckpointError, match=message):
        write_stored(tmp_path / "thing", KIND, content, tensors())
    assert list(tmp_path.iterdir()) == []


def test_floats_without_a_number(tmp_path: Path) -> None:
    """JSON has no infinity: `records` makes strings of them, and floats again."""
    write_stored(tmp_path / "thing", KIND, {"best": float("-inf")}, {})
    assert read_stored(tmp_path / "thing", KIND)[0] == {"best": "-inf"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", {"moment": 1}, "x is a dict; a checkpoint holds tensors only"),
        ("x", torch.ones(2, device="meta"), "weights cannot be stored"),
        ("x", torch.eye(2).to_sparse(), "weights cannot be stored"),
        ("x", torch.ones(2, dtype=torch.complex128), "weights cannot be stored: .*complex128"),
        ("x", torch.ones(2, dtype=torch.uint8).view(torch.float8_e8m0fnu), "weights cannot be stored: .*F8_E8M0"),
        ("__metadata__", torch.ones(2), "weights cannot be stored"),
    ],
)
def test_tensors_that_would_not_come_back(folder: Path, name: str, value: Json, message: str) -> None:
    """Refused, also where safetensors writes what it does not read; what was there stays."""
    before = files(folder)
    with pytest.raises(CheckpointError, match=message):
        write_stored(folder, KIND, {}, {name: value})
    assert files(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["thing"]


# -- damage -----------------------------------------------------------------------------------------------------------


def spoil(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file."""
    (folder / name).write_bytes(change((folder / name).read_bytes()))


def rewrite(folder: Path, **changes: Json) -> None:
    """Change the JSON and make its checksum right again; None removes a key."""
    document = json.loads((folder / "thing.json").read_text()) | changes
    document = {key: value for key, value in document.items() if value is not None and key != "checksum"}
    plain = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    (folder / "thing.json").write_text(json.dumps(document | {"checksum": hashlib.sha256(plain).hexdigest()}))


def replace_weights(folder: Path, raw: bytes) -> None:
    """Other weights, with size and digest made right."""
    (folder / "thing.safetensors").write_bytes(raw)
    rewrite(folder, weights={"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no json": (lambda f: (f / "thing.json").unlink(), r"thing\.json cannot be read .*thing\.json and thing\.safe"),
    "no weights": (lambda f: (f / "thing.safetensors").unlink(), r"thing\.safetensors cannot be read \(No such file"),
    "empty json": (lambda f: spoil(f, "thing.json", lambda raw: b""), "truncated or damaged"),
    "half json": (lambda f: spoil(f, "thing.json", lambda raw: raw[: len(raw) // 2]), "truncated or damaged"),
    "deep json": (lambda f: spoil(f, "thing.json", lambda raw: b"[" * 100_000), "truncated or damaged"),
    "a list": (lambda f: spoil(f, "thing.json", lambda raw: b"[]"), "format is None; allowed: 'esper-test'"),
    "NaN": (lambda f: spoil(f, "thing.json", lambda raw: raw.replace(b"7", b"NaN", 1)), "NaN is not a JSON value"),
    "other content": (
        lambda f: spoil(f, "thing.json", lambda raw: raw.replace(b'"a"', b'"b"')),
        "was changed: it states checksum",
    ),
    "other key": (lambda f: spoil(f, "thing.json", lambda raw: raw.replace(b'"rate"', b'"rats"')), "was changed"),
    "foreign format": (lambda f: rewrite(f, format="x"), "format is 'x'; allowed: 'esper-test'"),
    "no format": (lambda f: rewrite(f, format=None), "format is None; allowed"),
    "version of the past": (lambda f: rewrite(f, version=2), "version is 2; this Esper reads version 3"),
    "version of the future": (lambda f: rewrite(f, version=4), "version is 4; this Esper reads version 3"),
    "version of no kind": (lambda f: rewrite(f, version=[2]), r"version is \[2\]; this Esper reads version 3"),
    "a float as version": (lambda f: rewrite(f, version=3.0), r"version is 3\.0; this Esper reads version 3"),
    "no version": (lambda f: rewrite(f, version=None), "version is None; this Esper reads version 3"),
    "nothing on the weights": (lambda f: rewrite(f, weights=None), r"it lacks \['weights'\]"),
    "half on the weights": (lambda f: rewrite(f, weights={"size": 1}), "was changed, .*written was {'size': 1}"),
    "size of no kind": (lambda f: rewrite(f, weights={"size": "1", "sha256": ""}), "written was {'size': '1'"),
    "empty weights": (
        lambda f: spoil(f, "thing.safetensors", lambda raw: b""),
        "truncated or was replaced: it has 0 bytes",
    ),
    "half weights": (lambda f: spoil(f, "thing.safetensors", lambda raw: raw[: len(raw) // 2]), "truncated"),
    "longer weights": (lambda f: spoil(f, "thing.safetensors", lambda raw: raw + b"\0"), "truncated or was replaced"),
    "flipped bit": (
        lambda f: spoil(f, "thing.safetensors", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])),
        "was changed, is truncated or was replaced",
    ),
    "no safetensors": (lambda f: replace_weights(f, b"12345678"), "is no safetensors file"),
}


@pytest.mark.invariant(15)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(folder: Path, damage: str) -> None:
    """The error says what was found and what would be right."""
    change, message = DAMAGE[damage]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_stored(folder, KIND)
    assert str(folder) in str(caught.value)


def test_no_checksum(folder: Path) -> None:
    """Leaving it out is no way around it."""
    document = json.loads((folder / "thing.json").read_text())
    del document["checksum"]
    (folder / "thing.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"it lacks \['checksum'\]"):
        read_stored(folder, KIND)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """No byte of either file can change unnoticed, but for the layout of the JSON."""
    folder = tmp_path_factory.mktemp("flip") / "thing"
    write_stored(folder, KIND, CONTENT, tensors())
    name = data.draw(st.sampled_from([KIND.document, KIND.weights]))
    whole = (folder / name).read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != whole[place]))
    changed = whole[:place] + bytes([value]) + whole[place + 1 :]
    (folder / name).write_bytes(changed)
    if name == KIND.document:
        try:
            if json.loads(changed) == json.loads(whole):
                return
        except ValueError:
            pass
    with pytest.raises(CheckpointError):
        read_stored(folder, KIND)


def test_weights_of_another_folder(folder: Path, tmp_path: Path) -> None:
    """Two whole folders do not make a third: the JSON knows its own weights."""
    write_stored(tmp_path / "other", KIND, CONTENT, {name: tensor + 1 for name, tensor in tensors().items()})
    (folder / KIND.weights).write_bytes((tmp_path / "other" / KIND.weights).read_bytes())
    with pytest.raises(CheckpointError, match="was changed, is truncated or was replaced"):
        read_stored(folder, KIND)


class Bomb:
    """Makes a folder on unpickling."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.requirement(82)
@pytest.mark.parametrize("honest_digest", [False, True])
@pytest.mark.parametrize("of_torch", [False, True])
def test_pickle_is_refused_and_never_run(folder: Path, tmp_path: Path, of_torch: bool, honest_digest: bool) -> None:
    """A pickle in place of the weights is never executed, whatever the JSON says."""
    proof, written = tmp_path / "executed", tmp_path / "bomb"
    if of_torch:
        torch.save({"weight": Bomb(proof)}, written)
    else:
        written.write_bytes(pickle.dumps(Bomb(proof)))
    if honest_digest:
        replace_weights(folder, written.read_bytes())
    else:
        (folder / KIND.weights).write_bytes(written.read_bytes())
    with pytest.raises(CheckpointError):
        read_stored(folder, KIND)
    assert not proof.exists()
    pickle.loads(pickle.dumps(Bomb(proof)))
    assert proof.exists()  # it would have


def test_other_tensors_are_the_callers_business(folder: Path) -> None:
    """Which tensors there must be is not known here: they are given as they are."""
    replace_weights(folder, safetensors.torch.save({"x": torch.ones(2)}))
    content, found = read_stored(folder, KIND)
    assert content == CONTENT and list(found) == ["x"]


@pytest.mark.parametrize("target", ["nowhere", "thing/thing.json"])
def test_no_folder(folder: Path, target: str) -> None:
    """Nothing there, or a file: says which file is looked for."""
    with pytest.raises(CheckpointError, match=r"thing\.json cannot be read \(No"):
        read_stored(folder.parent / target, KIND)


# -- replacing --------------------------------------------------------------------------------------------------------


def test_replaces_its_own_kind(folder: Path) -> None:
    """The second one wins and leaves nothing behind."""
    write_stored(folder, KIND, {"thing": 2}, {"x": torch.ones(1)})
    content, found = read_stored(folder, KIND)
    assert content == {"thing": 2} and list(found) == ["x"]
    assert [path.name for path in folder.parent.iterdir()] == ["thing"]


def test_makes_the_folders_above(tmp_path: Path) -> None:
    """A path of which nothing exists."""
    write_stored(tmp_path / "runs" / "1" / "thing", KIND, CONTENT, tensors())
    assert read_stored(tmp_path / "runs" / "1" / "thing", KIND)[0] == CONTENT


def test_does_not_replace_strangers(folder: Path) -> None:
    """A folder with other files, or a file, is not deleted."""
    (folder / "notes.txt").write_text("mine")
    before = files(folder)
    for target in (folder, folder / "notes.txt"):
        with pytest.raises(CheckpointError, match="use a new folder"):
            write_stored(target, KIND, CONTENT, tensors())
    assert files(folder) == before
    other = StoredFormat("esper-other", 1, "other.json", "other.safetensors")
    with pytest.raises(CheckpointError, match=r"thing\.json"):
        write_stored(folder, other, CONTENT, tensors())
    assert files(folder) == before


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["weights", "json", "rename"])
def test_interrupted_writing_keeps_the_old_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: type[BaseException]
) -> None:
    """Whatever fails while a folder is written, the one that was there is whole, and nothing else is left."""
    before, rename = files(folder), Path.rename

    def fail(*args: object, **kwargs: object) -> None:
        raise error("stopped")

    def fail_for_new(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise error("stopped")
        return rename(self, target)

    with monkeypatch.context() as patch:
        if moment == "weights":
            patch.setattr(Path, "write_bytes", fail)
        elif moment == "json":
            patch.setattr(Path, "write_text", fail)
        else:
            patch.setattr(Path, "rename", fail_for_new)
        with pytest.raises(error, match="stopped"):
            write_stored(folder, KIND, {"thing": 2}, {"x": torch.ones(1)})
    assert files(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["thing"]


CRASH = """
import os, sys
from pathlib import Path
import torch
from esper.storage.stored import StoredFormat, write_stored
Path.write_text = lambda *args, **kwargs: os._exit(9)  # the weights are written, the JSON is not
kind = StoredFormat("esper-test", 3, "thing.json", "thing.safetensors")
write_stored(Path(sys.argv[1]), kind, {"thing": 2}, {"x": torch.ones(1)})
"""


def test_crash_keeps_the_old_one(folder: Path) -> None:
    """A process that ends in the middle cleans nothing up; the old one is whole, and the next can be written."""
    before = files(folder)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", CRASH, str(folder)], env=environment, timeout=120)
    assert done.returncode == 9
    assert files(folder) == before
    assert read_stored(folder, KIND)[0] == CONTENT
    write_stored(folder, KIND, {"thing": 3}, {})
    assert read_stored(folder, KIND) == ({"thing": 3}, {})


def test_a_writer_killed_between_two_renames(folder: Path) -> None:
    """The old one is read where it lies, and nothing is moved."""
    work = folder.parent / ".thing.esper-tmp"
    work.mkdir()
    folder.rename(work / "old")
    write_stored(work / "new", KIND, {"thing": 2}, {})
    assert read_stored(folder, KIND)[0] == CONTENT
    assert not folder.exists()
    write_stored(folder, KIND, {"thing": 3}, {})
    assert [path.name for path in folder.parent.iterdir()] == ["thing"]
    assert read_stored(folder, KIND)[0] == {"thing": 3}


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [BadValueError, ZeroDivisionError, KeyError, RuntimeError, TypeError, ValueError])
def test_refusal(error: type[Exception]) -> None:
    """What data can be to blame for becomes a CheckpointError that says where, with its cause."""
    with pytest.raises(CheckpointError, match=r"the place: .*bad") as caught, checkpoint_errors("the place"):
        raise error("bad")
    assert type(caught.value.__cause__) is error


def test_refusal_does_not_hide_the_rest() -> None:
    """A CheckpointError stays as it is, and a full disk or a wrong name in the code is no fault of the data."""
    with pytest.raises(CheckpointError, match=r"^bad$"), checkpoint_errors("the place"):
        raise CheckpointError("bad")
    for error in (OSError, AttributeError, KeyboardInterrupt):
        with pytest.raises(error), checkpoint_errors("the place"):
            raise error("bad")
