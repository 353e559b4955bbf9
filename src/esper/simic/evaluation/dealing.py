"""Jobs dealt to the ranks of a world. All ranks know all jobs, so only results travel, and all ranks get all of them.

Jobs are dealt in order, one to each rank at a time, and results come back in the order of the jobs.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.simic.distributed import Message, World
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.workers import Call, RunAll, run_with
from esper.simic.training.policy_files import is_policy
from esper.storage.files import replace_file

FILE = "file."  # prefix of tensors that are the bytes of a record file


@contextmanager
def run_dealt(world: World, workers: int, records: Path | None = None) -> Iterator[tuple[RunAll, Path | None]]:
    """How to run jobs, and the folder for their records on this rank: rank 0 gets what the others write in theirs.

    A process alone runs them itself or in its workers."""
    if world.size == 1:
        with run_with(workers) as run_all:
            yield run_all, records
        return
    if workers > 1:
        raise BadValueError(f"{workers} workers on each of {world.size} ranks; omit --workers, for each rank is one")
    with ExitStack() as opened:
        opened.enter_context(run_with(1))  # closes the arena
        folder = records
        if world.rank and records is not None:
            folder = Path(opened.enter_context(TemporaryDirectory()))

        def run_dealt_jobs(call: Call, items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
            everything = list(items)
            for begin in range(0, len(everything), world.size):
                dealt = everything[begin : begin + world.size]
                mine = _to_message(call(dealt[world.rank])) if world.rank < len(dealt) else Message({}, {})
                messages = world.gather(_with_files(mine, folder) if world.rank else mine)
                plain = [_without_files(message, folder) for message in messages]
                yield from zip(dealt, map(_from_message, world.share_all(plain)[: len(dealt)]), strict=True)

        yield run_dealt_jobs, folder


def check_found(world: World, policies: Iterable[Path]) -> None:
    """Raise on a rank other than 0 that lacks one of these policies; what rank 0 lacks is an error of another kind."""
    missing = [str(path) for path in dict.fromkeys(policies) if not is_policy(path)]
    if world.rank and missing:
        raise BadValueError(
            f"{', '.join(missing)} was not found, but each rank reads the policies; put them where all machines see "
            "them, or copy them to the same place on each"
        )


def _to_message(result: Any) -> Message:  # Any: a tensor, or a list of results
    if isinstance(result, Tensor):
        return Message({"result": result}, {})
    return Message({}, {"results": [asdict(one) for one in result]})


def _from_message(message: Message) -> Any:  # Any: as above
    if "result" in message.tensors:
        return message.tensors["result"]
    return [Result.from_json(values) for values in message.content["results"]]


def _with_files(message: Message, folder: Path | None) -> Message:
    """With the files that the job has left in the folder, which is empty then."""
    files: dict[str, Tensor] = {}
    if folder is not None:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = FILE + path.relative_to(folder).as_posix()
            files[name] = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            path.unlink()
    return Message({**message.tensors, **files}, message.content)


def _without_files(message: Message, folder: Path | None) -> Message:
    """Writes the files to the folder."""
    tensors: Mapping[str, Tensor] = message.tensors
    for name in tensors:
        if name.startswith(FILE) and folder is not None:
            path = folder / name.removeprefix(FILE)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, tensors[name].numpy().tobytes())
    return Message({name: value for name, value in tensors.items() if not name.startswith(FILE)}, message.content)
