"""What an evaluation has found, in a folder: one that was stopped goes on where it was."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch

import esper
from esper.leyline import BadValueError
from esper.leyline.records import Json, encode
from esper.simic.training.jobs import Contender, Done, Job, is_learned, make_jobs
from esper.simic.training.results import Fossil, Result
from esper.simic.training.runs import RunFolder


class KeptResults:
    """A file per contender and block of hosts. Its name says what was run: the hosts, the policy with its content, the
    code and torch. Whatever of these is different was not run yet. In which company does not matter: a policy finds the
    same alone and beside others, so rules that one evaluation has run are there for the next."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadValueError(f"nothing can be kept in {folder}: {error.strerror}") from None
        self.folder = folder
        self._code = {"code": source_digest(), "torch": torch.__version__}

    def divide(self, contenders: Sequence[Contender]) -> tuple[list[Done], list[Job]]:
        """What is done, with its results, and the jobs that are left."""
        known = [self._recall(one) for one in contenders]
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

    def keep(self, done: Iterable[Done]) -> Iterator[Done]:
        """The same, each written as it comes."""
        for one in done:
            hosts = one.job.hosts
            for contender, result in zip(one.job.contenders, one.results, strict=True):
                path = self.folder / f"{self._name(contender)}-{hosts.start}-{hosts.stop}.json"
                part = path.with_suffix(".part")
                part.write_text(json.dumps(asdict(result)))  # Python's own JSON knows infinity
                part.replace(path)  # a result is there whole or not at all
            yield one

    def _recall(self, one: Contender) -> dict[int, Result]:
        """By host."""
        found: dict[int, Result] = {}
        for path in sorted(self.folder.glob(f"{self._name(one)}-*.json")):
            result, first = _read(path), int(path.stem.split("-")[1])
            found |= {first + place: result.part(range(place, place + 1)) for place in range(len(result.objective))}
        return found

    def _name(self, one: Contender) -> str:
        what = {**self._code, "config": encode(replace(one.config, data_dir=None)), "contender": _content(one)}
        return _digest(json.dumps(what, sort_keys=True).encode())


@cache
def source_digest() -> str:
    """Of all code of this package: figures are only as good as what made them."""
    sources = sorted(Path(esper.__file__).parent.rglob("*.py"))
    return _digest(b"".join(source.read_bytes() for source in sources))


def _joined(found: dict[int, Result], hosts: range) -> Result:
    return Result.joined([found[host] for host in hosts])


def _content(one: Contender) -> list[Json]:
    """What a contender is made of; the name alone would also fit a run that has gone on since."""
    kind, _, file = one.spec.partition(":")
    source: Path | None = None
    if one.base is None and is_learned(one.spec):
        source = RunFolder.last_checkpoint(Path(one.spec))
    elif kind in ("heuristic", "schedule") and Path(file).is_file():
        source = Path(file)
    files = [] if source is None else sorted(source.iterdir()) if source.is_dir() else [source]
    return [one.spec, one.greedy, encode(one.base), [_digest(path.read_bytes()) for path in files]]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _read(path: Path) -> Result:
    try:
        values = json.loads(path.read_text())
        return Result(**{**values, "fossils": [[Fossil(*fossil) for fossil in found] for found in values["fossils"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise BadValueError(f"{path} is not a result that was kept ({error}); remove it, and it is run again") from None
