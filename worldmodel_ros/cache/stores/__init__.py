"""
Where slabs lie that are on no device: in the host's memory, on a disk, in an object store.

What a slab is made of, and which slabs are a session, is decided in ``engine.session_store``.
"""
