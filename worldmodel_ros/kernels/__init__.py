"""
Triton kernels for attention over pages, quantisation, linear layers and norms, each with its PyTorch definition.

A file with the suffix ``_triton`` or ``_hopper`` needs a GPU (or Triton's interpreter); the one without defines the result.
"""
