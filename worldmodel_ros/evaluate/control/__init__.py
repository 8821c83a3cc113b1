"""
What decisions are worth: tasks in simulated rooms with movers, driven by planners with different forecasts and by models.

Scenes and movers are ``sim``, the terms that a task is told in are ``control.terms``; what a model predicts is judged in
``quality``.
"""
