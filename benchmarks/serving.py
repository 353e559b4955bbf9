"""First paint of `esper serve` on a run whose log has a gigabyte, in Debian's Chromium.

    python benchmarks/serving.py --megabytes 1024

Makes a run of many rounds, each with the events of one of a trained run, or of one made up; serves it in another
process; and measures from the request to the first picture in the page: without and with what a former server stored in
the cache. Then it waits until the whole log was read.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from harness import RESULTS, print_table, write_result

from esper.leyline.records import config_checksum

HOSTS, STEPS, SLOTS = 24, 50, ("r1c0", "r1c1", "r1c2", "r1c3", "r1c4")
PORT = 8971
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
Json = Any


def main() -> None:
    """Print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=1024, help="size of events.jsonl, 2**20 bytes each")
    parser.add_argument("--runs", type=int, default=3, help="first paints of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of serving.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, cache = Path(folder, "runs", "long"), Path(folder, "cache")
        rounds = write_long_run(run, int(options.megabytes * 2**20))
        size = (run / "events.jsonl").stat().st_size
        paints: dict[str, list[float]] = {"nothing in the cache": [], "read before": []}
        whole = 0.0
        for _ in range(options.runs):
            shutil.rmtree(cache, ignore_errors=True)
            for kind, found in paints.items():
                seconds, read = measure(run.parent, cache, wait=kind == "nothing in the cache")
                found.append(seconds)
                whole = max(whole, read)
    rows = [(kind, *(f"{value:.2f}" for value in found)) for kind, found in paints.items()]
    head = ("cache", *(f"paint {index + 1} (s)" for index in range(options.runs)))
    print_table(f"events.jsonl: {size / 2**20:,.0f} MB, {rounds} rounds of {HOSTS} hosts, {STEPS} steps", head, rows)
    print(f"\nthe whole log was read after {whole:.0f} s")
    result: dict[str, Json] = {"bytes": size, "rounds": rounds, "first_paint_s": paints, "whole_log_s": whole}
    write_result("serving", result, options.out)


def write_long_run(run: Path, size: int) -> int:
    """A run with a log of at least so many bytes. Returns the number of rounds."""
    run.mkdir(parents=True)
    parts = [json.dumps(line, separators=(",", ":")) for line in round_events()]
    each = sum(map(len, parts)) + len(parts)
    rounds = -(-size // each)
    header: Json = {"config": {"task": "digits_long", "seed": 0, "rounds": rounds, "hosts": 30, "members": 4}}
    (run / "config.json").write_text(json.dumps(header | {"checksum": config_checksum(header)}))
    with (run / "events.jsonl").open("w") as events, (run / "metrics.jsonl").open("w") as metrics:
        for number in range(rounds):
            events.writelines(part.replace('"round":0', f'"round":{number}', 1) + "\n" for part in parts)
            metrics.write(json.dumps(round_metrics(number)) + "\n")
    return rounds


def round_events() -> list[Json]:
    """One round of hosts, each of which commits a seed."""
    lines: list[Json] = []
    where = {"round": 0, "task": "digits_long"}
    for env in range(HOSTS):
        stages = {
            "step": [5, 6, 15, 20, 30], "slot": [SLOTS[env % len(SLOTS)]] * 5, "blueprint": ["depthwise"] * 5,
            "source": "DGTBH", "target": "GTBHF", "cause": "gtatf",
        }  # fmt: skip
        curve = [10 + 80 * step / STEPS + 0.01 * env for step in range(STEPS)]
        alphas = {SLOTS[env % len(SLOTS)]: [min(1.0, max(0.0, (step - 15) / 5)) for step in range(STEPS)]}
        decided = {"step": [5, 15, 30], "op": ["GERMINATE", "ADVANCE", "FOSSILIZE"]}
        figures = {"objective": 5.0 + env, "gain": 6.0 + env, "accuracy": 80.0, "added_parameters": 72}
        curves = {"accuracies": curve, "control_accuracies": [0.9 * value for value in curve], "alphas": alphas}
        rewards = {"decisions": decided, "rewards": [0.123456 * step for step in range(STEPS)], "reward_parts": {}}
        lines.append({"kind": "episode", **where, "env": env, **figures, "stages": stages, **curves, **rewards})
    return lines


def round_metrics(number: int) -> Json:
    """The line of a round."""
    ops, born = {"WAIT": 1100, "GERMINATE": 24}, {"r1c0/depthwise": 24}
    means = {"objective": 5 + number / 1000, "objective_std": 2.0, "gain": 6 + number / 1000, "accuracy": 80.0}
    rest = {"added_parameters": 72.0, "committed": 1.0, "panics": 0, "ops": ops, "germinated": born}
    return {"round": number, **means, **rest, "ppo/approx_kl": 0.01, "timing": {"collect_s": 5.0, "update_s": 1.0}}


def measure(root: Path, cache: Path, *, wait: bool) -> tuple[float, float]:
    """Seconds from the request to the first picture, and until the whole log was read."""
    from playwright.sync_api import sync_playwright

    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "esper", "serve", str(root), "--port", str(PORT)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_for(f"http://localhost:{PORT}/")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
            page = browser.new_page()
            page.goto(f"http://localhost:{PORT}/")  # nicegui's own files are then in the browser's cache
            begin = time.perf_counter()
            page.goto(f"http://localhost:{PORT}/run?run=long")
            page.wait_for_selector(".view figure svg")
            painted = time.perf_counter() - begin
            if wait:
                page.wait_for_selector(".status progress", state="detached", timeout=600_000)
            read = time.perf_counter() - begin
            browser.close()
    finally:
        server.terminate()
        server.wait()
    return painted, read


def wait_for(address: str) -> None:
    """Until a server answers."""
    for _ in range(200):
        try:
            urllib.request.urlopen(address).read()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(address)


if __name__ == "__main__":
    main()
