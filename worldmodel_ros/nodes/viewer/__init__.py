"""Shows what runs in Rerun: a node that only listens."""
