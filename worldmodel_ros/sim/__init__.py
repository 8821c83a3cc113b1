"""
A simulated differential-drive robot in a walled room, with movers in task scenes: data source, ground truth and embedded
default.

Its node is ``nodes.sim_robot``; ``train.data`` records its episodes for training.
"""
