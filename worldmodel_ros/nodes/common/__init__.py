"""
What several nodes use: parameters, QoS, spinning, diagnostics, lifecycle and what-if clients.

Whatever one node alone uses belongs to the folder of that node.
"""
