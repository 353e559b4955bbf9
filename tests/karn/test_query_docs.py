"""docs/queries.md: its tables are those of the code, and its questions are answered by a run that was really trained.

`python tests/karn/test_query_docs.py` prints the tables.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
from karn.test_queries import rows_of
from simic.training.tiny import NAME, tiny_task
from test_docs import commands_of

from esper.cli import main
from esper.karn.queries import ask
from esper.karn.views import GROWER_VIEWS, VIEWS, SqlView

PAGE = Path(__file__).resolve().parents[2] / "docs" / "queries.md"


def tables(views: Mapping[str, SqlView] = VIEWS) -> str:
    """All views as Markdown."""
    parts = []
    for name, view in views.items():
        lines = [f"| `{column}` | {kind} | {meaning} |" for column, (kind, meaning) in view.columns.items()]
        meaning = textwrap.fill(f"**{name}.** {view.meaning}", 100, break_on_hyphens=False)
        parts.append("\n".join([f"{meaning}\n", "| column | type | meaning |", "|---|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def questions() -> list[str]:
    """The statements of the page."""
    return [words[3] for words in commands_of(PAGE) if words[:2] == ["esper", "query"] and len(words) > 3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of eight growing hosts, whose policy decides about commits itself."""
    tiny_task()
    path = tmp_path_factory.mktemp("trained") / "run"
    sizes = ["--rounds", "2", "--hosts", "12", "--members", "2", "--preset", "core"]
    steps = ["--ppo.rate", "0.001", "--ppo.rate-end", "1", "--ppo.epochs", "4", "--ppo.target-kl", "0.03"]
    main(["train", "--task", NAME, *sizes, *steps, "--out", str(path)])
    return path


def test_the_page_has_the_tables() -> None:
    """Word by word."""
    assert tables() in PAGE.read_text()
    assert tables(GROWER_VIEWS) in PAGE.read_text()


@pytest.mark.slow
def test_the_questions_are_answered(run: Path) -> None:
    """All of them, with rows."""
    asked = questions()
    assert len(asked) == 7
    for statement in asked:
        with ask(run, statement) as answer:
            assert len(list(answer.rows)) > 0, statement


@pytest.mark.slow
def test_decisions_are_those_of_the_metrics(run: Path) -> None:
    """Counted twice on their way: as ops of a round, and one by one."""
    counted = "SELECT round, lower(op) AS op, count(*) AS found FROM decisions GROUP BY ALL"
    written = (
        "UNPIVOT (SELECT round, COLUMNS('ops_(.*)') AS '\\1' FROM rounds) ON * EXCLUDE (round) INTO NAME op VALUE n"
    )
    assert rows_of(run, f"SELECT count(*) FROM ({counted})")[0][0] >= 4
    assert (
        rows_of(
            run, f"SELECT * FROM ({counted}) FULL JOIN ({written}) USING (round, op) WHERE found IS DISTINCT FROM n"
        )
        == []
    )
    assert rows_of(run, "SELECT DISTINCT count(*) FROM decisions GROUP BY round, env") == [(12,)]


@pytest.mark.slow
def test_rewards_are_those_of_the_metrics(run: Path) -> None:
    """Parts: their means over episodes. Steps: they sum to the parts, to the rounding of both."""
    for part in ("gain", "rent"):
        means = f"SELECT round, avg(points) AS points FROM rewards WHERE part = '{part}' GROUP BY round"
        found = rows_of(run, f"SELECT points, reward_{part} FROM ({means}) JOIN rounds USING (round)")
        assert len(found) == 2
        assert all(mean == pytest.approx(written, abs=1e-3) for mean, written in found)
    sums = "SELECT round, env, sum(points) AS points FROM rewards GROUP BY ALL"
    for reward, points in rows_of(run, f"SELECT reward, points FROM episodes JOIN ({sums}) USING (round, env)"):
        assert reward == pytest.approx(points, abs=0.02)


@pytest.mark.slow
def test_seeds_are_those_that_were_germinated(run: Path) -> None:
    """Every GERMINATE has its seed, and every commit its episode's parameters."""
    born = "SELECT round, env, step, slot, blueprint FROM decisions WHERE op = 'GERMINATE'"
    seeds = "SELECT round, env, germinated_at, slot, blueprint FROM seeds"
    assert sorted(rows_of(run, born)) == sorted(rows_of(run, seeds))
    ended = "SELECT round, env, ended_at, slot FROM seeds WHERE cause = 'fossilize'"
    assert sorted(rows_of(run, ended)) == sorted(
        rows_of(run, "SELECT round, env, step, slot FROM decisions WHERE op = 'FOSSILIZE'")
    )
    committed = "SELECT round, env, bool_or(outcome = 'committed') AS kept FROM seeds GROUP BY ALL"
    both = (
        f"SELECT added_parameters > 0, coalesce(kept, false) FROM episodes LEFT JOIN ({committed}) USING (round, env)"
    )
    assert all(grown == kept for grown, kept in rows_of(run, both))


if __name__ == "__main__":
    print(tables(), tables(GROWER_VIEWS), sep="\n")
