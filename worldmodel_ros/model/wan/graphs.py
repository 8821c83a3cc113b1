"""All passes of a chunk as one CUDA graph: the host launches one graph, not 2,500 kernels.

A graph reads and writes the memory that it was captured with. What differs from chunk to chunk (noise, condition, the camera's
rays, which pages are seen and written) is copied there before each replay; the pages themselves stay in place.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from ...kernels.graph_capture import capturing
from .dit import Prompt
from .sampler import Sampler
from .sequence import PagedAttention, PagedSequence


class GraphedSampler:
    """``Sampler`` over pages, whose ``chunk`` replays a graph. The first chunk of another size, of a text of another length,
    or over another owner's pages takes longer: it is captured. At most ``most`` graphs are kept, each with the memory of a
    pass. On a CPU there are no graphs; the same steps are run on the same buffers."""

    def __init__(self, sampler: Sampler, most: int = 2):
        self.sampler, self.dit, self.schedule = sampler, sampler.dit, sampler.schedule
        self._most, self._graphs = most, {}

    @torch.inference_mode()
    def chunk(self, sequence: PagedSequence, prompt: Prompt, noise: Callable[[int], Tensor], condition: Tensor | None = None,
              rays: Tensor | None = None) -> Tensor:
        """As ``Sampler.chunk``."""
        steps = [noise(step) for step in range(len(self.schedule.steps))]
        with sequence.chunk(steps[0].shape[1]) as attention:
            given = _Inputs(attention, prompt, steps, condition, rays)
            key = (attention.form, *((name, tensor.shape) for name, tensor in given.tensors.items()))
            graph = self._graphs.pop(key, None) or _Graph(self.sampler, attention, prompt, given)
            self._graphs[key] = graph  # the newest is last
            while len(self._graphs) > self._most:
                del self._graphs[next(iter(self._graphs))]
            return graph.replay(prompt, given)

    def commit(self, sequence: PagedSequence, prompt: Prompt, latents: Tensor, condition: Tensor | None = None,
               rays: Tensor | None = None) -> None:
        """``Sampler.commit``."""
        self.sampler.commit(sequence, prompt, latents, condition, rays)


class _Inputs:
    """All that passes read, by name. Lists of pages are padded to their greatest possible length."""

    def __init__(self, attention: PagedAttention, prompt: Prompt, noise: list[Tensor], condition: Tensor | None,
                 rays: Tensor | None):
        device = noise[0].device
        self.tensors = {f'noise {step}': tensor for step, tensor in enumerate(noise)}
        self.tensors |= {} if condition is None else {'condition': condition.to(device, torch.float32)}
        self.tensors |= {} if rays is None else {'rays': rays.to(device)}
        for name, tensor in attention.inputs().items():
            if name in ('pages', 'lengths'):
                tensor = torch.cat([tensor, tensor.new_zeros(attention.most_pages - len(tensor))])
            self.tensors[f'attention {name}'] = tensor
        self.prompt = {field.name: getattr(prompt, field.name) for field in fields(prompt)}
        self.tensors |= {f'prompt {name}': tensor for name, tensor in self.prompt.items()}


class _Graph:
    """The passes of one chunk, captured with its inputs."""

    def __init__(self, sampler: Sampler, attention: PagedAttention, prompt: Prompt, given: _Inputs):
        self._held = held = {name: tensor.clone() for name, tensor in given.tensors.items()}
        self._prompt = prompt
        text = Prompt(**{name: held[f'prompt {name}'] for name in given.prompt})
        attention = attention.reading({name: held[f'attention {name}'] for name in attention.inputs()})

        def passes() -> Tensor:
            return sampler.passes(attention, text, lambda step: held[f'noise {step}'], held.get('condition'),
                                  held.get('rays'))
        self._passes, self._graph, self._out = passes, None, None
        if sampler.dit.device.type == 'cuda':
            # Once outside of a graph: first-time compilation, loading and allocation must not be captured. The graph's kernels
            # keep the priority of this stream, which is above that of decoding in the background.
            stream = torch.cuda.Stream(sampler.dit.device, priority=-1)
            stream.wait_stream(torch.cuda.current_stream(sampler.dit.device))
            with torch.cuda.stream(stream):
                passes()
            torch.cuda.synchronize(sampler.dit.device)
            with capturing(stream) as self._graph:
                self._out = passes()

    def replay(self, prompt: Prompt, given: _Inputs) -> Tensor:
        """Return the chunk's latents."""
        for name, tensor in given.tensors.items():
            if not name.startswith('prompt') or prompt is not self._prompt:
                self._held[name].copy_(tensor)
        self._prompt = prompt
        if self._graph is None:
            return self._passes()
        self._graph.replay()
        return self._out.clone()
