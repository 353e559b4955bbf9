"""Follows a run folder while another process writes it.

    follower = RunFollower(Path("runs/first"))
    if follower.poll():             # reads what is new; now and then
        draw(follower.state)

The lines are folded into the state that reports are drawn from. A long log is read from its last few rounds on, and
what lies before them afterwards. Nothing that a file holds raises once the run was found: lines that are wrong are
skipped and named in `problems`.
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from esper.karn.fields import Fields
from esper.karn.front_cache import FrontCache
from esper.karn.growing_files import BLOCK, GrowingFile, Line, LiveTail
from esper.karn.growth import GrowthRun
from esper.karn.state import CONFIG, EVENTS, METRICS, RunState, is_of_grower, read_header
from esper.leyline import EsperError
from esper.leyline.records import refuse_constant

LIVE, SESSIONS = "live.jsonl", "sessions.jsonl"
LIVE_VERSION = 1
TAIL = 8 << 20
"""Bytes at the end of a log that are read first"""
MOST_PROBLEMS = 20
DECODER = json.JSONDecoder(parse_constant=refuse_constant)
"""One for all lines: to make one takes as long as to read a short line"""
WATCHED_S = 0.05
"""Seconds that a poll may take, by default"""


class Session(NamedTuple):
    """A line of `sessions.jsonl`: a process began, resumed or ended its work on the run."""

    kind: str
    time: str
    round: int
    why: str
    """Of an end: complete, stopped, or the error"""


class RunFollower:
    """The state of a run, which `poll` keeps up to date. For one thread."""

    def __init__(self, path: Path, *, tail: int = TAIL, cache: FrontCache | None = None) -> None:
        """Raises if the folder holds no run. Nothing else is read yet. `cache`: of what lies before the tail."""
        self.path, self.tail, self.cache = Path(path), tail, cache
        self.gone = False
        """Whether the run was deleted; the state is then the last one"""
        self._begin(read_header(self.path, logs_needed=False))

    def _begin(self, header: Fields) -> None:
        """Forget everything, and read from the beginning."""
        self.pinned: int | None = None
        """The round whose details are stored; None for the newest complete one"""
        make = GrowthRun.of if is_of_grower(header) else RunState.of
        self.state: RunState | GrowthRun = make(self.path, header)
        self.problems: list[str] = []
        """Lines that could not be read, and why; the first few"""
        self.sessions: list[Session] = []
        self._config = self._stamp()
        self._metrics, self._events = GrowingFile(self.path / METRICS), GrowingFile(self.path / EVENTS)
        self._sessions, self._live = GrowingFile(self.path / SESSIONS), LiveTail(self.path / LIVE)
        self._front = GrowingFile(self.path / EVENTS)
        self._tail_begin: int | None = None  # where the part begins that is read first; None before the first event
        self._awaited = -1  # the round or step that has to be complete before events are read further
        self._places: dict[int, tuple[int, int]] = {}  # round → where its first event lies: bytes, lines before it

    # -- reading ------------------------------------------------------------------------------------------------------

    def poll(self, seconds: float = WATCHED_S, *, front: bool = True) -> bool:
        """Read what is new, for about so many seconds; whether anything has changed. Without `front`, what lies before
        the tail of a long log waits."""
        deadline = time.monotonic() + seconds
        if self._stamp() is None:
            changed, self.gone = not self.gone, True
            return changed
        changed, self.gone = self.gone, False
        if self._stamp() != self._config or self._metrics.was_cut() or self._events.was_cut():
            changed = True
            try:
                self._begin(read_header(self.path, logs_needed=False))
            except EsperError as error:  # half written, or another program's by now
                self._note(str(error))
                return True
        changed |= self._read_all(self._sessions, self._add_session)
        changed |= self._read_all(self._metrics, self.state.add_metrics)
        self._follow_newest()
        changed |= self._read_events(deadline)
        changed |= self._read_live()
        return self._read_front(deadline) | changed if front else changed

    @property
    def behind(self) -> tuple[int, int]:
        """Bytes of the events that were read, and their size."""
        begin = self._tail_begin or 0
        read = self._events.offset - begin + min(self._front.offset, begin)
        return read, read if self._waits else max(read, self._events.size() or 0)

    @property
    def at_end(self) -> bool:
        """Whether the newest events of complete rounds or steps were read."""
        return self.state.complete < self._awaited or not self._events.has_more()

    @property
    def _waits(self) -> bool:
        """Whether the next event is of a round or step that is not complete."""
        return self.state.complete < self._awaited and self._front.offset >= (self._tail_begin or 0)

    def _stamp(self) -> tuple[int, int] | None:
        """What changes when another run begins in the folder."""
        try:
            found = (self.path / CONFIG).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _read_all(self, file: GrowingFile, add: Callable[[Fields], None]) -> bool:
        changed = False
        while lines := file.read():
            for line in lines:
                self._fold(file, line, add)
            changed = True
        return changed

    def _fold(self, file: GrowingFile, line: Line, add: Callable[[Fields], None], *, numbered: bool = True) -> None:
        """Parse a line and add it, or note what is wrong with it."""
        where = f"{file.path.name}, line {line.number}" if numbered else f"{file.path.name}, byte {line.begin:,}"
        try:
            try:
                content = DECODER.decode(line.raw.decode())
            except (ValueError, RecursionError) as error:
                self._note(f"{where} is not JSON: {error}")
                return
            add(Fields(content, where))
        except (EsperError, TypeError, ValueError, OverflowError) as error:
            self._note(str(error))

    def _note(self, problem: str) -> None:
        if problem not in self.problems and len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)

    def _add_session(self, line: Fields) -> None:
        why = line.optional_text("why") or ""
        self.sessions.append(Session(line.text("kind"), line.text("time"), line.whole("round"), why))

    # -- events -------------------------------------------------------------------------------------------------------

    def _follow_newest(self) -> None:
        if isinstance(self.state, RunState) and self.pinned is None and self.state.shown != self.state.complete:
            self.state.show(self.state.complete)

    def _read_events(self, deadline: float) -> bool:
        """Read the events of complete rounds or steps; those of others wait."""
        if self.state.complete < self._awaited or not self._events.has_more():
            return False
        if self._tail_begin is None:
            self._find_tail()
        file, changed = self._events, False
        while lines := file.read():
            for line in lines:
                if (number := self._number(line)) is not None and number > self.state.complete:
                    file.seek(line.begin, line.number - 1)
                    self._awaited = number
                    return changed or line is not lines[0]
                if number is not None:
                    self._places.setdefault(number, (line.begin, line.number - 1))
                self._fold(file, line, self.state.add_event, numbered=not self._tail_begin)
            changed = True
            if time.monotonic() > deadline:
                return True
        return changed

    def _number(self, line: Line) -> int | None:
        """The round or step of an event, from its first few keys; None where it is not to be had."""
        key = f'"{self.state.counter}":'.encode()
        begin = line.raw.find(key)
        digits = line.raw[begin + len(key) : begin + len(key) + 24].lstrip() if begin >= 0 else b""
        number = digits[: len(digits) - len(digits.lstrip(b"0123456789"))]
        return int(number) if number else None

    def _find_tail(self) -> None:
        """Begin where a round does, `tail` bytes before the end."""
        self._tail_begin, size = 0, self._events.size() or 0
        if isinstance(self.state, GrowthRun) or size <= self.tail:
            return
        probe = GrowingFile(self._events.path)
        probe.seek(size - self.tail, 0)
        lines = probe.read(self.tail)[1:]  # the first one is cut
        numbers = [self._number(line) for line in lines]
        for line, before, number in zip(lines[1:], numbers, numbers[1:], strict=False):
            if before is not None and number is not None and number > before:
                self._tail_begin = line.begin
                self._events.seek(line.begin, 0)
                return

    def _read_front(self, deadline: float) -> bool:
        """Read what lies before the tail."""
        end = self._tail_begin or 0
        changed = end > 0 == self._front.offset and self._load_front(end)
        begin = self._front.offset
        while self._front.offset < end and (changed is False or time.monotonic() < deadline):
            lines = self._front.read(min(BLOCK, end - self._front.offset))
            if not lines:
                break
            for line in lines:
                if line.begin >= end:  # of a block that had to be longer
                    break
                if (number := self._number(line)) is not None:
                    self._places.setdefault(number, (line.begin, line.number - 1))
                if not line.raw.startswith(b'{"kind":"followed"'):  # it is stored of one round only
                    self._fold(self._front, _without_curves(line), self.state.add_event)
            changed = True
        if begin < end <= self._front.offset:
            self._save_front(end)
        return changed

    def _load_front(self, end: int) -> bool:
        """Take over what the cache has of the part before `end`."""
        stored = None if self.cache is None else self.cache.load(self._events.path, end)
        if stored is None or isinstance(self.state, GrowthRun):
            return False
        self.state.add_front(stored)
        self._places = {**stored.places, **self._places}
        self._front.seek(stored.end, stored.lines)
        return True

    def _save_front(self, end: int) -> None:
        if self.cache is not None and isinstance(self.state, RunState) and not self.problems:
            places = {number: place for number, place in self._places.items() if place[0] < end}
            self.cache.save(self._events.path, self.state.front(end, self._front.number, places))

    def show(self, number: int | None) -> bool:
        """Store the details of this complete round, or of the newest (None). Whether its events are at hand: those of
        a long log may not have been read yet."""
        state = self.state
        if isinstance(state, GrowthRun):
            return number is None
        if number is not None and (number not in self._places or not state.has(number)):
            return False
        self.pinned = number
        wanted = state.complete if number is None else number
        if wanted == state.shown or wanted not in self._places:
            return True
        state.show(wanted)
        state.forget_details()
        for line in self._lines_of(wanted):
            if not line.raw.startswith(b'{"kind":"alarm"'):  # they are stored of all rounds
                self._fold(self._events, line, state.add_event, numbered=not self._tail_begin)
        return True

    def _lines_of(self, number: int) -> Iterable[Line]:
        """The events of one round."""
        file = GrowingFile(self._events.path)
        file.seek(*self._places[number])
        while lines := file.read():
            for line in lines:
                own = self._number(line)
                if own is not None and own > number:
                    return
                yield line

    # -- live ---------------------------------------------------------------------------------------------------------

    def _read_live(self) -> bool:
        return self._read_all(self._live, self._add_live)

    def _add_live(self, line: Fields) -> None:
        state = self.state
        if line.get("kind") == "live":
            if line.get("version") != LIVE_VERSION:
                self._note(
                    f"{line.where}: version is {line.get('version')!r}, this Esper reads version {LIVE_VERSION}; what"
                    " happens within a round is not shown"
                )
                state.live = None
            else:
                state.begin_live(line.whole("round"))
        elif state.live is not None and line.get("kind") == "step":
            state.live.add(line, ahead=isinstance(state, GrowthRun))


def _without_curves(line: Line) -> Line:
    """An episode up to its curves, which are stored of one round only and take long to parse."""
    if line.raw.startswith(b'{"kind":"episode"') and line.raw.endswith(b"}"):
        end = line.raw.find(b',"accuracies":[')
        if end > 0:
            return line._replace(raw=line.raw[:end] + b"}")
    return line
