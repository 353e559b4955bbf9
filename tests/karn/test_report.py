"""The page: complete, self-contained, and true to the files."""

import json
import os
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from karn.run_folders import (
    Page,
    default_events,
    difference,
    episode,
    evaluation,
    life,
    metrics,
    policy,
    stage,
    write_run,
)

from esper.cli import main
from esper.karn import page as page_module
from esper.karn import panels, read_evaluations, write_report
from esper.karn.evaluations import draw_evaluation
from esper.karn.page import element
from esper.karn.panels import columns_of, health_panels
from esper.karn.report import SECTIONS
from esper.karn.sections import ends_of, what_was_learned
from esper.karn.state import HEADLINES, read_run


def report(run: Path, **options: object) -> Page:
    """The page of a run."""
    return Page(write_report(run, **options).read_text())  # type: ignore[arg-type]  # by name


def standard_run(folder: Path) -> Path:
    """Two rounds and an evaluation."""
    write_run(folder)
    (folder / "evaluation.json").write_text(json.dumps(evaluation()))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two rounds and an evaluation."""
    return standard_run(tmp_path / "run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for tests that only look."""
    return standard_run(tmp_path_factory.mktemp("page") / "run")


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    """Its whole page."""
    return write_report(folder).read_text()


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    """The same, taken apart."""
    return Page(text)


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take most of a report's time; tests of words do without panels, and without turning others into SVG."""

    def to_svg(_: object, name: str) -> str:
        return f'<svg aria-labelledby="{name}-caption"></svg>'

    monkeypatch.setattr(page_module, "to_svg", to_svg)
    monkeypatch.setattr(panels, "draw_panel", lambda *_: None)


words_only = pytest.mark.usefixtures("blank")


def test_sections(page: Page) -> None:
    """All but that on teaching, each with its pictures and a sentence under every picture."""
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert sections == [name for name in SECTIONS if name != "teaching"]
    tags = [tag for tag, _ in page.tags]
    assert tags.count("svg") == tags.count("figure") == tags.count("figcaption") >= 4 + 1 + 4 + 2 + 5
    captions = [text for tag, text in page.texts if tag == "figcaption"]
    assert all(caption.endswith(".") and len(caption) > 20 for caption in captions)


def test_self_contained(text: str, page: Page) -> None:
    """Nothing is loaded from anywhere: no address, no script but that of films; links lead into the page."""
    assert "http" not in text
    assert "//" not in re.sub(r"data:image/png;base64,[^\"]+", "", text)
    assert not {"link", "iframe", "object", "img"} & {tag for tag, _ in page.tags}
    assert page.foreign_scripts() == []
    ids = page.all_of("id")
    assert len(ids) == len(set(ids))
    links = page.all_of("href") + page.all_of("xlink:href") + re.findall(r"url\((#[^)]+)\)", text)
    assert len(links) > 20
    assert {link for link in links if not link.startswith("data:image/png;base64,")} <= {f"#{name}" for name in ids}
    assert set(page.all_of("aria-labelledby")) <= set(ids)


def test_light_and_dark(text: str) -> None:
    """Every colour that drawings and rules use has a value for both, and paper is white."""
    used = set(re.findall(r"var\(--(\w+)\)", text)) - {"cell"}
    light = re.search(r":root\{color-scheme[^}]+\}", text)
    dark = re.search(r"@media screen and \(prefers-color-scheme:dark\)\{:root\{[^}]+\}", text)
    assert light is not None
    assert dark is not None
    assert used >= {"ink", "paper", "blue", "vermilion"}
    for rules in (light[0], dark[0]):
        assert used <= set(re.findall(r"--(\w+):#[0-9a-f]{6}", rules))
    assert "@media print" in text


def test_numbers_of_the_head(page: Page) -> None:
    """Task, seed, rounds, hash, settings, and the story: two of two commits are depthwise, born at 1 and 2."""
    words = page.text()
    for shown in ("digits_hand", "0123abcd", "2 complete of 3", "6, controls included; 2 beside each control"):
        assert shown in words
    assert "In round 1 the seed committed most was depthwise in slot r1c0 (2 of 2 commits, 100 %)" in words
    assert "germinated at step 1.5 and committed at step 6.5 in the median, of 8 steps" in words
    assert "The objective went from +1.25 points in round 0 to +2.25 in round 1." in words
    assert "ended with 15 added parameters in the mean, and 25 % of hosts kept at least one seed" in words


@pytest.mark.parametrize(("rounds", "size"), [(1, 1), (7, 1), (8, 2), (19, 4), (20, 5), (100, 5)])
def test_first_and_last_rounds(rounds: int, size: int, tmp_path: Path) -> None:
    """A quarter of the run each, at most five; the median is over the commits of the last."""
    episodes = [episode(number, 0, 1.0, life(number, 0, "r1c0", number % 2)) for number in range(rounds)]
    read = read_run(write_run(tmp_path, [metrics(number) for number in range(rounds)], episodes))
    first, last = ends_of(read)
    assert [entry.number for entry in first] == list(range(size))
    assert [entry.number for entry in last] == list(range(rounds - size, rounds))
    born = statistics.median(number % 2 for number in range(rounds - size, rounds))
    assert f"({size} of {size} commits, 100 %): germinated at step {born:g} " in what_was_learned(read)[0]
    means = [1.25 + statistics.fmean(numbers) for numbers in (range(size), range(rounds - size, rounds))]
    assert f"{means[1]:+.2f}" in what_was_learned(read)[1]
    assert f"{means[0]:+.2f}" in what_was_learned(read)[1]


def test_captions_of_hosts(page: Page) -> None:
    """Best first, with the figures of their episodes."""
    captions = [text for tag, text in page.texts if tag == "figcaption" and text.startswith("Host ")]
    starts = ["Host 2, the best of 4 by objective (+4.00)", "Host 0, number 2 of 4 by objective (+3.00)"]
    starts += ["Host 3, the median of 4 by objective (+2.00)", "Host 1, the worst of 4 by objective (+1.00)"]
    assert [caption.split(":")[0] for caption in captions] == starts
    assert "1 birth, 1 commit, no cuts; hardened it reached 54.0 %, +5.0 points" in captions[0]
    assert "1 birth, no commits, 1 cut; hardened it reached 51.0 %" in captions[3]
    assert "with 20 added parameters" in captions[0]


@words_only
def test_hosts_and_round(run: Path) -> None:
    page = report(run, hosts=2, round=0)
    assert "Hosts of round 0." in page.text()
    assert sum(text.startswith("Host ") for tag, text in page.texts if tag == "figcaption") == 2


def test_tables(page: Page) -> None:
    """The same numbers as in the files: metrics by round, policies, differences."""
    cells = [text for tag, text in page.texts if tag in ("td", "th")]
    for row in (["0", "+1.25", "2.50", "+2.25", "51.50", "15.0", "0.25", "0"], ["1", "+2.25", "2.50", "+3.25"]):
        assert any(cells[at : at + len(row)] == row for at in range(len(cells)))
    # Objectives 5.5, 6.5, 7.5: 6.5 ± t(2) / √3 = 6.5 ± 2.48, of which the series has 2.47.
    at = cells.index("runs/a")
    assert re.fullmatch(r"\+6\.50 \(\+4\.0\d to \+8\.9\d\)", cells[at + 1])
    assert cells[at + 4] == "1"
    at = cells.index("runs/a − wait")
    assert cells[at + 1 : at + 6] == ["+4.50", "+3.25 to +5.75", "0.0125", "1", "a report, no claim"]


@words_only
def test_claims_are_shown(run: Path) -> None:
    entry = difference("runs/a", "wait", superior=True, not_worse=True, margin=1.0)
    (run / "evaluation.json").write_text(json.dumps(evaluation(differences=[entry], final=True)))
    words = report(run).text()
    assert "superior, not worse by 1" in words
    assert "test images" in words


@words_only
def test_which_evaluations(run: Path, tmp_path: Path) -> None:
    """Those of the folder by default, those that are named otherwise; without any the page says how to get one."""
    (run / "evaluation-2.json").write_text(json.dumps(evaluation(task="second")))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(evaluation(task="third")))
    heads = [text for tag, text in report(run).texts if tag == "h3"]
    assert heads == ["second, evaluation-2.json", "digits_hand, evaluation.json"]
    assert [text for tag, text in report(run, evaluations=[other]).texts if tag == "h3"] == ["third, other.json"]
    assert "esper evaluate" in report(run, evaluations=[]).text("code")


def test_policies_are_drawn_where_they_are(tmp_path: Path) -> None:
    """A point per host, the mean with its arms, and training seeds by themselves."""
    path = tmp_path / "evaluation.json"
    seeds = [policy(1.0), policy(3.0)]
    path.write_text(json.dumps(evaluation(policies={"a+b": policy(2.0, by_seed=seeds)})))
    (found,) = read_evaluations(path)
    (axis,) = draw_evaluation(found).axes
    drawn = [(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) for line in axis.lines]
    assert ([0.0, 64.0, 160.0], [12.0, 13.0, 14.0]) in drawn
    assert ([pytest.approx(224 / 3)], [13.0]) in drawn
    assert ([pytest.approx(224 / 3)] * 2, [12.0, 14.0]) in drawn
    assert [tick for tick in axis.get_xticks() if tick] == [2, 10, 20, 50, 100]


@words_only
def test_several_tasks_in_a_file(run: Path) -> None:
    tasks = {"one": evaluation(task="one"), "two": evaluation(task="two")}
    content = {"tasks": tasks, "mean": {"differences": [difference("runs/a", "wait")]}}
    (run / "evaluation.json").write_text(json.dumps(content))
    heads = [text.split(",")[0] for tag, text in report(run).texts if tag == "h3"]
    assert heads == ["one", "two", "mean over tasks"]


@words_only
def test_health_leaves_out_what_is_missing(tmp_path: Path) -> None:
    """No panel without a column; strangers get one of their own; what never changes is said, not drawn."""
    rows = [metrics(number, **{"ppo/surprise": number, "ppo/policy_loss": 0.5}) for number in (0, 1)]
    run = write_run(tmp_path, rows)
    read = read_run(run)
    drawn, constant = health_panels(read)
    assert [panel.title for panel in drawn] == [
        "KL of the joint action", "Entropy", "Explained variance", "Reward by part", "Time", "ppo/surprise",
    ]  # fmt: skip
    assert columns_of(read, drawn[1]) == ["ppo/op/entropy", "ppo/slot/entropy"]
    assert list(constant.items()) == [("panics", 0.0), ("ppo/rate", 0.001), ("ppo/policy_loss", 0.5)]
    words = report(run).text()
    assert "The same in every round, to a millionth: panics = 0, ppo/rate = 0.001, ppo/policy_loss = 0.5." in words
    assert "Value loss" not in words


@words_only
def test_a_gap_is_a_gap(tmp_path: Path) -> None:
    """A column that one round lacks is no zero there."""
    rows = [metrics(number) for number in range(3)]
    del rows[1]["ppo/explained_variance"]
    run = read_run(write_run(tmp_path, rows, default_events(3)))
    assert run.series("ppo/explained_variance") == [0.0, None, 0.25]
    assert report(tmp_path).text()


def test_a_run_that_never_grew(tmp_path: Path) -> None:
    """One round, no seed at all."""
    events = [episode(0, env, 1.0) | {"alphas": {}} for env in range(4)]
    page = report(write_run(tmp_path, [{"round": 0, **dict.fromkeys(HEADLINES, 0.0)}], events))
    words = page.text()
    assert "No seed was committed in round 0. The objective of the one round so far is +0.00 points." in words
    assert "No seed was germinated in any round." in words


@words_only
def test_panics_are_told(tmp_path: Path) -> None:
    panic = {"kind": "panic", "round": 1, "step": 4, "env": 2, "symptoms": ["LOSS", "LOGITS"]}
    page = report(write_run(tmp_path, events=[*default_events(), panic]))
    assert "After step 4 the governor took it back (LOSS, LOGITS)." in page.text("figcaption")


def test_names_are_escaped(tmp_path: Path) -> None:
    """Whatever files call a task, slot, blueprint or policy stays text, in prose and in pictures."""
    evil = "<b>&$x^{2}$"
    born = stage(1, 0, 3, evil, "DORMANT", "GERMINATED", "germinate", blueprint=evil)
    events = [*default_events()[:-1], episode(1, 3, 2.0, [born])]
    rows = [metrics(0), metrics(1, germinated={f"{evil}/{evil}": 3}, ops={evil: 3}, **{f"ppo/{evil}/kl": 0.5})]
    run = write_run(tmp_path / "run", rows, events, task=evil, seed=evil)
    (run / "evaluation.json").write_text(json.dumps(evaluation(task=evil, policies={evil: policy()}, differences=[])))
    text = write_report(run).read_text()
    page = Page(text)
    assert "<b>" not in text
    assert "b" not in {tag for tag, _ in page.tags}
    assert page.text("title").startswith(f"Esper: {evil}, seed {evil}")
    drawn = page.text("text")
    assert drawn.count(evil) >= 5, "slot, blueprint, row of the map, op, head, policy"
    assert evil in page.text("h3")


def test_elements_escape_what_enters() -> None:
    """Text and values of attributes; what was built before stays as it is."""
    inner = element("b", "1 < 2")
    assert element("p", inner, " & <i>", class_='"x"') == '<p class="&quot;x&quot;"><b>1 &lt; 2</b> &amp; &lt;i&gt;</p>'


def test_same_run_same_page(folder: Path, text: str, tmp_path: Path) -> None:
    assert write_report(folder, tmp_path / "again.html").read_text() == text


# -- the command ------------------------------------------------------------------------------------------------------


@words_only
def test_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Says where the page is; by default in the run folder."""
    main(["report", str(run)])
    assert capsys.readouterr().out == f"the report is in {run}/report.html\n"
    out = tmp_path / "page.html"
    arguments = ["--evaluation", str(run / "evaluation.json"), "--out", str(out), "--hosts", "1", "--round", "0"]
    main(["report", str(run), *arguments])
    assert "Hosts of round 0." in Page(out.read_text()).text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


@words_only
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no run folder: there is no such folder"),
        (["run", "--round", "9"], "round 9 is not in run; it has rounds 0 to 1"),
        (["run", "--hosts", "0"], "hosts 0 is not an integer of 1 or more"),
        (["run", "--evaluation", "run/config.json"], "run/config.json is no evaluation: it has no 'policies'"),
        (["run", "--evaluation", "nowhere.json"], "nowhere.json is no evaluation"),
        (["run", "--out", "nowhere/x.html"], "nowhere/x.html cannot be written"),
        (["run", "--out", "run"], "run cannot be written: it is no file"),
    ],
)
def test_mistakes(
    arguments: list[str],
    message: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line and exit code 2; nothing is written."""
    monkeypatch.chdir(run.parent)
    before = sorted(run.parent.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"esper: {message}")
    assert sorted(run.parent.rglob("*")) == before


@words_only
def test_a_failed_write_leaves_the_old_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "report.html").write_text("old")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match=r"report.html cannot be written \(no space left on device\)"):
        write_report(run)
    assert (run / "report.html").read_text() == "old"
    assert not [name for name in os.listdir(run) if name.startswith(".")]
