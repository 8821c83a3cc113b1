"""
Runs of the training stages: configuration, order, the loop, processes on several GPUs, checkpoints and logs.

What is learned belongs to ``train.objectives``.
"""
