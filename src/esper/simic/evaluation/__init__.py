"""Policies compared on hosts that none of them has seen."""
