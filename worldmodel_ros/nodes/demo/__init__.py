"""
The observer of the demo: subscribes to all topics, sends what-if requests, and fills a ``demo.recording.Recording``.

Evaluating and plotting the recording belongs to ``demo``.
"""
