"""How long an update of the growth controller's policy takes against envs and steps, and how often it waits.

The `core` table of `digits_blind`, LSTM 64, 4 epochs × 4 minibatches, synthetic rounds. On CUDA every device sync of an
update is counted.

    python benchmarks/ppo_update.py --device cuda
"""

import argparse
import statistics
import time
import warnings
from pathlib import Path

import torch
from harness import RESULTS, Json, print_table, write_result

from esper.leyline import head_preset
from esper.simic.agent import PPOAgent, PPOConfig, Step, TamiyoRolloutBuffer
from esper.tamiyo import ObservationLayout, growth_table
from esper.tolaria import get_task


def make_agent(device: torch.device) -> PPOAgent:
    """An agent of the growth controller's shape."""
    slots = get_task("digits_blind").slot_config
    layout = ObservationLayout(
        host=tuple(f"host{i}" for i in range(20)),
        slot=tuple(f"slot{i}" for i in range(30)),
        offer=("worth", "fits"),
        critic=("potential", "control", "slope"),
        slots=len(slots),
        blueprints=len(slots.blueprint_names),
    )
    config = PPOConfig(epochs=4, gamma=1.0, target_kl=None)
    return PPOAgent(growth_table(head_preset("core"), slots), layout, config, total_updates=1000, device=device)


def collect(agent: PPOAgent, envs: int, steps: int) -> TamiyoRolloutBuffer:
    """One round of random observations, in which every action is legal."""
    buffer = TamiyoRolloutBuffer(
        envs, steps, agent.layout.size, agent.table, agent.config.network.hidden, device=agent.device
    )
    hidden_state = agent.network.initial_state(envs)
    buffer.begin(hidden_state, agent.epsilon)
    masks = agent.table.open_masks(envs, agent.device)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        seen = torch.randn((envs, agent.layout.size), generator=generator).to(agent.device)
        decision, values, hidden_state = agent.act(seen, masks, hidden_state, epsilon=buffer.epsilon)
        rewards = torch.randn(envs, generator=generator).to(agent.device)
        ends = torch.full((envs,), step == steps - 1, device=agent.device)
        values = agent.values_of(values, buffer.tasks)
        buffer.add(
            Step(seen, masks, decision.actions, decision.log_probs, values, rewards, ends, torch.zeros_like(values))
        )
    return buffer


def milliseconds(agent: PPOAgent, buffer: TamiyoRolloutBuffer, repeats: int) -> list[float]:
    """Wall time of updates on one round; the weights move on, the reference follows them."""
    times = []
    for repeat in range(repeats + 1):
        again = collect(agent, buffer.n_envs, buffer.capacity)
        start = time.perf_counter()
        agent.update(again)
        if repeat:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def host_syncs(agent: PPOAgent, buffer: TamiyoRolloutBuffer) -> int | None:
    """How often an update waits for the device; None on the CPU, which has nothing to wait for."""
    if agent.device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agent.update(buffer)
    torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def main() -> None:
    """Measure, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--envs", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 60, 180])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Json]] = []
    for envs in arguments.envs:
        for steps in arguments.steps:
            agent = make_agent(torch.device(arguments.device))
            times = milliseconds(agent, collect(agent, envs, steps), arguments.repeats)
            rows.append(
                {
                    "envs": envs,
                    "steps": steps,
                    "median_ms": statistics.median(times),
                    "low_ms": min(times),
                    "high_ms": max(times),
                    "host_syncs": host_syncs(agent, collect(agent, envs, steps)),
                    "epochs": agent.config.epochs,
                }
            )
    cells = [[r["envs"], r["steps"], r["median_ms"], r["low_ms"], r["high_ms"], str(r["host_syncs"])] for r in rows]
    print_table("PPO update", ["envs", "steps", "median ms", "low", "high", "device syncs"], cells)
    write_result("ppo_update", {"rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
