"""
Sessions of many clients on one engine: turns ticks and questions into jobs, and jobs into batched network calls.

``serving.scheduler`` decides the order of the jobs, and knows no networks.
"""
