"""Captures CUDA graphs, with kernels in place of small memsets.

cuBLAS and cuDNN clear a counter of a few bytes before a product or an attention. In a graph, that is a node of its own kind,
before and after which a GPU idles for longer than a kernel that writes the same zeros takes (docs/decisions.md).
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from .cuda_calls import DeviceMemory, done

try:
    from cuda.bindings import driver
except ImportError:
    driver = None

MAX_BYTES = 1 << 16  # of a memset that a kernel takes over

_log = logging.getLogger(__name__)


@contextmanager
def capturing(stream: torch.cuda.Stream, pool: tuple | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what is queued in this context, on ``stream``; the graph can be replayed afterwards. Other threads may use the
    device meanwhile. Memsets stay as they are without cuda-bindings of the driver's major version or an older one, or with a
    PyTorch that cannot show a graph (before 2.8)."""
    edited = _can_edit()
    graph = torch.cuda.CUDAGraph(keep_graph=True) if edited else torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode='thread_local'):
        yield graph
    if edited:
        try:
            replace_memsets(graph.raw_cuda_graph(), stream)
        except RuntimeError as error:
            _log.warning('memsets of a CUDA graph stay, which makes it slower: %s', error)
        graph.instantiate()


@cache
def _can_edit() -> bool:
    if driver is None or not hasattr(torch.cuda.CUDAGraph, 'raw_cuda_graph'):
        return False
    try:
        return done(driver.cuDriverGetVersion()) // 1000 >= driver.CUDA_VERSION // 1000
    except RuntimeError:
        return False


def replace_memsets(graph: int, stream: torch.cuda.Stream) -> int:
    """Replace small memsets to zero of a cudaGraph_t that has not been instantiated by kernels; return how many. ``stream``,
    in which nothing is being captured, gives their priority. Raises RuntimeError for what CUDA refuses; the graph then does
    the same as before."""
    graph = driver.CUgraph(graph)
    replaced = 0
    for node in _all(driver.cuGraphGetNodes, graph):
        if done(driver.cuGraphNodeGetType(node)) != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
            continue
        memset = done(driver.cuGraphMemsetNodeGetParams(node))
        address, size = int(memset.dst), memset.width * memset.elementSize
        if not 0 < size <= MAX_BYTES or size % 4 or address % 4 or memset.value or memset.height > 1:
            continue
        before, after = (_all(call, node) for call in (driver.cuGraphNodeGetDependencies, driver.cuGraphNodeGetDependentNodes))
        with _zeroing(address, size // 4, stream) as kernel:
            parameters = done(driver.cuGraphKernelNodeGetParams(kernel))
            new = done(driver.cuGraphAddKernelNode(graph, before, len(before), parameters))
            try:
                done(driver.cuGraphKernelNodeCopyAttributes(new, kernel))  # priority
                edges = [None] if driver.CUDA_VERSION >= 13000 else []  # their data; an argument since CUDA 13
                done(driver.cuGraphAddDependencies(graph, [new] * len(after), after, *edges, len(after)))
            except RuntimeError:
                driver.cuGraphDestroyNode(new)  # nothing waits for it
                raise
        done(driver.cuGraphDestroyNode(node))
        replaced += 1
    return replaced


@contextmanager
def _zeroing(address: int, words: int, stream: torch.cuda.Stream) -> Iterator[Any]:
    """Give a node, of a graph of its own, whose kernel clears memory."""
    memory = torch.as_tensor(DeviceMemory(address, words, '<i4'), device=stream.device)
    done(driver.cuStreamBeginCapture(stream.cuda_stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    try:
        with torch.cuda.stream(stream):
            memory.fill_(0)
    finally:
        graph = done(driver.cuStreamEndCapture(stream.cuda_stream))
    try:
        node, = _all(driver.cuGraphGetNodes, graph)
        yield node
    finally:
        driver.cuGraphDestroy(graph)


def _all(call: Callable[..., tuple], of: Any) -> list:
    """Return the nodes that a call gives, which is told their number."""
    count = done(call(of), -1)
    return list(done(call(of, count), 0))[:count] if count else []
