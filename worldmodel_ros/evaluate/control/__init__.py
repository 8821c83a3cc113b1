"""
Evaluation of decisions: tasks in simulated rooms with movers, driven by planners with different forecasts and by models.

Scenes and movers are in ``sim``, the terms of a task in ``control.terms``; predictions are judged in ``quality``.
"""
