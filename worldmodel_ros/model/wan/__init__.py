"""
Open world models of the Wan family: LingBot-World-Fast and its successors, Self-Forcing.

Networks as functions of tensors, the published checkpoints in both layouts, schedules, camera control, flat key and value
pages, and the chunk-by-chunk sampler. ``docs/open_models.md`` says what runs and what proves it. VAE and text encoder need the
extra ``[wan]``.
"""
