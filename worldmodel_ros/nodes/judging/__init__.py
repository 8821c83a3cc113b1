"""
Listens to how a simulated robot does its tasks.

The robot judges itself (``sim_robot``), by ``evaluate.control.judge``; what is made of it is ``cli.evaluate_control``.
"""
