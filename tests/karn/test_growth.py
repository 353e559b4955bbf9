"""The folder of a Grower: its page and its views, and what is wrong with a damaged one."""

import json
import re
from pathlib import Path

import pytest
from karn.run_folders import Json, Page, growth_events, growth_metrics, stage, write_growth, write_run
from karn.test_queries import rows_of

from esper.cli import main
from esper.karn import draw_growth, read_run, write_report
from esper.karn.growth import read_growth
from esper.karn.growth_page import SECTIONS, what_grew
from esper.karn.queries import columns_of
from esper.karn.timeline import Span, spans_of
from esper.karn.views import GROWER_VIEWS
from esper.leyline import BadValueError, EsperError, SeedStage, UnknownNameError


def test_the_page(tmp_path: Path) -> None:
    """One self-contained file with all sections, pictures and numbers."""
    text = write_report(write_growth(tmp_path)).read_text()
    page = Page(text)
    assert set(SECTIONS) <= set(page.all_of("id"))
    assert len([tag for tag, _ in page.tags if tag == "figure"]) == 4
    assert not re.search(r"(?:src|href)=\"(?!#)|url\((?!#)|@import", text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "link"})
    assert page.foreign_scripts() == []
    words = page.text()
    for expected in ("Net", "layer1.0", "layer2", "norm", "heuristic", "0123abcd", "5 of 8"):
        assert expected in words
    ids = page.all_of("id")
    assert len(ids) == len(set(ids))


def test_what_grew(tmp_path: Path) -> None:
    """In words."""
    finished = {**growth_events()[-1], "kind": "finished", "step": 5, "kept": ["layer1.0"], "dropped": []}
    run = read_growth(write_growth(tmp_path, events=[*growth_events(), finished]))
    assert what_grew(run) == [
        "The model had 5,000 parameters; after step 5 its seeds have 600 of a budget of 1,000: 2 births, 1 commit, "
        "1 cut.",
        "The validation accuracy went from 41 % to 45 %.",
        "Growth is finished: seeds stayed behind layer1.0; dropped behind none.",
    ]


def test_bars_stand_at_the_printed_steps(tmp_path: Path) -> None:
    """Ticks too, which a fleet counts otherwise."""
    run = read_growth(write_growth(tmp_path))
    assert spans_of(run.changes, 5) == [
        Span("layer1.0", SeedStage.BLENDING, 1, 2),
        Span("layer1.0", SeedStage.HOLDING, 2, 4),
        Span("layer1.0", SeedStage.FOSSILIZED, 4, 5),
        Span("layer2", SeedStage.BLENDING, 3, 4),
        Span("layer2", SeedStage.PRUNED, 4, 5),
    ]
    assert [panic.step + 1 for panic in run.panics] == [4]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rows",
    [
        [growth_metrics(1)],
        [growth_metrics(1, accuracy=None), growth_metrics(2, accuracy=None, loss="nan")],
        [growth_metrics(1, accuracy=None, loss="inf")],
        [growth_metrics(3, contributions={"gone": {"value": "nan", "error": 0.5}})],
        [growth_metrics(1, remarks=["<script>alert(1)</script>"])],
        [growth_metrics(1, contributions={"<b>": {"value": 1, "error": -2}})],
    ],
)
def test_any_run_is_drawn(rows: list[Json], tmp_path: Path) -> None:
    """Without warnings: a single step, a loss of the user's own, numbers that are not finite, odd names."""
    events = [stage(0, rows[0]["step"], 0, "<b>", "DORMANT", "GERMINATED", "germinate", "<i>$x_")]
    page = Page(write_report(write_growth(tmp_path, rows, events)).read_text())
    assert {tag for tag, _ in page.tags}.isdisjoint({"b"})
    assert page.foreign_scripts() == []


def test_views(tmp_path: Path) -> None:
    """A row per step, contribution, seed, change and panic."""
    write_growth(tmp_path)
    assert rows_of(tmp_path, "SELECT step, accuracy, loss, grown, timing_step_s FROM steps WHERE step < 3") == [
        (1, 41.0, 2.0, 600, 0.25),
        (2, 42.0, 1.0, 600, 0.25),
    ]
    assert rows_of(tmp_path, "SELECT * FROM contributions WHERE step <= 3") == [
        (2, "layer1.0", 3.0, 0.5),
        (3, "layer1.0", 4.5, 0.5),
    ]
    found = rows_of(
        tmp_path, "SELECT slot, blueprint, germinated_at, outcome, ended_at, cause FROM seeds ORDER BY slot"
    )
    assert found == [
        ("layer1.0", "norm", 1, "committed", 4, "fossilize"),
        ("layer2", "norm", 3, "pruned", 4, "prune"),
    ]
    assert rows_of(tmp_path, "SELECT count(*) FROM stages") == [(9,)]
    assert rows_of(tmp_path, "FROM panics") == [(4, ["NOT_FINITE"])]
    assert list(columns_of(tmp_path)) == list(GROWER_VIEWS)
    assert [column.name for column in columns_of(tmp_path)["panics"]] == ["step", "symptoms"]


def test_views_of_other_runs_are_named(tmp_path: Path) -> None:
    """Either way: the error lists those that there are."""
    with pytest.raises(UnknownNameError, match=r"rounds.*steps, contributions, seeds, stages, panics"):
        rows_of(write_growth(tmp_path / "grown"), "FROM rounds")
    with pytest.raises(UnknownNameError, match=r"steps.*rounds, episodes"):
        rows_of(write_run(tmp_path / "trained"), "FROM steps")


def test_incomplete_steps_are_skipped(tmp_path: Path) -> None:
    """Without their line of metrics; a torn line is none."""
    write_growth(tmp_path, [growth_metrics(step) for step in (1, 2)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')
    assert [change.target for change in read_growth(tmp_path).changes][-1] is SeedStage.HOLDING
    assert rows_of(tmp_path, "SELECT max(step) FROM stages") == [(2,)]
    assert rows_of(tmp_path, "FROM panics") == []


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`esper report` and `esper query`, also without a statement."""
    write_growth(tmp_path)
    main(["report", str(tmp_path)])
    assert "report.html" in capsys.readouterr().out and (tmp_path / "report.html").is_file()
    main(["query", str(tmp_path), "select max(accuracy) as best from steps", "--json", "-"])
    assert json.loads(capsys.readouterr().out) == [{"best": 45.0}]
    main(["query", str(tmp_path)])
    assert "contributions" in capsys.readouterr().out


def test_what_needs_rounds_says_so(tmp_path: Path) -> None:
    """Instead of a missing key."""
    write_growth(tmp_path)
    for wrong in (lambda: read_run(tmp_path), lambda: draw_growth(tmp_path, tmp_path / "a.png")):
        with pytest.raises(BadValueError, match="is the folder of a Grower"):
            wrong()
    with pytest.raises(BadValueError, match="no rounds and no evaluations"):
        write_report(tmp_path, round=0)


BAD_LINES = [
    ({"grown": -1}, "'grown' is -1"),
    ({"grown": 10**400}, "'grown' is 1000"),
    ({"loss": "much"}, "'loss' is 'much'"),
    ({"loss": 10**400}, "'loss' is 1000"),
    ({"accuracy": [1]}, r"'accuracy' is \[1\]"),
    ({"contributions": []}, "contributions is no JSON object"),
    ({"contributions": {"a": {"value": "x", "error": 0}}}, "'value' is 'x'"),
    ({"remarks": 3}, "'remarks' is no list"),
    ({"step": 0.5}, "'step' is 0.5"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_LINES)
def test_damaged_metrics(changes: Json, message: str, tmp_path: Path) -> None:
    """The error names the line and the key."""
    write_growth(tmp_path, [{**growth_metrics(1), **changes}])
    with pytest.raises(EsperError, match=rf"metrics.jsonl, line 1.*{message}"):
        write_report(tmp_path)


def test_damaged_folders(tmp_path: Path) -> None:
    """No step, steps out of order, a stage that does not exist, a configuration that was changed or lacks a key."""
    with pytest.raises(BadValueError, match="no complete step yet"):
        write_report(write_growth(tmp_path, []))
    with pytest.raises(BadValueError, match="step 1 comes after step 1"):
        write_report(write_growth(tmp_path, [growth_metrics(1), growth_metrics(1)]))
    with pytest.raises(EsperError, match="FLYING"):
        write_report(write_growth(tmp_path, events=[stage(0, 1, 0, "a", "DORMANT", "FLYING", "tick")]))
    with pytest.raises(BadValueError, match="'budget' is 'much'"):
        write_report(write_growth(tmp_path, budget="much"))
    with pytest.raises(BadValueError, match="slots is no JSON object"):
        write_report(write_growth(tmp_path, slots=[1]))
    write_growth(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("5000", "6000"))
    for wrong in (lambda: write_report(tmp_path), lambda: rows_of(tmp_path, "FROM steps")):
        with pytest.raises(BadValueError, match="was changed after the run began"):
            wrong()
    assert not (tmp_path / "report.html").exists()
