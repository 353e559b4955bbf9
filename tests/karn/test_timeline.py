"""Growth of a host: bars, marks and curves stand where the log says."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from karn.run_folders import episode, metrics, stage, write_run
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from PIL import Image

from esper.karn import draw_growth, read_run
from esper.karn.lines import Episode, StageEvent
from esper.karn.palette import STAGES
from esper.karn.state import RunState
from esper.karn.timeline import MARKS, STANDINGS, Span, choose_hosts, draw_host, marks_of, spans_of
from esper.leyline import SeedStage, StorageError, UnknownNameError


def marks(changes: Sequence[StageEvent]) -> list[tuple[str, str, int, str | None]]:
    """Slot, mark, time and blueprint."""
    return [(mark.slot, MARKS[mark.target][0], mark.at, mark.blueprint) for mark in marks_of(changes)]


def host(run: RunState, env: int) -> Episode:
    """One host of the shown round."""
    return next(episode for episode in run.episodes[run.shown] if episode.env == env)


def points(line: Line2D) -> tuple[list[float], list[float]]:
    """Where a line goes."""
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


def test_bars_and_marks(tmp_path: Path) -> None:
    """Germinated at 2, ticks one later, advance at 4, held from 6, committed at 7, until the end at 8."""
    run = read_run(write_run(tmp_path))
    own = [change for change in run.changes if change.env == 2]
    assert spans_of(own, run.steps) == [
        Span("r1c0", SeedStage.GERMINATED, 2, 3),
        Span("r1c0", SeedStage.TRAINING, 3, 4),
        Span("r1c0", SeedStage.BLENDING, 4, 6),
        Span("r1c0", SeedStage.HOLDING, 6, 7),
        Span("r1c0", SeedStage.FOSSILIZED, 7, 8),
    ]
    assert marks(own) == [("r1c0", "birth", 2, "depthwise"), ("r1c0", "commit", 7, "depthwise")]
    pruned = [change for change in run.changes if change.env == 1]
    assert marks(pruned) == [("r1c1", "birth", 0, "norm"), ("r1c1", "cut", 4, "norm")]


def test_what_takes_no_time_leaves_no_bar(tmp_path: Path) -> None:
    """A seed germinated in the last of 8 steps: its tick comes when the episode is over."""
    changes = [
        stage(0, 7, 0, "r1c0", "DORMANT", "GERMINATED", "germinate"),
        stage(0, 7, 0, "r1c0", "GERMINATED", "TRAINING", "tick"),
    ]
    run = read_run(write_run(tmp_path, [metrics(0)], [episode(0, 0, 1.0, changes)]))
    assert spans_of(run.changes, run.steps) == [Span("r1c0", SeedStage.GERMINATED, 7, 8)]


def test_what_a_panic_puts_back_is_no_birth(tmp_path: Path) -> None:
    """A seed cut at 3, which the panic after that step takes back: it trains on from 4, and was born once."""
    changes = [
        stage(0, 0, 0, "r1c0", "DORMANT", "GERMINATED", "germinate"),
        stage(0, 3, 0, "r1c0", "GERMINATED", "PRUNED", "prune"),
        stage(0, 3, 0, "r1c0", "PRUNED", "GERMINATED", "panic"),
    ]
    panic = {"kind": "panic", "round": 0, "step": 3, "env": 0, "symptoms": ["LOSS"]}
    run = read_run(write_run(tmp_path, [metrics(0)], [panic, episode(0, 0, 1.0, changes)]))
    assert [(span.stage.name, span.begin, span.end) for span in spans_of(run.changes, 8)] == [
        ("GERMINATED", 0, 3),
        ("PRUNED", 3, 4),
        ("GERMINATED", 4, 8),
    ]
    assert marks(run.changes) == [("r1c0", "birth", 0, "norm"), ("r1c0", "cut", 3, "norm")]
    for axis in draw_host(run, host(run, 0)).axes:
        assert [4, 4] in [points(line)[0] for line in axis.lines], "a line across, after the step"


def test_curves_are_those_of_the_log(tmp_path: Path) -> None:
    """What was measured after step s stands at s + 1; alpha fills its step, drawn inside the bar of its slot."""
    run = read_run(write_run(tmp_path))
    grown = host(run, 2)
    above, below = draw_host(run, grown).axes
    curves = {line.get_label(): points(line) for line in above.lines}
    assert list(curves["host"]) == [list(range(1, 9)), grown.accuracies]
    assert list(curves["its control"]) == [list(range(1, 9)), grown.control_accuracies]
    assert above.get_ylabel() == "accuracy (%)"
    assert [label.get_text() for label in below.get_yticklabels()] == ["r1c0", "r1c1"]
    # The first slot is the upper of two lanes, its bar from 1 to 1.6: alpha 0.5, of step 3, stands at 1.3.
    rim, dark = [points(line) for line in below.lines if len(points(line)[0]) == 16]
    assert rim[0] == dark[0] == [edge for step in range(8) for edge in (step, step + 1)]
    assert dark[1][6:10] == pytest.approx([1.3, 1.3, 1.6, 1.6])
    assert all(math.isnan(height) for height in dark[1][:6]), "alpha 0 is not drawn"


def test_marks_stand_at_their_step(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    below = draw_host(run, host(run, 2)).axes[1]
    marked = {line.get_marker(): points(line)[0] for line in below.lines if line.get_marker() != "None"}
    assert marked == {"^": [2], "*": [7]}
    assert [text.get_text() for text in below.texts] == ["depthwise"]


def test_every_stage_has_its_colour(tmp_path: Path) -> None:
    """One per stage, all different, and bars wear them."""
    assert len(set(STAGES.values())) == len(SeedStage) - 1
    run = read_run(write_run(tmp_path))
    below = draw_host(run, host(run, 2)).axes[1]
    worn = [to_hex(np.asarray(bars.get_facecolor())[0]) for bars in below.collections]
    stages = ["GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED"]
    assert worn == [STAGES[SeedStage[name]] for name in stages]


@pytest.mark.parametrize(
    ("hosts", "count", "ranks"),
    [
        (24, 1, [0]),
        (24, 2, [0, 12]),
        (24, 3, [0, 12, 23]),
        (24, 4, [0, 6, 12, 23]),
        (24, 5, [0, 6, 12, 17, 23]),
        (3, 9, [0, 1, 2]),
        (2, 4, [0, 1]),
        (1, 4, [0]),
        (7, 7, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_which_hosts(hosts: int, count: int, ranks: list[int]) -> None:
    """The best, the median, the worst, then those between; best first."""
    episodes = [Episode(env, float(env), 0, 0, 0) for env in range(hosts)]
    chosen = choose_hosts(episodes, count)
    assert [rank for rank, _ in chosen] == ranks
    assert [episode.env for _, episode in chosen] == [hosts - 1 - rank for rank in ranks]


def test_picture_for_a_readme(tmp_path: Path) -> None:
    """1200 pixels, of the host that was asked for."""
    run, out = write_run(tmp_path / "run"), tmp_path / "growth.png"
    seen = []
    for name in STANDINGS:
        draw_growth(run, out, host=name)
        with Image.open(out) as picture:
            assert picture.width == 1200
            assert 250 < picture.height < 900
            assert picture.getpixel((2, 2)) == (255, 255, 255, 255)
        seen.append(out.read_bytes())
    assert len(set(seen)) == 3
    assert [path.name for path in tmp_path.iterdir() if path != run] == ["growth.png"]


def test_picture_mistakes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(UnknownNameError, match="unknown host 'luckiest'; allowed: best, median, worst"):
        draw_growth(run, tmp_path / "x.png", host="luckiest")  # type: ignore[arg-type]
    with pytest.raises(StorageError, match=r"nowhere/x.png cannot be written"):
        draw_growth(run, tmp_path / "nowhere" / "x.png")
