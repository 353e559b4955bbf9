"""`esper grow`: a line per step, a report, and errors of one line."""

import json
import shutil
from pathlib import Path

import pytest
from simic.training.tiny import NAME, tiny_task

from esper.cli import main
from esper.grower.records import GrowthRecord
from esper.grower.task_growth import TaskGrowth


@pytest.fixture(autouse=True)
def plain_screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wide, without colours, in an empty folder."""
    tiny_task()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """What the command prints."""
    main(["grow", *arguments])
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def test_lines_and_report(capsys: pytest.CaptureFixture[str]) -> None:
    """A line per step with scores and actions, then what was kept; `--resume` repeats the report, a page shows it."""
    lines = lines_of(capsys, "--task", NAME, "--steps", "5", "--control", "--budget", "600")
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(":")[0] for line in steps] == [f"step {number} of 5" for number in range(1, 6)]
    assert " %, loss " in steps[0] and "germinated" in steps[0] and "of 600)" in steps[0]
    report = lines[-5:]
    assert [line.split(" ")[0] for line in report] == ["kept", "test", "ungrown", "model:", "log:"]
    result = json.loads(Path("runs/grow/result.json").read_text())
    assert f"{result['test']['accuracy']:.1f} % correct" in report[1] and "390 parameters" in report[2]
    assert lines_of(capsys, "--resume", "runs/grow") == report
    main(["report", "runs/grow"])
    assert Path("runs/grow/report.html").stat().st_size > 10_000


def test_stopped_and_resumed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C says how to continue, and the end is that of a run that was not stopped."""
    arguments = ["--task", NAME, "--steps", "5", "--seed", "2"]
    whole = lines_of(capsys, *arguments, "--out", "whole")
    run_step, steps = TaskGrowth.run_step, list[int]()

    def interrupted(growth: TaskGrowth, advance: object) -> GrowthRecord:
        if len(steps) == 2:
            raise KeyboardInterrupt
        steps.append(1)
        return run_step(growth, advance)  # type: ignore[arg-type]  # the callback of the command

    monkeypatch.setattr(TaskGrowth, "run_step", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["grow", *arguments, "--out", "cut"])
    code = ended.value.code
    del ended  # its frames hold the run, and so the lock of its folder
    assert code == 130
    assert capsys.readouterr().out.splitlines()[-1] == "stopped after step 2; continue with esper grow --resume cut"
    monkeypatch.setattr(TaskGrowth, "run_step", run_step)
    rest = lines_of(capsys, "--resume", "cut")
    assert [line for line in rest if line.startswith(("step", "kept", "test"))] == [
        line for line in whole if line.startswith(("step 3", "step 4", "step 5", "kept", "test"))
    ]


@pytest.mark.parametrize("policy", ["wait", "pretrained"])
def test_policies(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One that grows nothing, and the learned one that is shipped."""
    lines = lines_of(capsys, "--task", NAME, "--steps", "4", "--policy", policy, "--out", policy)
    assert policy != "wait" or "kept no seed" in lines
    assert json.loads(Path(policy, "config.json").read_text())["config"]["policy"] == policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "digts"], "unknown task 'digts'; allowed: "),
        (["--policy", "clever"], "unknown policy 'clever'; allowed: heuristic, wait, random, pretrained"),
        (["--steps", "0"], "--steps 0 is not an integer of 1 or more"),
        (["--budget", "-3"], "--budget -3 is not an integer of 1 or more: it is the number of parameters"),
        (["--budget", "7"], "budget 7 is too small: the smallest seed that fits has 12 parameters"),
        (["--device", "cuda:99"], "device 'cuda:99' is not here"),
        (["--resume", "nowhere"], "nowhere holds no growth to resume"),
        (["--resume", "nowhere", "--steps", "3"], "--resume continues nowhere with its own settings; omit --steps"),
        (["--task", "fashion_small", "--data-dir", "README"], "README"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, and nothing on the disk."""
    Path("README").write_text("a file")
    with pytest.raises(SystemExit) as ended:
        main(["grow", *arguments])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    (line,) = printed.err.splitlines()
    assert message in line
    assert [path.name for path in Path().iterdir()] == ["README"]


def test_a_used_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused with both ways out; so is the folder of `esper train`."""
    lines_of(capsys, "--task", NAME, "--steps", "1")
    shutil.rmtree("runs/grow/checkpoints")
    with pytest.raises(SystemExit, match="2"):
        main(["grow", "--task", NAME])
    assert "runs/grow already holds a run; name another with --out, or use --resume" in capsys.readouterr().err


def test_help_is_short(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than two screens, with every flag."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["grow", "--help"])
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 60
    flags = ("task", "budget", "steps", "policy", "seed", "control", "out", "resume", "device", "data-dir")
    assert all(f"--{name}" in printed for name in flags)
