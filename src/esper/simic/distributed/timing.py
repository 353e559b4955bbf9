"""How long ranks collect and wait for each other, and which of them is slow."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from esper.leyline.records import Json

SLOWER = 1.5  # a straggler takes this number of times as long as the median of the others …
ROUNDS = 3  # … in this number of rounds in a row


class RoundTiming(NamedTuple):
    """Seconds by rank."""

    collect_s: list[float]

    @property
    def wait_s(self) -> list[float]:
        """How long each rank waited for the slowest one."""
        return [max(self.collect_s) - seconds for seconds in self.collect_s]

    def to_json(self, exchanged: int) -> dict[str, Json]:
        """For `timing` in the metrics; `exchanged`: bytes that rank 0 sent and received in this round."""
        collect, wait = ([round(seconds, 6) for seconds in each] for each in (self.collect_s, self.wait_s))
        return {"ranks": {"collect_s": collect, "wait_s": wait, "exchanged_bytes": exchanged}}


class Stragglers:
    """Watches the rounds of a run for ranks that all others wait for."""

    def __init__(self) -> None:
        self._slow: dict[int, int] = {}  # by rank: rounds in a row

    def look(self, collect_s: Sequence[float]) -> list[tuple[int, str]]:
        """Ranks that have just become stragglers, and a sentence about each."""
        found = []
        for rank, seconds in enumerate(collect_s):
            others = [each for other, each in enumerate(collect_s) if other != rank]
            slow = bool(others) and seconds > SLOWER * median(others)
            self._slow[rank] = self._slow.get(rank, 0) + 1 if slow else 0
            if self._slow[rank] == ROUNDS:
                why = (
                    f"rank {rank} took {seconds:.3g} s to collect a round, the others {median(others):.3g} s: all wait "
                    "for it; give it fewer hosts (--hosts-by-rank), or look at its machine"
                )
                found.append((rank, why))
        return found
