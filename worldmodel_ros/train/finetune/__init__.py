"""Fine-tuning on one's own robot: recordings become clips, autoencoder and DiT adapt, a held-out part judges."""
