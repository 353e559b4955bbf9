"""Callbacks of `learn`: evaluation with early stop and best model, checkpoints, TensorBoard and CSV.

They are called in the order in which they are given. So an `Evaluation` before a writer gets its result logged.
"""

import csv
import io
import math
import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

from esper.leyline import BadValueError, MissingPackageError
from esper.leyline.numbers import require_whole
from esper.simic.agent.environments import MakeEnv
from esper.simic.agent.learning import Learned, LearnProgress
from esper.storage.files import replace_file, storage_errors
from esper.storage.series import Series

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVALUATED, BEST = "evaluation/mean_return", "evaluation/best_return"


class Evaluation:
    """Evaluates every `every` updates, and after the last, on fresh environments; always the same episodes.

    With `folder`, it writes every result to `folder/evaluations.csv`, and the best policy so far to `folder/best`. A
    continued training reads the results again. It ends the training when the mean return reaches `enough`, or has not
    risen in `patience` evaluations.
    """

    def __init__(
        self,
        every: int = 10,
        episodes: int = 20,
        *,
        seed: int = 0,
        greedy: bool = True,
        make_env: MakeEnv | None = None,
        folder: Path | str | None = None,
        enough: float = math.inf,
        patience: int | None = None,
    ) -> None:
        for name, value in (("every", every), ("episodes", episodes), ("patience", patience)):
            if value is not None:
                require_whole(name, value, 1)
        self.every, self.episodes, self.seed, self.greedy, self.make_env = every, episodes, seed, greedy, make_env
        self.folder, self.enough, self.patience = None if folder is None else Path(folder), enough, patience
        self.results: list[tuple[int, float]] = []  # environment steps, mean return
        self._log = None if folder is None else CsvLog(Path(folder) / "evaluations.csv")

    def __call__(self, state: LearnProgress) -> bool:
        agent = state.learned.agent
        if not self.results and self._log is not None:
            self.results = [(int(row["learn/steps"]), row[EVALUATED]) for row in self._log.read_before(state.steps)]
        if agent.updates % self.every and agent.progress < 1:
            return True
        chosen = {"greedy": self.greedy, "make_env": self.make_env}
        mean = statistics.fmean(state.learned.evaluate(self.episodes, self.seed, **chosen))  # type: ignore[arg-type]
        before = max((value for _, value in self.results), default=-math.inf)
        self.results.append((state.steps, mean))
        numbers = {EVALUATED: mean, BEST: max(mean, before)}
        state.numbers.update(numbers)
        if self.folder is not None and self._log is not None:
            if mean > before:
                state.learned.save(self.folder / "best")
            self._log.append({"learn/steps": float(state.steps), **numbers})
        return mean < self.enough and not self._stagnates()

    def _stagnates(self) -> bool:
        """Whether the best result is too long ago."""
        values = [value for _, value in self.results]
        return self.patience is not None and len(values) - 1 - values.index(max(values)) >= self.patience


class Checkpoints:
    """Saves every `every` updates, and after the last, to `folder/update-00010`, and so on; the last `keep` remain.

    A training that was killed continues: `learn(make_env, start=Checkpoints.load(folder), …)`.
    """

    def __init__(self, folder: Path | str, every: int = 10, keep: int = 3) -> None:
        require_whole("every", every, 1)
        self.every, self.series = every, Series(Path(folder), "update", keep)
        self._checked = False

    def __call__(self, state: LearnProgress) -> None:
        agent = state.learned.agent
        if not self._checked:  # at the first update: a training that begins anew must not mix with an older one
            self.series.require_newest(agent.updates)
            self._checked = True
        if agent.updates % self.every and agent.progress < 1:
            return
        state.learned.save(self.series.path_of(agent.updates))
        self.series.prune()

    @classmethod
    def load(cls, folder: Path | str, *, device: str = "cpu") -> Learned | None:
        """The newest checkpoint that is complete; None if there is none, which lets `learn` begin anew."""
        return Series(Path(folder), "update").read_newest(lambda _, path: Learned.load(path, device=device))


class CsvLog:
    """Writes all numbers of every update as a row of a CSV file. A continued training replaces later rows."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._rows: list[dict[str, float]] | None = None  # None: not read yet
        self._columns: list[str] = []

    def __call__(self, state: LearnProgress) -> None:
        if self._rows is None:
            self.read_before(state.steps)
        self.append(state.numbers)

    def read_before(self, steps: int) -> list[dict[str, float]]:
        """The rows of an earlier training up to these steps. Later ones are forgotten."""
        with storage_errors(self.path):
            text = self.path.read_text() if self.path.exists() else ""
        found = [
            {name: float(value) for name, value in row.items() if value} for row in csv.DictReader(io.StringIO(text))
        ]
        if any("learn/steps" not in row for row in found):
            raise BadValueError(f"{self.path} has no column 'learn/steps'; it is another file, so name a new one")
        self._rows = [row for row in found if row["learn/steps"] < steps]
        self._write()
        return self._rows

    def append(self, numbers: dict[str, float]) -> None:
        """Add a row. A new column is added to all rows, and the file written anew."""
        self._rows = [*(self._rows or []), dict(numbers)]
        if set(numbers) <= set(self._columns) and self.path.exists():
            with storage_errors(self.path), self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(numbers)
        else:
            self._write()

    def _write(self) -> None:
        rows, file = self._rows or [], io.StringIO()
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        if not rows and not self.path.exists():
            return
        writer = csv.DictWriter(file, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, file.getvalue())


class TensorBoardLog:
    """Draws all numbers of every update by environment steps. A continued training hides what was drawn later."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._writer: SummaryWriter | None = None

    def __enter__(self) -> Self:
        if find_spec("tensorboard") is None:  # told before the training
            raise MissingPackageError("TensorBoardLog", "tensorboard", "esper-morph[tensorboard]")
        return self

    def __call__(self, state: LearnProgress) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(str(self.folder), purge_step=state.steps)
        for name, value in state.numbers.items():
            self._writer.add_scalar(name, value, state.steps)
        self._writer.flush()

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
