"""Does somebody else's PPO learn to grow? MaskablePPO of sb3-contrib on `esper/Growth-v0`, made from its name.

    python benchmarks/growth_env.py --keep runs/growth_env

MaskablePPO trains with its defaults for 2,000 steps, which is one round of 2,048 and one update. Its likeliest actions
are then evaluated on hosts that were never trained on. `random` takes any legal action with equal probability, on the
same hosts. `wait`, which never grows, has an objective of 0 by definition. An interrupted run continues with the seeds
that `--keep` lacks. Needs sb3-contrib: pip install 'esper-morph[bench]'.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from harness import RESULTS, Json, print_table, spread, write_result
from numpy.typing import NDArray

from esper.integrations.gymnasium import ID
from esper.leyline import BadValueError, derive_seed
from esper.simic.evaluation.statistics import compare

Choose = Callable[[NDArray[np.float32], NDArray[np.bool_]], int]  # an action for an observation and its mask
LEARNED, RANDOM = "MaskablePPO", "random"


def objectives(task: str, hosts: int, choose: Choose) -> tuple[list[float], float]:
    """Objectives on unseen hosts, which have the same numbers for every policy, and steps per second of CPU time."""
    env = gymnasium.make(ID, task=task, hosts="evaluation")
    found, steps, start = list[float](), 0, time.process_time()
    for number in range(hosts):
        observation, info = env.reset(options={"host": number})
        ended = False
        while not ended:
            observation, _, ended, _, info = env.step(choose(observation, info["action_mask"]))
            steps += 1
        found.append(info["objective"])
    return found, steps / (time.process_time() - start)


def one_seed(task: str, steps: int, hosts: int, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate once. (Any: JSON values.)"""
    from sb3_contrib import MaskablePPO

    env = ID if task == "digits_blind" else gymnasium.make(ID, task=task)
    model = MaskablePPO("MlpPolicy", env, seed=seed, device="cpu", **settings)
    start = time.process_time()
    model.learn(steps)
    seconds = time.process_time() - start

    dice = np.random.default_rng(derive_seed(seed, "random"))
    policies: dict[str, Choose] = {
        LEARNED: lambda seen, mask: int(model.predict(seen, action_masks=mask, deterministic=True)[0]),
        RANDOM: lambda _, mask: int(dice.choice(np.flatnonzero(mask))),
    }
    found = {name: objectives(task, hosts, choose) for name, choose in policies.items()}
    return {
        "seed": seed,
        "trained_steps": model.num_timesteps,
        "train_steps_per_second": model.num_timesteps / seconds,
        "env_steps_per_second": found[RANDOM][1],
        "objectives": {name: values for name, (values, _) in found.items()},
    }


def kept(folder: Path | None, cell: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A stored result of the same settings, else a new one, which is stored."""
    path = None if folder is None else folder / f"seed{cell['seed']}.json"
    if path is not None and path.exists():
        stored: dict[str, Any] = json.loads(path.read_text())
        if stored["cell"] != cell:
            raise BadValueError(f"{path} was made with other settings; name another --keep")
        return dict(stored["result"])
    result = make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"cell": cell, "result": result}))
    return result


def main() -> None:
    """Train and evaluate on every seed, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--steps", type=int, default=2_000, help="MaskablePPO rounds up to whole rounds")
    parser.add_argument("--round", type=int, default=None, help="steps per round (default: MaskablePPO's 2,048)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=12, help="unseen hosts, the same for every policy")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the results of single seeds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {} if arguments.round is None else {"n_steps": arguments.round, "batch_size": arguments.round}
    task, steps, hosts = arguments.task, arguments.steps, arguments.hosts
    results = []
    for seed in range(arguments.seeds):
        cell = {"task": task, "steps": steps, "hosts": hosts, "seed": seed, "settings": settings}
        results.append(kept(arguments.keep, cell, partial(one_seed, task, steps, hosts, seed, settings)))
        means = {name: statistics.fmean(values) for name, values in results[-1]["objectives"].items()}
        print(f"seed {seed}: " + "; ".join(f"{name} {mean:+.1f}" for name, mean in means.items()), flush=True)
    by_seed = {name: [result["objectives"][name] for result in results] for name in (LEARNED, RANDOM)}
    found = compare(by_seed[LEARNED], by_seed[RANDOM])
    rows = [[name, spread([statistics.fmean(row) for row in values])] for name, values in by_seed.items()]
    title = f"{task}: objective on {hosts} unseen hosts after {results[0]['trained_steps']:,} steps"
    print_table(title, ["policy", "objective"], [*rows, ["wait", "0"]])
    print(f"\n{LEARNED} − {RANDOM}: {found.mean:+.1f}, 95 % {found.low:+.1f} to {found.high:+.1f}")
    speeds = [statistics.median(result[f"{kind}_steps_per_second"] for result in results) for kind in ("train", "env")]
    print(f"steps per second of CPU time: {speeds[0]:.1f} in training, {speeds[1]:.1f} of the environment alone")
    content: dict[str, Json] = {
        "task": task,
        "settings": settings or "MaskablePPO's defaults",
        "steps": results[0]["trained_steps"],
        "objectives": by_seed,
        "above_random": {"mean": found.mean, "low": found.low, "high": found.high, "p": found.p},
        "train_steps_per_second": speeds[0],
        "env_steps_per_second": speeds[1],
    }
    print(write_result(f"growth_env_{task}", content, arguments.out))


if __name__ == "__main__":
    main()
