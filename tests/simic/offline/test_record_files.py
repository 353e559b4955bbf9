"""Record files: what goes in comes out, in few bytes; a file is whole or not there; damage is told."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from simic.offline.made_up import HEADER, episodes, header, part, same

from esper.leyline import BadValueError, CheckpointError, StorageError
from esper.simic.offline import records as module
from esper.simic.offline.records import Records, RecordWriter
from esper.simic.offline.shards import FLAGS, RECORD_FILE, check_unused, episode_bytes, open_shard, to_tensors
from esper.storage.tensor_files import read_header, write_tensor_file
from esper.tamiyo import ActionTable
from esper.tamiyo.heads import ActionHead


def write(folder: Path, count: int = 5, **changes: object) -> Path:
    """One file of made-up episodes."""
    like = header(**changes)
    with RecordWriter(folder, like) as writer:
        writer.append(episodes(count, like))
    return folder / "00000.safetensors"


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    """All fields to the bit, all of the header, and nothing else in the folder."""
    write(tmp_path / "new" / "folder", 5)
    records = Records.open(tmp_path / "new" / "folder")
    assert (records.header, len(records), records.transitions) == (HEADER, 5, 20)
    assert same(records.episodes(), episodes(5))
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["00000.safetensors"]


def test_few_bytes(tmp_path: Path) -> None:
    """Flags and masks take a byte, choices too; what only the critic sees is a tensor of its own."""
    with safe_open(write(tmp_path), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    assert {tensors[name].dtype for name in (*FLAGS, "mask.op", "mask.slot")} == {torch.bool}
    assert (tensors["actions"].dtype, tensors["policy"].dtype) == (torch.uint8, torch.int32)
    assert {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()} == {torch.float32}
    observations = episodes(5).observations
    assert torch.equal(tensors["observations"], observations[..., :-2])
    assert torch.equal(tensors["critic"], observations[..., -2:])
    assert sum(tensor.nbytes for tensor in tensors.values()) == 5 * episode_bytes(HEADER)


def test_more_than_256_choices(tmp_path: Path) -> None:
    """An index of 299 does not fit into a byte."""
    wide = header(table=ActionTable((ActionHead("op", 300),)))
    chosen = episodes(2, wide)._replace(actions=torch.full((2, 4, 1), 299))
    with RecordWriter(tmp_path, wide) as writer:
        writer.append(chosen)
    assert same(Records.open(tmp_path).episodes(), chosen)


def test_files_are_filled_and_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However episodes arrive, a file has as many as fit; a full one is on disk at once, the rest at the end."""
    monkeypatch.setattr(module, "SHARD_BYTES", 3 * episode_bytes(HEADER))
    whole = episodes(11)
    writer = RecordWriter(tmp_path, HEADER, "a-")
    for begin, end, files in ((0, 2, 0), (2, 4, 1), (4, 11, 3)):
        writer.append(part(whole, slice(begin, end)))
        assert len(list(tmp_path.iterdir())) == writer.files == files
    writer.flush()
    names = [f"a-0000{number}.safetensors" for number in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [open_shard(tmp_path / name).content.episodes for name in names] == [3, 3, 3, 2]
    assert same(Records.open(tmp_path).episodes(), whole)


def test_an_error_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a full disk nor an error of the caller leaves a part of a file."""
    with pytest.raises(RuntimeError, match="mine"), RecordWriter(tmp_path, HEADER) as writer:
        writer.append(episodes(2))
        raise RuntimeError("mine")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match=r"00000\.safetensors cannot be written \(No space left"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_replaced(tmp_path: Path) -> None:
    """Two that write to one folder do not destroy each other's records."""
    path = write(tmp_path)
    before = path.read_bytes()
    with pytest.raises(BadValueError, match=r"00000\.safetensors exists: another process records to this folder"):
        write(tmp_path, 2)
    assert path.read_bytes() == before
    with pytest.raises(BadValueError, match=r"--record .* already holds records; choose another folder"):
        check_unused(tmp_path)
    with pytest.raises(BadValueError, match=r"--record .*safetensors is a file; name a folder"):
        check_unused(path)
    check_unused(tmp_path / "new")


def test_episodes_that_do_not_fit_their_header() -> None:
    """Each is refused before anything is written."""
    fine = episodes(2)
    for wrong, why in (
        (fine._replace(observations=fine.observations[..., 1:]), "observations have 6 columns; .* layout has 7"),
        (fine._replace(masks={"op": fine.masks["op"]}), r"masks for heads \['op'\]; .* table has \['op', 'slot'\]"),
        (fine._replace(actions=fine.actions[:, :2]), r"actions is \(torch.uint8, \(2, 2, 2\)\), not .*\(2, 4, 2\)"),
        (fine._replace(policy=torch.tensor([0, 2])), "policies are numbered from 0 to 2, of 2"),
    ):
        with pytest.raises(BadValueError, match=why):
            to_tensors(HEADER, wrong)


# -- damage -----------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def foreign(path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(2)}, path)


def newer(path: Path) -> None:
    write_tensor_file(path, RECORD_FILE._replace(version=3), {}, {})


def other_content(path: Path) -> None:
    write_tensor_file(path, RECORD_FILE, {"header": {}, "episodes": 1, "source": ""}, {})


def other_tensors(path: Path) -> None:
    tensors = to_tensors(HEADER, episodes(5))
    write_tensor_file(path, RECORD_FILE, read_header(path, RECORD_FILE), {**tensors, "forced": torch.zeros(5, 4)})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut, r"00000.safetensors is no record file, or it is truncated .*; copy it again, or omit it"),
        (change, r"00000.safetensors was changed or damaged"),
        (foreign, r"00000.safetensors is no record file: its format is None, not 'esper-records'"),
        (newer, r"00000.safetensors has version 3 of esper-records; this Esper reads version 2: make it again"),
        (other_content, r"00000.safetensors: the header.header has unknown keys"),
        (other_tensors, r"00000.safetensors does not fit its header \(forced is .*record it again, or omit it"),
    ],
)
def test_damage_is_told(damage: Callable[[Path], None], told: str, tmp_path: Path) -> None:
    """With the file and a remedy; as early as the header shows it."""
    damage(write(tmp_path))
    with pytest.raises(CheckpointError, match=told):
        Records.open(tmp_path).episodes()
