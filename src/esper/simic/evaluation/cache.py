"""The result cache: a folder from which an interrupted evaluation is resumed."""

import hashlib
import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from esper.leyline import BadValueError
from esper.leyline.records import encode
from esper.simic.evaluation.policies import Contender
from esper.simic.evaluation.results import Fossil, Result
from esper.storage.files import replace_file
from esper.storage.stored import Machine
from esper.tolaria import get_task
from esper.tolaria.data import data_digest


class ResultCache:
    """One file per contender and block of hosts, named by everything that the result depends on.

    That is the hosts, their data, the policy with its files, the code and the machine. A user's own tasks are known by
    name and data alone. The other contenders do not matter (on CUDA, up to rounding), so one evaluation can use the
    results of another.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadValueError(f"{folder} cannot hold results: {error.strerror}; name another folder") from None
        self.folder = folder

    def key(self, one: Contender) -> str:
        """The key of a contender; equal keys mean equal results."""
        task = get_task(one.config.task)
        identity = {
            "code": source_digest(),
            "machine": encode(Machine.here()),
            "config": encode(replace(one.config, data_dir=None)),
            "data": data_digest(task.load_data(one.config.data_dir)),
            "policy": [one.spec.text, one.greedy, encode(one.base)],
            "files": [_digest(path.read_bytes()) for path in one.spec.files(task)],
        }
        return _digest(json.dumps(identity, sort_keys=True).encode())

    def read(self, key: str) -> dict[int, Result]:
        """Stored results of a contender, by host."""
        results: dict[int, Result] = {}
        for path in sorted(self.folder.glob(f"{key}-*.json")):
            results.update(enumerate(_read(path).by_host(), int(path.stem.split("-")[1])))
        return results

    def write(self, key: str, hosts: range, result: Result) -> None:
        """Store a contender's result on these hosts."""
        # Python's own JSON, because it can store infinity.
        replace_file(self.folder / f"{key}-{hosts.start}-{hosts.stop}.json", json.dumps(asdict(result)))


@cache
def source_digest() -> str:
    """Digest of the whole package's code."""
    sources = sorted(Path(__file__).parents[2].rglob("*.py"))
    return _digest(b"".join(source.read_bytes() for source in sources))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _read(path: Path) -> Result:
    try:
        values = json.loads(path.read_text())
        fossils = [[Fossil(*fossil) for fossil in host] for host in values["fossils"]]
        return Result(**{**values, "fossils": fossils})
    except (ValueError, TypeError, KeyError) as error:
        raise BadValueError(f"{path} is not a stored result ({error}); remove it to run it again") from None
