"""Growth in Lightning, in real processes: killed, and on two ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.processes import run_script
from loops import equal

from esper.grower.container import CHILD

pytestmark = pytest.mark.slow
SCRIPT = "lightning_script.py"


def state_of(folder: Path) -> dict[str, Any]:
    """The last checkpoint. (Any: its parts)"""
    loaded: dict[str, Any] = torch.load(folder / "last.ckpt", weights_only=True)
    return loaded


def same(wanted: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether two checkpoints have the same weights, structure, momenta and rates, to the bit."""
    return (
        equal(wanted["state_dict"].items(), found["state_dict"].items())
        and str(wanted["optimizer_states"]) == str(found["optimizer_states"])
        and wanted["lr_schedulers"] == found["lr_schedulers"]
    )


def test_killed_and_resumed(tmp_path: Path) -> None:
    """SIGKILL in mid-growth: the resumed run ends as the uninterrupted one, and so does its log."""
    run_script(SCRIPT, tmp_path / "whole", "plain")
    run_script(SCRIPT, tmp_path / "cut", "plain", 2, killed=True)
    run_script(SCRIPT, tmp_path / "cut", "plain", "last.ckpt")
    wanted = state_of(tmp_path / "whole")
    assert any(f"{CHILD}.stage" in name for name in wanted["state_dict"])
    assert same(wanted, state_of(tmp_path / "cut"))
    for folder in ("whole", "cut"):
        assert len((tmp_path / folder / "log" / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("mode", ["ddp", "ddp-whole"])
def test_two_ranks_stay_equal(mode: str, tmp_path: Path) -> None:
    """`strategy="ddp"` with two processes: equal to the bit after every epoch, and resumed to the bit."""
    printed = run_script(SCRIPT, tmp_path / "whole", mode)
    for rank in (0, 1):
        tensors = [int(count) for count in re.findall(rf"rank {rank} equal with (\d+) tensors", printed)]
        assert len(tensors) == 5 and max(tensors) > 10, f"the host has 10 tensors, seeds more: {printed}"
    assert printed.count("step 5:") == 1, "rank 0 alone prints"
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole" / "epoch=2.ckpt").rename(tmp_path / "cut" / "epoch=2.ckpt")
    run_script(SCRIPT, tmp_path / "cut", mode, "epoch=2.ckpt")
    assert same(state_of(tmp_path / "whole"), state_of(tmp_path / "cut"))
