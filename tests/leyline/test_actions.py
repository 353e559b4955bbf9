"""The head table: what an action is made of, and which heads matter for which op."""

from dataclasses import replace

import pytest

from esper.leyline import (
    HEAD_NAMES,
    HEADS,
    RELEVANCE,
    Head,
    LifecycleOp,
    UnknownNameError,
    head_preset,
    relevance,
)
from esper.leyline.actions import HEAD_PRESETS

EXPECTED = {
    LifecycleOp.WAIT: {"op"},
    LifecycleOp.GERMINATE: {"op", "slot", "blueprint", "blend", "tempo", "alpha_target"},
    LifecycleOp.SET_ALPHA_TARGET: {"op", "slot", "alpha_target", "alpha_speed", "alpha_curve"},
    LifecycleOp.PRUNE: {"op", "slot", "alpha_speed", "alpha_curve"},
    LifecycleOp.FOSSILIZE: {"op", "slot"},
    LifecycleOp.ADVANCE: {"op", "slot"},
}


@pytest.mark.requirement(59)
@pytest.mark.parametrize("op", LifecycleOp)
def test_relevance_of_every_op(op: LifecycleOp) -> None:
    """Every op has an entry, with the heads that the design gives it."""
    assert RELEVANCE[op] == EXPECTED[op]


@pytest.mark.requirement(59)
@pytest.mark.parametrize("op", LifecycleOp)
def test_forgotten_op_fails(op: LifecycleOp) -> None:
    """A table whose op head lacks an op is refused, and the error names the op."""
    rows = tuple(
        replace(head, ops=tuple(o for o in head.ops if o is not op)) if head.name == "op" else head for head in HEADS
    )
    with pytest.raises(RuntimeError, match=op.name):
        relevance(rows)


@pytest.mark.requirement(59)
def test_table_without_an_op_head_fails() -> None:
    """A table without an op head is refused."""
    with pytest.raises(RuntimeError, match="WAIT"):
        relevance(HEADS[1:])


@pytest.mark.requirement(50)
def test_new_head_is_one_row() -> None:
    """Names and relevance follow from the table alone."""
    rows = (*HEADS, Head("mood", ("calm", "wild"), (LifecycleOp.WAIT,)))
    assert relevance(rows)[LifecycleOp.WAIT] == {"op", "mood"}
    assert {op: heads - {"mood"} for op, heads in relevance(rows).items()} == EXPECTED


@pytest.mark.requirement(50)
def test_names_come_from_the_table() -> None:
    """There is one tuple of names, in the table's order and without repetition."""
    assert tuple(head.name for head in HEADS) == HEAD_NAMES
    assert len(set(HEAD_NAMES)) == len(HEAD_NAMES) == 8


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("op", 6),
        ("slot", 4),
        ("blueprint", 7),
        ("blend", 3),
        ("tempo", 3),
        ("alpha_target", 3),
        ("alpha_speed", 4),
        ("alpha_curve", 5),
    ],
)
def test_sizes(name: str, size: int) -> None:
    """With four slots and seven blueprints."""
    head = HEADS[HEAD_NAMES.index(name)]
    assert head.size(slots=4, blueprints=7) == size
    assert 0 <= head.placeholder < size


def test_placeholders_are_the_core_preset() -> None:
    """What a head stands at when nobody sets it: add-blending, tempo 3, target 1."""
    chosen = {head.name: head.choices[head.placeholder] for head in HEADS}
    assert (chosen["blend"], chosen["tempo"], chosen["alpha_target"]) == ("add", 3, 1.0)


def test_core_preset() -> None:
    """Three heads and all ops but SET_ALPHA_TARGET."""
    core = head_preset("core")
    assert [head.name for head in core.heads] == ["op", "slot", "blueprint"]
    assert set(LifecycleOp) - set(core.ops) == {LifecycleOp.SET_ALPHA_TARGET}


def test_full_preset() -> None:
    """Everything."""
    full = head_preset("full")
    assert full.heads == HEADS and full.ops == tuple(LifecycleOp)


@pytest.mark.requirement(50)
@pytest.mark.parametrize("name", HEAD_PRESETS)
def test_presets_name_existing_heads(name: str) -> None:
    """Every name in a preset exists, and its heads keep the table's order."""
    preset = head_preset(name)
    assert {head.name for head in preset.heads} == set(preset.head_names)
    assert list(preset.heads) == sorted(preset.heads, key=HEADS.index)


@pytest.mark.invariant(15)
def test_unknown_preset() -> None:
    """The error names the value and what is allowed."""
    with pytest.raises(UnknownNameError, match="unknown head preset 'tiny'; allowed: core, commit, full"):
        head_preset("tiny")
