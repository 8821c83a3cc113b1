"""
One network on several GPUs: how its tokens, heads and weights are divided, and what its parts exchange.

The processes are started and watched by ``engine.distributed``.
"""
