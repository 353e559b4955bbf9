"""Named spans, and traces of operators."""

import json
import time
from pathlib import Path

import pytest
import torch

from esper.leyline import BadValueError, UnknownNameError
from esper.simic.telemetry import Spans, check_trace, operator_trace


def test_nested_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks once per look: what is inside counts outside too."""
    ticks = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))
    spans = Spans()
    with spans("round"):  # 0
        with spans("act"):  # 1–2
            pass
        with spans("act"):  # 3–4
            pass
    # 5
    totals = spans.drain()
    assert list(totals) == ["round", "round/act"]
    assert (totals["round"].visits, totals["round"].wall_s) == (1, 5.0)
    assert (totals["round/act"].visits, totals["round/act"].wall_s) == (2, 2.0)
    assert spans.drain() == {}


def test_the_same_name_in_two_places() -> None:
    """A span belongs to where it was entered."""
    spans = Spans()
    with spans("collect"), spans("act"):
        pass
    with spans("act"):
        pass
    assert list(spans.drain()) == ["collect", "collect/act", "act"]


def test_an_error_leaves_the_span() -> None:
    """What follows is not inside it."""
    spans = Spans()
    with pytest.raises(KeyError), spans("collect"), spans("act"):
        raise KeyError
    with spans("update"):
        pass
    assert list(spans.drain()) == ["collect", "collect/act", "update"]


def test_drained_while_open() -> None:
    """An open span is counted when it is left."""
    spans = Spans()
    with spans("round"):
        assert spans.drain() == {}
    assert spans.drain()["round"].visits == 1


@pytest.mark.requirement(34)
def test_off_costs_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """When switched off, it reads no clock and creates nothing."""

    def refuse() -> int:
        raise AssertionError("looked at a clock")

    for name in ("perf_counter_ns", "thread_time_ns", "perf_counter", "time", "monotonic_ns"):
        monkeypatch.setattr(time, name, refuse)
    spans = Spans(enabled=False)
    with spans("round"), spans("act"):
        pass
    assert spans("a") is spans("b")
    assert spans.drain() == {}
    with pytest.raises(AssertionError, match="looked at a clock"), Spans()("round"):
        pass


@pytest.mark.parametrize("name", ["", "a/b"])
def test_names(name: str) -> None:
    """A slash would look like nesting."""
    with pytest.raises(BadValueError, match="span called"):
        Spans()(name)


@pytest.mark.requirement(34, 35)
def test_trace_on_the_cpu(tmp_path: Path) -> None:
    """The requested file contains the operators that ran."""
    path = tmp_path / "traces" / "round-3.json"
    with operator_trace(path) as file:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert file == path
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert "aten::mm" in names
    assert list(tmp_path.rglob("*.json")) == [path]


@pytest.mark.requirement(34)
def test_trace_after_an_error(tmp_path: Path) -> None:
    """The trace is written although the code failed, and the error propagates."""
    path = tmp_path / "trace.json"
    with pytest.raises(KeyError), operator_trace(path):
        torch.ones(8, 8) @ torch.ones(8, 8)
        raise KeyError
    assert "aten::mm" in path.read_text()


@pytest.mark.requirement(34)
@pytest.mark.parametrize("device", ["meta", "mps", "xpu"])
def test_trace_of_an_unsupported_device(device: str, tmp_path: Path) -> None:
    """The error lists the supported devices before anything runs, and no file is written."""
    with (
        pytest.raises(UnknownNameError, match=f"'{device}'; allowed: cpu, cuda"),
        operator_trace(tmp_path / "t.json", device),
    ):
        raise AssertionError("ran")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requirement(34)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_trace_without_the_device(tmp_path: Path) -> None:
    """On a machine without CUDA, the error says so and names the remedy."""
    with (
        pytest.raises(BadValueError, match="no CUDA device or no CUPTI; trace on 'cpu' instead"),
        operator_trace(tmp_path / "t.json", "cuda"),
    ):
        raise AssertionError("ran")


@pytest.mark.requirement(34)
@pytest.mark.gpu
def test_trace_on_cuda(tmp_path: Path) -> None:
    """The trace contains kernels."""
    path = tmp_path / "trace.json"
    with operator_trace(path, "cuda"):
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


@pytest.mark.requirement(35)
def test_trace_paths(tmp_path: Path) -> None:
    """A path that cannot be written is refused before anything runs."""
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "file" / "t.json", "cannot be written"), (tmp_path / "t.txt", "must end in .json")):
        with pytest.raises(BadValueError, match=words), operator_trace(path):
            raise AssertionError("ran")


def test_trying_a_path_leaves_nothing(tmp_path: Path) -> None:
    """Folders come with the trace: a run that is traced into its own folder must find that free."""
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "run" / "profile" / "t.json", tmp_path / "there" / "t.json"):
        check_trace(path)
        assert [found.name for found in tmp_path.rglob("*")] == ["there"]
    with operator_trace(tmp_path / "run" / "profile" / "t.json") as file:
        torch.ones(2).sum()
    assert file.is_file()
