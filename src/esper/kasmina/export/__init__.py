"""Grown networks as torch-only source, and as modules built from that source."""

from esper.kasmina.export.carving import carve, is_limited
from esper.kasmina.export.networks import Growth, bare_copy, blocks_source, network_source
from esper.kasmina.export.source import ExportError, execute

__all__ = ["ExportError", "Growth", "bare_copy", "blocks_source", "carve", "execute", "is_limited", "network_source"]
