"""What a statement gave, and how it is written down."""

import csv
import glob
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TextIO

from esper.karn.fields import Fields, Json, is_number
from esper.karn.state import EVENTS, checked_lines, metric_lines, read_header
from esper.karn.views import LOGS, VIEWS, Log
from esper.leyline import BadValueError, EsperError, MissingPackageError, UnknownNameError
from esper.leyline.records import encode

Cell = Any  # whatever a statement selects
STDOUT = Path("-")


class Answer:
    """Named columns, and rows that are handed over once. Use it as a context manager."""

    def __init__(self, columns: Sequence[str], rows: Iterator[tuple[Cell, ...]], close: Callable[[], None]) -> None:
        self.columns, self.rows, self._close = list(columns), rows, close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def write_csv(self, path: Path) -> int:
        """A line per row under a line of names; lists and maps as JSON. Returns how many rows."""
        with _opened(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            count = 0
            for row in self.rows:
                writer.writerow([as_json(cell) if isinstance(cell, list | dict) else cell for cell in row])
                count += 1
        return count

    def write_json(self, path: Path) -> int:
        """A list of objects, one per line. Returns how many rows."""
        if repeated := sorted({name for name in self.columns if self.columns.count(name) > 1}):
            raise BadValueError(f"several columns are called {repeated}: name them with AS")
        with _opened(path) as file:
            count = 0
            for row in self.rows:
                file.write((",\n" if count else "[\n") + as_json(dict(zip(self.columns, row, strict=True))))
                count += 1
            file.write("\n]\n" if count else "[]\n")
        return count


def as_json(cell: Cell) -> str:
    """As JSON; numbers that are not finite become words, and what it has no form for becomes text."""
    return json.dumps(encode(cell), default=_plain, allow_nan=False, ensure_ascii=False)


def _plain(cell: Cell) -> Cell:
    return float(cell) if isinstance(cell, Decimal) else str(cell)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The screen's output, or a file that is seen only when it is complete."""
    if path == STDOUT:
        yield sys.stdout
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("x", encoding="utf-8", newline="") as file:
            yield file
        beside.replace(path)
    except OSError as error:
        raise BadValueError(f"{path} cannot be written: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


if TYPE_CHECKING:
    import duckdb

NESTED_ELSEWHERE = ("germinated", "tasks")
"""Of a line of the metrics: what other views tell in more detail."""
NOT_FINITE = ("nan", "inf", "-inf")
"""Numbers that JSON has no word for, as they are written."""
READING = ("SELECT", "EXPLAIN", "MULTI")
"""Kinds of statements that are run; MULTI is PIVOT."""
CHUNK = 10_000
TIMEOUT_S = 60.0
"""Seconds that a statement may take."""


class Column(NamedTuple):
    """A column of a view, as this run has it."""

    name: str
    type: str
    meaning: str


def ask(path: Path, statement: str, timeout: float = TIMEOUT_S) -> Answer:
    """Run one reading statement over the complete rounds of a run. Raises after `timeout` seconds."""
    task = read_header(path).inside("config").text("task")
    connection = _connect()
    try:
        _check(connection, statement)
        _create(connection, path)
        for kind in _needed(statement):
            _load(connection, path / EVENTS, kind, LOGS[kind], task)
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
        with _translated(), _time_limit(connection, timeout):
            connection.execute(statement)
        return Answer([entry[0] for entry in connection.description or []], _rows(connection), connection.close)
    except BaseException:
        connection.close()
        raise


def _rows(connection: "duckdb.DuckDBPyConnection") -> Iterator[tuple[Json, ...]]:
    """As they are asked for: a statement may give more than fits into memory as objects of Python's."""
    while True:
        with _translated():
            rows = connection.fetchmany(CHUNK)
        if not rows:
            return
        yield from rows


def columns_of(path: Path) -> dict[str, list[Column]]:
    """The views of a run and their columns. Reads no events."""
    read_header(path)
    with _connect() as connection:
        _create(connection, path)
        found = {}
        for name, view in VIEWS.items():
            described = connection.execute(f"DESCRIBE {name}").fetchall()
            meanings = {column: meaning for column, (_, meaning) in view.columns.items()}
            found[name] = [Column(column, kind, meanings.get(column, "")) for column, kind, *_ in described]
    return found


def _connect() -> "duckdb.DuckDBPyConnection":
    """A database in memory alone: what does not fit there is an error, not a file in the working folder."""
    try:
        import duckdb
    except ImportError as error:
        raise MissingPackageError("esper query", "duckdb", "esper-morph[query]") from error
    return duckdb.connect(":memory:", config={"temp_directory": ""})


def _check(connection: "duckdb.DuckDBPyConnection", statement: str) -> None:
    """Raise unless it is one statement that reads."""
    with _translated():
        parsed = connection.extract_statements(statement)
    if len(parsed) != 1:
        raise BadValueError(f"{len(parsed)} statements in {statement!r}; give one")
    kind = parsed[0].type.name
    if kind not in READING:
        raise BadValueError(f"{kind} is not run here: a run is only read, with SELECT")


def _needed(statement: str) -> list[str]:
    """Kinds of events that a statement may read: those behind the views that its text names.

    All, if it calls query() or query_table(), which can put a name together while they run.
    """
    text = statement.lower()
    named = [view for name, view in VIEWS.items() if name in text or "query" in text]
    return [kind for kind in LOGS if any(kind in view.logs for view in named)]


def _create(connection: "duckdb.DuckDBPyConnection", path: Path) -> None:
    """All views. Rounds are there; tables of events are empty."""
    connection.execute("CREATE SCHEMA log")
    for kind, log in LOGS.items():
        columns = ", ".join(f"{_quoted(name)} {type_}" for name, type_ in log.columns.items())
        connection.execute(f"CREATE TABLE log.{kind} ({columns})")
    rows = [{"round": number, **_numbers(line)} for number, line in metric_lines(path)]
    types = {name: type_ for name, (type_, _) in VIEWS["rounds"].columns.items()}
    types |= dict.fromkeys((name for row in rows for name in row if name not in types), "DOUBLE")
    columns = ", ".join(f"{_quoted(name)} {type_}" for name, type_ in types.items())
    connection.execute(f"CREATE TABLE log.rounds ({columns})")
    connection.execute(
        "INSERT INTO log.rounds BY NAME SELECT unnest(entry) FROM (SELECT unnest(from_json(?, ?)) AS entry)",
        [json.dumps(rows), json.dumps([types])],
    )
    for name, view in VIEWS.items():
        connection.execute(f"CREATE VIEW {name} AS {view.sql}")


def _numbers(line: Fields) -> dict[str, Json]:
    """Every number of a line of the metrics, by the name of its column."""
    found: dict[str, Json] = {}

    def visit(name: str, value: Json) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{name}/{key}", item)
        elif is_number(value) or value in NOT_FINITE:
            found[column_name(name)] = value

    for name, value in line.content.items():
        if name not in NESTED_ELSEWHERE:
            visit(name, value)
    return found


def column_name(metric: str) -> str:
    """As a metric is called in SQL: `ppo/op/entropy` → `ppo_op_entropy`."""
    return re.sub(r"\W+", "_", metric).lower()


def _load(connection: "duckdb.DuckDBPyConnection", path: Path, kind: str, log: Log, task: str) -> None:
    """Events of a kind into its table, those of complete rounds; damage is named."""
    types = ", ".join(f"'{name}': '{type_}'" for name, type_ in {"kind": "VARCHAR", **log.columns}.items())
    names = ", ".join(_quoted(name) for name in log.columns)
    read = f"SELECT {names} FROM read_ndjson(?, columns = {{{types}}}, ignore_errors = true)"
    # What is no JSON comes as a row of NULLs: it is kept for now, to be counted.
    file = glob.escape(str(path.resolve()))
    with _translated():
        connection.execute(f"INSERT INTO log.{kind} {read} WHERE kind = ? OR kind IS NULL", [file, kind])
    lacking = " OR ".join(f"{_quoted(name)} IS NULL" for name in log.required)
    damaged = _count(connection, f"log.{kind} WHERE {lacking}")
    if damaged > _is_torn(path):
        _name_damage(path, kind, log, damaged)
    connection.execute(f"DELETE FROM log.{kind} WHERE {lacking} OR round NOT IN (SELECT round FROM log.rounds)")
    if "task" in log.columns:  # the first logs did not name it: they had one
        connection.execute(f"UPDATE log.{kind} SET task = ? WHERE task IS NULL", [task])


def _count(connection: "duckdb.DuckDBPyConnection", of: str) -> int:
    found = connection.execute(f"SELECT count(*) FROM {of}").fetchone()
    assert found is not None
    return int(found[0])


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end: it is being written, or its run was killed."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _name_damage(path: Path, kind: str, log: Log, damaged: int) -> None:
    """Raise with the line that is no JSON, or no event. Slow: line by line."""
    take = {"INTEGER": Fields.whole, "DOUBLE": Fields.number, "VARCHAR": Fields.text}
    for line in checked_lines(path):
        if line.text("kind") == kind:
            for name in log.required:
                take[log.columns[name]](line, name)
    # Nothing: a line was torn when it was read, and has been completed since.
    if damaged > 1:
        raise BadValueError(f"{path} has {damaged} lines that are no events of kind {kind!r}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def _time_limit(connection: "duckdb.DuckDBPyConnection", seconds: float) -> Iterator[None]:
    """Interrupt what the connection runs inside the block once the time is up."""
    import duckdb

    timer = Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except duckdb.InterruptException:
        raise BadValueError(f"the statement took longer than {seconds:g} s; ask for less, or raise --timeout") from None
    finally:
        timer.cancel()


@contextmanager
def _translated() -> Iterator[None]:
    """Errors of DuckDB's as Esper's, in one line."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise _error(str(error)) from error


def _error(message: str) -> EsperError:
    unknown = re.match(r"Catalog Error: Table with name (\S+) does not exist", message)
    if unknown:
        return UnknownNameError("view", unknown[1], VIEWS)
    words = message.split("\n\n")[0].split("\nLINE ")[0]  # without the picture of where
    return BadValueError(f"the statement cannot be run: {' '.join(words.split())}")
