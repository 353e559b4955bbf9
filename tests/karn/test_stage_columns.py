"""Changes of stage in the lines of episodes: what was written is read, by Python and by SQL, and damage is named."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from karn.run_folders import Json, columns, default_events, episode, life, metrics, stage, write_run
from karn.test_queries import rows_of
from simic.training.tiny import make_runner
from torch import Tensor

from esper.karn import RunFollower, read_run
from esper.karn.fields import Fields
from esper.karn.histories import by_env
from esper.karn.lines import StageEvent
from esper.karn.stage_columns import changes_of
from esper.leyline import CAUSES, EsperError, SeedStage, StageChange
from esper.simic.agent import PPOAgent
from esper.simic.rewards import RewardConfig
from esper.simic.training.collect import RoundCollector
from esper.simic.training.config import growth_ppo
from esper.simic.training.episode import SeedChange
from esper.simic.training.recorder import stage_columns, write_record
from esper.simic.training.rollouts import RoundRecord
from esper.storage.logs import JsonLines, read_lines

BREAKS = (1, 4, 5, 9)
"""Steps in whose training every second host is broken"""


@pytest.fixture(scope="module")
def record() -> RoundRecord:
    """A round of six hosts, three of which panic again and again."""
    runner = make_runner()
    agent = PPOAgent(runner.table, runner.layout, replace(growth_ppo(), steps=12), total_updates=3)
    train, fleet = runner.fleet.train_step, runner.fleet

    def faulty() -> Tensor:
        if fleet.step_index in BREAKS:
            fleet.host.weights.matrix.data[runner.groups.envs[::2]] = math.nan
        return train()

    fleet.train_step = faulty  # type: ignore[method-assign]  # a fault
    [record] = RoundCollector([runner], agent, RewardConfig(), rng_seed=4).collect(0)
    return record


@pytest.fixture
def run(record: RoundRecord, tmp_path: Path) -> Path:
    """The folder of a run with this round."""
    path = write_run(tmp_path, [metrics(0)], [])
    with JsonLines(path / "events.jsonl") as log:
        write_record(log, 0, record)
    return path


def test_what_is_written_is_read(record: RoundRecord, run: Path) -> None:
    """Every change of every host in its order, also those that panics took back."""
    written = [
        StageEvent(step, env, change.slot_id, blueprint, change.source, change.target, change.cause)
        for step, (env, change, blueprint) in record.changes
    ]
    assert {change.cause for change in written} > {"germinate", "tick", "panic"}
    assert by_env(read_run(run).changes) == by_env(written)
    by_host = sorted(written, key=lambda change: change.env)
    assert rows_of(run, "SELECT env, step, slot, blueprint, source, target, cause FROM stages") == [
        (env, step, slot, blueprint, source.name, target.name, cause)
        for step, env, slot, blueprint, source, target, cause in by_host
    ]


def test_every_stage_and_cause_has_its_letter() -> None:
    """From each stage to the next one, by each cause."""
    stages, causes = list(SeedStage), list(CAUSES)
    changes = [
        (0, SeedChange(0, StageChange("r1c0", stage, stages[number - 1], causes[number % len(causes)]), None))
        for number, stage in enumerate(stages)
    ]
    read = changes_of(Fields({"stages": stage_columns(changes)}, "a line"), 0)
    assert [(each.source, each.target, each.cause) for each in read] == [
        (change.source, change.target, change.cause) for _, (_, change, _) in changes
    ]
    assert {each.cause for each in read} == set(CAUSES)


def test_each_change_begins_where_the_last_one_ended(run: Path) -> None:
    """In every slot, from DORMANT on, through panics."""
    lives: dict[tuple[int, str], list[StageEvent]] = {}
    for change in read_run(run).changes:
        lives.setdefault((change.env, change.slot), []).append(change)
    for life_ in lives.values():
        assert life_[0].source is SeedStage.DORMANT
        assert all(before.target is after.source for before, after in pairwise(life_))


def test_whole_alphas_are_integers(run: Path) -> None:
    """They are most of all; the others have two decimals."""
    episodes = [line for line in read_lines(run / "events.jsonl") if line["kind"] == "episode"]
    alphas = [alpha for line in episodes for curve in line["alphas"].values() for alpha in curve]
    assert {alpha for alpha in alphas if type(alpha) is int} == {0, 1}
    fractions = {alpha for alpha in alphas if type(alpha) is float}
    assert fractions and all(0 < alpha < 1 and alpha == round(alpha, 2) for alpha in fractions)


GOOD = columns(life(0, 0, "r1c0", 1))
WRONG: dict[str, list[Json]] = {
    "step": [-1, 4.0, "4", True, None, [4], 2**63],
    "slot": [3, None, True, ["r1c0"]],
    "blueprint": [3, False, {}],
}
DAMAGE: list[tuple[Json, str]] = [
    (None, "stages is no JSON object, but None"),
    ([GOOD], "stages is no JSON object, but "),
    ("DG", "stages is no JSON object, but 'DG'"),
    *(
        (
            {name: value for name, value in GOOD.items() if name != lacking},
            f"stages has no '{lacking}'; it should be a ",
        )
        for lacking in GOOD
    ),
    *(
        ({**GOOD, name: [*GOOD[name][:-1], wrong]}, f"stages: '{name}' is ")
        for name, values in WRONG.items()
        for wrong in values
    ),
    ({**GOOD, "step": 5}, "stages: 'step' is 5, not a list of integers of 0 or more"),
    ({**GOOD, "slot": "r1c0"}, "stages: 'slot' is 'r1c0', not a list of strings"),
    ({**GOOD, "source": list("DGTBH")}, r"stages: 'source' is \['D', 'G', 'T', 'B', 'H'\], not a string"),
    ({**GOOD, "target": 12345}, "stages: 'target' is 12345, not a string"),
    ({**GOOD, "target": "GTBHZ"}, r"stages, target\) 'Z'; allowed: D, G, T, B, H, F, P, E, R"),
    ({**GOOD, "source": "DGTBé"}, r"stages, source\) 'é'"),
    ({**GOOD, "source": "DGTB\n"}, r"stages, source\) '\\n'"),
    ({**GOOD, "cause": "gtat?"}, r"stages, cause\) '\?'; allowed: g, a, f, p, s, t, !"),
    *(({**GOOD, name: GOOD[name][:-1]}, "stages: its columns differ in length") for name in GOOD),
    ({**GOOD, "step": []}, "stages: its columns differ in length"),
]


@pytest.mark.parametrize(("stages", "message"), DAMAGE)
def test_damage_is_named(stages: Json, message: str, tmp_path: Path) -> None:
    """In one line with file, line and field, by reports and both views. A follower shows the rest."""
    events = default_events(1)
    events[2] = {**events[2], "stages": stages}
    write_run(tmp_path, [metrics(0)], events)
    reads: list[Callable[[Path], object]] = [
        read_run,
        lambda path: rows_of(path, "FROM stages"),
        lambda path: rows_of(path, "FROM seeds"),
    ]
    for read in reads:
        with pytest.raises(EsperError, match=f"events.jsonl, line 3, {message}") as found:
            read(tmp_path)
        assert "\n" not in str(found.value)
    follower = RunFollower(tmp_path)
    follower.poll()
    assert len(follower.problems) == 1 and "events.jsonl, line 3, stages" in follower.problems[0]
    assert [host.env for host in follower.state.histories()] == [0, 1, 3]
    assert rows_of(tmp_path, "SELECT count(*) FROM episodes") == [(4,)]


def test_keys_in_another_order_and_others(tmp_path: Path) -> None:
    """They make no difference."""
    stages = {"more": 1, **dict(reversed(GOOD.items()))}
    write_run(tmp_path, [metrics(0)], [{**episode(0, 0, 1.0), "stages": stages}])
    assert [change.target.letter for change in read_run(tmp_path).changes] == list("GTBHF")
    assert rows_of(tmp_path, "SELECT target[1] FROM stages") == [(letter,) for letter in "GTBHF"]


def test_a_step_that_no_run_has(tmp_path: Path) -> None:
    """A number that SQL's integers lack is an error there too, not a row less."""
    write_run(tmp_path, [metrics(0)], [{**episode(0, 0, 1.0), "stages": {**GOOD, "step": [1, 1, 3, 4, 2**40]}}])
    with pytest.raises(EsperError, match="1099511627776"):
        rows_of(tmp_path, "FROM stages")


def test_lines_of_changes_are_left_alone(tmp_path: Path) -> None:
    """A training run has none of the lines that a Grower writes; whoever adds one changes nothing."""
    lines = [stage(0, 2, 3, "r1c1", "DORMANT", "GERMINATED", "germinate"), {"kind": "stage"}]
    plain = write_run(tmp_path / "plain")
    other = write_run(tmp_path / "other", events=[*lines, *default_events()])
    assert read_run(other).histories() == read_run(plain).histories()
    for view in ("stages", "seeds"):
        asked = f"FROM {view} ORDER BY ALL"
        assert rows_of(other, asked) == rows_of(plain, asked) != []
    follower = RunFollower(other)
    follower.poll()
    assert (follower.problems, follower.state.histories()) == ([], read_run(plain).histories())
