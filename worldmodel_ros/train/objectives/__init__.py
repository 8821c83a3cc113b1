"""
The loss of each training stage: autoencoder, teacher, student, self-forcing, distribution matching, policy.

When a stage runs, and with which optimiser, belongs to ``train.run``.
"""
