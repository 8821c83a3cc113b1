"""How the processes of one network divide a pass: by frames or by weights.

* ``SequenceParallel``: each has a run of successive frames, with all weights (Ulysses, Jacobs et al. 2023, only where
  attention leaves the run). Layers that attend within a frame move nothing; layers that attend to the cache exchange
  some frames of all heads for all frames of some heads, and back.
* ``TensorParallel``: each has some heads and some hidden units, with all frames (Megatron-LM, Shoeybi et al. 2019).
  It moves more, and is for networks whose weights do not fit one GPU.

In both, a process holds the cache pages of its own heads.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from types import ModuleType

import torch
from torch import Tensor, nn

from ..precision import Fp8Linear
from . import rounding
from .link import Exchange, Link

ALIGNMENT = 16  # bytes; every tensor begins at a multiple, so that its bytes can be viewed as numbers


class Group:
    """This process among those of a link."""

    def __init__(self, link: Link):
        self.link, self.rank, self.count = link, link.rank, link.count

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's share of x along ``dim``."""
        if x.shape[dim] % self.count:
            raise ValueError(f'{x.shape[dim]} cannot be divided among {self.count} processes: of a tensor '
                             f'{tuple(x.shape)}, dimension {dim}')
        return x.chunk(self.count, dim)[self.rank]

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole, gathered from every process's share along ``dim``."""
        dim %= x.dim()
        return self.link.all_gather(x).movedim(0, dim).flatten(dim, dim + 1)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every process's x, which may be overwritten."""
        return self.link.sum(x)

    def sum_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to sum every process's x, which may be overwritten; return what waits for the sum and returns it."""
        return self.link.sum_later(x)

    def shared(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return rank 0's tensors; those of the others give shapes and types. If all lie in one block of memory, laid out
        alike in every process, they are overwritten."""
        if not tensors:
            return []
        block = _block_of(tensors)
        if block is not None:
            self.link.broadcast(block)
            return list(tensors)
        packed = pack(tensors)
        self.link.broadcast(packed)
        return unpack(packed, tensors)


class TensorParallel(Group):
    """Every process has all frames, and the weights of its own heads and hidden units (``tensor_parallel.share``)."""


class SequenceParallel(Group):
    """Every process has all weights, and its own run of the frames.

    ``rounded``: exchange values in e4m3, with a scale for each row along the last dimension (``rounding``). ``processors``: how
    many multiprocessors each GPU has at least, by which all processes choose alike how to attend.
    """

    def __init__(self, link: Link, rounded: bool = False):
        super().__init__(link)
        self.rounded, self.processors = rounded, 1

    def exchange(self, x: Tensor, divide: int, join: int) -> Tensor:
        """Exchange x, an own share along ``join`` and all along ``divide``, for an own share along ``divide`` and all along
        ``join``; neither is the last dimension."""
        divide, join, width = divide % x.dim(), join % x.dim(), x.shape[-1]
        part = [*x.shape[:divide], x.shape[divide] // self.count, *x.shape[divide + 1:]]  # for and from each process
        sent = x.reshape(math.prod(part[:divide]), self.count, -1, width)
        before, after = math.prod(part[:join]), math.prod(part[join:-1])
        if self.rounded:
            coding = _coding(x)
            joined = coding.decode(self.link.all_to_all(coding.encode(sent))[0], (before, after, width), x.dtype)
        else:
            joined = self.link.all_to_all(sent.transpose(0, 1).contiguous().flatten(1).view(torch.uint8), before).view(x.dtype)
        part[join] *= self.count
        return joined.reshape(part)

    def exchange_products(self, product: Callable[[int, Tensor | None], Tensor], like: Tensor, width: int,
                          joined: bool = False, exact: bool = False) -> Tensor:
        """``send_products``, and wait for what all processes have computed for this one, (count, n, K), or (n, count, K) if
        ``joined``. It is valid until the next exchange."""
        return self.send_products(product, like, width, joined, exact).whole()

    def send_products(self, product: Callable[[int, Tensor | None], Tensor], like: Tensor, width: int,
                      joined: bool = False, exact: bool = False) -> ArrivingProducts:
        """Compute what each process is to have, and send it. ``product`` computes that of a given process, (n, K) for each
        alike, K a multiple of ``width``; ``like`` has its shape and type, on any device. Each part is sent while the next ones
        are computed; this process's own comes last, and is neither sent nor rounded: ``product`` may write it to its second
        argument, and return that. ``exact``: others' are not rounded either. What an earlier exchange returned is valid only
        until this call, and what this one returns until the next."""
        sent, rounded = [], self.rounded and not exact
        if rounded:
            exchange = self.link.exchange(rounding.row_bytes(like.numel() // width, width))
        else:
            exchange = self.link.exchange(like.nbytes, len(like) if joined else 1)
        for to, source in self.link.turns():
            part = product(to, None)
            sent.append(_coding(part).encode(part.view(len(part), 1, -1, width))[0] if rounded else
                        part.view(-1).view(torch.uint8))
            exchange.swap(sent[-1], to, source)
        if rounded:
            whole = part.new_empty((len(part), self.count, *part.shape[1:]) if joined else (self.count, *part.shape))
        elif joined:
            whole = exchange.whole.view(like.dtype)
        else:
            whole = exchange.whole[0].view(like.dtype).view(self.count, *like.shape)
        places = whole.unbind(1 if joined else 0)
        own = product(self.rank, places[self.rank])
        if own is not places[self.rank]:
            places[self.rank].copy_(own)
        shape = like.shape[:-1].numel(), like.shape[-1] // width, width
        return ArrivingProducts(self, exchange, whole, places, shape if rounded else None, sent)


class ArrivingProducts:
    """Of ``SequenceParallel.send_products``: a part from each process, in the shape of its ``like``. ``own`` is there, the
    others are still on their way: call one of ``others``, ``whole`` and ``through``, once."""

    def __init__(self, group: SequenceParallel, exchange: Exchange, whole: Tensor, places: Sequence[Tensor],
                 rounded: tuple[int, int, int] | None, sent: list[Tensor]):
        self._group, self._exchange, self._whole, self._places = group, exchange, whole, places
        self._rounded = rounded  # the shape of a rounded part, (n, K / width, width)
        self._sent = sent  # must live until it is waited for
        self.own = places[group.rank]

    def others(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Wait; yield the number of each other process, and its part as it came: like ``own``, and None; or if rounded (n, K)
        in e4m3, and its scales (n, K / width)."""
        self._exchange.wait()
        for _, source in self._group.link.turns():
            if self._rounded is None:
                yield source, self._places[source], None
            else:
                values, scales = rounding.parts_of(self._exchange.whole[0, source][None], self._rounded)
                yield source, values[0].flatten(1), scales[0]

    def whole(self) -> Tensor:
        """Wait; return all parts, with the number of the process as first axis, or as second if they are joined, in the type of
        ``own``."""
        self._exchange.wait()
        if self._rounded is not None:
            for _, source in self._group.link.turns():
                out = self._places[source].unflatten(-1, (-1, self._rounded[2])).flatten(1, -2)[:, None]
                _coding(out).decode(self._exchange.whole[0, source][None], (len(out), *out.shape[2:]), out.dtype, out)
        return self._whole

    def through(self, linear: nn.Linear) -> Tensor:
        """Return what a layer makes of all parts (n, K) next to one another, (n, count * K), none of which is rounded: own
        ones are multiplied while the others arrive."""
        columns = linear.weight.chunk(self._group.count, 1)
        total = torch.addmm(linear.bias, self.own, columns[self._group.rank].t())
        for source, part, _ in self.others():
            total.addmm_(part, columns[source].t())
        return total


class ExchangedProducts(nn.Module):
    """A linear layer to queries, keys and values, ``parts`` for heads of ``head_dim`` each. Own tokens are multiplied for the
    heads of each process in turn, so that products are sent while the next are computed.

    Maps rows (n, D) of own tokens to (count, n, parts * own heads * head_dim), of all processes' tokens.
    """

    def __init__(self, linear: nn.Module, group: SequenceParallel, head_dim: int, parts: int = 3):
        super().__init__()
        self._group, self._head_dim = group, head_dim
        outputs = torch.arange(len(linear.weight)).view(parts, group.count, -1)
        self.shares = nn.ModuleList(with_outputs(linear, outputs[:, rank].flatten()) for rank in range(group.count))

    def forward(self, rows: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return self.send(rows).whole()

    def send(self, rows: Tensor | tuple[Tensor, Tensor]) -> ArrivingProducts:
        """As ``forward``, without waiting."""
        values, first = rows if isinstance(rows, Tensor) else rows[0], self.shares[0]
        like = torch.empty((*values.shape[:-1], first.out_features), device='meta',
                           dtype=first.dtype if isinstance(first, Fp8Linear) else first.weight.dtype)

        def product(rank: int, out: Tensor | None) -> Tensor:
            share = self.shares[rank]
            if out is not None and not isinstance(rows, Tensor):
                return share(rows, out=out)
            if out is None or isinstance(share, Fp8Linear) or share.bias is None:
                return share(rows)
            torch.addmm(share.bias, rows.flatten(0, -2), share.weight.t(), out=out.flatten(0, -2))
            return out
        return self._group.send_products(product, like, self._head_dim)


def with_outputs(linear: nn.Module, outputs: Tensor) -> nn.Module:
    """Return a linear layer, in FP8 or not, restricted to some of its outputs."""
    share, outputs = copy(linear), outputs.to(linear.weight.device)
    share._parameters, share._buffers = dict(linear._parameters), dict(linear._buffers)
    for held in (share._parameters, share._buffers):
        for name, axis in (('weight', 0), ('bias', 0), ('weight_scale', -1)):
            if held.get(name) is not None:
                part = held[name].view(torch.uint8) if held[name].element_size() == 1 else held[name]
                part = part.index_select(axis, outputs).view(held[name].dtype)
                held[name] = nn.Parameter(part, requires_grad=False) if held is share._parameters else part
    share.out_features = len(outputs)
    return share


def _block_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the memory that several tensors share, as bytes; None if they do not."""
    storage = tensors[0].untyped_storage()
    if len(tensors) == 1 or any(tensor.untyped_storage().data_ptr() != storage.data_ptr() for tensor in tensors):
        return None
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage)


def _coding(x: Tensor) -> ModuleType:
    if not x.is_cuda:
        return rounding
    from . import rounding_triton
    return rounding_triton


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors, one after the other, uint8 (n,)."""
    parts = []
    for tensor in tensors:
        part = tensor.contiguous().view(-1).view(torch.uint8)
        parts += [part, part.new_zeros(-len(part) % ALIGNMENT)]
    return torch.cat(parts)


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Invert ``pack``: return views of its result, with the shapes and types of ``like``."""
    found, start = [], 0
    for tensor in like:
        found.append(packed[start:start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return found
