"""One-line breakages of the source, and the test that catches each.

    python benchmarks/breakages.py --jobs 2

Entries are in tests/breakages.toml: `name`, `row` (of the requirements, or a package), `file`, `find`, `replace` and
`test` (a pytest node id). `find` occurs exactly once in its file. Each worker has its own copy of the tree. It replaces
the text, runs the test, which must fail, and puts the text back. Tests are part of the copy, because some of them read
the source beside them. First all tests run once unbroken: a test that fails anyway would catch everything.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from harness import RESULTS, print_table, write_result

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 600
"""Seconds that one test may take."""
FAILED = 1
"""Exit code of pytest when it could collect everything and a test failed."""


@dataclass(frozen=True)
class Breakage:
    """One change of the source that a test must notice."""

    name: str
    row: str
    file: str
    find: str
    replace: str
    test: str

    def broken(self, root: Path) -> str:
        """The file with the change made."""
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{self.name}: {self.find!r} occurs {count} times in {self.file}; it must occur once")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True)
class Outcome:
    """What came of one breakage."""

    name: str
    row: str
    caught: bool
    seconds: float
    said: str
    """The last line of pytest."""


def read_breakages(root: Path = ROOT) -> list[Breakage]:
    """All entries of tests/breakages*.toml. Unknown, missing or repeated keys and names raise ValueError."""
    names = {field.name for field in fields(Breakage)}
    found: list[Breakage] = []
    for path in sorted((root / "tests").glob("breakages*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["breakage"]:
            if set(entry) != names:
                raise ValueError(f"{path.name}: an entry has the keys {sorted(entry)}; wanted {sorted(names)}")
            found.append(Breakage(**{name: str(value) for name, value in entry.items()}))
    if repeated := sorted({each.name for each in found if sum(other.name == each.name for other in found) > 1}):
        raise ValueError(f"names occur twice: {repeated}; rename all but one")
    return found


def copy_tree(folder: Path) -> Path:
    """A copy of all files that are in the repository or about to be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("benchmarks/results/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def run_tests(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of pytest, run in a copy. No bytecode: a file that changes back within a second would be
    taken for the one before."""
    environment = os.environ | {
        "PYTHONPATH": str(root / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = ["-o", "addopts=", "-q", "--strict-markers", "-p", "no:cacheprovider", "-rf", "--tb=line"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return -1, f"not done within {TIMEOUT} s"
    return done.returncode, done.stdout + done.stderr


def try_breakage(root: Path, breakage: Breakage) -> Outcome:
    """Break the copy, run the test, put the copy back."""
    path, changed, start = root / breakage.file, breakage.broken(root), time.perf_counter()
    whole = path.read_text(encoding="utf-8")
    try:
        path.write_text(changed, encoding="utf-8")
        code, output = run_tests(root, [breakage.test])
    finally:
        path.write_text(whole, encoding="utf-8")
    lines = output.strip().splitlines()
    # A fixture that raises has exit code 1 too, but no test of that name failed.
    caught = code == FAILED and any(line.startswith("FAILED ") for line in lines)
    return Outcome(breakage.name, breakage.row, caught, time.perf_counter() - start, lines[-1] if lines else "")


def try_all(breakages: Sequence[Breakage], jobs: int, folder: Path) -> list[Outcome]:
    """Try all breakages in order, on `jobs` copies at a time."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(jobs):
        copies.put(copy_tree(folder / f"copy-{number}"))
    first = copies.get()
    code, output = run_tests(first, sorted({each.test for each in breakages}))
    if code != 0:
        raise SystemExit(f"the tests do not pass on the unbroken source:\n{output[-3000:]}")
    copies.put(first)

    def work(breakage: Breakage) -> Outcome:
        copy = copies.get()
        try:
            outcome = try_breakage(copy, breakage)
        finally:
            copies.put(copy)
        print(f"{breakage.name}: {'caught' if outcome.caught else 'NOT CAUGHT'} ({outcome.said})", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(work, breakages))


def main() -> None:
    """Try all breakages, or those named. Exits with 1 if one is not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="breakages at a time")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of breakages (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {arguments.jobs}")
    breakages = read_breakages()
    if unknown := sorted(set(arguments.only or ()) - {each.name for each in breakages}):
        parser.error(f"--only {unknown}: no such breakage; allowed: {[each.name for each in breakages]}")
    chosen = [each for each in breakages if not arguments.only or each.name in arguments.only]
    for each in chosen:
        each.broken(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = try_all(chosen, arguments.jobs, Path(folder))
    rows = [(each.name, each.row, "yes" if each.caught else "NO", each.seconds) for each in outcomes]
    caught = sum(each.caught for each in outcomes)
    print_table(f"{caught} of {len(outcomes)} breakages caught", ["name", "row", "caught", "seconds"], rows)
    path = write_result(
        "breakages", {"caught": caught, "breakages": [asdict(each) for each in outcomes]}, arguments.out
    )
    print(f"\n{path}")
    if caught < len(outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
