"""
Records the topics of a drive into a bag without holding up whoever publishes them.

Formats and recovery of bags belong to `bags`.
"""
