"""The stages of a seed and the one table of steps between them."""

import pytest

from esper.leyline import ACTIVE_STAGES, COOLDOWN_STAGES, LIVE_STAGES, SeedStage, can_transition
from esper.leyline.slots import TRANSITIONS

STEPS = {
    ("DORMANT", "GERMINATED"),
    ("GERMINATED", "TRAINING"),
    ("TRAINING", "BLENDING"),
    ("BLENDING", "HOLDING"),
    ("HOLDING", "BLENDING"),
    ("HOLDING", "FOSSILIZED"),
    ("GERMINATED", "PRUNED"),
    ("TRAINING", "PRUNED"),
    ("BLENDING", "PRUNED"),
    ("HOLDING", "PRUNED"),
    ("PRUNED", "EMBARGOED"),
    ("EMBARGOED", "RESETTING"),
    ("RESETTING", "DORMANT"),
}


def test_values_are_dense() -> None:
    """Stages index tensors directly."""
    assert [int(stage) for stage in SeedStage] == list(range(9))


@pytest.mark.invariant(5)
@pytest.mark.parametrize("source", SeedStage)
@pytest.mark.parametrize("target", SeedStage)
def test_every_pair(source: SeedStage, target: SeedStage) -> None:
    """Thirteen of the 81 pairs are transitions, and no stage leads to itself."""
    assert can_transition(source, target) == ((source.name, target.name) in STEPS)


@pytest.mark.invariant(5)
def test_fossil_has_no_exit() -> None:
    """FOSSILIZED is the only stage without an exit."""
    assert [stage for stage in SeedStage if not TRANSITIONS[stage]] == [SeedStage.FOSSILIZED]


def test_table_is_read_only() -> None:
    """Nobody adds a step at run time."""
    with pytest.raises(TypeError):
        TRANSITIONS[SeedStage.FOSSILIZED] = (SeedStage.DORMANT,)  # type: ignore[index]  # that is the point


def test_sets_of_stages() -> None:
    """A seed lives, or the slot rests, or it is dormant; only live seeds act."""
    assert LIVE_STAGES.isdisjoint(COOLDOWN_STAGES)
    assert LIVE_STAGES | COOLDOWN_STAGES | {SeedStage.DORMANT} == set(SeedStage)
    assert LIVE_STAGES > ACTIVE_STAGES
    assert {SeedStage.GERMINATED, SeedStage.TRAINING} == LIVE_STAGES - ACTIVE_STAGES


@pytest.mark.parametrize("start", sorted(LIVE_STAGES - {SeedStage.FOSSILIZED}))
def test_prune_leads_back_to_dormant(start: SeedStage) -> None:
    """Every live stage but FOSSILIZED can be pruned, and the rest has one way, home."""
    assert SeedStage.PRUNED in TRANSITIONS[start]
    path = [SeedStage.PRUNED]
    while path[-1] is not SeedStage.DORMANT:
        (following,) = TRANSITIONS[path[-1]]
        path.append(following)
    assert path == [SeedStage.PRUNED, SeedStage.EMBARGOED, SeedStage.RESETTING, SeedStage.DORMANT]
