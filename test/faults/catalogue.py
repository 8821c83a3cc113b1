"""All rows of the matrix, in the order in which they are played: those of one system together."""

from faults import camera, clocks, disk, files, network, nodes, ranks, servers, strangers  # noqa: F401 - each adds its rows
from faults.matrix import CASES as _CASES
from faults.systems import PLANS

CASES = sorted(_CASES, key=lambda row: list(PLANS).index(row.system))
