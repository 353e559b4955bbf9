"""Run small scenarios with one version of the code and record what they compute. Called by `same_as.py`.

PYTHONPATH=TREE/src python benchmarks/same_as_probe.py train gpt --out FOLDER

Each scenario gets a folder of JSON and safetensors files. Only interfaces that are meant to last are used: the command
line, and names that `esper` and its subpackages export. Esper is imported once, then every scenario runs in a fork of
this process: they share nothing, and importing torch takes longer than some of them.
"""

import argparse
import dataclasses
import importlib
import io
import json
import os
import re
import runpy
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DOORS = ("esper", "esper.kasmina", "esper.tolaria")
"""Packages that are searched for a name, in this order."""
FAILED = "failed.txt"
"""Stands in the folder of a scenario that raised an error."""
TASK, OTHER_TASK = "digits_varied", "digits_blind"
MINIBATCHES = 4
"""Per step, in place of the tasks' 16: the same code runs in two thirds of the time."""
RATE_OF_PANICS = 1.2
"""A learning rate at which some hosts of the task break, at different steps."""

Value = str | int | float | bool


# -- what the code under test offers ----------------------------------------------------------------------------------


def door(name: str) -> Any:  # Any: a class or function of either version
    """A public name of Esper, wherever this version exports it."""
    for package in DOORS:
        try:
            return getattr(importlib.import_module(package), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(DOORS)} exports {name}")


def entry_point() -> Callable[[], object]:
    """The function behind the command `esper`, which reads sys.argv."""
    try:
        main: Callable[[], object] = importlib.import_module("esper.cli").main
    except (ImportError, AttributeError):
        return lambda: runpy.run_module("esper", run_name="__main__", alter_sys=True)
    return main


def check_source() -> None:
    """Raise unless Esper comes from the tree under test: an installed one must not stand in for it."""
    tree = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
    found = str(importlib.import_module("esper").__file__)
    if not tree or not Path(found).is_relative_to(Path(tree).resolve()):
        raise ImportError(f"esper was imported from {found}, not from the tree that PYTHONPATH names ({tree!r})")


def esper(*arguments: str) -> None:
    """Run a command in this process; RuntimeError if it ends with another exit code than 0."""
    sys.argv = ["esper", *arguments]
    try:
        entry_point()()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"esper {' '.join(arguments)}: exit code {end.code}") from end


def help_of(command: str) -> str:
    """The help text of a subcommand."""
    with redirect_stdout(io.StringIO()) as printed:
        esper(command, "--help")
    return printed.getvalue()


def settings(command: str, values: Mapping[str, Value]) -> list[str]:
    """Arguments that set fields by their path ("ppo.epochs"): flags where there are any, else `--config FILE`."""
    text = help_of(command)
    flags = {path: f"--{path.replace('_', '-')}" for path in values}
    offered = {path for path, flag in flags.items() if re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w.-])", text)}
    arguments = [part for path in values if path in offered for part in (flags[path], str(values[path]))]
    stored = {path: value for path, value in values.items() if path not in offered}
    if not stored:
        return arguments
    if "--config" not in text:
        raise RuntimeError(f"esper {command} offers neither {', '.join(flags[path] for path in stored)} nor --config")
    with tempfile.NamedTemporaryFile("w", suffix=".toml", dir=".", delete=False) as file:
        file.write(toml(stored))
    return [*arguments, "--config", file.name]


def toml(values: Mapping[str, Value]) -> str:
    """Fields by their path as TOML, a table per prefix."""
    tables: dict[str, list[str]] = {"": []}
    for path, value in values.items():
        table, _, name = path.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
    return "\n".join(line for table, lines in tables.items() for line in ([f"[{table}]"] if table else []) + lines)


def change_task(name: str, **values: object) -> None:
    """Set fields of a registered task, for this process."""
    task = door("get_task")(name)
    for field, value in values.items():
        if field not in {each.name for each in dataclasses.fields(task)}:
            raise RuntimeError(f"tasks have no field {field!r}")
        object.__setattr__(task, field, value)
    if door("get_task")(name) is not task:
        raise RuntimeError("get_task returns copies, so a task cannot be changed for a scenario")


# -- records ----------------------------------------------------------------------------------------------------------


def record_json(path: Path, content: object) -> None:
    """Write one JSON file."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def record_tensors(path: Path, tensors: Iterable[Tensor]) -> None:
    """Write tensors under their numbers."""
    copies = {f"{number:05d}": tensor.detach().cpu().contiguous().clone() for number, tensor in enumerate(tensors)}
    save_file(copies, path)


def record_run(run: Path, folder: Path) -> None:
    """The logs of a run and the tensors of its checkpoints."""
    for name in ("metrics", "events"):
        lines = (run / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        record_json(folder / f"{name}.json", [json.loads(line) for line in lines])
    for checkpoint in sorted((run / "checkpoints").iterdir()):
        record_tensors(folder / f"weights of {checkpoint.name}.safetensors", stored_tensors(checkpoint))


def stored_tensors(folder: Path) -> list[Tensor]:
    """All tensors of a folder, by file and name."""
    files = [load_file(path) for path in sorted(folder.rglob("*.safetensors"))]
    if not files:
        raise RuntimeError(f"{folder} holds no safetensors file")
    return [file[name] for file in files for name in sorted(file)]


# -- scenarios of the command line ------------------------------------------------------------------------------------


def train_run(out: str, *more: str, task: str = TASK, rounds: int = 1, hosts: int = 4) -> Path:
    """Train in a new folder, unless an earlier scenario has done it."""
    if not Path(out).exists():
        size = ("--rounds", str(rounds), "--hosts", str(hosts))
        esper("train", "--task", task, *size, "--seed", "0", *more, "--out", out)
    return Path(out)


def train(folder: Path) -> None:
    """Two rounds of two groups."""
    record_run(train_run("train", rounds=2, hosts=8), folder)


def resume(folder: Path) -> None:
    """The same run without its last checkpoint, as if it had been killed in its second round."""
    shutil.copytree(train_run("train", rounds=2, hosts=8), "resume")
    *_, last = sorted(Path("resume/checkpoints").iterdir())
    shutil.rmtree(last)
    esper("train", "--resume", "resume")
    record_run(Path("resume"), folder)


def evaluate(folder: Path) -> None:
    """A trained run and four rules, on one host of each kind."""
    train_run("train", rounds=2, hosts=8)
    policies = "train,heuristic,schedule,random,wait"
    arguments = ("--task", TASK, "--policies", policies, "--hosts", "3", "--seed", "2")
    esper("evaluate", *arguments, "--json", "evaluation.json")
    record_json(folder / "evaluation.json", json.loads(Path("evaluation.json").read_text(encoding="utf-8")))


def tune(folder: Path) -> None:
    """Both searches with the fewest episodes that they accept."""
    for kind in ("schedule", "heuristic"):
        more = settings("tune", {"kind": kind, "episodes": 16})
        esper("tune", "--task", TASK, *more, "--out", f"{kind}.json")
        record_json(folder / f"tuned {kind}.json", json.loads(Path(f"{kind}.json").read_text(encoding="utf-8")))


def full_preset(folder: Path) -> None:
    """A controller with all heads and ops."""
    record_run(train_run("full", *settings("train", {"preset": "full"})), folder)


def straight_through(folder: Path) -> None:
    """Seeds that learn through the main row."""
    record_run(train_run("straight", *settings("train", {"isolation": "straight_through"})), folder)


def two_tasks(folder: Path) -> None:
    """One policy on two tasks, with another number of hosts per group."""
    more = settings("train", {"members": 1, "ppo.epochs": 2})
    record_run(train_run("tasks", *more, task=f"{OTHER_TASK},{TASK}", hosts=8), folder)


def panic(folder: Path) -> None:
    """Hosts that break and return to their snapshots."""
    optimiser = dataclasses.replace(door("get_task")(TASK).optimiser, rate=RATE_OF_PANICS)
    change_task(TASK, optimiser=optimiser)
    run = train_run("panic")
    if '"panic"' not in (run / "events.jsonl").read_text(encoding="utf-8"):
        raise RuntimeError("no host panicked: the scenario tests nothing; choose another RATE_OF_PANICS")
    record_run(run, folder)


# -- scenarios of single models ---------------------------------------------------------------------------------------


class Grown(NamedTuple):
    """A model that was grown by a script, and what happened."""

    model: Any  # Any: a MorphogeneticModel of either version
    inputs: Tensor
    trace: list[dict[str, object]]


Script = dict[int, list[Callable[[Any], object]]]
"""By step, what is done to a model."""
STEPS = 18


def script_of(one: str, two: str, blueprints: Sequence[str]) -> Script:
    """The lives of three seeds in two slots. Steps 2, 3 and 5 each have a verb that comes a step too early."""
    return {
        0: [lambda model: model.germinate_seed(one, blueprints[0], style="gate", tempo=2)],
        1: [lambda model: model.germinate_seed(two, blueprints[1], alpha_target=0.7)],
        2: [lambda model: model.advance(one)],
        3: [lambda model: model.advance(one), lambda model: model.advance(two)],
        4: [lambda model: model.advance(two)],
        5: [lambda model: model.fossilize(one)],
        6: [lambda model: model.fossilize(one)],
        8: [lambda model: model.prune_seed(two, steps=2)],
        14: [lambda model: model.germinate_seed(two, blueprints[2], style="multiply")],
        17: [lambda model: model.advance(two)],
    }


def accepted(verb: Callable[[Any], object], model: Any) -> bool:
    """Whether a verb of the lifecycle passes its gate."""
    try:
        verb(model)
    except (AttributeError, TypeError):  # the verb itself is another
        raise
    except Exception as error:
        print(error)
        return False
    return True


def points_of(difference: Any) -> float:  # Any: a PairedDifference of either version
    """The effect of a seed in points; the field was once called `accuracy`."""
    measured = difference.points if hasattr(difference, "points") else difference.accuracy
    return float(measured.value)


def grow(model: Any, inputs: Tensor, targets: Tensor, script: Script) -> Grown:
    """Train a model and follow the script; note losses, stages, alphas and measurements of every step."""
    optimizer = door("GrowingOptimizer")(model, lambda p: torch.optim.AdamW(p, lr=0.01), clip_norm=1.0)
    trace: list[dict[str, object]] = []
    for step in range(STEPS):
        verdicts = [accepted(verb, model) for verb in script.get(step, [])]
        losses = []
        for part in torch.arange(len(inputs)).chunk(2):
            optimizer.zero_grad()
            rows = torch.stack(list(model.train().losses(inputs[part], targets[part]).values()))
            rows.sum().backward()
            optimizer.step()
            losses.append(rows.tolist())
        measured = model.eval().measure(inputs, targets, calibration=inputs)
        states = [slot.state for slot in model.seed_slots.values()]
        trace.append(
            {
                "accepted": verdicts,
                "losses": losses,
                "stages": [state.stage.name for state in states],
                "alphas": [state.alpha for state in states],
                "main": [measured.main.loss, measured.main.accuracy],
                "auditions": {slot: points_of(each) for slot, each in measured.auditions.items()},
                "contributions": {slot: points_of(each) for slot, each in measured.contributions.items()},
            }
        )
        model.tick()
    return Grown(model, inputs, trace)


def grown_gpt() -> Grown:
    """A language host of three layers."""
    torch.manual_seed(1)
    model = door("MorphogeneticModel")(door("GPTHost")(layers=3, width=16, heads=2, block=8, vocab=11))
    ids = torch.randint(11, (32, 9))
    return grow(model, ids[:, :-1], ids[:, 1:], script_of("r0c0", "r0c1", ["mlp_small", "lora", "attention"]))


def grown_cnn() -> Grown:
    """A convolutional host of two blocks."""
    torch.manual_seed(2)
    model = door("MorphogeneticModel")(door("CNNHost")((4, 8), classes=5, resolution=8))
    script = script_of("r1c0", "r0c1", ["conv_light", "depthwise", "bottleneck"])
    return grow(model, torch.rand(64, 3, 8, 8), torch.randint(5, (64,)), script)


def grown_attached() -> Grown:
    """A module of torch with slots behind two of its layers."""
    torch.manual_seed(3)
    layers = [torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32, 5))
    images = torch.rand(64, 1, 8, 8)
    model = door("attach")(net, {"2": 8, "4": 32}, example=images[:2])
    return grow(model, images, torch.randint(5, (64,)), script_of("2", "4", ["conv_small", "norm", "mlp_small"]))


@torch.no_grad()
def record_network(name: str, network: torch.nn.Module, inputs: Tensor, folder: Path) -> None:
    """Its weights, and what it computes."""
    record_tensors(folder / f"weights of {name}.safetensors", network.state_dict().values())
    record_tensors(folder / f"outputs of {name}.safetensors", [network.eval()(inputs)])


def gpt(folder: Path) -> None:
    """A language model, and the same one saved and loaded."""
    model, ids, trace = grown_gpt()
    record_json(folder / "trace.json", trace)
    record_network("model", model, ids, folder)
    model.save("model")
    record_network("loaded model", door("MorphogeneticModel").load("model"), ids, folder)


def harden(folder: Path) -> None:
    """Three grown models as plain modules: with their last seed, which is still blending in, and without it."""
    for name, grown in (("cnn", grown_cnn()), ("gpt", grown_gpt()), ("attached", grown_attached())):
        model, inputs, trace = grown
        record_json(folder / f"trace of {name}.json", trace)
        (last,) = (slot_id for slot_id, slot in model.seed_slots.items() if slot.state.stage.name == "BLENDING")
        for label, choice in (
            (f"{name} that keeps {last}", {"keep": [last]}),
            (f"{name} that drops {last}", {"drop": [last], "calibration": inputs}),
        ):
            record_network(label, model.harden(label, **choice), inputs, folder)
            record_tensors(folder / f"weights of {label}, on disk.safetensors", stored_tensors(Path(label)))


# -- running them -----------------------------------------------------------------------------------------------------

SHARES: tuple[dict[str, Callable[[Path], None]], ...] = (
    {each.__name__: each for each in (train, resume, evaluate, full_preset, two_tasks)},
    {each.__name__: each for each in (tune, straight_through, panic, gpt, harden)},
)
"""Scenarios in two shares of about the same length; those that use one run are together."""
SCENARIOS = {name: each for share in SHARES for name, each in share.items()}


def run_forked(name: str, work: Path, out: Path) -> bool:
    """Run one scenario in a fork of this process; whether it succeeded. What it prints goes to a file."""
    folder, log = out / name, work / f"{name}.log"
    folder.mkdir(parents=True)
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    code = 1
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(work)
        SCENARIOS[name](folder)
        code = 0
    except BaseException:
        sys.stdout.flush()
        printed = log.read_text(encoding="utf-8", errors="replace")[-4000:]
        (folder / FAILED).write_text(f"{printed}\n{traceback.format_exc()}", encoding="utf-8")
    finally:
        os._exit(code)
    raise AssertionError("a child ends in its own branch")


def main() -> None:
    """Run the named scenarios, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"default: all of {', '.join(SCENARIOS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder for a folder per scenario")
    arguments = parser.parse_args()
    names = arguments.scenarios or list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        parser.error(f"unknown scenarios {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    torch.set_num_threads(1)
    entry_point()
    check_source()
    for task in (TASK, OTHER_TASK):
        change_task(task, batches_per_step=MINIBATCHES)
    with tempfile.TemporaryDirectory() as work:
        done = [run_forked(name, Path(work), arguments.out.resolve()) for name in names]
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
