"""Runs to look at in the terminal, and a pilot that presses keys."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from karn.live_files import header, live_step, write_live
from karn.run_folders import Json, default_events, difference, evaluation, metrics, policy, write_growth, write_run
from textual.pilot import Pilot

from esper.karn.terminal.app import WatchApp
from esper.karn.terminal.moment import Watched

CHOICES = [
    {
        "op": {"GERMINATE": 0.8, "WAIT": 0.2},
        "slot": {"r1c0": 0.9, "r1c1": 0.1},
        "blueprint": {"depthwise": 0.6, "norm": 0.4},
    },
    *[{"op": {"WAIT": 0.7, "ADVANCE": 0.3}}] * 7,
]
MEASURED = [[], [], [["r1c0", 2.5, 0.5, None, None]], [], *[[["r1c0", None, None, 1.25, 0.25]]] * 4]


def followed(number: int, env: int) -> Json:
    """What was followed of a host."""
    return {
        "kind": "followed",
        "round": number,
        "task": "digits_hand",
        "step": 0,
        "env": env,
        "choices": CHOICES,
        "measured": MEASURED,
    }


def decided(event: Json) -> Json:
    """An episode with its decisions."""
    if event["kind"] != "episode" or event["env"] not in (0, 2):
        return event
    columns = {"step": [1, 3, 6], "op": ["GERMINATE", "ADVANCE", "FOSSILIZE"], "slot": ["r1c0"] * 3}
    return event | {"decisions": columns | {"blueprint": ["depthwise", None, None]}}


ALARM = {
    "kind": "alarm", "alarm": "kl_spike", "severity": "warning", "round": 1, "subject": "",
    "ended": False, "value": 0.2, "limit": 0.18, "cause": "the joint KL is 0.2 (limit 0.18)",
    "remedy": "lower the learning rate",
}  # fmt: skip
PANIC = {"kind": "panic", "round": 1, "task": "digits_hand", "step": 5, "env": 3, "symptoms": ["DIVERGENCE"]}


def complete_run(path: Path, rounds: int = 2, **changes: Json) -> Path:
    """A run with all that a screen can show: decisions, probabilities, a panic, an alarm, an evaluation."""
    rows = [metrics(number, **{"ppo/max_kl": 0.05 + 0.2 * number, "ppo/entropy": 0.9}) for number in range(rounds)]
    events = [decided(each) for each in default_events(rounds)]
    events += [followed(rounds - 1, 0), followed(rounds - 1, 1), PANIC, ALARM]
    write_run(path, rows, events, **changes)
    policies = {"runs/a": policy(4.5), "heuristic": policy(2.0), "wait": policy()}
    content = evaluation(policies=policies, differences=[difference("runs/a", "wait")])
    (path / "evaluation.json").write_text(json.dumps(content))
    return path


def live_run(path: Path) -> Path:
    """A run whose third round is being played."""
    complete_run(path)
    session = '{"kind":"begun","time":"2025-01-01T00:00:00+00:00","round":0,"rounds":3,"machine":{},"git":null}\n'
    (path / "sessions.jsonl").write_text(session)
    write_live(path, header(2), *(live_step(2, step) for step in range(4)))
    return path


def grown(path: Path) -> Path:
    """A Grower's run."""
    return write_growth(path)


def shown(app: WatchApp) -> list[str]:
    """The lines of the screen as text."""
    return [strip.text for strip in app.screen._compositor.render_strips()]


Steps = Callable[[WatchApp, Pilot[None]], Awaitable[Any]]  # Any: nothing


def drive(
    paths: Sequence[Path], steps: Steps, size: tuple[int, int] = (80, 24), **options: Any
) -> None:  # Any: of the app
    """Run the app without a terminal while `steps` presses keys and looks."""

    async def run() -> None:
        app = WatchApp([Watched.of(path) for path in paths], **options)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await steps(app, pilot)

    asyncio.run(run())
