"""
The deadline loop of one robot: takes observations, chooses a tier for each, and answers none of them late. No torch.

The model and its sessions are ``engine``; what may be commanded at all is decided in ``safety``, by another process.
"""
