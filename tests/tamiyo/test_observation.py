"""How observations lie in one vector."""

import pytest
import torch

from esper.leyline import BadValueError
from esper.tamiyo import ObservationLayout, vector_layout

GROWTH = ObservationLayout(
    host=("time", "loss"),
    slot=("width", "rms", "alpha"),
    offer=("audition",),
    critic=("potential",),
    slots=2,
    blueprints=4,
)
"""2 + 2·3 + 2·4·1 + 1 = 17 numbers of 2 + 3 + 1 + 1 = 7 kinds."""


def test_sizes_add_up() -> None:
    """By hand, see above."""
    assert GROWTH.sizes == (2, 6, 8, 1)
    assert GROWTH.size == 17
    assert vector_layout(5).sizes == (5, 0, 0, 0)


def test_split() -> None:
    """Part after part, slot after slot, offer after offer."""
    host, slots, offers, critic = GROWTH.split(torch.arange(17.0))
    assert host.tolist() == [0, 1]
    assert slots.tolist() == [[2, 3, 4], [5, 6, 7]]
    assert offers.tolist() == [[[8], [9], [10], [11]], [[12], [13], [14], [15]]]
    assert critic.tolist() == [16]


@pytest.mark.parametrize("lead", [(), (5,), (5, 3)])
def test_leading_axes_are_kept(lead: tuple[int, ...]) -> None:
    """None, envs, envs and steps."""
    shapes = [tuple(part.shape) for part in GROWTH.split(torch.zeros(*lead, 17))]
    assert shapes == [(*lead, 2), (*lead, 2, 3), (*lead, 2, 4, 1), (*lead, 1)]


def test_split_is_by_views() -> None:
    """Nothing is copied: whoever writes into a part writes into the observation."""
    flat = torch.zeros(3, GROWTH.size)
    for place, part in enumerate(GROWTH.split(flat), start=1):
        part.fill_(place)
    assert flat.unique(return_counts=True)[1].tolist() == [3 * 2, 3 * 6, 3 * 8, 3 * 1]


def test_parts_that_do_not_exist_are_empty() -> None:
    """A plain vector is all host; slots may come without offers."""
    host, slots, offers, critic = vector_layout(5).split(torch.arange(10.0).view(2, 5))
    assert host.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [tuple(part.shape) for part in (slots, offers, critic)] == [(2, 0, 0), (2, 0, 0, 0), (2, 0)]
    layout = ObservationLayout(host=(), slot=("width",), slots=3, blueprints=4)
    assert tuple(layout.split(torch.zeros(2, 3))[2].shape) == (2, 3, 4, 0)


def test_slots_share_their_statistics() -> None:
    """The first two numbers are the host's, then 2–4 for either slot, 5 for all eight offers, 6 for the critic."""
    assert GROWTH.columns().tolist() == [0, 1, 2, 3, 4, 2, 3, 4, *[5] * 8, 6]
    assert vector_layout(3).columns().tolist() == [0, 1, 2]


def test_every_statistic_has_a_name_of_its_own() -> None:
    """In the order of `columns`."""
    names = GROWTH.column_names
    assert names == ("time", "loss", "slot.width", "slot.rms", "slot.alpha", "offer.audition", "critic.potential")
    assert sorted(set(GROWTH.columns().tolist())) == list(range(len(names)))
    assert vector_layout(2).column_names == ("x0", "x1")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"host": ()}, "at least one column"),
        ({"host": ("a", "b", "a")}, r"unique; \['a'\]"),
        ({"host": ("slot.width",), "slot": ("width",), "slots": 1}, "slot.width"),
        ({"host": ("a",), "slots": 2}, "2 slots of 0 columns"),
        ({"host": ("a",), "slot": ("width",)}, "0 slots of 1 columns"),
        ({"host": ("a",), "slot": ("width",), "slots": 2, "offer": ("audition",)}, "0 blueprints"),
        ({"host": ("a",), "offer": ("audition",), "blueprints": 3}, "0 slots"),
        ({"host": ("a",), "slot": ("width",), "slots": -1}, "slots -1"),
    ],
)
def test_layouts_that_do_not_fit_together_are_refused(layout: dict[str, object], message: str) -> None:
    """Where they are made, and not in the network."""
    with pytest.raises(BadValueError, match=message):
        ObservationLayout(**layout)  # type: ignore[arg-type]  # the point of the test
