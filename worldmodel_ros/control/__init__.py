"""
The deadline loop of one robot: chooses a tier for each observation and never answers late. No torch.

The model and its sessions are in ``engine``; limits on commands are enforced by ``safety``, in another process.
"""
