"""Grown networks as torch-only source: a generated file, and the same text as a living module."""

from esper.kasmina.export.attached import bare_copy, blocks_source
from esper.kasmina.export.growth import Growth
from esper.kasmina.export.network import network_source
from esper.kasmina.export.source import ExportError, execute

__all__ = ["ExportError", "Growth", "bare_copy", "blocks_source", "execute", "network_source"]
