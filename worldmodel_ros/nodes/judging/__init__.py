"""
Listens to the task results of a simulated robot.

The robot judges itself (``sim_robot``) with ``evaluate.control.judge``; ``cli.evaluate_control`` evaluates the results.
"""
