"""Training: simulated episodes, VAE, teacher and few-step student, each a stage of one command."""
