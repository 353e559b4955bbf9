"""The configuration of a run on disk: written once, proven whenever it is read."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from esper.leyline import BadValueError, CheckpointError
from esper.leyline.files import replace_file
from esper.leyline.records import Json, decode, encode
from esper.leyline.stored import checksum, refusal
from esper.simic.telemetry import AlarmLimits
from esper.simic.training.config import TrainConfig

CONFIG = "config.json"
PATHS = ("data_dir", "start")
"""Settings that are paths; JSON holds them as text."""


class Header(NamedTuple):
    """What `config.json` tells."""

    config: TrainConfig
    keep_checkpoints: int


def write_config(path: Path, config: TrainConfig, keep_checkpoints: int) -> None:
    """Write the resolved configuration of a run, whole or not at all."""
    content = {
        "config": encode({**asdict(config), **{name: _text(_absolute(getattr(config, name))) for name in PATHS}}),
        "keep_checkpoints": keep_checkpoints,
        "git": git_hash(),
        "torch": torch.__version__,
    }
    content["checksum"] = _config_checksum(content)
    replace_file(path / CONFIG, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _text(path: object) -> str | None:
    return None if path is None else str(path)


def _place(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _config_checksum(content: Mapping[str, Json]) -> str:
    """Over everything but where data sets lie, which may differ from machine to machine."""
    config = {name: value for name, value in content["config"].items() if name != "data_dir"}
    return checksum({**{name: value for name, value in content.items() if name != "checksum"}, "config": config})


def read_config(path: Path) -> TrainConfig:
    """The resolved configuration of a run."""
    return read_header(path).config


def check_settings(path: Path, config: TrainConfig) -> None:
    """Raise unless these are the settings that a run was begun with; where data lie may differ."""
    begun = read_config(path)
    differ = [
        f"{each.name} {getattr(config, each.name)!r}, begun with {getattr(begun, each.name)!r}"
        for each in fields(TrainConfig)
        if each.name != "data_dir" and _absolute(getattr(config, each.name)) != _absolute(getattr(begun, each.name))
    ]
    if differ:
        raise BadValueError(
            f"{path} cannot go on with other settings ({'; '.join(differ)}): take its own, or another folder"
        )


def _absolute(value: object) -> object:
    return value.resolve() if isinstance(value, Path) else value


def read_header(path: Path) -> Header:
    """The configuration, proven to be what was written. Older folders state no checksum, no start and no limits of
    alarms, and keep all checkpoints."""
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        values = dict(content["config"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise BadValueError(f"{path} is no run folder: {CONFIG} is missing or damaged ({error})") from error
    with refusal(str(path / CONFIG)):
        if "checksum" in content and content["checksum"] != (found := _config_checksum(content)):
            raise CheckpointError(
                f"{path / CONFIG} was changed: it states checksum {content['checksum']!r}, its content has {found}; "
                "put back what was written, or begin anew in another folder"
            )
    values.setdefault("alarms", encode(AlarmLimits()))
    data_dir, start = (_place(values.pop(name, None)) for name in PATHS)
    config: TrainConfig = decode(TrainConfig, {**values, **dict.fromkeys(PATHS)}, "config")
    keep = decode(int, content.get("keep_checkpoints", sys.maxsize), "keep_checkpoints")
    return Header(replace(config, data_dir=data_dir, start=start), keep)


def git_hash() -> str | None:
    """The commit that the code is at, where it lies in a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
