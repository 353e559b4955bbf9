"""Live files written by hand."""

import json
from pathlib import Path
from typing import Any

Json = Any  # what will become JSON


def header(round_number: int, began: int = 1) -> Json:
    """The first line of a filling."""
    return {"kind": "live", "version": 1, "round": round_number, "began": began}


def live_step(round_number: int, step: int, **changes: Json) -> Json:
    """A step of two hosts; the first one has germinated a seed at the beginning."""
    born = [
        [0, "r1c0", "norm", "DORMANT", "GERMINATED", "germinate"],
        [0, "r1c0", "norm", "GERMINATED", "TRAINING", "tick"],
    ]
    return {
        "kind": "step", "time": 1000.0 + step, "round": round_number, "task": "digits_hand", "step": step, "steps": 8,
        "first_env": 0, "slots": ["r1c0", "r1c1"], "accuracies": [40.0 + step, 40.0],
        "control_accuracies": [40.0 + step / 2, 40.0], "gains": [step / 2, 0.0], "losses": [0.5, None],
        "seeds": [[0, "r1c0", "TRAINING", "norm", 0.0, float(step), 0.5, None, None]],
        "actions": [[0, "GERMINATE", "r1c0", "norm"]] if step == 0 else [], "probabilities": [0.5, 0.25],
        "choices": [{"op": {"GERMINATE": 0.75, "WAIT": 0.25}}, {}], "changes": born if step == 0 else [],
        "panics": [], **changes,
    }  # fmt: skip


def write_live(path: Path, *lines: Json) -> Path:
    """A live file of these lines."""
    file = path / "live.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
