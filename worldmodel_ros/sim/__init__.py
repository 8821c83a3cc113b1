"""
A simulated differential-drive robot in a walled room, with movers in the scenes of tasks: data source, ground truth and
embedded default.

Its node is ``nodes.sim_robot``; recording its drives for training is ``train.data``.
"""
