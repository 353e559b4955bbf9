"""Widgets of the terminal: a scrolled list of lines, the fleet, and tabs. They draw only what is visible."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static

from esper.karn.histories import HostHistory
from esper.karn.terminal.drawing import STYLES, legend, number, safe, sparkline, stage_cell, styled
from esper.leyline import SeedStage

Draw = Callable[[int, int], list[Text]]
REVERSED = Style(reverse=True)


class Lines(ScrollView, can_focus=True):
    """Lines of text, drawn anew for the width and height that there are."""

    def __init__(self, draw: Draw, name: str) -> None:
        super().__init__(id=name)
        self.draw, self.lines = draw, list[Text]()

    def redraw(self) -> None:
        """Draw what is known now."""
        size = self.scrollable_content_region.size
        if size.width:
            self.lines = self.draw(size.width, size.height)
            self.virtual_size = Size(size.width, len(self.lines))
            self.refresh()

    def on_resize(self) -> None:
        self.redraw()

    def render_line(self, y: int) -> Strip:
        index, width = self.scroll_offset.y + y, self.size.width
        if index >= len(self.lines):
            return Strip.blank(width, self.rich_style)
        segments = self.lines[index].render(self.app.console)
        return Strip(segments).apply_style(self.rich_style).adjust_cell_length(width, self.rich_style)


class Fleet(ScrollView, can_focus=True):
    """A cell per host: its slots by stage, its gain, and how that has gone."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(0, -1)", "move", show=False),
        Binding("down", "move(0, 1)", "move", show=False),
        Binding("left", "move(-1, 0)", "move", show=False),
        Binding("right", "move(1, 0)", "move", show=False),
        Binding("enter", "choose", "host"),
    ]
    LABEL, FIGURES, SPARK, GAP = 5, 15, 10, 2

    class Chosen(Message):
        """A host was chosen."""

        def __init__(self, env: int) -> None:
            super().__init__()
            self.env = env

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self.hosts: Sequence[HostHistory] = ()
        self.slots: Sequence[str] = ()
        self.trained = self.cursor = 0
        self._cells: dict[int, list[Segment]] = {}

    def show(self, hosts: Sequence[HostHistory], slots: Sequence[str], trained: int, env: int) -> None:
        """Draw these hosts after so many steps trained; `env` is the selected one."""
        self.hosts, self.slots, self.trained, self._cells = hosts, slots, trained, {}
        self.cursor = next((index for index, host in enumerate(hosts) if host.env == env), 0)
        self.virtual_size = Size(self.size.width, -(-len(hosts) // self.across))
        self.refresh()

    @property
    def cell_width(self) -> int:
        """Columns of one host."""
        return self.LABEL + len(self.slots) * 2 + 1 + self.FIGURES + self.SPARK + self.GAP

    @property
    def across(self) -> int:
        """Hosts beside each other."""
        return max(1, self.scrollable_content_region.width // self.cell_width)

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, -(-len(self.hosts) // self.across))

    def render_line(self, y: int) -> Strip:
        row, width, style = self.scroll_offset.y + y, self.size.width, self.rich_style
        segments: list[Segment] = []
        for index in range(row * self.across, min(len(self.hosts), (row + 1) * self.across)):
            if index not in self._cells:
                self._cells[index] = self._cell(self.hosts[index])
            label, *rest = self._cells[index]
            segments += [Segment(label.text, REVERSED) if index == self.cursor else label, *rest]
        return Strip(segments).apply_style(style).adjust_cell_length(width, style)

    def _cell(self, host: HostHistory) -> list[Segment]:
        """One host. Made of segments, for a screen may show hundreds."""
        stages = host.stages(self.trained)
        has_gain = any(value is not None for value in host.gains)
        scores = host.accuracies if any(host.accuracies) else host.losses
        curve = host.gains if has_gain else scores
        gain = host.value(host.gains, self.trained)
        colour = "muted" if gain is None or abs(gain) < 0.005 else "green" if gain > 0 else "vermilion"
        past = curve[: max(0, self.trained - host.begins_after)]
        return [
            Segment(f"{host.env:>{self.LABEL - 1}} "),
            *(Segment(*stage_cell(stages.get(slot, SeedStage.DORMANT), 2)) for slot in self.slots),
            Segment(f" {number(host.value(scores, self.trained), '6.1f'):>6}"),
            Segment(f" {number(gain, '+.1f'):>6}  ", STYLES[colour]),
            Segment(sparkline(past, self.SPARK), STYLES["blue"]),
            Segment(" " * self.GAP),
        ]

    # -- choosing -----------------------------------------------------------------------------------------------------

    def action_move(self, across: int, down: int) -> None:
        """Move the selection."""
        if self.hosts:
            target = self.cursor + across + down * self.across
            if 0 <= target < len(self.hosts):
                self.cursor = target
                self.scroll_to_region(Region(0, target // self.across, self.size.width, 1), animate=False)
                self.refresh()

    def action_choose(self) -> None:
        """Look at the selected host."""
        if self.hosts:
            self.post_message(self.Chosen(self.hosts[self.cursor].env))

    def on_click(self, event: events.Click) -> None:
        """Look at the host under the mouse."""
        index = (self.scroll_offset.y + event.y) * self.across + min(event.x // self.cell_width, self.across - 1)
        if index < len(self.hosts):
            self.cursor = index
            self.action_choose()


def fleet_caption(hosts: Sequence[HostHistory], slots: Sequence[str], width: int) -> list[Text]:
    """What a cell of the fleet shows."""
    score = "loss" if hosts and not any(any(host.accuracies) for host in hosts) else "accuracy in %"
    course = (f"{score.split()[0]} by step", "blue")
    parts: list[str | tuple[str, str]] = ["gain where it has a control, ", course]
    if any(value is not None for host in hosts for value in host.gains):
        sides = ("over", "green"), "/", ("under", "vermilion")
        parts = ["live gain in points ", *sides, " its control, ", ("by step", "blue")]
    order = safe(", ".join(slots)) or "none known yet"
    return [
        styled(f"host, slots, {score}, ", *parts),
        styled((f"slots from the input on: {order}; each curve has a scale of its own", "muted")),
        *legend(width - 1),
    ]


class TabLabel(Static):
    """The title of a screen, which shows it when it is clicked."""

    class Clicked(Message):
        """It was clicked."""

        def __init__(self, screen: str) -> None:
            super().__init__()
            self.wanted = screen

    def __init__(self, key: str, screen: str) -> None:
        super().__init__(Text(f" {key} {screen} "), id=f"tab-{screen}", classes="tab", markup=False)
        self.wanted = screen

    def on_click(self) -> None:
        self.post_message(self.Clicked(self.wanted))
