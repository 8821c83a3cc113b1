"""
Code shared by several nodes: parameters, QoS, spinning, diagnostics, lifecycle and what-if clients.

Code of a single node belongs in the folder of that node.
"""
