"""Kinds of hosts: what hosts of one task may lack. Their masks tell them apart, so they train in one fleet.

A design names a kernel and a width per block: `3w-1n-3w` has 3×3 kernels and the full width in the first and the last
block, a 1×1 kernel and a quarter of the width in the one between.
"""

import re
from typing import NamedTuple

from esper.kasmina import CNNHost, Host
from esper.leyline import BadValueError
from esper.leyline.numbers import require_known

INTACT = "none"
DEFECTS = (INTACT, "blind", "blind_first_slot_cut")
DESIGN = re.compile(r"[13][wn](-[13][wn])*")
NARROW = 4  # the full width divided by the narrow one


class BlockDesign(NamedTuple):
    """The size of one block."""

    kernel_size: int
    narrow: bool


def parse_design(kind: str) -> list[BlockDesign] | None:
    """The blocks of a design; None if the kind is none."""
    if not DESIGN.fullmatch(kind):
        return None
    return [BlockDesign(int(part[0]), part[1] == "n") for part in kind.split("-")]


def check_kind(kind: str) -> None:
    """Raise unless there are hosts of this kind."""
    if parse_design(kind) is None:
        require_known("defect", kind, [*DEFECTS, "designs such as 3w-1n-3w"])


def make_kind(host: Host, kind: str, first_slot: str) -> None:
    """Mask a fresh host so that it is of this kind. `first_slot` is the task's."""
    if kind == INTACT:
        return
    if not isinstance(host, CNNHost):
        raise BadValueError(f"defect {kind!r} is for CNN hosts, not for {type(host).__name__}")
    if (design := parse_design(kind)) is not None:
        if len(design) != len(host.widths):
            raise BadValueError(f"design {kind!r} has {len(design)} blocks, the host has {len(host.widths)}")
        for block, (part, width) in enumerate(zip(design, host.widths, strict=True)):
            channels = max(1, width // NARROW) if part.narrow else None
            host.limit(block, centre_only=part.kernel_size == 1, channels=channels)
        return
    host.blind()
    if kind == "blind_first_slot_cut":
        # What grows in the first slot (and before its pool) does not reach the rest of the network.
        host.conductance[: host.slot_index(first_slot) + 1] = 0
