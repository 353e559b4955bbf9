"""The example scripts for clusters, run with stand-ins for the tools that a test has not."""

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from simic.training.smallest import results
from test_doc_commands import reduced
from test_docs import ROOT, launched

from esper.cli import main

yaml = pytest.importorskip("yaml")

SCALING = ROOT / "examples" / "scaling"
STANDINS = {
    "torchrun": 'printf "%s\\n" "${@@Q}" > torchrun.txt; env > environment.txt',
    "srun": 'exec "$@"',
    "scontrol": 'test "$*" = "show hostnames node[3-6]"; printf "node%s\\n" 3 4 5 6',
}
SMALLER = {"--task": "digits_blind", "--device": "cpu"}
"""A task that a test can run."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run a command in an empty folder; returns what it passes to torchrun."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, body in STANDINS.items():
        (tools / name).write_text(f"#!/bin/bash\nset -e\n{body}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def run(*command: str, **variables: str) -> list[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO", "OMP", "TORCH"))}
        environment = inherited | {"PATH": f"{tools}:{os.environ['PATH']}"} | variables
        subprocess.run(command, env=environment, check=True, timeout=60)
        return ["torchrun", *shlex.split(Path("torchrun.txt").read_text())]

    return run


def settings() -> dict[str, str]:
    """Variables that torchrun was started with."""
    names = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    pairs = [line.partition("=") for line in Path("environment.txt").read_text().splitlines()]
    return {name: value for name, _, value in pairs if name in names}


def option(words: list[str], name: str) -> str:
    """The value of a flag."""
    return words[words.index(name) + 1]


def check_command(start: Callable[[], list[str]], out: str) -> None:
    """What each rank runs: at reduced size it trains. The second time it continues that run."""
    words = launched(start())
    for flag, value in SMALLER.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    assert words[:2] == ["esper", "train"] and option(words, "--out") == out
    main(reduced(words))
    before = results(Path(out))
    words = launched(start())
    assert words == ["esper", "train", "--resume", out]
    main(words[1:])
    assert results(Path(out)) == before


@pytest.mark.usefixtures("short_episodes")
def test_slurm(start: Callable[..., list[str]]) -> None:
    """The first of the job's nodes is where all meet."""
    job = {"SLURM_JOB_NODELIST": "node[3-6]", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "77"}
    script = SCALING / "slurm.sh"
    words = start("bash", str(script), **job)
    assert [option(words, f"--{name}") for name in ("nnodes", "rdzv-endpoint", "rdzv-id")] == ["4", "node3:29400", "77"]
    directives = dict(
        line.removeprefix("#SBATCH --").split("=")
        for line in script.read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert directives["ntasks-per-node"] == "1" and directives["gpus-per-node"] == option(words, "--nproc-per-node")
    assert settings() == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    check_command(lambda: start("bash", str(script), "runs/mine", **job), "runs/mine")


@pytest.mark.usefixtures("short_episodes")
def test_kubernetes(start: Callable[..., list[str]], tmp_path: Path) -> None:
    """Names, numbers of pods and GPUs fit together, and the container's command runs."""
    service, job = yaml.safe_load_all((SCALING / "kubernetes.yaml").read_text())
    assert [service["kind"], job["kind"], service["spec"]["clusterIP"]] == ["Service", "Job", "None"]
    name, pod = service["metadata"]["name"], job["spec"]["template"]["spec"]
    assert pod["subdomain"] == name and service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["OUT"].startswith(container["volumeMounts"][0]["mountPath"])
    out = str(tmp_path / "run")
    variables |= {"OUT": out, "ESPER_DATA": os.environ.get("ESPER_DATA", "")}
    words = start(*container["command"], *container["args"], **variables)
    assert settings() == {name: value for name, value in variables.items() if name not in ("OUT", "ESPER_DATA")}
    assert option(words, "--nnodes") == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert option(words, "--nproc-per-node") == str(container["resources"]["limits"]["nvidia.com/gpu"])
    port = service["spec"]["ports"][0]["port"]
    assert option(words, "--rdzv-endpoint") == f"{job['metadata']['name']}-0.{pod['subdomain']}:{port}"
    check_command(lambda: start(*container["command"], *container["args"], **variables), out)


@pytest.mark.usefixtures("short_episodes")
def test_laptops(start: Callable[..., list[str]]) -> None:
    """Both laptops run the same, but for their number."""
    script = str(SCALING / "laptops.sh")
    first, second = (start("bash", script, str(node), "192.168.1.10", "wlan0") for node in (0, 1))
    assert (option(first, "--node-rank"), option(second, "--node-rank")) == ("0", "1")
    assert launched(first) == launched(second) and option(first, "--master-addr") == "192.168.1.10"
    assert settings() == {"GLOO_SOCKET_IFNAME": "wlan0", "OMP_NUM_THREADS": "1"}
    with pytest.raises(subprocess.CalledProcessError):
        start("bash", script, "0", "192.168.1.10")
    check_command(lambda: start("bash", script, "0", "192.168.1.10", "wlan0"), "runs/laptops")


@pytest.mark.parametrize("script", sorted(SCALING.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    """And can be executed."""
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    assert os.access(script, os.X_OK)
