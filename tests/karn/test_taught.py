"""The section on teaching, and the page of a run that was only taught."""

import json
from pathlib import Path

import pytest
from karn.run_folders import Json, Page, write_run

from esper.karn import write_report
from esper.karn.taught import REPORT, Choice, Taught, read_taught
from esper.leyline import BadValueError


def teach(run: Path, **changes: Json) -> Path:
    """Add the report of teaching to a run folder."""
    choices = [
        {"beta": 0.1, "pooling": 0.0, "sharpness": 3.0, "objective": 18.25},
        {"beta": 0.3, "pooling": 1.0, "sharpness": 1.0, "objective": 12.5},
    ]
    (run / REPORT).parent.mkdir()
    content = {"episodes": 300, "hosts": 18, "choices": choices, "accuracy": {"joint": 0.96, "op": 0.98}, **changes}
    (run / REPORT).write_text(json.dumps(content))
    return run


def test_what_was_taught_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert read_taught(run) is None
    choices = [Choice(0.1, 0.0, 3.0, 18.25), Choice(0.3, 1.0, 1.0, 12.5)]
    assert read_taught(teach(run)) == Taught(300, 18, choices, {"joint": 0.96, "op": 0.98})


def test_a_taught_run_shows_its_teaching(tmp_path: Path) -> None:
    plain = write_report(write_run(tmp_path / "plain")).read_text()
    assert 'id="teaching"' not in plain
    text = write_report(teach(write_run(tmp_path / "run"))).read_text()
    assert "300 episodes of fixed plans on 18 hosts" in text
    assert "joint 96 %, op 98 %" in text
    assert "0.1 0 3 +18.25 0.3 1 1 +12.50" in Page(text).text("th", "td")
    assert 'id="growth"' in text


def test_a_run_that_was_only_taught_has_a_page(tmp_path: Path) -> None:
    """It has no rounds, and so no growth, curves or health."""
    text = write_report(teach(write_run(tmp_path / "run", [], [], rounds=0))).read_text()
    assert "its policy is the one that it was taught" in text
    assert 'id="teaching"' in text and 'id="policies"' in text
    for section in ("growth", "learning", "decisions", "health"):
        assert f'id="{section}"' not in text and f'href="#{section}"' not in text


def test_a_broken_report_is_named(tmp_path: Path) -> None:
    run = teach(write_run(tmp_path / "run"), choices=[{"beta": "much"}])
    with pytest.raises(BadValueError, match=r"report.json, choices\[0\]: 'beta' is 'much', not a finite number"):
        write_report(run)


def test_a_round_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="has no complete round yet"):
        write_report(teach(write_run(tmp_path / "run", [], [], rounds=0)), round=0)
