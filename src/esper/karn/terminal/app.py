"""The app: screens of one run, a list of runs, keys, and the clock that reads files and drives replays."""

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher, Footer, Static

from esper.karn.growth import GrowthRun
from esper.karn.overview import condition_of
from esper.karn.terminal.decisions_view import decision_lines
from esper.karn.terminal.drawing import COLOURS, heading, legend, safe, styled
from esper.karn.terminal.host_view import host_lines
from esper.karn.terminal.journal import journal_lines
from esper.karn.terminal.moment import Watched
from esper.karn.terminal.overview_view import overview_lines
from esper.karn.terminal.runs_view import HEAD, run_lines
from esper.karn.terminal.widgets import Draw, Fleet, Lines, TabLabel, fleet_caption

SCREENS = ("overview", "fleet", "host", "decisions", "log")
RUNS = "runs"
FRAME_S, POLL_S, BUDGET_S = 0.1, 0.3, 0.05
"""Seconds between frames of a replay, between looks at the files, and that a look may take"""
FIRST_LOOK_S = 0.5
SPEEDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
KEYS = {
    "1 2 3 4 5": "overview, fleet, host, decisions, log",
    "arrows, page up, page down": "scroll; in the fleet and the runs, select",
    "enter": "look at the selected host or run",
    "n  b": "the next host, the one before",
    ",  .": "a step back, a step on",
    "[  ]": "the round before, the next one",
    "space": "play from here, or pause",
    "p": "replay from the first round",
    "-  +": "slower, faster",
    "f": "follow the newest",
    "r": "the list of runs",
    "?": "this page",
    "q": "quit",
}


def settle() -> None:
    """Exempt what was imported from garbage collection, which would hold up a redraw for 0.1 s now and then."""
    gc.collect()
    gc.freeze()


def show(runs: Sequence[Path], *, replay: bool, speed: float, round: int | None) -> None:
    """Run the app until the user quits."""
    settle()
    WatchApp([Watched.of(path) for path in runs], replay=replay, speed=speed, round=round).run()


class HelpScreen(ModalScreen[None]):
    """Keys and colours."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q,enter", "dismiss", "back")]

    def compose(self) -> ComposeResult:
        lines = [heading("Keys"), *(styled((f"{keys:<28}", "sky"), meaning) for keys, meaning in KEYS.items())]
        lines += [Text(end=""), heading("Stages"), *legend(74)]
        lines += [styled("commit = fossilized, cut = pruned"), Text(end="")]
        lines.append(
            styled(
                "gains and objectives are points of accuracy: ",
                ("over", "green"),
                " or ",
                ("under", "vermilion"),
                " the control",
            )
        )
        yield Static(Text("\n").join(lines), id="help", markup=False)


class WatchApp(App[None]):
    """Shows runs that other processes write."""

    TITLE = "esper watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = f"""
    Screen {{ background: #14181d; color: {COLOURS["ink"]}; }}
    #title {{ height: 1; background: #1d232a; }}
    #tabs {{ height: 1; background: #1d232a; }}
    .tab {{ width: auto; height: 1; color: {COLOURS["muted"]}; }}
    .tab.on {{ color: #14181d; background: {COLOURS["sky"]}; text-style: bold; }}
    ContentSwitcher {{ height: 1fr; }}
    Lines, Fleet {{ height: 1fr; overflow-x: hidden; background: #14181d; scrollbar-size-vertical: 1;
        scrollbar-color: {COLOURS["muted"]}; scrollbar-background: #1d232a; }}
    HelpScreen {{ align: center middle; }}
    #help {{ width: 78; height: auto; max-height: 100%; padding: 0 1; background: #1d232a; }}
    #caption {{ height: auto; }}
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(index), f"screen('{name}')", name, show=False) for index, name in enumerate(SCREENS, 1)),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "quit", "quit"),
        Binding("space", "pause", "play"),
        Binding("comma", "step(-1)", "or", key_display=","),
        Binding("full_stop", "step(1)", "step", key_display="."),
        Binding("left_square_bracket", "round(-1)", "or", key_display="["),
        Binding("right_square_bracket", "round(1)", "round", key_display="]"),
        Binding("n", "host(1)", "next host"),
        Binding("f", "follow", "newest"),
        Binding("b", "host(-1)", "host before", show=False),
        Binding("p", "replay", "replay", show=False),
        Binding("minus", "speed(-1)", "slower", show=False),
        Binding("plus,equals_sign", "speed(1)", "faster", show=False),
        Binding("r", "runs", "runs", show=False),
    ]

    def __init__(
        self, runs: Sequence[Watched], *, replay: bool = False, speed: float = 4.0, round: int | None = None
    ) -> None:
        super().__init__()
        self.runs, self.index, self.speed = list(runs), 0, speed
        self.shown = RUNS if len(self.runs) > 1 else SCREENS[0]
        self._begin_with = (replay, round)
        self._polled = self._stepped = time.monotonic()
        self._turn = 0

    @property
    def watched(self) -> Watched:
        """The run that is looked at."""
        return self.runs[self.index]

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        with Horizontal(id="tabs"):
            if len(self.runs) > 1:
                yield TabLabel("r", RUNS)
            for index, name in enumerate(SCREENS, 1):
                yield TabLabel(str(index), name)
        with ContentSwitcher(initial=self.shown):
            yield Lines(lambda width, height: run_lines(self.runs, self.index, width, height), RUNS)
            for name in SCREENS:
                if name == "fleet":
                    with Vertical(id=name):
                        yield Static(id="caption", markup=False)
                        yield Fleet("grid")
                else:
                    yield Lines(self._drawer(name), name)
        yield Footer(show_command_palette=False, compact=True)

    def _drawer(self, name: str) -> Draw:
        """What draws a screen of the run that is looked at."""
        of_run: dict[str, Callable[[Watched, int, int], list[Text]]] = {
            "overview": overview_lines,
            "decisions": decision_lines,
            "log": journal_lines,
            "host": host_lines,
        }
        return lambda width, height: of_run[name](self.watched, width, height)

    def on_mount(self) -> None:
        """Read what there is, and start the clock."""
        for run in self.runs:
            run.poll(FIRST_LOOK_S / len(self.runs))
        replay, number = self._begin_with
        if replay:
            self.watched.replay(number)
        elif number is not None and self.watched.to_round(number):
            self.watched.trained = self.watched.last()
        if number is not None and self.watched.number != number:
            self.notify(f"round {number} is not complete, or its events are still being read", markup=False)
        self.set_interval(FRAME_S, self.frame)
        self.action_screen(self.shown)

    # -- the clock ----------------------------------------------------------------------------------------------------

    def frame(self) -> None:
        """Move a replay on, look at the files now and then, and draw if anything has changed."""
        now, changed = time.monotonic(), False
        for _ in range(min(50, int((now - self._stepped) * self.speed))):
            changed |= self.watched.tick()
            self._stepped = now
        if not self.watched.running:
            self._stepped = now
        if now - self._polled >= POLL_S or self._is_behind():
            changed |= self._poll()
            self._polled = time.monotonic()
        if changed:
            self.redraw()

    def _is_behind(self) -> bool:
        read, size = self.watched.follower.behind
        return read < size

    def _poll(self) -> bool:
        """Look at the run that is shown, and in the list at the others in turn."""
        changed = self.watched.poll(BUDGET_S)
        if self.shown == RUNS:
            self._turn = (self._turn + 1) % len(self.runs)
            for run in (self.runs[self._turn], self.runs[self._turn - 1]):
                changed |= run.poll(BUDGET_S / 2)
        return changed

    def redraw(self) -> None:
        """Draw the screen that is shown."""
        self.query_one("#title", Static).update(self._title())
        if self.shown == "fleet":
            run = self.watched
            slots = run.state.slots
            self.query_one("#caption", Static).update(
                Text("\n").join(fleet_caption(run.hosts(), slots, self.size.width))
            )
            self.query_one(Fleet).show(run.hosts(), slots, run.trained, run.env)
        else:
            self.query_one(f"#{self.shown}", Lines).redraw()

    def _title(self) -> Text:
        run, state = self.watched, self.watched.state
        if self.shown == RUNS:
            return styled((f"{len(self.runs)} runs", "bold"))
        where = "" if isinstance(state, GrowthRun) else "no round yet" if run.number < 0 else f"round {run.number}, "
        step = f"step {run.trained} of {max((host.steps for host in run.hosts()), default=0)}" if run.hosts() else ""
        read, size = run.follower.behind
        reading = f", {100 * read // max(1, size)} % of the log read" if read < size else ""
        task = safe(state.config.get("task", state.config.get("host")))
        return styled((safe(run.name), "bold"), f" {task}: {where}{step} ", self._mode(), (reading, "muted"))

    def _mode(self) -> tuple[str, str]:
        run = self.watched
        if run.running:
            return f"▶ replay, {self.speed:g} steps per second", "sky"
        if not run.following:
            return "‖ held; f follows", "orange"
        return ("● live", "green") if run.is_live else (safe(condition_of(run.follower)), "muted")

    # -- keys and clicks ----------------------------------------------------------------------------------------------

    def action_screen(self, name: str) -> None:
        """Show a screen."""
        self.shown = name
        self.query_one(ContentSwitcher).current = name
        for label in self.query(TabLabel):
            label.set_class(label.wanted == name, "on")
        self.query_one("#grid" if name == "fleet" else f"#{name}").focus()
        self.call_after_refresh(self.redraw)

    def action_host(self, by: int) -> None:
        """Look at another host."""
        self.watched.move_host(by)
        self.redraw()

    def action_step(self, by: int) -> None:
        """Move the cursor within the round."""
        self.watched.running = False
        self.watched.move_step(by)
        self.redraw()

    def action_round(self, by: int) -> None:
        """Move the cursor to another round."""
        self.watched.move_round(by)
        self.redraw()

    def action_pause(self) -> None:
        """Play from here, or pause."""
        self._stepped = time.monotonic()
        self.watched.pause()
        self.redraw()

    def action_replay(self) -> None:
        """Play from the first round."""
        self._stepped = time.monotonic()
        self.watched.replay()
        self.redraw()

    def action_speed(self, by: int) -> None:
        """Play slower or faster."""
        faster, slower = [s for s in SPEEDS if s > self.speed], [s for s in SPEEDS if s < self.speed]
        self.speed = (faster or [self.speed])[0] if by > 0 else (slower or [self.speed])[-1]
        self.redraw()

    def action_follow(self) -> None:
        """Show the newest from now on."""
        self.watched.follow()
        self.redraw()

    def action_runs(self) -> None:
        """The list of runs, if there are several."""
        if len(self.runs) > 1:
            self.action_screen(RUNS)

    def action_help(self) -> None:
        """Keys and colours."""
        self.push_screen(HelpScreen())

    def on_key(self, event: events.Key) -> None:
        """Select in the list of runs."""
        if self.shown == RUNS and event.key in ("up", "down", "enter"):
            event.prevent_default().stop()
            if event.key == "enter":
                self.action_screen(SCREENS[0])
            else:
                self._select(self.index + (1 if event.key == "down" else -1))

    def _select(self, index: int) -> None:
        self.index = min(max(index, 0), len(self.runs) - 1)
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        """Open the run under the mouse."""
        if self.shown == RUNS and isinstance(event.widget, Lines):
            index = event.widget.scroll_offset.y + event.get_content_offset_capture(event.widget).y - HEAD
            if 0 <= index < len(self.runs):
                self._select(index)
                self.action_screen(SCREENS[0])

    def on_tab_label_clicked(self, message: TabLabel.Clicked) -> None:
        """Show the screen of a title."""
        self.action_screen(message.wanted)

    def on_fleet_chosen(self, message: Fleet.Chosen) -> None:
        """Look at the host that was chosen."""
        self.watched.env = message.env
        self.action_screen("host")
