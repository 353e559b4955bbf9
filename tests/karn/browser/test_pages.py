"""What pages show: every view of every kind of run, damaged logs, hostile texts; and the server over HTTP."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote_plus

import pytest
from karn.browser.serving import SOURCE, get, server
from karn.run_folders import (
    Json,
    Page,
    default_events,
    episode,
    evaluation,
    growth_metrics,
    metrics,
    stage,
    write_growth,
    write_lines,
    write_run,
)

from esper.karn.browser.asked import VIEWS, Asked
from esper.karn.browser.draw import draw_view, film_of_asked, heading, status_of
from esper.karn.browser.folder import RunFolders
from esper.karn.browser.parts import sparkline, stage_cell
from esper.karn.browser.runs import compared, run_list, summary_of
from esper.karn.browser.watched import Watched
from esper.karn.histories import SeedNow
from esper.karn.palette import STAGES
from esper.leyline import BadValueError, SeedStage

HOSTILE = "<img src=x onerror=alert(1)></script><b>\x1b[2J{{7*7}}"


def watch(root: Path, name: str = "run") -> Watched:
    """A run of a folder, read whole."""
    folders = RunFolders(root)
    watched = Watched(folders, folders.find(name))
    watched.read_first()
    watched.poll(5)
    return watched


def page_of(watched: Watched, view: str, **changes: Json) -> Page:
    """A view as a page."""
    return Page("".join(draw_view(watched, Asked(watched.run.name, view, **changes))))


@pytest.fixture
def trained(tmp_path: Path) -> Watched:
    """Two rounds of four hosts."""
    write_run(tmp_path / "run")
    (tmp_path / "run" / "evaluation.json").write_text(json.dumps(evaluation()))
    return watch(tmp_path)


@pytest.fixture
def grown(tmp_path: Path) -> Watched:
    """Five steps of one model."""
    write_growth(tmp_path / "run")
    return watch(tmp_path)


EXPECTED = {
    "overview": ("rounds", "2 complete of 3", "Objective after every round", "No alarm was raised."),
    "fleet": ("gain by step", "Slots from left to right: r1c0, r1c1;"),
    "host": ("digits_hand, round 1, host 2", "save the film as GIF", "fossilized", "Host 2, the best of 4"),
    "decisions": ("How often a host germinated a seed",),
    "health": ("How far an update moved the policy",),
    "log": ("★ depthwise committed in r1c0, host 2", "✖ norm cut in r1c1, host 1", "Round 1"),
    "evaluations": ("95 % interval", "+3.25 to +5.75", "runs/a"),
    "sql": ("Views and their columns", "episodes"),
}


@pytest.mark.default_cases("fleet", "host", "log", "evaluations", "sql")  # the others draw many figures
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_training_run(trained: Watched, view: str) -> None:
    """Each shows what its name says."""
    text = page_of(trained, view).text()
    for words in EXPECTED[view]:
        assert words in text


@pytest.mark.default_cases("fleet", "host", "log", "evaluations", "sql", "decisions", "health")
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_grower(grown: Watched, view: str) -> None:
    """One model, no policy, no rounds: no view fails, and those about it show it."""
    text = page_of(grown, view).text()
    expected = {"overview": "The validation accuracy went", "host": "1,000 parameters grown", "sql": "contributions"}
    expected |= {"log": "★ norm committed in layer1.0", "fleet": "layer1.0, layer2", "decisions": "GERMINATE layer1.0"}
    assert expected.get(view, "") in text
    assert page_of(grown, view, round=3, host=9, step=2).text()


def test_an_earlier_round(trained: Watched) -> None:
    """Every round can be asked for, then the newest again; one that is not there is named."""
    assert "round 0, host 0" in page_of(trained, "host", round=0, host=0, step=3).text()
    assert "round 1, host 2" in page_of(trained, "host").text()
    assert "Round 7 is not complete" in page_of(trained, "fleet", round=7).text()
    assert "There is no host 99 in round 1." in page_of(trained, "host", host=99).text()
    with pytest.raises(BadValueError, match="no host 99"):
        film_of_asked(trained, Asked("run", "host", host=99))
    with pytest.raises(BadValueError, match="round 7 of run is not complete"):
        film_of_asked(trained, Asked("run", "host", 7))


def test_a_round_that_is_being_played(tmp_path: Path) -> None:
    """Its hosts as far as they are; the last complete round is still there."""
    run = write_run(tmp_path / "run")
    header = {"kind": "live", "version": 1, "round": 2, "began": 5}
    step = {
        "kind": "step", "time": 1.0, "round": 2, "task": "digits_hand", "step": 0, "steps": 8, "first_env": 0,
        "slots": ["r1c0", "r1c1"], "accuracies": [50.0, 60.0], "control_accuracies": [45.0, 45.0],
        "gains": [5.0, 15.0], "losses": [1.0, 1.0],
        "seeds": [[1, "r1c1", "TRAINING", "norm", 0.0, None, None, None, None]],
        "actions": [[1, "GERMINATE", "r1c1", "norm"]], "probabilities": [0.5, 0.25],
        "choices": [{"op": {"WAIT": 0.5, "GERMINATE": 0.5}}],
        "changes": [[1, "r1c1", "norm", "DORMANT", "GERMINATED", "germinate"]], "panics": [],
    }  # fmt: skip
    write_lines(run / "live.jsonl", [header, step])
    watched = watch(tmp_path)
    assert "round 2 is being played: step 1 of 8" in status_of(watched)
    assert "+15.0" in page_of(watched, "fleet").text()
    text = page_of(watched, "host", host=1).text()
    assert "round 2, host 1, playing" in text
    assert "GERMINATE r1c1 norm" in text
    assert "25 %" in text
    assert "op: WAIT 50 %, GERMINATE 50 %" in page_of(watched, "host", host=0).text()
    assert "round 1, host 1" in page_of(watched, "host", round=1, host=1).text()


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")  # an escape character has no picture
def test_hostile_texts(tmp_path: Path) -> None:
    """Names in logs, evaluations and statements are shown as text."""
    events = [episode(0, 0, 1.0, [stage(0, 1, 0, HOSTILE, "DORMANT", "GERMINATED", "germinate", HOSTILE)])]
    alarm = {"kind": "alarm", "round": 0, "alarm": HOSTILE, "severity": HOSTILE, "cause": HOSTILE, "ended": False}
    run = write_run(tmp_path / "run", [metrics(0)], [*events, alarm], task=HOSTILE)
    (run / "evaluation.json").write_text(json.dumps(evaluation(task=HOSTILE)))
    write_growth(tmp_path / "grown", [growth_metrics(1, remarks=[HOSTILE])], [], host=HOSTILE)
    for name in ("run", "grown"):
        watched = watch(tmp_path, name)
        parts = [heading(watched, Asked(name)), status_of(watched), *run_list([summary_of(watched.run)])]
        drawn = [view for view in VIEWS if view not in ("overview", "health")]  # the report's, whose names are tested
        pages = [page_of(watched, view, sql=f"select '{HOSTILE}' as x") for view in drawn]
        for page in (*pages, Page("".join(parts))):
            assert {tag for tag, _ in page.tags}.isdisjoint({"img", "script"})
            assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_a_damaged_log(tmp_path: Path) -> None:
    """What is wrong is named with its line; all else is shown."""
    run = write_run(tmp_path / "run")
    lines = (run / "events.jsonl").read_text().splitlines()
    lines[3] = "<b>no JSON"
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    page = page_of(watch(tmp_path), "host")
    assert "events.jsonl, line 4 is not JSON" in page.text()
    assert "round 1, host 2" in page.text()


def test_a_live_file_of_another_version(tmp_path: Path) -> None:
    """It says so, and shows the complete rounds."""
    run = write_run(tmp_path / "run")
    write_lines(run / "live.jsonl", [{"kind": "live", "version": 99, "round": 2, "began": 5}])
    text = page_of(watch(tmp_path), "fleet").text()
    assert "version is 99" in text
    assert "Slots from left to right" in text


def test_a_run_that_is_deleted(trained: Watched) -> None:
    """Shown is what was read before."""
    shutil.rmtree(trained.run.path)
    trained.poll(0.1)
    assert "This run was deleted" in status_of(trained)
    assert "round 1, host 2" in page_of(trained, "host").text()
    assert "is no run folder" in page_of(trained, "sql").text()


def test_a_run_without_a_round(tmp_path: Path) -> None:
    """Every view says that there is nothing yet."""
    write_run(tmp_path / "run", [], [])
    write_growth(tmp_path / "grown", [], [])
    for name in ("run", "grown"):
        watched = watch(tmp_path, name)
        for view in VIEWS:
            assert page_of(watched, view).text()
        assert "0 of" in status_of(watched)
        assert "None of these runs has" in "".join(compared({name: watched.state}))
        with pytest.raises(BadValueError):
            film_of_asked(watched, Asked(name, "host"))


def test_pages_are_drawn_once(trained: Watched) -> None:
    """And again when the run has changed."""
    first = draw_view(trained, Asked("run", "log"))
    assert all(one is two for one, two in zip(first, draw_view(trained, Asked("run", "log")), strict=True))
    with (trained.run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(2)) + "\n")
    with (trained.run.path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({**event, "round": 2}) + "\n" for event in default_events(1))
    trained.poll(1)
    assert "Round 2" in page_of(trained, "log").text()


def test_statements(trained: Watched) -> None:
    """Answers are tables; what is wrong, or more than reading, is an error on the page."""
    assert "4 rows" in page_of(trained, "sql", sql="select env, objective from episodes where round = 1").text()
    assert "the first 500" in page_of(trained, "sql", sql="select * from range(10000)").text()
    for wrong in ("drop view rounds", "select 1; select 2", "from nothing", "copy rounds to '/tmp/x'", "not sql"):
        page = page_of(trained, "sql", sql=wrong)
        assert [attributes.get("role") for _, attributes in page.tags].count("alert") == 1, wrong
    for outside in ("from read_csv('/etc/passwd')", "from '/etc/passwd'", "select * from read_text('/etc/hostname')"):
        page = page_of(trained, "sql", sql=outside)
        assert [attributes.get("role") for _, attributes in page.tags].count("alert") == 1, outside


def test_slots_and_sparklines() -> None:
    """A cell has the colour and the letter of its stage, and says so in words; a curve is as wide as its steps."""
    seed = SeedNow(SeedStage.BLENDING, "norm", 0.25, 1, 1)
    page = Page(stage_cell("r1c0", seed))
    ((_, cell), (_, bar)) = page.tags
    assert cell["aria-label"] == "r1c0: blending, norm, alpha 0.25"
    assert f"background:{STAGES[SeedStage.BLENDING]}" in str(cell["style"])
    assert (page.text("span"), bar["style"]) == ("B", "width:25%")
    assert Page(stage_cell("r1c0", None)).text("span") == "·"
    assert 'points="48.0,22.0 96.0,2.0"' in sparkline([0.0, 10.0], 2)
    assert 'class="zero"' in sparkline([None, None], 2)


def test_the_first_picture_does_not_wait_for_the_front(tmp_path: Path) -> None:
    """Of a long log the last rounds are read and drawn; what lies before is read when it is due."""
    write_run(tmp_path / "run", [metrics(number) for number in range(40)], default_events(40))
    folders = RunFolders(tmp_path)
    watched = Watched(folders, folders.find("run"))
    watched.follower.tail = (tmp_path / "run" / "events.jsonl").stat().st_size // 5
    watched.read_first()
    watched.front_at = math.inf
    assert not watched.follow()
    assert "reading the log" in status_of(watched)
    assert "0 F · +3.5" in page_of(watched, "fleet").text()  # host 0 of round 39
    assert not watched.follower.show(0)
    watched.front_at = 0.0
    while watched.follow():
        pass
    assert "reading the log" not in status_of(watched)
    assert watched.follower.show(0)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a run of each kind."""
    root = tmp_path_factory.mktemp("served")
    (root / "runs").mkdir()
    write_run(root / "runs" / "trained")
    write_growth(root / "runs" / "grown")
    write_run(root / "private")
    with server(root / "runs", root / "cache") as found:
        yield found.rstrip("/")


def test_over_http(address: str) -> None:
    """The list, each kind of run, a comparison; the drawing is in the page that the server sends."""
    for path, words in {
        "/": "compare the chosen runs",
        "/run?run=trained&view=host": "round 1, host 2",
        "/run?run=grown&view=host": "parameters grown",
        "/compare?run=grown": "Models",
    }.items():
        status, headers, body = get(address + path)
        assert status == 200, path
        assert words in body.decode(), path
        assert headers["content-security-policy"].startswith("default-src 'self'")


def test_films_over_http(address: str) -> None:
    """As GIF, and a step of it as PNG."""
    status, headers, body = get(f"{address}/film?run=trained&round=0&host=0&step=3&as=png")
    assert (status, headers["content-type"], body[:4]) == (200, "image/png", b"\x89PNG")
    assert 'filename="growth.png"' in headers["content-disposition"]
    status, _, other = get(f"{address}/film?run=trained&round=0&host=0&step=8&as=png")
    assert (status, other[:4]) == (200, b"\x89PNG")
    assert other != body


@pytest.mark.parametrize("path", ["/run", "/film", "/compare"])
@pytest.mark.parametrize("name", ["../private", "/etc", "..", "trained/../../private", "%2e%2e/private", "<b>x"])
def test_refusals_over_http(address: str, path: str, name: str) -> None:
    """What is not in the list is not there."""
    status, _, body = get(f"{address}{path}?run={quote_plus(name)}")
    assert status == 404
    assert "there is no run" in body.decode()
    assert "<b>x" not in body.decode() or path == "/film"  # which is plain text


@pytest.mark.parametrize(
    "path",
    ["/run?run=trained&view=files", "/run?run=trained&round=-1", "/docs", "/openapi.json", "/../private/config.json"],
)
def test_nothing_else_is_there(address: str, path: str) -> None:
    """Wrong views and numbers, and pages that FastAPI would add."""
    assert get(address + path)[0] == 404


def test_help_is_quick() -> None:
    """It imports neither torch nor nicegui."""
    code = (
        "import sys\nfrom esper.cli import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'nicegui', 'matplotlib', 'fastapi'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
    assert "--port" in done.stdout
