"""Esper in other people's tools: one module per package, which imports that package."""
