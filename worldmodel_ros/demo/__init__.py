"""The demonstration: drive the simulated robot, watch it from outside, judge it and draw what happened."""
