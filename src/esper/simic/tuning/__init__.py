"""Searches schedules and thresholds with a stated number of episodes."""
