"""The fault matrix: what is done to which part of a running system, what must come of it, and how soon."""
