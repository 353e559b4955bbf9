"""Same behaviour: two commits compute the same on the CPU, to the bit.

python benchmarks/same_as.py main .                        # the working tree against a commit
python benchmarks/same_as.py BASE HEAD --keep FOLDER       # stores the results of commits for the next comparison

Both versions run the scenarios of `same_as_probe.py` with this interpreter and one thread: train, resume, evaluate,
tune, other settings, panics, a GPT, hardened models. Compared are logs, decisions, objectives, evaluations, tuned files
and tensors. Logs may differ in what the clock and the machine say, in the wording of text, and in the order of keys.
Weights are compared by type, shape and bytes; names of parameters do not count. A key or word that was renamed on
purpose belongs in the tables below.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness import RESULTS, Json, describe_machine, print_table, write_result
from safetensors.torch import load_file
from same_as_probe import FAILED, SCENARIOS, SHARES
from torch import Tensor

RENAMED_KEYS: dict[str, str] = {}
"""Keys of JSON objects, old → new; applied to A where B has the new one and not the old one."""
RENAMED_VALUES: dict[str, str] = {}
"""Words that are values, such as kinds of events, old → new; applied to A where B has the new one."""
IGNORED_KEYS = frozenset({"timing", "provenance"})
"""Depend on the clock, the machine or the commit."""
VIEWS = {
    "events.json": {"actions": "decisions", "objectives": "objective"},
    "evaluation.json": {"objectives": "objective"},
}
"""By file, keys whose values get a row of their own."""

ROOT = Path(__file__).resolve().parents[1]
PROBE = Path(__file__).with_name("same_as_probe.py")
WORKING_TREE = "."
LONGEST = 120
"""Characters of a difference in the table; the JSON has all of them."""


@dataclass(frozen=True)
class Row:
    """One comparison."""

    scenario: str
    what: str
    difference: str | None
    """The first one; None: equal."""


# -- comparing --------------------------------------------------------------------------------------------------------


def compare(a: Path, b: Path) -> list[Row]:
    """Compare the records of two versions, a folder per scenario each. Pure: only reads."""
    names = sorted({path.name for side in (a, b) for path in side.iterdir()}, key=_position)
    rows = []
    for name in names:
        rows += compare_scenario(name, a / name, b / name)
        if name == "resume" and "train" in names:
            for label, side in (("A", a), ("B", b)):
                found = compare_scenario(name, side / "train", side / name, rename=False)
                difference = next((row.difference for row in found if row.difference), None)
                rows.append(Row(name, f"as never stopped, {label}", difference))
    return rows


def _position(name: str) -> int:
    return list(SCENARIOS).index(name) if name in SCENARIOS else len(SCENARIOS)


def compare_scenario(scenario: str, a: Path, b: Path, *, rename: bool = True) -> list[Row]:
    """A row for each sort of file (the first word of its name), and for each view."""
    if failed := [f"{label} failed: {_last_line(side)}" for label, side in (("A", a), ("B", b)) if _last_line(side)]:
        return [Row(scenario, "everything", "; ".join(failed))]
    found: dict[str, list[str | None]] = {}
    for name in sorted({path.name for side in (a, b) for path in side.iterdir()}):
        for what, difference in compare_files(a / name, b / name, rename=rename).items():
            found.setdefault(what, []).append(difference and f"{Path(name).stem}: {difference}")
    return [Row(scenario, what, next(filter(None, each), None)) for what, each in found.items()]


def _last_line(folder: Path) -> str:
    """Why a scenario failed; empty if it did not."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return "there are no results"
    path = folder / FAILED
    return path.read_text(encoding="utf-8").strip().splitlines()[-1] if path.exists() else ""


def compare_files(a: Path, b: Path, *, rename: bool = True) -> dict[str, str | None]:
    """The first difference of two files, and of each view of them; None where they are equal."""
    what = a.stem.split()[0]
    if missing := [label for label, path in (("A", a), ("B", b)) if not path.exists()]:
        return {what: f"not in {missing[0]}"}
    if a.suffix == ".safetensors":
        return {what: tensor_difference(_tensors(a), _tensors(b), ordered=what != "weights")}
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (a, b))
    before, after = comparable(renamed(before, after) if rename else before), comparable(after)
    differences = {what: json_difference(before, after)}
    for view, key in VIEWS.get(a.name, {}).items():
        pair = list(values_of(before, key)), list(values_of(after, key))
        differences[view] = json_difference(*pair) if all(pair) else f"there is no {key!r}"
    return differences


def renamed(old: Json, new: Json) -> Json:
    """The old content with the keys and words that the new one has in their place."""
    if isinstance(old, dict) and isinstance(new, dict):
        today = {key: RENAMED_KEYS[key] for key in old if key in RENAMED_KEYS and key not in new}
        names = {key: today[key] if today.get(key) in new else key for key in old}
        return {names[key]: renamed(value, new.get(names[key])) for key, value in old.items()}
    if isinstance(old, list) and isinstance(new, list):
        return [renamed(*pair) for pair in zip(old, new, strict=False)] + old[len(new) :]
    return new if isinstance(old, str) and RENAMED_VALUES.get(old, old) == new else old


def comparable(content: Json) -> Json:
    """Without what may differ: ignored keys, and text of more than one word, which is for people."""
    if isinstance(content, Mapping):
        return {key: comparable(value) for key, value in content.items() if key not in IGNORED_KEYS}
    if isinstance(content, str):
        return "(text)" if " " in content else content
    return [comparable(value) for value in content] if isinstance(content, Sequence) else content


def values_of(content: Json, key: str) -> Iterator[Json]:
    """All values that stand under a key, at any depth."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            yield from [value] if name == key else values_of(value, key)
    elif isinstance(content, Sequence) and not isinstance(content, str):
        for value in content:
            yield from values_of(value, key)


def json_difference(a: Json, b: Json, place: str = "") -> str | None:
    """Where two contents first differ, and how. Numbers must have the same digits; the order of keys is free."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in (*a, *(key for key in b if key not in a)):
            if key not in a or key not in b:
                return f"{place}.{key} is only in {'A' if key in a else 'B'}"
            if found := json_difference(a[key], b[key], f"{place}.{key}"):
                return found
        return None
    if isinstance(a, list) and isinstance(b, list):
        for number, (left, right) in enumerate(zip(a, b, strict=False)):
            if found := json_difference(left, right, f"{place}[{number}]"):
                return found
        return None if len(a) == len(b) else f"{place} has {len(a)} entries, then {len(b)}"
    left, right = json.dumps(a), json.dumps(b)
    return None if left == right else f"{place}: {left[:60]}, then {right[:60]}"


def _tensors(path: Path) -> list[Tensor]:
    tensors = load_file(path)
    return [tensors[name] for name in sorted(tensors)]


def tensor_difference(a: list[Tensor], b: list[Tensor], *, ordered: bool) -> str | None:
    """How two lists of tensors differ. Without `ordered` it is enough that both hold the same ones."""
    if not ordered:
        a, b = (sorted(tensors, key=_kind) for tensors in (a, b))
    left, right = [_content(tensor) for tensor in a], [_content(tensor) for tensor in b]
    if left == right or (not ordered and Counter(left) == Counter(right)):
        return None
    if [_kind(tensor) for tensor in a] != [_kind(tensor) for tensor in b]:
        return f"{len(a)} tensors, then {len(b)}, of other types or shapes"
    unequal = [number for number, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]]
    gap = max(float((a[number].double() - b[number].double()).abs().max()) for number in unequal)
    first = a[unequal[0]]
    return f"{len(unequal)} of {len(a)} tensors differ by up to {gap:.3g}, first {first.dtype} {tuple(first.shape)}"


def _kind(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype), tuple(tensor.shape)


def _content(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return *_kind(tensor), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One of the two versions, and where its records go."""

    label: str
    revision: str
    commit: str | None
    """None: the working tree."""
    records: Path
    cache: Path | None

    def missing(self, share: Sequence[str]) -> list[str]:
        """Take what the cache has; the scenarios of this share that have to run."""
        for name in share:
            if self.cache is not None and (self.cache / name).is_dir():
                shutil.copytree(self.cache / name, self.records / name)
        return [name for name in share if not (self.records / name).is_dir()]

    def store(self, names: Sequence[str]) -> None:
        """Put records into the cache, each whole or not at all."""
        for name in names if self.cache is not None else ():
            assert self.cache is not None
            if (self.records / name).is_dir() and not (self.records / name / FAILED).exists():
                self.cache.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=self.cache, prefix=".new-") as new:
                    shutil.copytree(self.records / name, Path(new) / name)
                    if not (self.cache / name).exists():
                        (Path(new) / name).rename(self.cache / name)


def git(*arguments: str) -> str:
    """Run git in this repository."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def side_of(label: str, revision: str, scratch: Path, keep: Path | None) -> Side:
    """Look a revision up. Results are cached by commit, scenarios, torch and processor."""
    commit = None if revision == WORKING_TREE else git("rev-parse", "--verify", f"{revision}^{{commit}}")
    records = scratch / f"records-{label}"
    records.mkdir()
    if commit is None or keep is None:
        return Side(label, revision, commit, records, None)
    setting = (PROBE.read_text(encoding="utf-8"), torch.__version__, describe_machine()["cpu"])
    digest = hashlib.sha256(repr(setting).encode()).hexdigest()[:12]
    return Side(label, revision, commit, records, keep.resolve() / f"{commit}-{digest}")


@contextmanager
def source_of(side: Side, scratch: Path) -> Iterator[Path]:
    """The `src` folder of a version: of a worktree that is removed afterwards, or a copy of the working tree's."""
    tree = scratch / f"tree-{side.label}"
    if side.commit is None:
        shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
        yield tree / "src"
        return
    git("worktree", "add", "--detach", str(tree), side.commit)
    try:
        yield tree / "src"
    finally:
        git("worktree", "remove", "--force", str(tree))


def run_probe(source: Path, names: Sequence[str], side: Side) -> None:
    """Run scenarios in a process of their own."""
    environment = {
        **os.environ,
        **{name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")},
        "PYTHONPATH": str(source),
        "COLUMNS": "200",
    }
    command = [sys.executable, str(PROBE), *names, "--out", str(side.records)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    for name in names:
        folder = side.records / name
        if done.returncode and not (folder.is_dir() and any(folder.iterdir())):  # it has not come so far
            folder.mkdir(exist_ok=True)
            (folder / FAILED).write_text(done.stderr.strip() or f"exit code {done.returncode}", encoding="utf-8")


def measure(sides: Sequence[Side], names: Sequence[str], jobs: int, scratch: Path) -> None:
    """Run whatever is not in the cache: two shares of scenarios per version, at most `jobs` at once."""
    shares = [[name for name in share if name in names] for share in SHARES]
    work = [(side, missing) for share in shares for side in sides if (missing := side.missing(share))]
    with ExitStack() as opened, ThreadPoolExecutor(jobs) as pool:
        sources = {side.label: opened.enter_context(source_of(side, scratch)) for side in sides if _has(work, side)}
        running = [pool.submit(run_probe, sources[side.label], missing, side) for side, missing in work]
        for each in running:
            each.result()
    for side, missing in work:
        side.store(missing)


def _has(work: Sequence[tuple[Side, list[str]]], side: Side) -> bool:
    return any(each is side for each, _ in work)


def main() -> None:
    """Run, compare, print one table, write one JSON; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", help="a commit, or . for the working tree")
    parser.add_argument("b", metavar="B", help="a commit, or . for the working tree")
    parser.add_argument("--keep", type=Path, help="folder in which the results of commits are stored and looked up")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--out", type=Path, default=RESULTS / "same_as.json", help="JSON file to write")
    arguments = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="same_as-") as folder:
        scratch = Path(folder)
        revisions = {"A": arguments.a, "B": arguments.b}
        sides = [side_of(label, revision, scratch, arguments.keep) for label, revision in revisions.items()]
        measure(sides, arguments.only, arguments.jobs, scratch)
        rows = compare(*(side.records for side in sides))
    commits = {side.label: side.commit or "working tree" for side in sides}
    print_table(
        f"A = {arguments.a} ({commits['A'][:12]}), B = {arguments.b} ({commits['B'][:12]})",
        ["scenario", "compared", "result"],
        [[row.scenario, row.what, (row.difference or "equal")[:LONGEST]] for row in rows],
    )
    different = [row for row in rows if row.difference is not None]
    print(f"{len(rows) - len(different)} of {len(rows)} comparisons are equal")
    seconds = time.perf_counter() - start
    result: dict[str, Json] = {**commits, "equal": not different, "seconds": seconds, "rows": [asdict(r) for r in rows]}
    write_result(arguments.out.stem, result, arguments.out.parent)
    if different:
        sys.exit(1)


if __name__ == "__main__":
    main()
