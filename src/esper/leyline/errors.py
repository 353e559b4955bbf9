"""Errors that name the value that was given and what is allowed instead.

Each is also the built-in error that a caller would expect (ValueError, RuntimeError …), so code that does not know
Esper can still catch it.
"""

from collections.abc import Iterable


class EsperError(Exception):
    """Root of everything that Esper raises on purpose."""


class UnknownNameError(EsperError, ValueError):
    """A name (blueprint, slot, style, task …) that is not registered."""

    def __init__(self, kind: str, given: object, allowed: Iterable[object]) -> None:
        names = ", ".join(str(name) for name in allowed) or "none"
        super().__init__(f"unknown {kind} {given!r}; allowed: {names}")


class BadValueError(EsperError, ValueError):
    """A value outside the range that the message states."""


class StageError(EsperError, RuntimeError):
    """A transition that the lifecycle does not have."""


class GateRefusedError(EsperError, RuntimeError):
    """A legal transition whose gate did not pass; the message lists the reasons."""


class SlotOccupiedError(EsperError, RuntimeError):
    """Germination in a slot that is not dormant."""


class HostMismatchError(EsperError, ValueError):
    """A host whose segments, slots or activations do not fit together."""


class BlueprintContractError(EsperError, AssertionError):
    """A blueprint that breaks a clause of its contract."""


class CheckpointError(EsperError, ValueError):
    """A checkpoint that is damaged, foreign or of another version."""


class StorageError(EsperError, OSError):
    """A file or folder that cannot be written: a full disk, no permission. What was whole on disk still is."""


class DataError(EsperError, ValueError):
    """A data set that is missing, damaged or too small for its task."""


class FleetMemoryError(EsperError, MemoryError):
    """A fleet that does not fit into memory; the message says how many hosts would."""


class MissingPackageError(EsperError, ImportError):
    """Something was asked for whose package, an extra of Esper's, is not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs the package {package}, which is not installed: pip install '{extra}'")
