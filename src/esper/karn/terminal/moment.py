"""What a terminal shows of a run, and when: live, a complete round, or a replay of it."""

from dataclasses import dataclass, field
from pathlib import Path

from esper.karn.follower import RunFollower
from esper.karn.growth import GrowthRun
from esper.karn.histories import HostHistory
from esper.karn.overview import compared
from esper.karn.state import RunState


@dataclass
class Watched:
    """A run that is followed, and a cursor in it."""

    follower: RunFollower
    following: bool = True
    """Whether it shows the newest there is; else the cursor stands where it was put"""
    running: bool = False
    """Whether the cursor moves on its own, as in a replay"""
    number: int = -1
    """The round at the cursor"""
    trained: int = 0
    """Steps trained at the cursor"""
    env: int = 0
    """The host that is looked at"""
    policies: list[tuple[str, float]] = field(default_factory=list)
    """Of the run's evaluations, with their mean objectives"""
    remarks: list[str] = field(default_factory=list)
    """What of the evaluations could not be read"""
    _compared: float = -1.0

    @classmethod
    def of(cls, path: Path) -> "Watched":
        """A run that begins to be followed."""
        return cls(RunFollower(path))

    @property
    def state(self) -> RunState | GrowthRun:
        """What is known of the run now."""
        return self.follower.state

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.follower.path.resolve().name

    def is_named(self, policy: str) -> bool:
        """Whether a policy of an evaluation is this run: by its path, the end of it, or as `esper demo` calls it."""
        parts = Path(policy).parts
        return policy == "learned" or (bool(parts) and self.follower.path.resolve().parts[-len(parts) :] == parts)

    def poll(self, seconds: float) -> bool:
        """Read what is new; whether anything has changed."""
        changed = self.follower.poll(seconds)
        changed |= self._read_evaluations()
        state = self.state
        if self.following:
            self._to_newest()
        elif isinstance(state, RunState) and not self.is_live and state.shown != self.number:
            changed |= self.follower.show(self.number)  # it was live when the cursor was put there
        return changed

    def _read_evaluations(self) -> bool:
        times = [file.stat().st_mtime for file in self.follower.path.glob("evaluation*.json") if file.is_file()]
        newest = max(times, default=0.0)
        if newest == self._compared:
            return False
        self._compared = newest
        self.policies, self.remarks = compared(self.follower.path)
        return True

    # -- what is shown ------------------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether the round at the cursor is being played."""
        state = self.state
        return isinstance(state, RunState) and state.playing is not None and self.number == state.playing.number

    def hosts(self) -> list[HostHistory]:
        """The hosts of the round at the cursor, in order."""
        state = self.state
        if isinstance(state, RunState) and self.is_live and state.playing is not None:
            return [state.playing.hosts[env] for env in sorted(state.playing.hosts)]
        return state.histories() if isinstance(state, GrowthRun) or state.shown == self.number else []

    def host(self) -> HostHistory | None:
        """The host that is looked at, or the first one."""
        hosts = self.hosts()
        return next((host for host in hosts if host.env == self.env), hosts[0] if hosts else None)

    def last(self) -> int:
        """The last step that is known of the round at the cursor."""
        return max((host.trained for host in self.hosts()), default=0)

    def first(self) -> int:
        """The first step of the round at the cursor."""
        return min((host.begins_after for host in self.hosts()), default=0)

    # -- the cursor ---------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Show the newest from now on."""
        self.following, self.running = True, False
        self.follower.show(None)
        self._to_newest()

    def _to_newest(self) -> None:
        state = self.state
        if isinstance(state, RunState):
            self.number = state.playing.number if state.playing is not None else state.shown
        self.trained = self.last()

    def to_round(self, number: int) -> bool:
        """Put the cursor at the beginning of a complete round; False if its events have not been read."""
        if isinstance(self.state, GrowthRun):
            number = -1
        elif not self.follower.show(number):
            return False
        self.following, self.number = False, number
        self.trained = self.first()
        return True

    def move_round(self, by: int) -> None:
        """To the complete round before or behind; behind the last one, to the newest there is."""
        state = self.state
        if isinstance(state, GrowthRun):
            return
        numbers = [entry.number for entry in state.rounds]
        others = [n for n in numbers if n > self.number] if by > 0 else [n for n in numbers[::-1] if n < self.number]
        if others:
            running = self.running
            if self.to_round(others[0]):
                self.trained, self.running = self.last(), running
        elif by > 0:
            self.follow()

    def move_step(self, by: int) -> None:
        """A step back or on, within the round."""
        self._hold()
        self.trained = min(max(self.trained + by, self.first()), self.last())

    def _hold(self) -> None:
        """Leave the newest."""
        if self.following and isinstance(self.state, RunState) and not self.is_live:
            self.follower.show(self.number)
        self.following = False

    def replay(self, number: int | None = None) -> None:
        """Run from the beginning of a round (default: the first)."""
        state = self.state
        numbers = [entry.number for entry in state.rounds] if isinstance(state, RunState) else []
        if self.to_round(number if number is not None else numbers[0] if numbers else -1):
            self.running = True

    def tick(self) -> bool:
        """A step of the replay; whether anything has changed."""
        if not self.running:
            return False
        if self.trained < self.last():
            self.trained += 1
            return True
        before = self.number
        state = self.state
        numbers = [entry.number for entry in state.rounds] if isinstance(state, RunState) else []
        later = [number for number in numbers if number > self.number]
        if later and self.to_round(later[0]):
            return self.number != before
        self.running = False
        return True

    def pause(self) -> None:
        """Stop the replay, or let it run on."""
        if self.running:
            self.running = False
        else:
            self._hold()
            if self.trained >= self.last():
                self.trained = self.first()
            self.running = True

    def move_host(self, by: int) -> None:
        """To the next host, or the one before."""
        envs = [host.env for host in self.hosts()]
        if envs:
            here = envs.index(self.env) if self.env in envs else 0
            self.env = envs[(here + by) % len(envs)]
