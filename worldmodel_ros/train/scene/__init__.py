"""
Trains ``model.scene_forecast`` on simulated scenes with movers: episodes with the place of everything, and the loop.

What the world model is trained on for pictures, plans and outcomes is ``train.data`` and ``train.run``.
"""
