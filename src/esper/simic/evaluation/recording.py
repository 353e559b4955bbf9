"""Records of an evaluation: files per policy and block of hosts, so that workers share a folder and a resumed
evaluation records nothing twice."""

import re
from collections.abc import Sequence
from pathlib import Path

from esper.leyline import BadValueError
from esper.simic.evaluation.policies import Contender
from esper.simic.evaluation.results import Result
from esper.simic.offline.records import RecordWriter
from esper.simic.offline.shards import SUFFIX, check_folder, check_unused, record_files
from esper.simic.training.tape import EpisodeTape, record_header
from esper.storage.files import storage_errors


class EvaluationRecords:
    """The records of an evaluation, `<key of the policy>-<first host>-<end>-<number>`."""

    def __init__(self, folder: Path, *, resumed: bool) -> None:
        """`resumed`: whether the folder may hold records, of which those of equal keys count."""
        (check_folder if resumed else check_unused)(folder)
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def blocks(self, key: str) -> list[range]:
        """The blocks of hosts that are recorded for a key."""
        pattern = rf"{key}-(\d+)-(\d+)-\d+{re.escape(SUFFIX)}"
        matches = (re.fullmatch(pattern, path.name) for path in record_files(self.folder))
        return [range(int(match[1]), int(match[2])) for match in matches if match]

    def of_recorded(self, key: str, results: dict[int, Result]) -> dict[int, Result]:
        """Those of a policy's results, by host, whose episodes are recorded."""
        recorded = {host for block in self.blocks(key) for host in block}
        return {host: result for host, result in results.items() if host in recorded}

    def target(self, key: str, hosts: range) -> Path:
        """Where a policy's episodes on these hosts go: the path of its files without number and suffix."""
        for block in self.blocks(key):
            if block != hosts and block.start < hosts.stop and hosts.start < block.stop:
                raise BadValueError(
                    f"--record {self.folder} has hosts {block.start} to {block.stop - 1} of a policy in one file, this "
                    f"evaluation {hosts.start} to {hosts.stop - 1}; list the same policies as before, with as many "
                    "ranks and --workers, or choose another folder"
                )
        return self.folder / f"{key}-{hosts.start:05d}-{hosts.stop:05d}"


def policy_name(one: Contender) -> str:
    """The name of a contender in records."""
    return f"{one.spec.text} (greedy)" if one.greedy else one.spec.text


def write_records(
    contenders: Sequence[Contender], targets: Sequence[Path], tape: EpisodeTape, seeds: Sequence[int]
) -> None:
    """Write what contenders played side by side on these hosts."""
    runner, width = tape.runner, len(contenders)
    for number, (one, target) in enumerate(zip(contenders, targets, strict=True)):
        for old in target.parent.glob(f"{target.name}-*{SUFFIX}"):
            old.unlink()  # its process was killed before the result was kept
        header = record_header(runner.fleet.task, runner.preset, (policy_name(one),), runner.layout)
        with RecordWriter(target.parent, header, f"{target.name}-") as writer:
            writer.append(tape.episodes(range(number, width * len(seeds), width), [0] * len(seeds), seeds))
