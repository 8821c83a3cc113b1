"""
Stores of slabs outside devices: in host memory, on a disk, in an object store.

``engine.session_store`` decides what a slab contains and which slabs make a session.
"""
