"""Records of episodes on disk: a writer that appends, and a reader that streams.

with RecordWriter(folder, header) as writer:
    writer.append(episodes)
for batch in Records.open(folder).minibatches(256, generator):
    ...
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_known, require_whole
from esper.simic.offline.episodes import Episodes, RecordHeader
from esper.simic.offline.shards import (
    SUFFIX,
    Shard,
    Tensors,
    episode_bytes,
    join,
    open_shard,
    read_shard,
    record_files,
    select,
    to_episodes,
    to_tensors,
    write_shard,
)

SHARD_BYTES = 32 * 2**20  # most bytes of a file
POOL_BYTES = 4 * SHARD_BYTES  # bytes from which minibatches are drawn at a time


class RecordWriter:
    """Writes episodes to `FOLDER/<name>00000.safetensors`, …; leaving it as a context manager writes the last file."""

    def __init__(self, folder: Path, header: RecordHeader, name: str = "", source: str = "") -> None:
        """`source`: checksum of the settings of the run that records."""
        self.folder, self.header, self.name, self.source = folder, header, name, source
        self.files = 0  # written so far
        self._per_file = max(1, SHARD_BYTES // episode_bytes(header))
        self._waiting: list[Tensors] = []

    def append(self, episodes: Episodes) -> None:
        """Add finished episodes. Writes every file that is full."""
        self._waiting.append(to_tensors(self.header, episodes))
        if sum(len(part["policy"]) for part in self._waiting) >= self._per_file:
            self._write(full_only=True)

    def flush(self) -> None:
        """Write the episodes that fill no file."""
        self._write(full_only=False)

    def _write(self, *, full_only: bool) -> None:
        if not self._waiting:
            return
        waiting = join(self._waiting)
        numbers = torch.arange(len(waiting["policy"])).split(self._per_file)
        self._waiting = []
        for part in numbers:
            if len(part) < self._per_file and full_only:
                self._waiting = [select(waiting, part)]
            elif len(part):
                path = self.folder / f"{self.name}{self.files:05d}{SUFFIX}"
                write_shard(path, self.header, select(waiting, part), self.source)
                self.files += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()


class Records:
    """Recorded episodes in files. Only headers are in memory until episodes are asked for."""

    def __init__(self, shards: Sequence[Shard], policies: tuple[str, ...] | None = None) -> None:
        """`policies`: names and numbers of all policies; by default those of these files."""
        self.shards = tuple(shards)
        every = (name for shard in shards for name in shard.content.header.policies)
        self.policies = tuple(dict.fromkeys(every)) if policies is None else policies
        self.headers = {  # by task
            shard.content.header.task: replace(shard.content.header, policies=self.policies) for shard in shards
        }

    @classmethod
    def open(
        cls, paths: Path | str | Iterable[Path | str], *, task: str | None = None, several_tasks: bool = False
    ) -> Self:
        """The records in files and folders. Reads and checks all headers, no tensors.

        `task` selects those of one task; `several_tasks` allows tasks whose columns and heads are equal.
        """
        given = [paths] if isinstance(paths, Path | str) else list(paths)
        files = {file.resolve(): file for path in given for file in _files_of(Path(path))}
        shards = [open_shard(file) for file in files.values()]
        if task is not None:
            require_known("recorded task", task, sorted({shard.content.header.task for shard in shards}))
            shards = [shard for shard in shards if shard.content.header.task == task]
        if not shards:
            raise BadValueError("there is nothing to open; name at least one record file or folder")
        firsts: dict[str, Shard] = {}  # of each task
        for shard in shards:
            _check_alike(shard, shards[0], several_tasks=several_tasks)
            _check_alike(shard, firsts.setdefault(shard.content.header.task, shard), several_tasks=several_tasks)
        return cls(shards)

    @property
    def header(self) -> RecordHeader:
        """What all episodes have in common, with the policies of all files."""
        if len(self.headers) > 1:
            raise BadValueError(
                f"records of several tasks have a header each: take one of by_task(), {', '.join(self.headers)}"
            )
        return next(iter(self.headers.values()))

    def by_task(self) -> dict[str, "Records"]:
        """The records of each task. Numbers of policies stay the same."""
        return {
            task: Records([shard for shard in self.shards if shard.content.header.task == task], self.policies)
            for task in self.headers
        }

    def __len__(self) -> int:
        """Number of episodes."""
        return sum(shard.content.episodes for shard in self.shards)

    @property
    def transitions(self) -> int:
        """Number of steps in all episodes."""
        return sum(shard.content.episodes * shard.content.header.steps for shard in self.shards)

    def episodes(self, rows: range | None = None) -> Episodes:
        """All episodes in the order of the files, or some by number. Reads only the files that hold them."""
        header, rows = self.header, range(len(self)) if rows is None else rows
        if not rows or rows.step < 1 or rows[0] < 0 or rows[-1] >= len(self):
            raise BadValueError(f"{rows} selects none or unknown ones of {len(self)} episodes; count from 0, upwards")
        ends = accumulate(shard.content.episodes for shard in self.shards)
        parts = []
        for shard, end in zip(self.shards, ends, strict=True):
            begin = end - shard.content.episodes
            if inside := rows[bisect_left(rows, begin) : bisect_left(rows, end)]:
                parts.append(select(self._read(shard), torch.tensor(inside) - begin))
        return to_episodes(header, join(parts))

    def in_order(self) -> Iterator[Episodes]:
        """The episodes of one file after the other."""
        return (to_episodes(self.header, self._read(shard)) for shard in self.shards)

    def minibatches(self, size: int, generator: torch.Generator) -> Iterator[Episodes]:
        """One epoch: every episode once, in random order, `size` at a time and of one task each.

        Reads each file once and holds about `POOL_BYTES`, from which it draws. The last minibatch of a task is smaller
        if its episodes are no multiple of `size`.
        """
        require_whole("size", size, 1)
        return self._interleave(size, generator)

    def _interleave(self, size: int, generator: torch.Generator) -> Iterator[Episodes]:
        """Minibatches of all tasks, each next one drawn from those that are left."""
        tasks = list(self.by_task().values())
        streams = [task._epoch(size, generator, POOL_BYTES // len(tasks)) for task in tasks]
        left = torch.tensor([float(ceil(len(task) / size)) for task in tasks])
        while left.any():
            chosen = int(torch.multinomial(left, 1, generator=generator))
            left[chosen] -= 1
            yield next(streams[chosen])

    def _epoch(self, size: int, generator: torch.Generator, room: int) -> Iterator[Episodes]:
        """Minibatches of one task: shuffled files, then shuffled episodes of as many files as there is room for."""
        shuffled = [self.shards[index] for index in _permutation(len(self.shards), generator)]
        pools, parts = _pools(shuffled, room), list[Tensors]()
        while pools:
            pool = join(parts + [self._read(shard) for shard in pools.pop(0)])
            order = _permutation(len(pool["policy"]), generator)
            full = len(order) - (len(order) % size if pools else 0)
            for rows in order[:full].split(size):
                if len(rows):
                    yield to_episodes(self.header, select(pool, rows))
            parts = [select(pool, order[full:])]  # go into the next pool, so that only the last minibatch is smaller
            del pool  # before the next one is read

    def _read(self, shard: Shard) -> Tensors:
        """The tensors of a file, with the numbers that policies have here."""
        tensors = read_shard(shard)
        numbers = torch.tensor([self.policies.index(name) for name in shard.content.header.policies], dtype=torch.int32)
        return {**tensors, "policy": numbers[tensors["policy"].long()]}


def _permutation(count: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=generator)


def _pools(shards: Sequence[Shard], room: int) -> list[list[Shard]]:
    """Files in their order, divided into pools of at most `room` bytes, or of one file."""
    pools: list[list[Shard]] = []
    used = 0
    for shard in shards:
        if not pools or used + shard.size > room:
            pools.append([])
            used = 0
        pools[-1].append(shard)
        used += shard.size
    return pools


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if not (files := record_files(path)):
        raise BadValueError(f"{path} holds no records; name a folder that --record has written to")
    return files


def _check_alike(shard: Shard, first: Shard, *, several_tasks: bool) -> None:
    """Raise unless two files can be read as one set."""
    own, other, pair = shard.content.header, first.content.header, f"{shard.path} and {first.path}"
    if own.task != other.task and not several_tasks:
        raise BadValueError(
            f"{pair} are of tasks {own.task!r} and {other.task!r}; open one of them (task=…, --task), or allow "
            "several_tasks"
        )
    if own.preset != other.preset:
        raise BadValueError(f"{pair} have head presets {own.preset!r} and {other.preset!r}; open them separately")
    differing = [name for name in ("table", "layout") if getattr(own, name) != getattr(other, name)]
    if own.task == other.task:
        facts = ("steps", "chance_accuracy", "by_loss")
        differing += [name for name in facts if getattr(own, name) != getattr(other, name)]
    if differing:
        raise BadValueError(
            f"{pair} differ in {', '.join(differing)}: slots, blueprints, sensing or the task changed between them; "
            "open them separately"
        )
