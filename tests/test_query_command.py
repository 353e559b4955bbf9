"""`esper query` on the command line."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from karn.run_folders import write_run

from esper.cli import main
from esper.karn.views import VIEWS


@pytest.fixture(autouse=True)
def plain_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is coloured."""
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two rounds of four hosts."""
    return write_run(tmp_path / "run")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints."""
    main(["query", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def cells(line: str) -> list[str]:
    """Of a row of a table."""
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def test_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names above, a row each; NULL is empty, lists are JSON, and nothing is cut where there is no terminal."""
    wide = ", ".join(f"'{'x' * 30}' AS wide{number}" for number in range(8))
    out = printed(capsys, str(run), f"select round, objective, NULL as nothing, [1, 2] as list, {wide} from rounds")
    rows = [cells(line) for line in out.splitlines() if line.startswith(("│", "┃"))]
    assert rows[0][:5] == ["round", "objective", "nothing", "list", "wide0"]
    assert [row[:4] for row in rows[1:]] == [["0", "1.25", "", "[1, 2]"], ["1", "2.25", "", "[1, 2]"]]
    assert rows[1][4:] == ["x" * 30] * 8


def test_rows_on_the_screen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So many, and it says that there are more; none is said too."""
    out = printed(capsys, str(run), "select env from episodes", "--rows", "3")
    assert sum(line.startswith("│") for line in out.splitlines()) == 3
    assert "only the first 3" in out
    out = printed(capsys, str(run), "select env from episodes", "--rows", "8")
    assert sum(line.startswith("│") for line in out.splitlines()) == 8
    assert "only" not in out
    assert "no rows" in printed(capsys, str(run), "from alarms")


def test_views_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every column that this run has."""
    out = printed(capsys, str(run))
    for name, view in VIEWS.items():
        assert f"\n{name}\n" in out
        assert all(f"│ {column} " in out for column in view.columns)
    assert "ppo_slot_entropy" in out


def test_csv_and_json(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same rows in both, in a file and on the standard output."""
    asked = "select round, env, stages, ended_at, 'a \"b\", c' as words from seeds where env = 1 order by round"
    stages = ["GERMINATED", "TRAINING", "PRUNED", "EMBARGOED"]
    rows = [{"round": n, "env": 1, "stages": stages, "ended_at": 4, "words": 'a "b", c'} for n in (0, 1)]
    table, objects = tmp_path / "a.csv", tmp_path / "a.json"
    assert printed(capsys, str(run), asked, "--csv", str(table)) == f"2 rows in {table}\n"
    assert printed(capsys, str(run), asked, "--json", str(objects)) == f"2 rows in {objects}\n"
    assert json.loads(objects.read_text()) == rows
    read = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [{**row, "stages": json.loads(row["stages"])} for row in read] == [
        {**row, "round": str(row["round"]), "env": "1", "ended_at": "4"} for row in rows
    ]
    assert printed(capsys, str(run), asked, "--csv", "-") == table.read_text()
    assert printed(capsys, str(run), asked, "--json", "-") == objects.read_text()
    assert json.loads(printed(capsys, str(run), "from alarms", "--json", "-")) == []
    odd = "select 'nan'::double as lost, 1.5::decimal(4, 2) as exact, date '2024-05-06' as day"
    assert json.loads(printed(capsys, str(run), odd, "--json", "-")) == [
        {"lost": "nan", "exact": 1.5, "day": "2024-05-06"}
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "from rounds"], "nowhere is no run folder"),
        (["run", "selec"], "Parser Error"),
        (["run", "from nothing"], "unknown view 'nothing'"),
        (["run", "--csv", "a.csv"], "take the answer of a statement"),
        (["run", "from rounds", "--csv", "a.csv", "--json", "a.json"], "one of them at a time"),
        (
            ["run", "from rounds", "--csv", "run/events.jsonl"],
            "run/events.jsonl belongs to the run run; write to a file",
        ),
        (["run", "from rounds", "--csv", "run/checkpoints/round-00002/agent.json"], "belongs to the run"),
        (["run", "from rounds", "--json", "run/sessions.jsonl"], "belongs to the run"),
        (["run", "from rounds", "--json", "elsewhere/../run/new.json"], "belongs to the run"),
        (["run", "from rounds", "--csv", "run"], "belongs to the run"),
        (["run", "from rounds", "--csv", "nowhere/a.csv"], "cannot be written"),
        (["run", "select round as a, env as a from seeds", "--json", "a.json"], "called ['a']"),
        (["run", "select i::tinyint as i from range(20000) as t(i)", "--csv", "a.csv"], "Conversion Error"),
        (["run", "from rounds", "--rows", "0"], "rows"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and no file is written or half written."""
    monkeypatch.chdir(run.parent)
    before = {path: path.read_bytes() for path in run.parent.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as stopped:
        main(["query", *arguments])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err
    assert captured.out == ""
    assert {path: path.read_bytes() for path in run.parent.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("run_name", "target"),
    [
        ("run", "to_run/new.csv"),
        ("run", "to_metrics"),
        ("to_run", "run/new.csv"),
        ("run", "run/checkpoints/agent.csv"),
        ("run", "disk/agent.csv"),
        ("run", "run/out.csv"),
    ],
)
def test_links_lead_nowhere_into_a_run(
    run_name: str, target: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither links to a run, nor those in it: its checkpoints may lie on another disk."""
    monkeypatch.chdir(run.parent)
    Path("to_run").symlink_to("run")
    Path("to_metrics").symlink_to("run/metrics.jsonl")
    Path("disk").mkdir()
    (run / "checkpoints").symlink_to(Path("disk").resolve())
    (run / "out.csv").symlink_to("../a.csv")
    before = {path: path.read_bytes() for path in run.parent.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit):
        main(["query", run_name, "from rounds", "--csv", target])
    assert f"{target} belongs to the run {run_name}; write to a file elsewhere" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.parent.rglob("*") if path.is_file()} == before


def test_an_answer_beside_a_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From within it, too; and the standard output is no file of that name."""
    monkeypatch.chdir(run)
    assert printed(capsys, ".", "select 1 as one", "--csv", "../run.csv") == "1 row in ../run.csv\n"
    assert (tmp_path / "run.csv").read_text() == "one\n1\n"
    assert printed(capsys, ".", "select 1 as one", "--csv", "-") == "one\n1\n"


def test_an_answer_replaces_a_file_whole(run: Path, tmp_path: Path) -> None:
    """An older one stays until the new one is complete."""
    target = tmp_path / "a.csv"
    target.write_text("older")
    with pytest.raises(SystemExit):
        main(["query", str(run), "select i::tinyint from range(20000) as t(i)", "--csv", str(target)])
    assert target.read_text() == "older"
    main(["query", str(run), "select 1 as one", "--csv", str(target)])
    assert target.read_text() == "one\n1\n"


def test_a_reader_that_has_had_enough(run: Path) -> None:
    """`| head`: no traceback."""
    code = "import sys; from esper.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "query", str(run), "select i from range(100000) as t(i)", "--csv", "-"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "src")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "i\n"
        process.stdout.close()
        assert process.wait(timeout=300) == 0
        assert process.stderr.read() == ""


def test_no_log_commands_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences are shown, in cells, names of columns and errors, and never sent."""
    run = write_run(tmp_path / "run")
    attack = "\x1b]0;owned\x07\x9b2J"
    main(["query", str(run), f"select '{attack}' as \"{attack}\""])
    printed = capsys.readouterr().out
    assert r"\x1b]0;owned\x07\x9b2J" in printed
    assert not set(printed) & {"\x1b", "\x07", "\x9b"}
    with pytest.raises(SystemExit, match="2"):
        main(["query", str(run), f'select * from "{attack}"'])
    assert not set(capsys.readouterr().err) & {"\x1b", "\x07", "\x9b"}


def test_a_statement_without_end_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the time that it may take, with the remedy."""
    run = write_run(tmp_path / "run")
    endless = "select count(*) from range(1000000000) a, range(1000000000) b where a.range * b.range = -1"
    with pytest.raises(SystemExit, match="2"):
        main(["query", str(run), endless, "--timeout", "0.2"])
    assert capsys.readouterr().err == "esper: the statement took too long; ask for less, or raise --timeout\n"
