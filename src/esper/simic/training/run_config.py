"""The configuration of a run on disk: written once, proven whenever it is read."""

import json
import os
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
    # What a run started from is found from its own folder: both may be moved together.
    start = None if config.start is None else os.path.relpath(config.start.resolve(), path.resolve())
    data_dir = None if config.data_dir is None else str(config.data_dir.resolve())
    content = {
        "config": encode({**asdict(config), "start": start, "data_dir": data_dir}),
        "keep_checkpoints": keep_checkpoints,
        "git": git_hash(),
        "torch": torch.__version__,
    }
    content["checksum"] = _config_checksum(content)
    replace_file(path / CONFIG, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _start_of(path: Path, text: str | None) -> Path | None:
    """Older folders hold it as it was given, from a working folder that nobody knows."""
    if text is None:
        return None
    start = Path(os.path.normpath(path.resolve() / text))
    return Path(text) if Path(text).is_dir() and not start.is_dir() else start


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
    data_dir, start = (values.pop(name, None) for name in PATHS)
    config: TrainConfig = decode(TrainConfig, {**values, **dict.fromkeys(PATHS)}, "config")
    keep = decode(int, content.get("keep_checkpoints", sys.maxsize), "keep_checkpoints")
    place = None if data_dir is None else Path(data_dir)
    return Header(replace(config, data_dir=place, start=_start_of(path, start)), keep)


def git_hash() -> str | None:
    """The commit that the code is at, where it lies in a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
