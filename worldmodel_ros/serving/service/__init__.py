"""
Sessions of many clients on one engine: turns ticks and questions into jobs, and jobs into batched passes.

The order of the jobs is decided in ``serving.scheduler``, which knows no networks.
"""
