"""
Runs of the training stages: configuration, order, the loop, processes on several GPUs, checkpoints and logs.

The losses are in ``train.objectives``.
"""
