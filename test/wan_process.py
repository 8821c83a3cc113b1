"""One of several processes of a tiny Wan network: saves its outputs, divided in each of the ways in KINDS.

    python wan_process.py FOLDER RANK COUNT [PORT]; the first prints the port that the others take
"""
import gc
import math
import sys
import threading
import time
from pathlib import Path

import torch
import wan_tiny as tiny
from test_wan_model import CONFIG, SHORT, WINDOW

from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.parallel.group import SequenceParallel, TensorParallel
from worldmodel_ros.model.parallel.link import Link
from worldmodel_ros.model.wan.checkpoint import build, tensor_share
from worldmodel_ros.model.wan.parallel import join
from worldmodel_ros.model.wan.precision import to_fp8
from worldmodel_ros.model.wan.sampler import Sampler
from worldmodel_ros.model.wan.sequence import PagedSequences


KINDS = {  # how the network is divided, and the precision of its layers and pages
    'tensor': Precision.FP32, 'tensor-fp8': Precision.FP8, 'sequence': Precision.FP32, 'sequence-fp8': Precision.FP8}


@torch.inference_mode()
def chunks(precision, group=None, count=4):
    """Return latents of chunks, of a branch, and of a sequence resumed from a saved one, with a rolling window and moved
    sinks."""
    layers = torch.float32 if precision is Precision.FP32 else torch.bfloat16
    part = {'part': tensor_share(CONFIG, group.rank, group.count)} if isinstance(group, TensorParallel) else {}
    dit = build(CONFIG, tiny.Drawn(), layers=layers, **part)
    if precision is Precision.FP8:
        to_fp8(dit)
    if group is not None:
        join(dit, group)
    owner = PagedSequences(CONFIG, WINDOW, tiny.GRID, precision, page_tokens=16, branches=1, sequences=2, group=group)
    sampler, sequence, prompt, found = Sampler(dit, SHORT), owner.open(), dit.prompt(tiny.text()), []

    def chunk(sequence, number):
        rays = tiny.draw(f'rays {number}', 3 * math.prod(tiny.GRID), 1536)
        found.append(sampler.chunk(sequence, prompt, tiny.noise(number, 3), tiny.condition(number, 3), rays))
    for number in range(count):
        chunk(sequence, number)
    fork, other = sequence.fork(), owner.open()
    chunk(fork, count)
    other.restore(sequence.save())
    chunk(other, count + 1)
    return found


def sums(link):
    """Sum with the messages of the passes and those of the background, which the processes begin in different order."""
    links, found = (link, link.background()), [None, None]

    def add(kind):
        found[kind] = float(links[kind].sum(torch.tensor([10.0 ** kind])))
    first, second = (0, 1) if link.rank == 0 else (1, 0)
    thread = threading.Thread(target=add, args=(first,))
    thread.start()
    time.sleep(0.2)  # it waits for the other process
    add(second)
    thread.join()
    return found


if __name__ == '__main__':
    gc.freeze()  # imports stay: scanning them for garbage at exit took 0.3 s
    torch.set_num_threads(1)
    folder, rank, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if rank == 0:
        store = Link.listen(count)
        print(store.port, flush=True)
    else:
        store = Link.connect(int(sys.argv[4]), count)
    link = Link.join(torch.device('cpu'), rank, count, store)
    torch.save(sums(link), folder / f'sums.{rank}.pt')
    for kind, precision in KINDS.items():
        group = TensorParallel(link) if kind.startswith('tensor') else SequenceParallel(link, kind == 'sequence-fp8')
        torch.save(chunks(precision, group), folder / f'{kind}.{rank}.pt')
    Link.leave().result()  # else message threads may outlive the interpreter, which then aborts
