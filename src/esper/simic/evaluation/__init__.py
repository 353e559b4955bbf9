"""Compares policies on hosts that none of them has seen."""
