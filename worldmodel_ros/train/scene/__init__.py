"""
Trains ``model.scene_forecast`` on simulated scenes with movers: episodes with the place of everything, and the loop.

The world model's own training on images, plans and outcomes is in ``train.data`` and ``train.run``.
"""
