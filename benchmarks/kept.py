"""Finished runs of a benchmark in one file, a line of JSON each: it can be stopped at any time, and started again."""

import json
from collections.abc import Mapping
from pathlib import Path

from harness import Json

from esper.leyline import BadValueError

Content = Mapping[str, Json]


class Kept:
    """The finished runs by name."""

    def __init__(self, path: Path, settings: Content) -> None:
        """`settings` are what all runs depend on."""
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.runs: dict[str, Content] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # killed while it wrote the last line
            path.write_text(whole, encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), 1):
            stored = json.loads(line)
            if stored["settings"] != self.settings:
                raise BadValueError(
                    f"{path}, line {number}, was made with other settings ({stored['settings']}, now {self.settings}): "
                    "name another --keep"
                )
            self.runs[stored["name"]] = stored["run"]

    def add(self, name: str, run: Content) -> None:
        """Store a run. It is on the disk when this returns."""
        line = json.dumps({"name": name, "settings": self.settings, "run": run}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.runs[name] = json.loads(line)["run"]


def number(run: Content, name: str) -> float:
    """A number of a stored run."""
    value = run[name]
    assert isinstance(value, int | float)
    return float(value)
