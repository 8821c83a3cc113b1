"""
Networks of the world model, as pure functions of tensors, and checkpoints.

Nothing here depends on ROS, sessions or deadlines; ``model.parallel`` divides one network among several GPUs.
"""
