"""
How fast the machine is, by what the scenarios have it do: a tick of the shipped model.

Two robots' nodes, their simulators and a server on two cores have no time to spare: where a tick takes a tenth longer
than on the machine that the budget was measured on, the robots' own models, which stand in for a server that is late,
keep it late.
"""

import time

import numpy as np

# s, of two steps in onnx-int8 by one thread on two cores of an AMD EPYC: benchmarks/results/engines_epyc_2_cores.json
USUAL = 0.021
SLOW = 0.023
TICKS = 40


def tick_seconds() -> float:
    """Median of ticks of two steps; nothing else should run meanwhile."""
    from worldmodel_ros.engine import load

    engine = load(model='tiny', backend='onnx-int8', threads=1)
    engine.warm_up()
    session, frame = engine.open_session(), np.zeros((*engine.spec.image_size, 3), np.uint8)
    took = []
    for _ in range(engine.spec.window_frames + TICKS):
        start = time.perf_counter()
        session.observe(frame, np.zeros(engine.spec.actions, np.float32))
        session.imagine(session.plan(engine.spec.goals[0]), 2)
        took.append(time.perf_counter() - start)
    return float(np.median(took[-TICKS:]))
