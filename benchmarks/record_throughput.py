"""How fast records are written and read into minibatches, and how much memory that takes.

Random episodes with the columns and heads of a task are written, then read for one epoch in random order. Each runs in
a process of its own. Memory is the most that it ever used, less what it used after its imports.

    python benchmarks/record_throughput.py
"""

import argparse
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from harness import RESULTS, Json, print_table, write_result

from esper.leyline import head_preset
from esper.simic.offline.episodes import Episodes, RecordHeader
from esper.simic.offline.records import Records, RecordWriter
from esper.simic.training.tape import record_header
from esper.tolaria import get_task

LEAST_SPEED = 100_000  # transitions per second into minibatches
MOST_MEMORY = 2**30  # bytes beyond what importing takes
AT_ONCE = 500  # episodes that are written at a time
MIB = 2**20


class Work(NamedTuple):
    """What one process does."""

    folder: Path
    task: str
    episodes: int
    minibatch: int
    threads: int


class Measured(NamedTuple):
    """One pass over all transitions."""

    seconds: float
    memory: int  # bytes beyond what importing takes
    transitions: int

    @property
    def speed(self) -> float:
        """Transitions per second."""
        return self.transitions / self.seconds


def peak_memory() -> int:
    """The most bytes that this process ever used. Not from `getrusage`, which includes those of its parent."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def random_episodes(header: RecordHeader, count: int, generator: torch.Generator) -> Episodes:
    """Episodes that nobody played: random numbers in the shapes of the header."""
    steps, table = header.steps, header.table

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand((count, *shape), generator=generator)

    choices = torch.tensor([head.size for head in table.heads])
    panics = numbers(steps) < 0.01
    return Episodes(
        observations=numbers(steps, header.layout.size),
        masks={head.name: numbers(steps, *table.mask_shape(head)) < 0.5 for head in table.heads},
        actions=(numbers(steps, len(table)) * choices).long(),
        log_probs=-numbers(steps, len(table)),
        forced=numbers(steps) < 0.3,
        terminated=panics,
        truncated=torch.zeros_like(panics),
        panics=panics,
        gain=numbers(steps),
        accuracy=numbers(steps),
        control_accuracy=numbers(steps),
        acting_parameters=numbers(steps),
        fossil_parameters=numbers(steps),
        host_parameters=1 + numbers(),
        final_gain=numbers(),
        epsilon=numbers(),
        policy=torch.zeros(count, dtype=torch.long),
        host_seed=torch.randint(2**60, (count,), generator=generator),
        round=torch.zeros(count, dtype=torch.long),
    )


def write(work: Work) -> Measured:
    """Write the episodes. The time to draw them does not count."""
    torch.set_num_threads(work.threads)
    header = record_header(get_task(work.task), head_preset("core"), ["random"])
    generator, before, seconds = torch.Generator().manual_seed(0), peak_memory(), 0.0
    with RecordWriter(work.folder, header) as writer:
        for begin in range(0, work.episodes, AT_ONCE):
            episodes = random_episodes(header, min(AT_ONCE, work.episodes - begin), generator)
            start = time.perf_counter()
            writer.append(episodes)
            seconds += time.perf_counter() - start
        start = time.perf_counter()
    return Measured(seconds + time.perf_counter() - start, peak_memory() - before, work.episodes * header.steps)


def read(work: Work) -> Measured:
    """Open the records and take every minibatch of one epoch."""
    torch.set_num_threads(work.threads)
    before, start = peak_memory(), time.perf_counter()
    records = Records.open(work.folder)
    batches = records.minibatches(work.minibatch, torch.Generator().manual_seed(1))
    transitions = sum(batch.forced.numel() for batch in batches)
    seconds = time.perf_counter() - start
    assert transitions == records.transitions == work.episodes * records.header.steps
    return Measured(seconds, peak_memory() - before, transitions)


def main() -> None:
    """Write, read, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--episodes", type=int, default=50_000)
    parser.add_argument("--minibatch", type=int, default=256, help="episodes per minibatch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder), arguments.task, arguments.episodes, arguments.minibatch, arguments.threads)
        measured = {}
        for phase in (write, read):
            with get_context("spawn").Pool(1) as pool:
                measured[phase.__name__] = pool.apply(phase, (work,))
        files = list(Path(folder).iterdir())
        size = sum(file.stat().st_size for file in files)
    report(arguments, measured, len(files), size)


def report(arguments: argparse.Namespace, measured: dict[str, Measured], files: int, size: int) -> None:
    """Speed and memory of both directions, beside the bars for reading."""
    transitions = measured["read"].transitions
    print_table(
        f"{transitions:,} transitions of {arguments.task} in {files} files, {size / transitions:.0f} bytes each; bars "
        f"for reading: {LEAST_SPEED:,} per second, {MOST_MEMORY // MIB} MiB",
        ["", "seconds", "transitions per second", "memory, MiB"],
        [[name, each.seconds, f"{each.speed:,.0f}", each.memory / MIB] for name, each in measured.items()],
    )
    result: dict[str, Json] = {
        "task": arguments.task,
        "episodes": arguments.episodes,
        "transitions": transitions,
        "minibatch": arguments.minibatch,
        "threads": arguments.threads,
        "files": files,
        "bytes": size,
        "bars": {"transitions_per_second": LEAST_SPEED, "memory": MOST_MEMORY},
        **{name: {**each._asdict(), "transitions_per_second": each.speed} for name, each in measured.items()},
    }
    write_result("record_throughput", result, arguments.out)


if __name__ == "__main__":
    main()
