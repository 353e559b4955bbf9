"""Reading records: parts, epochs in random order with few files in memory, and which files belong together."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from simic.offline.made_up import HEADER, episodes, header, part, same

from esper.leyline import BadValueError, CheckpointError, UnknownNameError
from esper.simic.offline import records as module
from esper.simic.offline.episodes import Episodes, RecordHeader
from esper.simic.offline.records import Records, RecordWriter
from esper.simic.offline.shards import Shard, Tensors, episode_bytes, read_shard
from esper.tamiyo import ActionTable, ObservationLayout
from esper.tamiyo.heads import ActionHead

SIZES = (5, 5, 5, 5, 5, 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """27 episodes in six files, of which three fit into the pool."""
    monkeypatch.setattr(module, "SHARD_BYTES", SIZES[0] * episode_bytes(HEADER))
    with RecordWriter(tmp_path, HEADER) as writer:
        writer.append(episodes(27))
    largest = max(path.stat().st_size for path in tmp_path.iterdir())
    monkeypatch.setattr(module, "POOL_BYTES", 3 * largest)
    return tmp_path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read, in their order."""
    paths: list[Path] = []

    def note(shard: Shard) -> Tensors:
        paths.append(shard.path)
        return read_shard(shard)

    monkeypatch.setattr(module, "read_shard", note)
    return paths


def seeds(some: Episodes) -> list[int]:
    """Which episodes these are."""
    return [seed - 2**61 for seed in some.host_seed.tolist()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("rows", [range(27), range(4, 6), range(5, 10), range(26, 27), range(1, 27, 6)])
def test_parts(folder: Path, rows: range, read: list[Path]) -> None:
    """By number, over the borders of files; only those that are needed are read."""
    assert same(Records.open(folder).episodes(rows), part(episodes(27), torch.tensor(rows)))
    assert [int(path.stem) for path in read] == sorted({row // 5 for row in rows})


@pytest.mark.parametrize("rows", [range(0), range(27, 28), range(-1, 3), range(5, 0, -1)])
def test_parts_that_are_not_there(folder: Path, rows: range) -> None:
    with pytest.raises(BadValueError, match=r"range\(.*\) selects none or unknown ones of 27 episodes"):
        Records.open(folder).episodes(rows)


def test_in_order(folder: Path) -> None:
    """A file at a time."""
    parts = list(Records.open(folder).in_order())
    assert [len(some.policy) for some in parts] == list(SIZES)
    assert [seed for some in parts for seed in seeds(some)] == list(range(27))


def test_an_epoch(folder: Path) -> None:
    """Every episode once with all that belongs to it, in minibatches that are full but for the last, in an order that
    follows from the generator."""
    whole, records = episodes(27), Records.open(folder)
    batches = list(records.minibatches(4, generator()))
    assert [len(batch.policy) for batch in batches] == [4] * 6 + [3]
    assert sorted(seed for batch in batches for seed in seeds(batch)) == list(range(27))
    assert all(same(batch, part(whole, torch.tensor(seeds(batch)))) for batch in batches)
    orders = [[seeds(batch) for batch in records.minibatches(4, generator(seed))] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] == [seeds(batch) for batch in batches]
    assert orders[0] != orders[2]
    assert [len(batch.policy) for batch in records.minibatches(100, generator())] == [27]
    with pytest.raises(BadValueError, match="size 0 is not an integer of 1 or more"):
        records.minibatches(0, generator())


def test_an_epoch_mixes_files(folder: Path) -> None:
    """Files come in random order, and a minibatch has episodes of several: neighbours of the record are apart."""
    first: set[int] = set()
    neighbours = 0
    for seed in range(20):
        order = [each for batch in Records.open(folder).minibatches(9, generator(seed)) for each in seeds(batch)]
        first.add(order[0] // 5)
        neighbours += sum(abs(a - b) == 1 for a, b in pairwise(order))
    assert len(first) > 3
    assert neighbours < 20 * 26 / 4, "of all pairs in sequence; without shuffling all were neighbours"


def test_an_epoch_holds_few_files(folder: Path, read: list[Path]) -> None:
    """Each is read once, and never more than the pool ahead of what was given out."""
    given = 0
    for batch in Records.open(folder).minibatches(4, generator()):
        given += len(batch.policy)
        loaded = sum(SIZES[int(path.stem)] for path in read)
        assert loaded - given < 3 * 5 + 4
    assert len(read) == len(set(read)) == 6


# -- what belongs together --------------------------------------------------------------------------------------------


def write(folder: Path, name: str, count: int, like: RecordHeader, seed: int = 0) -> Path:
    with RecordWriter(folder, like, name) as writer:
        writer.append(episodes(count, like, seed))
    return folder / f"{name}00000.safetensors"


def test_several_paths(tmp_path: Path) -> None:
    """Files and folders, in the order given; one that is named twice counts once."""
    a, b = write(tmp_path / "x", "a", 3, HEADER), write(tmp_path / "y", "b", 2, HEADER, 1)
    joined = Records.open([b, tmp_path / "x", str(a)])
    assert len(joined) == 5
    assert torch.equal(joined.episodes(range(2)).gain, episodes(2, seed=1).gain)
    assert len(Records.open(str(tmp_path / "x"))) == 3


def test_policies_of_all_files_are_numbered_anew(tmp_path: Path) -> None:
    """Files name their own; together each has one number, and every episode keeps its own name."""
    names = [("learned", "random"), ("wait",), ("random", "wait")]
    for number, policies in enumerate(names):
        write(tmp_path, f"{number}-", 8, header(policies=policies), number)
    records = Records.open(tmp_path)
    assert records.header.policies == ("learned", "random", "wait")
    expected = [
        policies[number]
        for seed, policies in enumerate(names)
        for number in episodes(8, header(policies=policies), seed).policy.tolist()
    ]
    assert [records.policies[number] for number in records.episodes().policy.tolist()] == expected


def test_several_tasks(tmp_path: Path) -> None:
    """Only on request: then minibatches are of one task each, in a mixed order; headers and parts are by task."""
    long, short = header(policies=("wait",)), header(task="short", steps=2, policies=("random",))
    first, second = write(tmp_path, "a", 7, long), write(tmp_path, "b", 5, short)
    with pytest.raises(BadValueError, match=rf"{second} and {first} are of tasks 'short' and 'made_up'; open one of"):
        Records.open(tmp_path)
    assert Records.open(tmp_path, task="short").header == short
    with pytest.raises(UnknownNameError, match="unknown recorded task 'shrt'; allowed: made_up, short"):
        Records.open(tmp_path, task="shrt")
    both = Records.open(tmp_path, several_tasks=True)
    assert (len(both), both.transitions) == (12, 7 * 4 + 5 * 2)
    for ask in (lambda: both.header, both.episodes, lambda: list(both.in_order())):
        with pytest.raises(BadValueError, match=r"several tasks have a header each: .* by_task\(\), made_up, short"):
            ask()
    parts = both.by_task()
    assert parts["short"].header == header(task="short", steps=2, policies=("wait", "random"))
    assert set(parts["short"].episodes().policy.tolist()) == {1}
    lengths = [(len(batch.policy), batch.gain.shape[1]) for batch in both.minibatches(2, generator())]
    assert sorted(lengths) == [(1, 2), (1, 4), (2, 2), (2, 2), (2, 4), (2, 4), (2, 4)]
    orders = {tuple(batch.gain.shape[1] for batch in both.minibatches(2, generator(seed))) for seed in range(5)}
    assert len(orders) > 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"preset": "full"}, "have head presets 'full' and 'core'; open them separately"),
        ({"table": ActionTable((ActionHead("op", 3),))}, "differ in table: .*; open them separately"),
        ({"layout": ObservationLayout(("time_left",))}, "differ in layout: slots, blueprints, sensing"),
        ({"steps": 5, "by_loss": True}, "differ in steps, by_loss"),
        ({"chance_accuracy": 50.0, "by_loss": True}, "differ in chance_accuracy, by_loss"),
    ],
)
@pytest.mark.parametrize("several_tasks", [False, True])
def test_what_does_not_belong_together(
    changes: dict[str, object], told: str, several_tasks: bool, tmp_path: Path
) -> None:
    """Is refused with both files, also if another task stands before them."""
    if several_tasks:
        write(tmp_path, "0", 1, header(task="another"))
    first, second = write(tmp_path, "a", 1, HEADER), write(tmp_path, "b", 1, header(**changes))
    other = tmp_path / "000000.safetensors" if {"preset", "table", "layout"} & set(changes) and several_tasks else first
    with pytest.raises(BadValueError, match=f"{second} and {other} {told}"):
        Records.open(tmp_path, several_tasks=several_tasks)


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=r"holds no records; name a folder that --record has written to"):
        Records.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"a.safetensors: there is no such file"):
        Records.open(tmp_path / "a.safetensors")
    with pytest.raises(BadValueError, match="nothing to open"):
        Records.open([])
