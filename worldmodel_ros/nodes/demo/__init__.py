"""
The observer of the demo: hears all topics, asks what-if questions, and fills a ``demo.recording.Recording``.

Judging and drawing that belongs to ``demo``.
"""
