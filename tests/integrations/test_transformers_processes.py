"""Growth in the Hugging Face Trainer, in real processes: killed, and on two ranks."""

import re
from pathlib import Path

import pytest
import torch
from integrations.processes import run_script
from loops import equal
from safetensors.torch import load_file

from esper.grower.container import CHILD

pytestmark = pytest.mark.slow
SCRIPT = "trainer_script.py"


def same(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same weights, structure and momenta, to the bit."""
    wanted, found = (load_file(folder / "end.safetensors") for folder in (one, other))
    momenta = [str(torch.load(folder / "end.optimizer", weights_only=True)) for folder in (one, other)]
    assert any(f"{CHILD}.transformer" in name for name in wanted)
    return equal(wanted.items(), found.items()) and momenta[0] == momenta[1]


def test_killed_and_resumed(tmp_path: Path) -> None:
    """SIGKILL in mid-growth: the resumed run ends as the uninterrupted one, and so does its log."""
    run_script(SCRIPT, tmp_path / "whole")
    run_script(SCRIPT, tmp_path / "cut", 2, killed=True)
    run_script(SCRIPT, tmp_path / "cut", "resume")
    assert same(tmp_path / "whole", tmp_path / "cut")
    for folder in ("whole", "cut"):
        assert len((tmp_path / folder / "log" / "metrics.jsonl").read_text().splitlines()) == 5


def test_two_ranks_stay_equal(tmp_path: Path) -> None:
    """Launched with torchrun on two processes: equal to the bit after every epoch, and resumed to the bit."""
    printed = run_script(SCRIPT, tmp_path / "whole", ranks=2)
    for rank in (0, 1):
        tensors = [int(count) for count in re.findall(rf"rank {rank} equal with (\d+) tensors", printed)]
        assert len(tensors) == 5 and tensors[-1] > 28, "the host has 28 tensors, seeds more"
    assert printed.count("step 5:") == 1, "rank 0 alone prints"
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole" / "checkpoint-9").rename(tmp_path / "cut" / "checkpoint-9")
    run_script(SCRIPT, tmp_path / "cut", "resume", ranks=2)
    assert same(tmp_path / "whole", tmp_path / "cut")
