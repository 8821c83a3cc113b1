"""Simulation of a fleet of GPUs that serves robots, on a virtual clock, with the server's own scheduler."""
