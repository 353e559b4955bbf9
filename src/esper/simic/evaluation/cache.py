"""The result cache: a folder from which an interrupted evaluation is resumed."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

from esper.leyline import BadValueError
from esper.leyline.records import encode
from esper.simic.distributed.world import source_digest
from esper.simic.evaluation.policies import Contender
from esper.simic.evaluation.results import Result
from esper.storage.files import replace_file
from esper.storage.stored import Machine
from esper.tolaria import get_task
from esper.tolaria.data import data_digest


class ResultCache:
    """One file per contender and block of hosts, named by everything that the result depends on.

    That is the hosts, their data, the policy's files, the code and the machine, but not the other contenders (on CUDA,
    up to rounding). A user's own tasks are known by name and data alone."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadValueError(f"{folder} cannot hold results: {error.strerror}; name another folder") from None
        self.folder = folder

    def read(self, key: str) -> dict[int, Result]:
        """Stored results of a contender, by host."""
        results: dict[int, Result] = {}
        for path in sorted(self.folder.glob(f"{key}-*.json")):
            try:
                result = Result.from_json(json.loads(path.read_text()))
            except (ValueError, TypeError, KeyError) as error:
                raise BadValueError(f"{path} is not a stored result ({error}); remove it to run it again") from None
            results.update(enumerate(result.by_host(), int(path.stem.split("-")[1])))
        return results

    def write(self, key: str, hosts: range, result: Result) -> None:
        """Store a contender's result on these hosts."""
        # Python's own JSON, because it can store infinity.
        replace_file(self.folder / f"{key}-{hosts.start}-{hosts.stop}.json", json.dumps(asdict(result)))


def contender_key(one: Contender) -> str:
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


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
