"""SQL over a run: every view by hand, what is damaged or unfinished, and what a statement may not do."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from karn.run_folders import Json, columns, default_events, episode, life, metrics, stage, write_run

from esper.karn import queries
from esper.karn.queries import ask, columns_of
from esper.karn.views import LOGS, VIEWS
from esper.leyline import BadValueError, EsperError, MissingPackageError, UnknownNameError


def rows_of(path: Path, statement: str) -> list[tuple[Json, ...]]:
    """All rows of an answer."""
    with ask(path, statement) as answer:
        return list(answer.rows)


def full_episode(round_number: int, env: int, **changes: Json) -> Json:
    """An episode of eight steps with decisions: a seed is germinated at 1, advanced at 4, cut at 6."""
    return {
        **episode(round_number, env, 4.0),
        "task": "digits_hand",
        "decisions": {
            "step": [1, 4, 6], "op": ["GERMINATE", "ADVANCE", "PRUNE"], "slot": ["r1c0", "r1c0", "r1c1"],
            "blueprint": ["norm", None, None],
        },
        "rewards": [0.0, 0.5, 0.0, 0.0, 2.5, 0.0, -0.25, 1.0],
        "reward_parts": {"gain": 4.75, "rent": -1.0},
        **changes,
    }  # fmt: skip


# -- what each view says ----------------------------------------------------------------------------------------------


def test_rounds(tmp_path: Path) -> None:
    """Numbers of the metrics, nested ones too, under names that SQL can say; what a round lacks is NULL, and a number
    that is not finite is one."""
    write_run(tmp_path, [metrics(0), metrics(1, **{"ppo/value_loss": "nan", "tasks": {"a": {"gain": 1}}})])
    found = rows_of(
        tmp_path,
        "SELECT round, objective, panics, reward_rent, ops_germinate, ppo_op_entropy, timing_collect_s FROM rounds",
    )
    assert found == [(0, 1.25, 0, -0.5, 2, 0.9, 3.0), (1, 2.25, 0, -1.5, 2, 0.8, 4.0)]
    (lost,), (not_finite,) = rows_of(tmp_path, "SELECT ppo_value_loss FROM rounds ORDER BY round")
    assert lost is None
    assert math.isnan(not_finite)
    assert not any("germinated" in column.name or "tasks" in column.name for column in columns_of(tmp_path)["rounds"])


def test_numbers_at_any_depth(tmp_path: Path) -> None:
    """What the hub has dropped lies two levels down."""
    timing = {"collect_s": 3.0, "hub": {"dropped": 7, "failed": {"console": 2}}, "words": "none"}
    write_run(tmp_path, [metrics(0, timing=timing)])
    found = rows_of(tmp_path, "SELECT timing_collect_s, timing_hub_dropped, timing_hub_failed_console FROM rounds")
    assert found == [(3.0, 7.0, 2.0)]


def test_decisions(tmp_path: Path) -> None:
    """A row per step: those that are not written waited."""
    write_run(tmp_path, events=[full_episode(0, 2)])
    found = rows_of(
        tmp_path,
        "SELECT step, op, slot, blueprint, tempo, reward, accuracy, control_accuracy FROM decisions"
        " WHERE round = 0 AND env = 2 AND task = 'digits_hand' ORDER BY step",
    )
    assert [row[1] for row in found] == ["WAIT", "GERMINATE", "WAIT", "WAIT", "ADVANCE", "WAIT", "PRUNE", "WAIT"]
    assert found[0] == (0, "WAIT", None, None, None, 0.0, 42.0, 40.0)
    assert found[1] == (1, "GERMINATE", "r1c0", "norm", None, 0.5, 43.0, 40.5)
    assert found[6] == (6, "PRUNE", "r1c1", None, None, -0.25, 48.0, 43.0)


def test_decisions_of_all_heads(tmp_path: Path) -> None:
    """Of the full preset."""
    decisions = {
        "step": [0, 3], "op": ["GERMINATE", "SET_ALPHA_TARGET"], "slot": ["r1c0", "r1c0"], "blueprint": ["norm", None],
        "blend": ["gate", None], "tempo": [5, None], "alpha_target": [1.0, 0.5], "alpha_speed": [None, 3],
        "alpha_curve": [None, "cosine"],
    }  # fmt: skip
    write_run(tmp_path, events=[full_episode(0, 0, decisions=decisions)])
    heads = "blend, tempo, alpha_target, alpha_speed, alpha_curve"
    assert rows_of(tmp_path, f"SELECT {heads} FROM decisions WHERE op <> 'WAIT' ORDER BY step") == [
        ("gate", 5, 1.0, None, None),
        (None, None, 0.5, 3, "cosine"),
    ]


def test_rewards_and_episodes(tmp_path: Path) -> None:
    """Parts of an episode's reward, and their sum: 0.5 + 2.5 − 0.25 + 1."""
    write_run(tmp_path, events=[full_episode(0, 1), full_episode(1, 0)])
    parts = rows_of(tmp_path, "SELECT round, task, env, part, points FROM rewards ORDER BY ALL")
    assert parts == [
        (0, "digits_hand", 1, "gain", 4.75), (0, "digits_hand", 1, "rent", -1.0),
        (1, "digits_hand", 0, "gain", 4.75), (1, "digits_hand", 0, "rent", -1.0),
    ]  # fmt: skip
    found = rows_of(
        tmp_path, "SELECT objective, gain, accuracy, added_parameters, reward FROM episodes WHERE round = 0"
    )
    assert found == [(4.0, 5.0, 54.0, 10, 3.75)]
    ((last, alphas),) = rows_of(tmp_path, "SELECT accuracies[-1], alphas['r1c0'][4] FROM episodes WHERE round = 1")
    assert (last, alphas) == (47.0, 0.5)


OUTCOME = "SELECT germinated_at, blending_at, holding_at, outcome, ended_at, cause FROM seeds WHERE env = 0 ORDER BY 1"


def moves(*changes: tuple[int, str, str, str]) -> list[Json]:
    """An episode of round 0 whose one seed changes its stage so: (step, source, target, cause)."""
    return [episode(0, 0, 1.0, [stage(0, step, 0, "r1c0", *change) for step, *change in changes])]


BORN = (1, "DORMANT", "GERMINATED", "germinate")
TRAINS = (1, "GERMINATED", "TRAINING", "tick")
CUT = [
    (3, "TRAINING", "PRUNED", "prune"), (3, "PRUNED", "EMBARGOED", "tick"), (4, "EMBARGOED", "RESETTING", "tick"),
    (5, "RESETTING", "DORMANT", "tick"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], []),
        ([BORN], [(1, None, None, "uncommitted", None, None)]),
        ([BORN, TRAINS, (3, "TRAINING", "BLENDING", "advance")], [(1, 3, None, "uncommitted", None, None)]),
        ([BORN, TRAINS, *CUT], [(1, None, None, "pruned", 3, "prune")]),
        (
            [BORN, TRAINS, *CUT, (6, "DORMANT", "GERMINATED", "germinate")],
            [(1, None, None, "pruned", 3, "prune"), (6, None, None, "uncommitted", None, None)],
        ),
        # A panic takes the birth back: the slot is empty, or rests again.
        ([BORN, (1, "GERMINATED", "DORMANT", "panic")], [(1, None, None, "undone", 1, "panic")]),
        (
            [BORN, (1, "GERMINATED", "RESETTING", "panic"), (1, "RESETTING", "DORMANT", "tick")],
            [(1, None, None, "undone", 1, "panic")],
        ),
        # A panic takes a tick back, which is no birth, …
        ([BORN, TRAINS, (2, "TRAINING", "GERMINATED", "panic")], [(1, None, None, "uncommitted", None, None)]),
        ([BORN, TRAINS, *CUT, (6, "DORMANT", "GERMINATED", "panic")], [(1, None, None, "uncommitted", None, None)]),
        # … an end, …
        (
            [BORN, TRAINS, (3, "TRAINING", "PRUNED", "prune"), (3, "PRUNED", "TRAINING", "panic")],
            [(1, None, None, "uncommitted", None, None)],
        ),
        # … and a commit, which comes again later.
        (
            [
                BORN, TRAINS, (2, "TRAINING", "BLENDING", "advance"), (3, "BLENDING", "HOLDING", "tick"),
                (5, "HOLDING", "FOSSILIZED", "fossilize"), (5, "FOSSILIZED", "HOLDING", "panic"),
                (7, "HOLDING", "FOSSILIZED", "fossilize"),
            ],
            [(1, 2, 3, "committed", 7, "fossilize")],
        ),
    ],
)  # fmt: skip
def test_outcomes_of_seeds(changes: list[tuple[int, str, str, str]], expected: list[Json], tmp_path: Path) -> None:
    write_run(tmp_path, events=moves(*changes))
    assert rows_of(tmp_path, OUTCOME) == expected


def test_lives_are_told_apart(tmp_path: Path) -> None:
    """By round, host and slot; each with its own blueprint and stages."""
    both = [*life(0, 0, "r1c0", 1, "depthwise"), *life(0, 0, "r1c2", 0, "conv_small")]
    write_run(tmp_path, events=[episode(0, 0, 3.0, both), *default_events()[1:]])
    found = rows_of(tmp_path, "SELECT round, env, slot, blueprint, outcome, ended_at FROM seeds ORDER BY ALL")
    of_round = [
        (0, "r1c0", "depthwise", "committed", 6), (1, "r1c1", "norm", "pruned", 4),
        (2, "r1c0", "depthwise", "committed", 7),
    ]  # fmt: skip
    more = (0, 0, "r1c2", "conv_small", "committed", 5)
    assert found == sorted([more, *((number, *row) for number in (0, 1) for row in of_round)])
    ((stages,),) = rows_of(tmp_path, "SELECT stages FROM seeds WHERE round = 1 AND env = 1")
    assert stages == ["GERMINATED", "TRAINING", "PRUNED", "EMBARGOED"]
    ((changes,),) = rows_of(tmp_path, "SELECT count(*) FROM stages WHERE round = 1 AND env = 1")
    assert changes == 4


def test_panics_and_alarms(tmp_path: Path) -> None:
    """As they were written; a value that is not finite is one."""
    panic = {"kind": "panic", "task": "digits_hand", "round": 1, "step": 4, "env": 2, "symptoms": ["LOSS", "LOGITS"]}
    alarm = {
        "kind": "alarm", "alarm": "kl_spike", "severity": "warning", "round": 1, "subject": "", "ended": False,
        "value": 0.2, "limit": 0.15, "cause": "KL 0.2 above 0.15", "remedy": "lower the rate",
    }  # fmt: skip
    fault = {**alarm, "alarm": "numerical_fault", "severity": "critical", "value": "nan", "limit": None}
    write_run(tmp_path, events=[*default_events(), panic, alarm, fault])
    assert rows_of(tmp_path, "FROM panics") == [(1, "digits_hand", 2, 4, ["LOSS", "LOGITS"])]
    first, second = rows_of(tmp_path, "FROM alarms")
    assert first == (1, "kl_spike", "warning", "", False, 0.2, 0.15, "KL 0.2 above 0.15", "lower the rate")
    assert second[1:3] == ("numerical_fault", "critical")
    assert math.isnan(second[5])
    assert second[6] is None


def test_several_tasks(tmp_path: Path) -> None:
    """Each event's own."""
    write_run(tmp_path, events=[full_episode(0, 0, task="a"), full_episode(0, 1, task="b")], task="a,b")
    assert rows_of(tmp_path, "SELECT task, env FROM episodes ORDER BY 1") == [("a", 0), ("b", 1)]


def test_views_are_as_documented(tmp_path: Path) -> None:
    """Columns, their order and types; `rounds` has those of the run behind them."""
    for name, found in columns_of(write_run(tmp_path)).items():
        documented = [(column, kind, meaning) for column, (kind, meaning) in VIEWS[name].columns.items()]
        assert [tuple(column) for column in found[: len(documented)]] == documented
        assert (len(found) > len(documented)) == (name == "rounds")
    assert list(columns_of(tmp_path)) == list(VIEWS)


# -- unfinished, damaged ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("torn", ['{"round": 2, "kind": "epis', '{"kind": "stage", "round": 1, "step": ', "{"])
def test_a_torn_last_line_is_survived(name: str, torn: str, tmp_path: Path) -> None:
    """A run that writes, or was killed as it did."""
    write_run(tmp_path)
    asked = "SELECT (SELECT count(*) FROM rounds), (SELECT count(*) FROM episodes), (SELECT count(*) FROM stages)"
    whole = rows_of(tmp_path, asked)
    with (tmp_path / name).open("a") as file:
        file.write(torn)
    assert rows_of(tmp_path, asked) == whole == [(2, 8, 28)]


def test_a_line_that_is_completed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torn for DuckDB, whole a moment later: no damage."""
    write_run(tmp_path)
    events, load = tmp_path / "events.jsonl", queries._is_torn
    text = events.read_text()
    events.write_text(text[:-30])

    def complete(path: Path) -> bool:
        path.write_text(text)
        return load(path)

    monkeypatch.setattr(queries, "_is_torn", complete)
    assert rows_of(tmp_path, "SELECT count(*) FROM episodes") == [(7,)]


def test_events_of_an_unfinished_round_do_not_count(tmp_path: Path) -> None:
    unfinished = full_episode(2, 0, stages=columns(life(2, 0, "r1c2", 0)))
    write_run(tmp_path, events=[*default_events(), unfinished, {"kind": "of tomorrow"}])
    for name in ("episodes", "seeds", "stages", "decisions", "rewards"):
        assert rows_of(tmp_path, f"SELECT count(*) FROM {name} WHERE round = 2") == [(0,)], name


def test_before_the_first_round(tmp_path: Path) -> None:
    """Everything is empty, and nothing is wrong."""
    write_run(tmp_path, rows=[], events=[])
    for name in VIEWS:
        assert rows_of(tmp_path, f"FROM {name}") == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no JSON", "line 9 is not JSON"),
        ('{"kind": "episode", "round": 0}', "line 9 has no 'env'"),
        ('{"kind": "episode", "round": 0, "env": 1, "objective": "good"}', "line 9: 'objective' is 'good'"),
        ('{"kind": "episode", "round": "first", "env": 1}', "line 9: 'round' is 'first'"),
        ("[1]", "line 9 is no JSON object"),
        ('{"round": 0}', "line 9 has no 'kind'"),
    ],
)
def test_damage_is_named(line: str, message: str, tmp_path: Path) -> None:
    """The line in mid-file, whatever else is right; with a torn last line too."""
    lines = [*default_events(), line]
    for last in ([], ['{"kind": "episo']):
        write_run(tmp_path, events=lines[:-1])
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write("\n".join([line, '{"kind": "stage", "round": 9}'.replace("stage", "other"), *last]))
            file.write("" if last else "\n")
        with pytest.raises(BadValueError, match=message):
            rows_of(tmp_path, "FROM episodes")


def test_damage_of_one_kind_leaves_the_others(tmp_path: Path) -> None:
    """An alarm that is none is no reason to refuse the seeds."""
    write_run(tmp_path, events=[*default_events(), {"kind": "alarm", "what": "KL"}])
    assert rows_of(tmp_path, "SELECT count(*) FROM seeds") == [(6,)]
    with pytest.raises(BadValueError, match="line 9 has no 'round'"):
        rows_of(tmp_path, "FROM alarms")


@pytest.mark.parametrize(
    ("rows", "message"),
    [([{"objective": 1}], "line 1 has no 'round'"), ([metrics(1), metrics(0)], "round 0 comes after round 1")],
)
def test_wrong_metrics_are_named(rows: list[Json], message: str, tmp_path: Path) -> None:
    write_run(tmp_path, rows)
    with pytest.raises(BadValueError, match=message):
        rows_of(tmp_path, "FROM rounds")


def test_no_run_folder(tmp_path: Path) -> None:
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(BadValueError, match="no run folder"):
            rows_of(wrong, "FROM rounds")
        with pytest.raises(BadValueError, match="no run folder"):
            columns_of(wrong)


def test_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    """Signs that mean something to SQL or to a pattern of file names."""
    path = tmp_path / "it's a [run]*?"
    other = tmp_path / "it's a run"
    write_run(other, events=[])
    write_run(path)
    assert rows_of(path, "SELECT count(*) FROM episodes") == [(8,)]


# -- what a statement may do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("selec 1", "the statement cannot be run: Parser Error"),
        ("SELECT nope FROM rounds", '"nope" not found'),
        ("SELECT 'a'::INTEGER FROM rounds", "Could not convert"),
        ("SELECT * FROM nope", "unknown view 'nope'; allowed: rounds, episodes, decisions"),
        ("FROM 'metrics.jsonl'", "disabled"),
        ("", "0 statements"),
        ("SELECT 1; SELECT 2", "2 statements"),
    ],
)
def test_mistakes(statement: str, message: str, tmp_path: Path) -> None:
    """One line that says what is wrong."""
    write_run(tmp_path)
    with pytest.raises(EsperError, match=message) as caught:
        rows_of(tmp_path, statement)
    assert "\n" not in str(caught.value)


def test_an_error_in_a_late_row(tmp_path: Path) -> None:
    """When rows have been handed over already."""
    late = "SELECT CASE WHEN i = 150000 THEN 'a' ELSE '1' END::INTEGER FROM range(200000) AS t(i)"
    with pytest.raises(BadValueError, match="Could not convert"):
        rows_of(write_run(tmp_path), late)


@pytest.mark.parametrize(
    "statement",
    [
        "COPY rounds TO '{here}/stolen.csv'",
        "ATTACH '{here}/other.db'",
        "EXPORT DATABASE '{here}/all'",
        "CREATE TABLE mine AS FROM rounds",
        "DROP VIEW rounds",
        "DELETE FROM log.rounds",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "INSTALL httpfs",
        "LOAD httpfs",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "EXPLAIN ANALYZE COPY rounds TO '{here}/stolen.csv'",
        "SELECT * FROM read_text('{here}/secret.txt')",
        "SELECT * FROM '{here}/secret.txt'",
        "SELECT * FROM glob('{here}/*')",
        "SELECT * FROM query('FROM read_text(''{here}/secret.txt'')')",
        "WITH a AS (COPY rounds TO '{here}/stolen.csv') FROM a",
    ],
)
def test_a_statement_reads_the_views_and_nothing_else(statement: str, tmp_path: Path) -> None:
    """No file is read or written beside the run's, and no setting changed."""
    run = write_run(tmp_path / "run")
    (tmp_path / "secret.txt").write_text("secret")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(EsperError):
        rows_of(run, statement.format(here=tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_variables_are_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB would take an array of that name in the code that calls it."""
    monkeypatch.setattr(queries, "numbers", {"one": np.array([1.0])}, raising=False)
    with pytest.raises(UnknownNameError, match="unknown view 'numbers'"):
        rows_of(write_run(tmp_path), "FROM numbers")


def test_no_files_beside_the_run(tmp_path: Path) -> None:
    """What does not fit into memory is not put into a folder where the command happens to be called."""
    assert rows_of(write_run(tmp_path), "SELECT current_setting('temp_directory')") == [("",)]


def test_what_it_does_in_memory_stays_there(tmp_path: Path) -> None:
    """DuckDB takes an INSERT inside of WITH: it changes the copy, and the run is what it was."""
    write_run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    changed = "WITH a AS (INSERT INTO log.rounds (round) VALUES (99) RETURNING round) SELECT round FROM a"
    assert rows_of(tmp_path, changed) == [(99,)]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert rows_of(tmp_path, "SELECT count(*) FROM rounds") == [(2,)]


OF_TRAINING = [name for name in LOGS if name != "stage"]


@pytest.mark.parametrize(
    ("statement", "kinds"),
    [
        ("SELECT count(*) FROM rounds", []),
        ("SELECT * FROM Seeds", ["stages"]),
        ("SELECT op FROM decisions", ["episode"]),
        ("SELECT * FROM episodes JOIN seeds USING (round, env)", ["stages", "episode"]),
        ("FROM query('FROM ' || 'epi' || 'sodes')", OF_TRAINING),
        ("FROM query_table('epi' || 'sodes')", OF_TRAINING),
    ],
)
def test_only_what_is_asked_for_is_read(
    statement: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of that."""
    loaded, load = [], queries._load

    def noted(*arguments: Json) -> None:
        loaded.append(arguments[2])
        load(*arguments)

    monkeypatch.setattr(queries, "_load", noted)
    assert rows_of(write_run(tmp_path, events=[*default_events(), full_episode(1, 0)]), statement)
    assert loaded == kinds


@pytest.mark.parametrize(
    "statement",
    [
        "PIVOT stages ON target USING count(*) GROUP BY round",
        "DESCRIBE seeds",
        "SUMMARIZE rounds",
        "SHOW TABLES",
        "EXPLAIN FROM seeds",
        "WITH best AS (FROM episodes ORDER BY objective DESC LIMIT 1) SELECT env FROM best",
    ],
)
def test_other_ways_to_ask(statement: str, tmp_path: Path) -> None:
    assert rows_of(write_run(tmp_path), statement)


def test_without_duckdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingPackageError, match=r"duckdb, which is not installed.*esper-morph\[query\]"):
        rows_of(write_run(tmp_path), "FROM rounds")


def test_unknown_views_are_told_with_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError) as caught:
        rows_of(write_run(tmp_path), "FROM seed")
    assert all(name in str(caught.value) for name in VIEWS)
