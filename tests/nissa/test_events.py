"""Events as lines: the keys that readers of a log rely on, in their order."""

import json
import math
from pathlib import Path

import pytest

from esper.leyline import BadValueError
from esper.nissa import (
    AlarmRaised,
    CompileFailed,
    EpisodeEnded,
    Event,
    HostFollowed,
    Panicked,
    RoundExamined,
    RoundMeasured,
    RunBegun,
    RunEnded,
    RunResumed,
    SeedSuspected,
    StageChanged,
    StepTaken,
    as_line,
)
from esper.storage.logs import JsonLines, read_lines

EPISODE = EpisodeEnded(
    1, "digits", 4, 1.5, 2.0, 90.0, 64, {"step": [0], "source": "D"}, [80.0, 90.0], [80.0, 88.0], {"r1c0": [0.0, 1.0]},
    decisions={"step": [0], "op": ["GERMINATE"]}, rewards=[0.5, 1.0], reward_parts={"gain": 1.5},
)  # fmt: skip
ALARM = AlarmRaised("kl_spike", "warning", 3, "", False, 0.2, 0.15, "joint KL is 0.2 (limit 0.15)", "lower the rate")
CASES: list[tuple[Event, str]] = [
    (
        StageChanged(1, "digits", 2, 3, "r1c0", None, "DORMANT", "GERMINATED", "germinate"),
        '{"kind":"stage","round":1,"task":"digits","step":2,"env":3,"slot":"r1c0","blueprint":null,'
        '"source":"DORMANT","target":"GERMINATED","cause":"germinate"}',
    ),
    (
        Panicked(1, "digits", 2, 3, ["loss"]),
        '{"kind":"panic","round":1,"task":"digits","step":2,"env":3,"symptoms":["loss"]}',
    ),
    (
        EPISODE,
        '{"kind":"episode","round":1,"task":"digits","env":4,"objective":1.5,"gain":2.0,"accuracy":90.0,'
        '"added_parameters":64,"stages":{"step":[0],"source":"D"},"accuracies":[80.0,90.0],"control_accuracies":[80.0,88.0],"alphas":{"r1c0":[0.0,1.0]},'
        '"decisions":{"step":[0],"op":["GERMINATE"]},"rewards":[0.5,1.0],"reward_parts":{"gain":1.5}}',
    ),
    (
        ALARM,
        '{"kind":"alarm","alarm":"kl_spike","severity":"warning","round":3,"subject":"","ended":false,"value":0.2,'
        '"limit":0.15,"cause":"joint KL is 0.2 (limit 0.15)","remedy":"lower the rate"}',
    ),
    (
        RoundExamined(4, {"total": {"norm": 1.5}}, {"worst": []}, {"loss": {"mean": 0.5}}, {"digits": None}),
        '{"kind":"detail","round":4,"gradients":{"total":{"norm":1.5}},"ratios":{"worst":[]},'
        '"observations":{"loss":{"mean":0.5}},"lstm":{"digits":null}}',
    ),
    (
        SeedSuspected(3, "digits", 5, 1, "r1c0", "hacking", "warning", 6.0, 1.0),
        '{"kind":"suspect","round":3,"task":"digits","step":5,"env":1,"slot":"r1c0","suspicion":"hacking",'
        '"severity":"warning","contribution":6.0,"gain":1.0}',
    ),
    (
        RunBegun("2025-01-01", 0, 9, {"torch": "2.13.0"}, "abc"),
        '{"kind":"begun","time":"2025-01-01","round":0,"rounds":9,"machine":{"torch":"2.13.0"},"git":"abc"}',
    ),
    (
        RunResumed("2025-01-01", 3, 9, {}, None, ["threads 1 → 2"]),
        '{"kind":"resumed","time":"2025-01-01","round":3,"rounds":9,"machine":{},"git":null,'
        '"remarks":["threads 1 \\u2192 2"]}',
    ),
    (
        HostFollowed(1, "digits", 0, 3, [{"op": {"WAIT": 0.75}}, {}], [[], [("r1c0", 1.5, 0.5, None, None)]]),
        '{"kind":"followed","round":1,"task":"digits","step":0,"env":3,"choices":[{"op":{"WAIT":0.75}},{}],'
        '"measured":[[],[["r1c0",1.5,0.5,null,null]]]}',
    ),
    (
        StepTaken(
            9.5,
            1,
            "digits",
            2,
            8,
            4,
            ["r1c0"],
            [50.0],
            [40.0],
            [10.0],
            [None],
            [(4, "r1c0", "TRAINING", "norm", 0.0, 1.5, 0.5, None, None)],
            [(4, "GERMINATE", "r1c0", "norm")],
            [0.5],
            [{}],
            [(4, "r1c0", "norm", "DORMANT", "GERMINATED", "germinate")],
            [(4, ["LOSS"])],
        ),
        '{"kind":"step","time":9.5,"round":1,"task":"digits","step":2,"steps":8,"first_env":4,"slots":["r1c0"],'
        '"accuracies":[50.0],"control_accuracies":[40.0],"gains":[10.0],"losses":[null],'
        '"seeds":[[4,"r1c0","TRAINING","norm",0.0,1.5,0.5,null,null]],"actions":[[4,"GERMINATE","r1c0","norm"]],'
        '"probabilities":[0.5],"choices":[{}],"changes":[[4,"r1c0","norm","DORMANT","GERMINATED","germinate"]],'
        '"panics":[[4,["LOSS"]]]}',
    ),
    (CompileFailed("t", 0, "no gcc"), '{"kind":"compile_failed","time":"t","round":0,"why":"no gcc"}'),
    (RunEnded("t", 9, "complete", 0), '{"kind":"ended","time":"t","round":9,"why":"complete","dropped":0}'),
]


@pytest.mark.parametrize(("event", "line"), CASES, ids=lambda value: getattr(value, "kind", ""))
def test_lines(event: Event, line: str, tmp_path: Path) -> None:
    """Readers of old and new logs look for these keys."""
    with JsonLines(tmp_path / "log.jsonl") as log:
        log.write(**as_line(event))
    assert (tmp_path / "log.jsonl").read_text() == line + "\n"
    assert list(read_lines(tmp_path / "log.jsonl")) == [json.loads(line)]


def test_an_alarm_about_no_number_is_written(tmp_path: Path) -> None:
    """It may be the very thing that is wrong; an episode without an objective is a fault of ours."""
    alarm = AlarmRaised("numerical_fault", "critical", 0, "", False, math.nan, math.inf, "", "")
    with JsonLines(tmp_path / "log.jsonl") as log:
        log.write(**as_line(alarm))
        with pytest.raises(BadValueError, match="nan"):
            log.write(**as_line(EpisodeEnded(1, "digits", 4, math.nan, 2.0, 90.0, 64, {}, [], [], {}, {}, [], {})))
    [line] = read_lines(tmp_path / "log.jsonl")
    assert (line["value"], line["limit"]) == ("nan", "inf")


def test_an_alarm_in_words() -> None:
    """As a terminal shows it, and by which name sinks draw it."""
    assert str(ALARM) == "warning: round 3: kl_spike: joint KL is 0.2 (limit 0.15); lower the rate"
    assert ALARM.metric == "alarms/kl_spike"
    about = AlarmRaised("entropy_collapse", "info", 3, "slot", True, 0.2, 0.02, "over", "")
    assert str(about) == "info: round 3: entropy_collapse: over"
    assert about.metric == "alarms/entropy_collapse/slot"


def test_numbers_of_a_round() -> None:
    """Paths of any depth; words for what is not finite are numbers, others are not."""
    values = {
        "objective": 1,
        "reward": {"gain": 2.5},
        "tasks": {"digits": {"reward": {"gain": -1.0}}},
        "germinated": {"r1c0/conv": 3},
        "ppo/max_kl": "inf",
        "ppo/value_loss": "nan",
        "note": "words",
        "nothing": None,
    }
    numbers = RoundMeasured(0, values).numbers()
    assert math.isnan(numbers.pop("ppo/value_loss"))
    assert numbers == {
        "objective": 1.0,
        "reward/gain": 2.5,
        "tasks/digits/reward/gain": -1.0,
        "germinated/r1c0/conv": 3.0,
        "ppo/max_kl": math.inf,
    }
