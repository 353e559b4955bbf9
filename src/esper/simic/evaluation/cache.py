"""What an evaluation has found, in a folder: one that was stopped goes on where it was."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from esper.leyline import BadValueError
from esper.leyline.records import encode
from esper.simic.evaluation.policies import policy_files
from esper.simic.evaluation.results import Fossil, Result
from esper.simic.evaluation.workers import Contender, Done, Job, RunJobs, make_jobs
from esper.storage.files import replace_file
from esper.storage.stored import Machine
from esper.tolaria import get_task
from esper.tolaria.data import data_digest


class ResultCache:
    """A file per contender and block of hosts. Its name says what was run: the hosts, their data wherever those lie,
    the policy with its content, the code and the machine. Whatever of these is different was not run yet; tasks of your
    own are known by their name and data alone. In which company does not matter (on CUDA, up to rounding): a policy
    finds the same alone and beside others, so rules that one evaluation has run are there for the next."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadValueError(f"nothing can be kept in {folder}: {error.strerror}") from None
        self.folder = folder

    def recall(self, contenders: Sequence[Contender], run_jobs: RunJobs) -> Iterator[Done]:
        """What is known, and the rest as it is found and written down."""
        names = [name_of(one) for one in contenders]  # once: a run may go on meanwhile
        done, jobs = self._divide(contenders, names)
        yield from done
        for one in run_jobs(jobs):
            hosts = one.job.hosts
            for place, result in zip(one.job.places, one.results, strict=True):
                # Python's own JSON: it knows infinity.
                text = json.dumps(asdict(result))
                replace_file(self.folder / f"{names[place]}-{hosts.start}-{hosts.stop}.json", text)
            yield one

    def _divide(self, contenders: Sequence[Contender], names: Sequence[str]) -> tuple[list[Done], list[Job]]:
        """What is done, with its results, and the jobs that are left."""
        known = [self._known(name) for name in names]
        done, left = [], []
        for place, (one, found) in enumerate(zip(contenders, known, strict=True)):
            if len(found) == one.config.hosts:
                hosts = range(one.config.hosts)
                done.append(Done(Job((one,), hosts, (place,)), [_joined(found, hosts)]))
            else:
                left.append(place)
        jobs = []
        for job in make_jobs([contenders[place] for place in left]):
            moved = replace(job, places=tuple(left[place] for place in job.places))
            if all(host in known[place] for place in moved.places for host in moved.hosts):
                done.append(Done(moved, [_joined(known[place], moved.hosts) for place in moved.places]))
            else:
                jobs.append(moved)
        return done, jobs

    def _known(self, name: str) -> dict[int, Result]:
        """By host."""
        found: dict[int, Result] = {}
        for path in sorted(self.folder.glob(f"{name}-*.json")):
            result, first = _read(path), int(path.stem.split("-")[1])
            found |= {first + place: result.part(range(place, place + 1)) for place in range(len(result.objective))}
        return found


def name_of(one: Contender) -> str:
    """Two contenders have the same name only where they would find the same."""
    # All that a control of another policy has is its base.
    files = policy_files(one.spec, get_task(one.config.task)) if one.base is None else []
    what = {
        "code": source_digest(),
        "machine": encode(Machine.here()),
        "config": encode(replace(one.config, data_dir=None)),
        "data": data_digest(get_task(one.config.task).load_data(one.config.data_dir)),
        "policy": [one.spec, one.greedy, encode(one.base)],
        "files": [_digest(path.read_bytes()) for path in files],
    }
    return _digest(json.dumps(what, sort_keys=True).encode())


@cache
def source_digest() -> str:
    """Of all code of this package: figures are only as good as what made them."""
    sources = sorted(Path(__file__).parents[2].rglob("*.py"))
    return _digest(b"".join(source.read_bytes() for source in sources))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _joined(found: dict[int, Result], hosts: Iterable[int]) -> Result:
    return Result.joined([found[host] for host in hosts])


def _read(path: Path) -> Result:
    try:
        values = json.loads(path.read_text())
        return Result(**{**values, "fossils": [[Fossil(*fossil) for fossil in found] for found in values["fossils"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise BadValueError(f"{path} is not a result that was kept ({error}); remove it, and it is run again") from None
