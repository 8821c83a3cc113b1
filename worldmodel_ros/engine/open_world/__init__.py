"""
Open world models (``model/wan``) for a robot: an image and the camera's poses in, video out.

A world is described by a file next to its checkpoint (``description``), loaded once (``world``), and shared by as many sessions
as its pages hold (``session``); ``worker`` runs one session for a node. There is no policy: nothing here commands a robot.
"""
