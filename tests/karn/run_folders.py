"""Run folders and evaluations written by hand, small enough to know every number."""

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from esper.karn.film_page import film_scripts
from esper.leyline import CAUSES, SeedStage
from esper.leyline.records import config_checksum

Json = Any  # what will become JSON

STEPS = 8
TASK = "digits_hand"


def stage(
    round_number: int, step: int, env: int, slot: str, source: str, target: str, cause: str, blueprint: str = "norm"
) -> Json:
    """A change of stage, as a Grower writes it."""
    return {
        "kind": "stage", "round": round_number, "task": TASK, "step": step, "env": env, "slot": slot,
        "blueprint": blueprint, "source": source, "target": target, "cause": cause,
    }  # fmt: skip


def life(round_number: int, env: int, slot: str, born: int, blueprint: str = "norm") -> list[Json]:
    """A seed that is germinated at a step and committed five steps later."""
    moves = [
        (born, "DORMANT", "GERMINATED", "germinate"),
        (born, "GERMINATED", "TRAINING", "tick"),
        (born + 2, "TRAINING", "BLENDING", "advance"),
        (born + 3, "BLENDING", "HOLDING", "tick"),
        (born + 5, "HOLDING", "FOSSILIZED", "fossilize"),
    ]
    return [stage(round_number, step, env, slot, a, b, cause, blueprint) for step, a, b, cause in moves]


def columns(changes: Sequence[Json]) -> Json:
    """Changes of stage, as an episode has them."""
    listed = {name: [change[name] for change in changes] for name in ("step", "slot", "blueprint")}
    stages = {name: "".join(SeedStage[change[name]].letter for change in changes) for name in ("source", "target")}
    return {**listed, **stages, "cause": "".join(CAUSES[change["cause"]] for change in changes)}


def episode(round_number: int, env: int, objective: float, changes: Sequence[Json] = ()) -> Json:
    """An episode event; the gain is a point more than the objective."""
    return {
        "kind": "episode", "round": round_number, "task": TASK, "env": env, "objective": objective,
        "gain": objective + 1, "accuracy": 50 + objective, "added_parameters": 10 * env,
        "stages": columns(changes),
        "accuracies": [40.0 + step + env for step in range(STEPS)],
        "control_accuracies": [40.0 + 0.5 * step for step in range(STEPS)],
        "alphas": {"r1c0": [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0]},
    }  # fmt: skip


def metrics(round_number: int, **changes: Json) -> Json:
    """A line of the metrics."""
    return {
        "round": round_number, "objective": 1.25 + round_number, "objective_std": 2.5, "gain": 2.25 + round_number,
        "accuracy": 51.5, "added_parameters": 15.0, "committed": 0.25, "panics": 0,
        "reward": {"gain": 2.0, "rent": -0.5 - round_number}, "ops": {"WAIT": 30, "GERMINATE": 2},
        "germinated": {"r1c1/norm": 1, "r1c0/depthwise": 1}, "ppo/approx_kl": 0.01 * (1 + round_number),
        "ppo/explained_variance": 0.125 * round_number, "ppo/op/entropy": 0.9 - 0.1 * round_number,
        "ppo/slot/entropy": 0.8, "ppo/rate": 0.001, "timing": {"collect_s": 3.0 + round_number},
        **changes,
    }  # fmt: skip


def default_events(rounds: int = 2) -> list[Json]:
    """Four hosts a round with objectives 4, 3, 2, 1 (of envs 2, 0, 3, 1); two of them keep a seed."""
    events: list[Json] = []
    for number in range(rounds):
        cut = [
            stage(number, 0, 1, "r1c1", "DORMANT", "GERMINATED", "germinate"),
            stage(number, 0, 1, "r1c1", "GERMINATED", "TRAINING", "tick"),
            stage(number, 4, 1, "r1c1", "TRAINING", "PRUNED", "prune"),
            stage(number, 4, 1, "r1c1", "PRUNED", "EMBARGOED", "tick"),
        ]
        events += [
            episode(number, 0, 3.0, life(number, 0, "r1c0", 1, "depthwise")),
            episode(number, 1, 1.0, cut),
            episode(number, 2, 4.0, life(number, 2, "r1c0", 2, "depthwise")),
            episode(number, 3, 2.0),
        ]
    return events


def write_lines(path: Path, lines: list[Json]) -> None:
    """One object per line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(path: Path, rows: list[Json] | None = None, events: list[Json] | None = None, **config: Json) -> Path:
    """A run folder: by default two rounds of four hosts."""
    path.mkdir(exist_ok=True)
    settings = {"task": TASK, "seed": 5, "rounds": 3, "hosts": 6, "members": 2, "ppo": {"target_kl": 0.03}}
    header = {"config": settings | config, "git": "0123abcd", "torch": "2.13"}
    (path / "config.json").write_text(json.dumps(header | {"checksum": config_checksum(header)}))
    write_lines(path / "metrics.jsonl", [metrics(0), metrics(1)] if rows is None else rows)
    write_lines(path / "events.jsonl", default_events() if events is None else events)
    return path


def growth_metrics(step: int, **changes: Json) -> Json:
    """A line of the metrics of a Grower."""
    contributions = {"layer1.0": {"value": 1.5 * step, "error": 0.5}} if step > 1 else {}
    return {
        "step": step, "accuracy": 40.0 + step, "loss": 2.0 / step, "grown": 600, "contributions": contributions,
        "remarks": [], "timing": {"step_s": 0.25}, **changes,
    }  # fmt: skip


def growth_events() -> list[Json]:
    """Born at step 1, held from 2, committed at 4; another is born at 3 and pruned in a panic at 4."""
    moves = [
        (1, "layer1.0", "DORMANT", "GERMINATED", "germinate"),
        (1, "layer1.0", "GERMINATED", "TRAINING", "germinate"),
        (1, "layer1.0", "TRAINING", "BLENDING", "germinate"),
        (2, "layer1.0", "BLENDING", "HOLDING", "tick"),
        (3, "layer2", "DORMANT", "GERMINATED", "germinate"),
        (3, "layer2", "GERMINATED", "TRAINING", "germinate"),
        (3, "layer2", "TRAINING", "BLENDING", "germinate"),
        (4, "layer2", "BLENDING", "PRUNED", "prune"),
        (4, "layer1.0", "HOLDING", "FOSSILIZED", "fossilize"),
    ]
    panic = {"kind": "panic", "round": 0, "task": "Net", "step": 4, "env": 0, "symptoms": ["NOT_FINITE"]}
    return [*(stage(0, step, 0, slot, a, b, cause) for step, slot, a, b, cause in moves), panic]


def write_growth(path: Path, rows: list[Json] | None = None, events: list[Json] | None = None, **config: Json) -> Path:
    """The folder of a Grower: by default five steps."""
    path.mkdir(exist_ok=True)
    settings = {
        "host": "Net", "host_parameters": 5000, "budget": 1000, "steps": 8, "policy": "heuristic", "rng_seed": 0,
        "own_loss": False, "slots": {"layer1.0": {"topology": "image", "width": 8}, "layer2": {}},
    }  # fmt: skip
    header = {"kind": "grower", "config": settings | config, "begins_after": 0, "git": "0123abcd", "torch": "2.13"}
    (path / "config.json").write_text(json.dumps(header | {"checksum": config_checksum(header)}))
    write_lines(path / "metrics.jsonl", [growth_metrics(step) for step in range(1, 6)] if rows is None else rows)
    write_lines(path / "events.jsonl", growth_events() if events is None else events)
    return path


def policy(shift: float = 0.0, **changes: Json) -> Json:
    """Figures of one policy on three hosts: mean objective 2 + shift, deviation 1."""
    return {
        "objective": [1.0 + shift, 2.0 + shift, 3.0 + shift], "accuracy": [60.0 + shift, 62.0 + shift, 64.0 + shift],
        "added_params": [0, 64, 160], "control_accuracy": [50.0, 51.0, 52.0], "by_seed": [], **changes,
    }  # fmt: skip


def difference(name: str, other: str, **changes: Json) -> Json:
    """One comparison."""
    figures = {
        "mean": 4.5,
        "low": 3.25,
        "high": 5.75,
        "bootstrap_low": 3.5,
        "bootstrap_high": 5.5,
        "p": 0.01,
        "seeds": 1,
    }
    return {"policy": name, "against": other, "difference": figures, "adjusted_p": 0.0125, "superior": False, **changes}


def evaluation(**changes: Json) -> Json:
    """A whole file."""
    policies = {"runs/a": policy(4.5), "wait": policy()}
    return {
        "task": "digits_hand", "hosts": 3, "seed": 7, "final": False, "policies": policies,
        "differences": [difference("runs/a", "wait")], "a key of tomorrow": {"x": [1]}, **changes,
    }  # fmt: skip


class Page(HTMLParser):
    """What a page consists of; raises where tags are not balanced."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        """(innermost tag, text)"""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data))

    def all_of(self, attribute: str) -> list[str]:
        """Every value of an attribute."""
        return [value for _, attributes in self.tags if (value := attributes.get(attribute)) is not None]

    def foreign_scripts(self) -> list[str]:
        """Scripts other than the player of films, and those from elsewhere."""
        own = film_scripts().removeprefix("<script>").removesuffix("</script>")
        sources = [str(attributes["src"]) for tag, attributes in self.tags if tag == "script" and "src" in attributes]
        return [text for tag, text in self.texts if tag == "script" and text != own] + sources

    def text(self, *tags: str) -> str:
        """All text that is shown, or that of some elements."""
        return " ".join(data for tag, data in self.texts if (tag in tags if tags else tag != "script"))
