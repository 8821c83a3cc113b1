"""
The 3-D paged KV cache: layouts, pages, block tables, patterns, tiers and snapshots of what a session has seen.

Kernels that read and write pages are ``kernels``; which session owns which pages is decided in ``engine.memory``.
"""
