"""Kernels of the paged attention, each beside the plain PyTorch function that defines it."""
