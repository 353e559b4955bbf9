"""From `esper train` and `esper evaluate` to the page: what they write is what the report reads."""

import json
from pathlib import Path

import pytest
from karn.run_folders import Page
from simic.training.tiny import NAME, tiny_task

from esper.cli import main
from esper.karn import read_run


@pytest.mark.slow
def test_train_evaluate_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Curves of every host are there, and the page has the numbers of metrics and evaluation."""
    tiny_task()
    run, figures = tmp_path / "run", tmp_path / "run" / "evaluation.json"
    main(["train", "--task", NAME, "--rounds", "2", "--hosts", "3", "--members", "2", "--out", str(run)])
    main(["evaluate", "--task", NAME, "--policies", f"{run},wait", "--hosts", "2", "--json", str(figures)])
    main(["report", str(run)])
    assert capsys.readouterr().out.splitlines()[-1] == f"the report is in {run}/report.html"
    read = read_run(run)
    assert read.steps == 12
    assert [len(read.episodes[number]) for number in (0, 1)] == [2, 2]
    for episode in read.episodes[1]:
        assert len(episode.accuracies) == len(episode.control_accuracies) == 12
        changed = {change.slot for change in read.changes if change.env == episode.env}
        assert set(episode.alphas) <= changed
    words = Page((run / "report.html").read_text()).text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"went from {rows[0]['objective']:+.2f} points in round 0 to {rows[1]['objective']:+.2f} in round 1" in words
    (difference,) = json.loads(figures.read_text())["differences"]
    assert f"{run} − wait {difference['difference']['mean']:+.2f}" in words
    assert "Entropy" in words
