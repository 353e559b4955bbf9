"""benchmarks/adaptation.py: the order of its runs, what it keeps, and which runs it compares."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench import run_script

from esper.leyline import BadValueError
from esper.simic.evaluation.statistics import compare
from esper.tolaria.data.dataset import is_present

Script = Callable[[str], ModuleType]
CELLS = [("noise", 0), ("noise", 1), ("blur", 0)]


def finished(run: Any, **more: Any) -> dict[str, Any]:
    """What a run could have ended with. (Any: of a script)"""
    content = {"method": run.method, "rate": run.rate, "statistics": run.statistics, "added": 1000, "seconds": 1.0}
    return content | {"validation": 50.0, "test_accuracy": 50.0, "machine": {}} | more


def future_of(result: dict[str, Any]) -> Future[dict[str, Any]]:
    """A future that is done."""
    future: Future[dict[str, Any]] = Future()
    future.set_result(result)
    return future


def test_heads_decide_about_statistics(script_of: Script, tmp_path: Path) -> None:
    """All runs of a cell are made once, and updates get the statistics with which the better head validated."""
    script, kept = script_of("adaptation"), script_of("kept").Kept(tmp_path / "kept.jsonl", {})
    made: list[Any] = []

    def make(run: Any) -> Future[dict[str, Any]]:
        made.append(run)
        good = "original" if run.seed else "recalibrated"
        return future_of(finished(run, validation=60.0 if run.statistics == good else 50.0))

    script.run_all(CELLS, 2, kept, make, 3, float("inf"))
    assert len(made) == len({run.name for run in made}) == 3 * 24 == len(kept.runs)
    assert all(script.is_complete(cell, 2, kept) for cell in CELLS)
    for run in made:
        if run.method in ("norms", *script.LORA):
            assert run.statistics == ("original" if run.seed else "recalibrated")
    methods = {run.method for run in made}
    sweeps = {method: {run.rate for run in made if run.method == method} for method in methods}
    assert {len(rates) for rates in sweeps.values()} == {2}, "sweeps are of equal size"


def test_after_the_deadline_nothing_begins(script_of: Script, tmp_path: Path) -> None:
    """And a later start makes what is missing, no more."""
    script, kept = script_of("adaptation"), script_of("kept").Kept(tmp_path / "kept.jsonl", {})
    script.run_all(CELLS, 1, kept, lambda run: future_of(finished(run)), 2, 0.0)
    assert not kept.runs
    for run in script.runs_of(CELLS[0], 1, kept)[:2]:
        kept.add(run.name, finished(run))
    made: list[Any] = []
    again = script_of("kept").Kept(tmp_path / "kept.jsonl", {})

    def make(run: Any) -> Future[dict[str, Any]]:
        made.append(run)
        return future_of(finished(run))

    script.run_all(CELLS[:1], 1, again, make, 2, float("inf"))
    assert len(made) == 12 - 2 and script.is_complete(CELLS[0], 1, again)


def test_the_comparison_is_fair(script_of: Script) -> None:
    """Chosen on validation images, within the budget, each with its best rate."""
    script, methods = script_of("adaptation"), script_of("adaptation_methods")

    def run(method: str, validation: float, test: float, added: int) -> dict[str, Any]:
        one = methods.Run("noise", 0, method, 1e-3, "original")
        return finished(one, validation=validation, test_accuracy=test, added=added)

    runs = [
        run("ours 1 %", 70, 71, 900),
        run("ours 1 %", 60, 99, 900),
        run("ours 3 %", 90, 90, 2900),
        run("head", 50, 80, 0),
        run("norms", 65, 66, 1000),
        run("lora 4 all", 80, 88, 1001),
        run("full", 95, 96, 100_000),
    ]
    found = script.compare_cell(runs, 1, 100_000)
    assert (found["ours"], found["other"], found["method"], found["full"]) == (71, 66, "norms", 96)
    assert script.compare_cell(runs, 3, 100_000)["method"] == "lora 4 all"


def test_intervals_are_crossed(script_of: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases and seeds are crossed random effects, paired by seed."""
    script, methods = script_of("adaptation"), script_of("adaptation_methods")
    gaps = {("noise", 0): 1.0, ("noise", 1): 2.0, ("blur", 0): -1.0, ("blur", 1): 3.0, ("contrast", 0): 0.5}
    gaps[("contrast", 1)] = 0.0
    cells = {}
    for (case, seed), gap in gaps.items():
        runs = [methods.Run(case, seed, method, 1e-3) for method in ("head", *script.OURS, "full")]
        cells[case, seed] = [finished(run, test_accuracy=50.0 + gap * (run.method in script.OURS)) for run in runs]
    found = script.summarise(cells, 100_000)["3"]
    expected = compare([[1.0, -1.0, 0.5], [2.0, 3.0, 0.0]], [[0.0] * 3] * 2, paired=True)
    assert (found["low"], found["high"]) == (expected.low, expected.high)
    assert found["difference"] == pytest.approx(5.5 / 6)


def test_a_torn_line_is_made_again(script_of: Script, tmp_path: Path) -> None:
    """A kill while a run is stored loses that run alone; other settings are refused."""
    kept = script_of("kept").Kept
    path = tmp_path / "runs" / "kept.jsonl"
    first = kept(path, {"epochs": 3, "sizes": (1, 2)})
    first.add("one", {"seconds": 1.5})
    first.add("two", {"seconds": 2.5})
    path.write_text(path.read_text()[:-7])
    second = kept(path, {"epochs": 3, "sizes": (1, 2)})
    assert second.runs == {"one": {"seconds": 1.5}}
    second.add("two", {"seconds": 3.5})
    assert kept(path, {"epochs": 3, "sizes": (1, 2)}).runs["two"] == {"seconds": 3.5}
    with pytest.raises(BadValueError, match=r"line 1, was made with other settings.*name another --keep"):
        kept(path, {"epochs": 4, "sizes": (1, 2)})


@pytest.mark.slow
def test_adaptation(tmp_path: Path) -> None:
    """At its smallest: all methods in one cell, with the tables, the file that is kept, and one JSON."""
    if not is_present("cifar10_jpeg"):
        pytest.skip("no CIFAR-10 in the folder of ESPER_DATA")
    sizes = [f"--{name}=1" for name in ("rates", "seeds")] + ["--train=64", "--validation=64", "--test=64"]
    folders = ["--keep", str(tmp_path / "kept.jsonl"), "--out", str(tmp_path / "out")]
    arguments = ["--cases", "inversion", "--epochs=5", "--device=cpu", *sizes, *folders]
    printed = run_script("adaptation.py", tmp_path, *arguments)
    assert sum(line.startswith(("1 %", "3 %", "10 %")) for line in printed.splitlines()) == 3
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 12
    written = json.loads((tmp_path / "out" / "adaptation.json").read_text())
    assert [len(each["cells"]) for each in written["budgets"].values()] == [1, 1, 1]
    assert written["machine"].keys() == written["trained_on"].keys()
