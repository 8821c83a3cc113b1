"""
Records topics into a bag without holding up their publishers.

Formats and recovery of bags belong to ``bags``.
"""
