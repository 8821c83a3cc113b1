"""
Fine-tuning on recordings of one's own robot: clips, adaptation of autoencoder and DiT, evaluation on a held-out part.

Training from scratch is the rest of ``train``.
"""
