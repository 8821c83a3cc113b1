"""
A model on several GPUs or CPUs: one process for each, of which rank 0 owns the sessions and leads the others.

``model.parallel`` divides a single pass.
"""
