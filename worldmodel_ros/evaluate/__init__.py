"""Judging a model: here in the simulator's closed loop."""
