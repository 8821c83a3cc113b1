"""
The 3-D paged KV cache: layouts, pages, block tables, patterns, tiers and snapshots.

``kernels`` has the kernels that read and write pages; ``engine.memory`` decides which session owns which pages.
"""
