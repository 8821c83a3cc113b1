"""Integration scenarios on the running system, written once for every harness that can start it."""
