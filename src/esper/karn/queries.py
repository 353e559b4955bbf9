"""SQL over a run: its views in a database in memory, and the answer to a statement."""

import csv
import glob
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from esper.karn.fields import Fields, checked_lines, is_number
from esper.karn.growth import contributions_of
from esper.karn.stage_columns import changes_of
from esper.karn.state import EVENTS, Counter, is_of_grower, metric_lines, read_header
from esper.karn.views import CHANGES, GROWER_VIEWS, LOGS, VIEWS, Log, SqlView
from esper.leyline import BadValueError, MissingPackageError, UnknownNameError
from esper.leyline.records import NOT_FINITE, Json, encode, flatten
from esper.storage.files import storage_errors

if TYPE_CHECKING:
    import duckdb

Cell = Any  # whatever a statement selects
STDOUT = Path("-")
NESTED_ELSEWHERE = ("germinated", "tasks", "contributions")
"""Keys of the metrics that other views show in more detail"""
READING = ("SELECT", "EXPLAIN", "MULTI")
"""Kinds of statements that are run; MULTI is PIVOT."""
CHUNK = 10_000
TIMEOUT_S = 60.0
"""Seconds that a statement may take"""


class Column(NamedTuple):
    """A column of a view, as this run has it."""

    name: str
    type: str
    meaning: str


class Answer(NamedTuple):
    """Named columns, and an iterator over the rows."""

    columns: list[str]
    rows: Iterator[tuple[Cell, ...]]

    def write_csv(self, path: Path) -> int:
        """Write a header and a line per row, with lists and maps as JSON. Returns the number of rows."""
        count = 0
        with _opened(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            for row in self.rows:
                writer.writerow([as_json(cell) if isinstance(cell, list | dict) else cell for cell in row])
                count += 1
        return count

    def write_json(self, path: Path) -> int:
        """Write a list of objects, one per line. Returns the number of rows."""
        if repeated := sorted({name for name in self.columns if self.columns.count(name) > 1}):
            raise BadValueError(f"several columns are called {repeated}: name them with AS")
        count = 0
        with _opened(path) as file:
            for count, row in enumerate(self.rows, 1):
                file.write((",\n" if count > 1 else "[\n") + as_json(dict(zip(self.columns, row, strict=True))))
            file.write("\n]\n" if count else "[]\n")
        return count


def as_json(cell: Cell) -> str:
    """A cell as JSON. Numbers that are not finite become words, other types become text."""

    def plain(value: Cell) -> Cell:
        return float(value) if isinstance(value, Decimal) else str(value)

    return json.dumps(encode(cell), default=plain, allow_nan=False, ensure_ascii=False)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The standard output, or a file that appears once it is complete."""
    if path == STDOUT:
        yield sys.stdout
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with storage_errors(path):
        try:
            with beside.open("x", encoding="utf-8", newline="") as file:
                yield file
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def ask(path: Path, statement: str, timeout: float = TIMEOUT_S) -> Iterator[Answer]:
    """Run one reading statement over the complete rounds of a run, for at most `timeout` seconds."""
    views = views_of(path)
    with _database(views) as connection:
        parsed = connection.extract_statements(statement)
        if len(parsed) != 1:
            raise BadValueError(f"{len(parsed)} statements in {statement!r}; give one")
        if (kind := parsed[0].type.name) not in READING:
            raise BadValueError(f"{kind} is not run here: a run is only read, with SELECT")
        _create(connection, path, views)
        # Events behind the views that the text names; all, if it calls query() or query_table(), which can put a name
        # together while they run.
        text = statement.lower()
        needed = {view.log for name, view in views.items() if name in text or "query" in text}
        for table in (table for table in LOGS if table in needed):
            _load(connection, path / EVENTS, table, _counter(views))
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
        timer = Timer(timeout, connection.interrupt)
        timer.start()
        try:
            connection.execute(statement)
        finally:
            timer.cancel()
        chunks = iter(lambda: connection.fetchmany(CHUNK), [])
        yield Answer([entry[0] for entry in connection.description or []], chain.from_iterable(chunks))


def views_of(path: Path) -> Mapping[str, SqlView]:
    """The views of a run: a Grower's has others than a training's."""
    return GROWER_VIEWS if is_of_grower(read_header(path)) else VIEWS


def columns_of(path: Path) -> dict[str, list[Column]]:
    """The views of a run and their columns. Reads no events."""
    views = views_of(path)
    columns = {}
    with _database(views) as connection:
        _create(connection, path, views)
        for name, view in views.items():
            described = connection.execute(f"DESCRIBE {name}").fetchall()
            columns[name] = [Column(each, kind, view.columns.get(each, ("", ""))[1]) for each, kind, *_ in described]
    return columns


@contextmanager
def _database(views: Mapping[str, SqlView]) -> Iterator["duckdb.DuckDBPyConnection"]:
    """A database in memory, which never spills to a file. Errors of DuckDB become Esper's, in one line."""
    try:
        import duckdb
    except ImportError as error:
        raise MissingPackageError("esper query", "duckdb", "esper-morph[query]") from error
    with duckdb.connect(":memory:", config={"temp_directory": ""}) as connection:
        try:
            yield connection
        except duckdb.InterruptException:
            raise BadValueError("the statement took too long; ask for less, or raise --timeout") from None
        except duckdb.Error as error:
            if unknown := re.match(r"Catalog Error: Table with name (\S+) does not exist", str(error)):
                raise UnknownNameError("view", unknown[1], views) from error
            words = str(error).split("\n\n")[0].split("\nLINE ")[0]  # without the picture of where
            raise BadValueError(f"the statement cannot be run: {' '.join(words.split())}") from error


def _create(connection: "duckdb.DuckDBPyConnection", path: Path, views: Mapping[str, SqlView]) -> None:
    """Create all views. Fills the tables of metrics; the tables of events stay empty."""
    connection.execute("CREATE SCHEMA log")
    for table, log in LOGS.items():
        _fill(connection, table, log.columns, [])
    connection.execute(f"CREATE VIEW log.changes AS {CHANGES[_counter(views)]}")
    if views is VIEWS:
        _fill_metrics(connection, "rounds", views, list(metric_lines(path)))
    else:
        lines = list(metric_lines(path, "step"))
        _fill_metrics(connection, "steps", views, lines)
        rows = [
            {"step": line["step"], "slot": slot, "contribution": measured.value, "error": measured.error}
            for line in lines
            for slot, measured in contributions_of(line).items()
        ]
        _fill(connection, "contributions", _types(views["contributions"]), rows)
    for name, view in views.items():
        connection.execute(f"CREATE VIEW {name} AS {view.sql}")


def _counter(views: Mapping[str, SqlView]) -> Counter:
    return "round" if views is VIEWS else "step"


def _types(view: SqlView) -> dict[str, str]:
    return {name: type_ for name, (type_, _) in view.columns.items()}


def _fill_metrics(
    connection: "duckdb.DuckDBPyConnection", table: str, views: Mapping[str, SqlView], lines: Iterable[Fields]
) -> None:
    """Create a table with every number of the metrics."""
    rows = [
        {
            re.sub(r"\W+", "_", name).lower(): value  # ppo/op/entropy → ppo_op_entropy
            for name, value in flatten(line, skip=NESTED_ELSEWHERE)
            if is_number(value) or value in NOT_FINITE
        }
        for line in lines
    ]
    types = _types(views[table])
    _fill(connection, table, types | dict.fromkeys((n for row in rows for n in row if n not in types), "DOUBLE"), rows)


def _fill(
    connection: "duckdb.DuckDBPyConnection", table: str, types: Mapping[str, str], rows: list[dict[str, Json]]
) -> None:
    """Create a table with these columns and rows."""
    declared = ", ".join(f'"{name}" {type_}' for name, type_ in types.items())
    connection.execute(f"CREATE TABLE log.{table} ({declared})")
    if rows:
        connection.execute(
            f"INSERT INTO log.{table} BY NAME SELECT unnest(entry) FROM (SELECT unnest(from_json(?, ?)) AS entry)",
            [json.dumps(rows), json.dumps([dict(types)])],
        )


def _load(connection: "duckdb.DuckDBPyConnection", path: Path, table: str, counter: Counter) -> None:
    """Fill a table of `LOGS` with the events of complete rounds or steps. Raises for damaged lines."""
    log = LOGS[table]
    types = ", ".join(f"'{name}': '{type_}'" for name, type_ in {"kind": "VARCHAR", **log.columns}.items())
    names = ", ".join(f'"{name}"' for name in log.columns)
    # What is no JSON comes as a row of NULLs: it is kept for now, to be counted.
    read = f"FROM read_ndjson(?, columns = {{{types}}}, ignore_errors = true) WHERE kind = ? OR kind IS NULL"
    file = glob.escape(str(path.resolve()))
    connection.execute(f"INSERT INTO log.{table} {log.checked(f'SELECT {names} {read}')}", [file, log.kind])
    lacking = " OR ".join(f"{name} IS NULL" for name in log.required)
    ((damaged,),) = connection.execute(f"SELECT count(*) FROM log.{table} WHERE {lacking}").fetchall()
    if damaged > _is_torn(path):
        _name_damage(path, log, damaged)
    complete = f"(SELECT {counter} FROM log.{counter}s)"
    connection.execute(f"DELETE FROM log.{table} WHERE {lacking} OR {counter} NOT IN {complete}")


def _is_torn(path: Path) -> bool:
    """Whether the last line is incomplete: it is being written, or its run was killed."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read() not in (b"", b"\n")


def _name_damage(path: Path, log: Log, damaged: int) -> None:
    """Raise with the number of the first damaged line. Slow, because it checks line by line."""
    take: dict[str, Callable[[Fields, str], object]] = {
        "INTEGER": Fields.whole,
        "DOUBLE": Fields.number,
        "VARCHAR": Fields.text,
        "JSON": lambda line, _: changes_of(line, line.whole("env")),
    }
    for line in checked_lines(path):
        if line.text("kind") == log.kind:
            for name in log.required:
                take[log.columns[name]](line, name)
    # Nothing: a line was torn when it was read, and has been completed since.
    if damaged > 1:
        raise BadValueError(f"{path} has {damaged} lines that are no events of kind {log.kind!r}")
