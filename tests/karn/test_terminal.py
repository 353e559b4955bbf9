"""`esper watch`: every screen and key, driven without a terminal."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from karn.live_files import live_step
from karn.run_folders import columns, default_events, episode, metrics, stage, write_run
from karn.terminal_runs import complete_run, drive, grown, live_run, shown
from textual.pilot import Pilot
from textual.widgets import Footer

from esper.cli import main
from esper.karn.terminal import runs_in, watch
from esper.karn.terminal.app import KEYS, HelpScreen, WatchApp
from esper.karn.terminal.drawing import sparkline
from esper.karn.terminal.host_view import BORDER, host_lines
from esper.karn.terminal.moment import Watched
from esper.karn.terminal.widgets import Fleet, Lines
from esper.leyline import BadValueError

Look = Pilot[None]


def text_of(app: WatchApp) -> str:
    """All of the screen."""
    return "\n".join(shown(app))


def see(app: WatchApp, *words: str) -> None:
    """All of these are on the screen."""
    text = text_of(app)
    assert [word for word in words if word not in text] == [], text


def helps(app: WatchApp) -> bool:
    """Whether the page of keys is on the screen."""
    return isinstance(app.screen, HelpScreen)


def test_the_screens_of_a_run(tmp_path: Path) -> None:
    """One after the other by their keys, on the smallest terminal."""

    async def steps(app: WatchApp, pilot: Look) -> None:
        see(app, "2 of 3 rounds complete", "control (never grows)", "+0.00", "runs/a, evaluated", "+6.50", "objective")
        app.query_one("#overview", Lines).scroll_end(animate=False)
        await pilot.pause()
        see(app, "ppo/max_kl = 0.25", "healthy: at most 0.18", "kl_spike, since round 1", "lower the learning rate")
        await pilot.press("2")
        see(app, "gain in points over/under its control", "slots from the input on: r1c0, r1c1")
        see(app, "   0 F ·    47.0   +3.5")
        await pilot.press("3")
        see(
            app,
            "host 0",
            "accuracy 47.0 %, control 43.5 %, live gain +3.50; objective +3.00",
            "r1c0",
            "▲",
            "★",
            "F fossilized",
        )
        app.query_one("#host", Lines).scroll_end(animate=False)
        await pilot.pause()
        see(app, "+1.25 ± 0.25", "WAIT", "70.0 %", "step    1: germinate depthwise r1c0")
        await pilot.press("4")
        see(app, "r1c0/depthwise", "germinations", "commits", "Ops")
        await pilot.press("5")
        see(app, "★ commit host    2  depthwise in r1c0", "! panic  host    3  DIVERGENCE", "kl_spike begins")
        await pilot.press("1")
        assert app.shown == "overview"

    drive([complete_run(tmp_path)], steps)


def test_the_round_that_is_played(tmp_path: Path) -> None:
    """The fleet follows it step by step, until the cursor is put elsewhere."""
    run = live_run(tmp_path)

    async def steps(app: WatchApp, pilot: Look) -> None:
        await pilot.press("2")
        assert "round 2, step 4 of 8 ● live" in shown(app)[0]
        see(app, "   0 T ·    43.0   +1.5")
        with (run / "live.jsonl").open("a") as file:
            file.write(json.dumps(live_step(2, 4)) + "\n")
        await pilot.pause(0.5)
        assert "round 2, step 5 of 8 ● live" in shown(app)[0]
        await pilot.press("comma", "comma")
        assert "step 3 of 8 ‖ held" in shown(app)[0]
        await pilot.press("full_stop")
        assert "step 4 of 8 ‖ held" in shown(app)[0]
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps(episode(2, 0, 1.0)) + "\n")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(2)) + "\n")
        await pilot.pause(0.5)
        assert "round 2, step 4 of 8 ‖ held" in shown(app)[0]
        await pilot.press("f")
        assert "round 2, step 8 of 8 training" in shown(app)[0]

    drive([run], steps)


def test_replay(tmp_path: Path) -> None:
    """From the first round on, step by step, as fast as one likes; then it stands still."""

    async def steps(app: WatchApp, pilot: Look) -> None:
        assert "round 0, step" in shown(app)[0] and "▶ replay, 1 steps per second" in shown(app)[0]
        await pilot.press("minus")
        assert "replay, 0.5 steps per second" in shown(app)[0]
        await pilot.press("space")
        held = app.watched.trained
        await pilot.pause(0.15)
        assert app.watched.trained == held and "held" in shown(app)[0]
        await pilot.press(*["plus"] * 7)
        assert app.speed == 32.0
        await pilot.press("space")
        for _ in range(200):
            await pilot.pause(0.05)
            if not app.watched.running:
                break
        assert (app.watched.number, app.watched.trained, app.watched.running) == (1, 8, False)
        await pilot.press(*["minus"] * 6, "p")
        assert (app.watched.number, app.watched.running) == (0, True)

    drive([complete_run(tmp_path)], steps, replay=True, speed=1.0)


def test_the_inverted_column_stands_where_the_numbers_come_from(tmp_path: Path) -> None:
    """Letter, alpha and curve in it are those after the steps trained; after the last step too."""
    watched = Watched.of(complete_run(tmp_path))
    watched.poll(5.0)
    host = watched.host()
    assert host is not None
    for trained in range(9):
        watched.trained = trained
        lines = host_lines(watched, 80, 24)
        lane = next(line for line in lines if line.plain.startswith("r1c0"))
        (column,) = (span.start for span in lane.spans if span.style == BORDER)
        seed = host.at(trained).get("r1c0")
        alpha = None if seed is None or seed.alpha == 0.0 else seed.alpha
        assert lane.plain[column] in ("·" if seed is None else f"{seed.stage.letter}▲★")
        assert lines[lines.index(lane) + 1].plain[column] == sparkline([alpha], 1, (0.0, 1.0))
        drawn = [row for row in range(1, 5) if "⠀" < lines[row].plain[column] <= "⣿"]
        assert bool(drawn) == (trained > 0)
        # The accuracy goes from 40 to 47 in 7 steps, over 4 rows of 4 dots from bottom to top.
        assert not drawn or drawn[0] == 1 + round((8 - trained) / 7 * 15) // 4


def test_the_run_among_its_evaluated_policies(tmp_path: Path) -> None:
    """It is marked, under its path or the end of it."""
    watched = Watched.of(write_run(tmp_path / "first"))
    names = (str(tmp_path / "first"), f"{tmp_path.name}/first", "first", "learned", "heuristic", "other/first", "")
    assert [watched.is_named(name) for name in names] == [True] * 4 + [False] * 3


def test_rounds_and_hosts(tmp_path: Path) -> None:
    """Brackets go from round to round, n and b from host to host."""

    async def steps(app: WatchApp, pilot: Look) -> None:
        await pilot.press("3", "left_square_bracket")
        assert "round 0, step 8 of 8 ‖ held" in shown(app)[0]
        await pilot.press("n")
        assert any(line.startswith("host 1 ") for line in shown(app))
        await pilot.press("b", "b")
        assert any(line.startswith("host 3 ") for line in shown(app))
        await pilot.press("right_square_bracket", "right_square_bracket")
        assert app.watched.following and "round 1" in shown(app)[0]
        await pilot.press("left_square_bracket", "left_square_bracket", "left_square_bracket")
        assert app.watched.number == 0

    drive([complete_run(tmp_path)], steps)


def test_the_fleet_by_arrows_and_mouse(tmp_path: Path) -> None:
    """The selected host is looked at."""

    async def steps(app: WatchApp, pilot: Look) -> None:
        await pilot.press("2", "right", "down", "up", "down", "enter")
        assert app.shown == "host" and app.watched.env == 3
        await pilot.click("#tab-fleet")
        assert app.shown == "fleet"
        grid = app.query_one(Fleet)
        await pilot.click(Fleet, offset=(2, 1))
        assert app.shown == "host" and app.watched.env == 2
        await pilot.press("2")
        await pilot.click(Fleet, offset=(2, 9))
        assert app.shown == "fleet"
        await pilot.press("left", "left", "left")
        assert grid.cursor == 0

    drive([complete_run(tmp_path)], steps)


def test_help(tmp_path: Path) -> None:
    """All keys with their meaning; every key that is bound is in it."""

    async def steps(app: WatchApp, pilot: Look) -> None:
        await pilot.press("question_mark")
        assert helps(app)
        for keys, meaning in KEYS.items():
            assert keys in text_of(app) and meaning[:20] in text_of(app)
        await pilot.press("escape")
        assert not helps(app)
        bound = {binding.key for _, binding, *_ in app.active_bindings.values()}
        assert {"1", "5", "comma", "full_stop", "space", "f", "r", "p", "n", "b", "q"} <= bound
        assert app.query_one(Footer).size.height == 1
        await pilot.press("r")
        assert app.shown == "overview"
        await pilot.press("q")
        assert app._exit

    drive([complete_run(tmp_path)], steps)


def test_many_runs(tmp_path: Path) -> None:
    """Side by side: of any kind, one that begins among them; arrows, enter and mouse open one."""
    complete_run(tmp_path / "a")
    grown(tmp_path / "b")
    write_run(tmp_path / "c", [], [])

    async def steps(app: WatchApp, pilot: Look) -> None:
        lines = shown(app)
        (a,), (b,), (c,) = ([line for line in lines if line[2:3] == name] for name in "abc")
        assert "2/3" in a and "+2.25" in a and "+3.25" in a
        assert "growing" in b and "5/8" in b and "45 %" in b
        assert "0/3" in c
        await pilot.press("down", "enter")
        assert shown(app)[0].startswith("b Net: step 5 of 8")
        await pilot.press("r", "up", "up", "down", "down", "down", "enter")
        assert shown(app)[0].startswith("c digits_hand: no round yet")
        for key in "2345":
            await pilot.press(key)
        await pilot.click("#tab-runs")
        await pilot.click("#runs", offset=(5, 3))
        assert shown(app)[0].startswith("a digits_hand: round 1")

    drive(runs_in(tmp_path), steps)


@pytest.mark.parametrize("width", [80, 120])
def test_a_grower(width: int, tmp_path: Path) -> None:
    """One model in every view, without rounds and without a policy."""

    async def steps(app: WatchApp, pilot: Look) -> None:
        see(app, "step 5 of 8", "of a budget of 1,000")
        await pilot.press("2")
        see(app, "   0 F P    45.0      –", "accuracy by step")
        await pilot.press("3")
        see(app, "layer1.0", "F fossilized")
        await pilot.press("4")
        see(app, "layer1.0/norm", "2 births, 1 commit, 1 cut, 1 panic")
        await pilot.press("5")
        see(app, "! panic  host    0  NOT_FINITE")
        await pilot.press("p")
        assert "step 0 of 8 ▶ replay" in shown(app)[0]
        await pilot.press("right_square_bracket", "left_square_bracket", "f")
        assert app.watched.following

    drive([grown(tmp_path)], steps, size=(width, 24))


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """Neither markup nor escapes are obeyed: they are shown."""
    escape, markup = "\x1b[31mred\x1b]0;title\x07", "[bold red]x[/] [link=file:///etc/passwd]y[/link]"
    moves = [
        episode(1, 3, 2.0, [stage(1, 0, 3, escape, "DORMANT", "GERMINATED", "germinate", markup)]),
        {
            "kind": "alarm",
            "round": 1,
            "alarm": markup,
            "severity": escape,
            "cause": f"{escape}\n\r\u202e",
            "remedy": "[/]",
        },
    ]
    rows = [metrics(0), metrics(1, germinated={f"{escape}/{markup}": 1}, **{"[/]": 1.0})]
    write_run(tmp_path, rows, [*default_events()[:-1], *moves], task=markup)
    (tmp_path / "evaluation.json").write_text(json.dumps({"task": escape}))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({**episode(1, 0, 1.0), "stages": {**columns([]), "source": markup}}) + "\n")

    async def steps(app: WatchApp, pilot: Look) -> None:
        seen = ""
        for key in "12345":
            await pilot.press(key)
            app.watched.env = 3
            for _ in range(3):
                seen += text_of(app)
                await pilot.press("pagedown")
        assert "[bold red]x[/]" in seen and "\\x1b[31mred" in seen and "\\u202e" in seen
        assert not any(not letter.isprintable() and letter != "\n" for letter in seen)
        assert "\x1b[31mred" not in app.export_screenshot()

    drive([tmp_path], steps)


def test_a_run_that_is_deleted_or_damaged_while_it_is_watched(tmp_path: Path) -> None:
    """The last state stays, and what is wrong is said."""
    run = complete_run(tmp_path / "run")

    async def steps(app: WatchApp, pilot: Look) -> None:
        with (run / "events.jsonl").open("a") as file:
            file.write("not json\n")
        await pilot.pause(0.5)
        await pilot.press("end")
        see(app, "events.jsonl, line 13 is not JSON")
        shutil.rmtree(run)
        await pilot.pause(0.5)
        assert "deleted" in shown(app)[0]
        for key in "12345":
            await pilot.press(key)
        see(app, "kl_spike")

    drive([run], steps)


def test_no_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are letters, and everything is grey."""
    monkeypatch.setenv("NO_COLOR", "1")

    async def steps(app: WatchApp, pilot: Look) -> None:
        for key in "12345":
            await pilot.press(key)
            await pilot.pause()
            for strip in app.screen._compositor.render_strips():
                for segment in strip:
                    for colour in (segment.style.color, segment.style.bgcolor) if segment.style else ():
                        if colour is not None and colour.triplet is not None:
                            assert len(set(colour.triplet)) == 1, (key, segment)

    drive([complete_run(tmp_path)], steps)


def test_sizes(tmp_path: Path) -> None:
    """Every screen on terminals that are tiny, or become it."""

    async def steps(app: WatchApp, pilot: Look) -> None:
        for size in ((20, 6), (300, 80), (40, 10)):
            await pilot.resize_terminal(*size)
            for key in "12345":
                await pilot.press(key)
                assert max(len(line) for line in shown(app)) <= size[0]

    drive([live_run(tmp_path)], steps)


# -- the command ------------------------------------------------------------------------------------------------------


def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the screen is taken."""
    (tmp_path / "empty").mkdir()
    cases = {
        ("empty",): "is no run folder, and no folder of runs",
        ("nowhere",): "there is no such folder",
        ("empty", "--speed", "0"): "speed",
        ("empty", "--round", "-1"): "round",
    }
    for (name, *rest), message in cases.items():
        with pytest.raises(SystemExit) as stopped:
            main(["watch", str(tmp_path / name), *rest])
        told = capsys.readouterr().err
        assert stopped.value.code == 2 and message in told and told.count("\n") == 1
    write_run(tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path / "run")])
    assert "draws on a terminal" in capsys.readouterr().err
    monkeypatch.setattr("esper.karn.terminal.opening.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path / "run")])
    assert "pip install 'esper-morph[watch]'" in capsys.readouterr().err


def test_the_command_runs_the_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its flags; a round that is not there is said, not raised."""
    begun = []

    def run(app: WatchApp) -> None:
        begun.append(app)

    monkeypatch.setattr(WatchApp, "run", run)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    (tmp_path / "runs").mkdir()
    main(["watch", str(write_run(tmp_path / "runs" / "a")), "--replay", "--speed", "8"])
    main(["watch", str(tmp_path / "runs")])
    flags = [(len(app.runs), app.speed, app._begin_with) for app in begun]
    assert flags == [(1, 8.0, (True, None)), (1, 4.0, (False, None))]
    with pytest.raises(BadValueError, match="no run folder"):
        watch(tmp_path)
