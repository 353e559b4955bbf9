"""The run folder of a Grower: written as it grows, continued after a kill, refused where it is not its own."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loops import digits, loader, make, plan, spoil, through_disk, train_epoch

from esper.karn import RunFollower, ask, write_report
from esper.leyline import BadValueError, EsperError
from esper.leyline.records import config_checksum
from esper.storage.logs import read_lines

DATA = digits(200)
VALIDATION = digits(300)[0][200:], digits(300)[1][200:]
STEPS = 8
BIRTHS = plan((1, "stage1", "conv_light"), (3, "stage2", "conv_light"))


def run(folder: Path | None, first: int, last: int, saved: Any = None, **options: Any) -> tuple[Any, list[str]]:
    """Epochs `first` to `last`, dropped without an end."""
    model, optimizer, grower = make(**{"steps": STEPS, "budget": 3000, "folder": folder, **options})
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # which would share its tensors
    lines = []
    for epoch in range(first, last):
        train_epoch(model, optimizer, DATA, epoch)
        lines.append(str(grower.step(loader(VALIDATION))))
    return through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), lines


def content(folder: Path) -> tuple[list[Any], list[Any]]:
    """Events, and metrics without what depends on the clock."""
    metrics = [{key: value for key, value in line.items() if key != "timing"} for line in lines_of(folder, "metrics")]
    return lines_of(folder, "events"), metrics


def lines_of(folder: Path, name: str) -> list[Any]:
    """All lines of a log."""
    return list(read_lines(folder / f"{name}.jsonl"))


def test_what_is_written(tmp_path: Path) -> None:
    """Settings with a checksum, every change of stage, and a line per step."""
    folder = tmp_path / "runs" / "mine"
    run(folder, 0, 4, policy=BIRTHS, seed_options={"lr": 0.05})
    header = json.loads((folder / "config.json").read_text())
    assert header["checksum"] == config_checksum(header)
    assert header["kind"] == "grower" and header["torch"] and "git" in header
    assert header["config"] == {
        "host": "BlindCNN", "host_parameters": 378, "budget": 3000, "steps": 8, "own_loss": False, "rng_seed": 0,
        "policy": "plan.<locals>.<lambda>", "seed_options": {"lr": 0.05},
        "slots": {"stage1": {"topology": "image", "width": 8}, "stage2": {"topology": "image", "width": 16}},
    }  # fmt: skip
    events, metrics = content(folder)
    born = [(each["step"], each["slot"], each["blueprint"]) for each in events if each["target"] == "GERMINATED"]
    assert born == [(1, "stage1", "conv_light"), (3, "stage2", "conv_light")]
    moves = [(each["step"], each["source"], each["target"], each["cause"]) for each in events[:4]]
    assert moves == [
        (1, "DORMANT", "GERMINATED", "germinate"),
        (1, "GERMINATED", "TRAINING", "germinate"),
        (1, "TRAINING", "BLENDING", "germinate"),
        (2, "BLENDING", "HOLDING", "tick"),
    ]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert metrics[0]["contributions"] == {} and metrics[0]["grown"] == 600
    assert set(metrics[3]["contributions"]) == {"stage1", "stage2"}
    assert set(metrics[3]["contributions"]["stage1"]) == {"value", "error"}
    assert all(line["timing"]["step_s"] > 0 for line in lines_of(folder, "metrics"))


def test_nothing_is_written_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, no file."""
    monkeypatch.chdir(tmp_path)
    run(None, 0, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_killed_and_resumed(cut: int, tmp_path: Path) -> None:
    """The log is that of a run that never stopped, though the killed process had gone on after its checkpoint."""
    _, whole = run(tmp_path / "whole", 0, STEPS)
    saved, begun = run(tmp_path / "cut", 0, cut)
    run(tmp_path / "cut", cut, cut + 2, saved)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "accu')  # torn
    _, rest = run(tmp_path / "cut", cut, STEPS, saved)
    assert begun + rest == whole
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert list((tmp_path / "cut").glob("metrics.jsonl.tail-*"))


def test_every_step_is_told(tmp_path: Path) -> None:
    """In the live file, with stages and actions, as a follower sees them; it is empty once growth has finished."""
    model, optimizer, grower = make(folder=tmp_path, policy=BIRTHS, steps=STEPS, budget=3000)
    for step in (1, 2):
        train_epoch(model, optimizer, DATA, step)
        record = grower.step(loader(VALIDATION))
    header, first, second = lines_of(tmp_path, "live")
    assert (header["kind"], header["round"]) == ("live", 0)
    assert (first["step"], first["steps"], first["slots"]) == (1, STEPS, ["stage1", "stage2"])
    assert first["actions"] == [[0, "GERMINATE", "stage1", "conv_light"]]
    assert [row[1:5] for row in second["seeds"]] == [["stage1", "HOLDING", "conv_light", 1.0]]
    assert second["accuracies"] == [pytest.approx(record.accuracy, abs=0.006)]
    follower = RunFollower(tmp_path)
    follower.poll()
    (host,) = follower.state.histories()
    assert follower.problems == [] and follower.state.live is not None
    live = follower.state.live.hosts[0]
    assert (live.trained, live.changes, live.actions) == (host.trained, host.changes, host.actions)
    assert {slot: seed.stage for slot, seed in live.at().items()} == {
        slot: seed.stage for slot, seed in host.at().items()
    }
    grower.finish(loader(VALIDATION))
    assert (tmp_path / "live.jsonl").read_bytes() == b""


def test_a_live_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Growth continues, and says so once."""
    (tmp_path / "live.jsonl").mkdir()
    _, lines = run(tmp_path, 0, 2, policy=BIRTHS)
    assert len(lines) == 2 and len(lines_of(tmp_path, "metrics")) == 2
    assert capsys.readouterr().err.count("is no longer written") == 1


def test_a_step_is_on_the_disk_when_it_returns(tmp_path: Path) -> None:
    """While the Grower is alive and its files are open."""
    model, optimizer, grower = make(folder=tmp_path)
    for step in (1, 2):
        train_epoch(model, optimizer, DATA, step)
        grower.step(loader(VALIDATION))
        assert len(lines_of(tmp_path, "metrics")) == step


def test_a_rolled_back_run_cuts_its_log(tmp_path: Path) -> None:
    """Loading an earlier state into a Grower that runs."""
    model, optimizer, grower = make(folder=tmp_path, steps=STEPS)
    for epoch in range(4):
        train_epoch(model, optimizer, DATA, epoch)
        grower.step(loader(VALIDATION))
        if epoch == 1:
            saved = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train_epoch(model, optimizer, DATA, 2)
    assert grower.step(loader(VALIDATION)).step == 3
    assert [line["step"] for line in lines_of(tmp_path, "metrics")] == [1, 2, 3]


def test_a_panic_is_logged(tmp_path: Path) -> None:
    """With the loss as a word, because JSON has no NaN."""
    model, optimizer, grower = make(folder=tmp_path, policy=BIRTHS, budget=3000)
    for epoch in range(3):
        train_epoch(model, optimizer, DATA, epoch)
        if epoch == 2:
            spoil(model, float("nan"), "stage1")
        grower.step(loader(VALIDATION))
    events, metrics = content(tmp_path)
    panic, pruned = events[-2:]
    assert (panic["kind"], panic["step"], panic["symptoms"]) == ("panic", 3, ["NOT_FINITE"])
    assert (pruned["target"], pruned["blueprint"], pruned["cause"]) == ("PRUNED", "conv_light", "prune")
    assert metrics[-1]["loss"] == "nan" and "restored step 2" in metrics[-1]["remarks"][0]


def test_the_end_is_logged(tmp_path: Path) -> None:
    """And the folder is free: another process may read or continue it."""
    model, optimizer, grower = make(folder=tmp_path, policy=BIRTHS, budget=3000)
    for epoch in range(4):
        train_epoch(model, optimizer, DATA, epoch)
        grower.step(loader(VALIDATION))
    saved = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    grower.finish(keep=["stage1"], drop=["stage2"])
    last = lines_of(tmp_path, "events")[-1]
    assert (last["kind"], last["step"], last["kept"], last["dropped"]) == ("finished", 4, ["stage1"], ["stage2"])
    run(tmp_path, 4, 5, saved, policy=BIRTHS)
    assert "finished" not in [line["kind"] for line in lines_of(tmp_path, "events")]


def test_a_first_start_refuses_a_run(tmp_path: Path) -> None:
    """The model is bare again; other files do not matter."""
    (tmp_path / "checkpoint.pt").write_text("the user's own")
    run(tmp_path, 0, 1)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    model, optimizer, grower = make(folder=tmp_path)
    with pytest.raises(BadValueError, match="already holds a run; name another folder, or resume"):
        train_epoch(model, optimizer, DATA)
    train_epoch(model, optimizer, DATA)
    assert not any(name.startswith("esper") for name, _ in model.named_modules())
    with pytest.raises(EsperError):
        grower.step(loader(VALIDATION))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_start_that_was_killed_at_once_may_be_repeated(tmp_path: Path) -> None:
    """No step is complete, so nothing is lost."""
    model, optimizer, grower = make(folder=tmp_path)
    train_epoch(model, optimizer, DATA)
    del model, optimizer, grower
    run(tmp_path, 0, 1)
    assert len(lines_of(tmp_path, "metrics")) == 1


def test_a_log_may_begin_in_the_middle(tmp_path: Path) -> None:
    """A resumed run with a new folder; killed there, it continues."""
    saved, _ = run(None, 0, 3)
    later, _ = run(tmp_path, 3, 5, saved)
    run(tmp_path, 5, 6, later)
    run(tmp_path, 3, 5, saved)
    assert [line["step"] for line in lines_of(tmp_path, "metrics")] == [4, 5]


def _damage(line: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "metrics.jsonl").write_text(line + "\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
        (lambda folder: (folder / "config.json").write_text("[" * 9999), "config.json is damaged"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "config.json is damaged"),
        (lambda folder: (folder / "config.json").unlink(), "has events.jsonl but no config.json"),
        (_damage("[1]"), "metrics.jsonl, line 1 is damaged"),
        (_damage("no JSON"), "metrics.jsonl, line 1 is damaged"),
        (_damage('{"step": "x"}'), "metrics.jsonl, line 1 is damaged"),
        (lambda folder: (folder / "metrics.jsonl").write_text(""), "steps up to 0, but .* after step 2"),
    ],
)
def test_damaged_folders(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    """A plain error that names the file."""
    saved, _ = run(tmp_path, 0, 2)
    damage(tmp_path)
    with pytest.raises(EsperError, match=message):
        run(tmp_path, 2, 3, saved)


def test_other_folders(tmp_path: Path) -> None:
    """Of another Grower, of another kind, a file, changed, or in use."""
    saved, _ = run(tmp_path / "a", 0, 2)
    with pytest.raises(BadValueError, match=r"begun by another Grower \(budget 2500, begun with 3000\)"):
        run(tmp_path / "a", 2, 3, saved, budget=2500)
    path = tmp_path / "a" / "config.json"
    path.write_text(path.read_text().replace("3000", "2500"))
    with pytest.raises(EsperError, match="was changed after the run began"):
        run(tmp_path / "a", 2, 3, saved)
    trained: dict[str, Any] = {"config": {"task": "digits"}}
    path.write_text(json.dumps(trained | {"checksum": config_checksum(trained)}))
    with pytest.raises(BadValueError, match="a run of another kind"):
        run(tmp_path / "a", 0, 1)
    with pytest.raises(BadValueError, match="is a file"):
        make(folder=path)
    model, optimizer, _grower = make(folder=tmp_path / "b")
    train_epoch(model, optimizer, DATA)
    with pytest.raises(BadValueError, match="is being written by"):
        run(tmp_path / "b", 0, 1)


def test_only_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have the same decisions."""
    monkeypatch.setattr("esper.grower.ranks.rank", lambda: 1)
    run(tmp_path / "none", 0, 2)
    assert not (tmp_path / "none").exists()


def test_reports_and_queries_read_it(tmp_path: Path) -> None:
    """What was written is what is shown."""
    _, lines = run(tmp_path, 0, STEPS)
    assert "stage1" in write_report(tmp_path).read_text()
    with ask(tmp_path, "SELECT count(*), max(grown) FROM steps") as answer:
        (found,) = answer.rows
    assert found == (STEPS, max(line["grown"] for line in lines_of(tmp_path, "metrics")))
    with ask(tmp_path, "SELECT count(*) FROM seeds") as answer:
        assert list(answer.rows) == [(sum(line.count("germinated") for line in lines),)]
