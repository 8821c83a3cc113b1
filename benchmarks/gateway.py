"""What the network gateway costs, how many robots it serves in time, and what hostile clients do to the others.

    python benchmarks/gateway.py --json benchmarks/results/gateway_<machine>.json
    python benchmarks/gateway.py --model small --backend torch-bf16 --json benchmarks/results/gateway_small_<gpu>.json
    python benchmarks/gateway.py --parts cost --seconds 5                  # some of it

Engine (``worldmodel serve``), gateway and clients are processes of their own on one machine. A preset without shipped weights
gets random ones, which are as fast. Rows: ``round_trip_ms`` at the client; ``gateway_ms`` of it, everything but the engine's
answer over the Unix socket; ``plain_ms``, what bare WebSockets take for as many bytes, measured in turn with it; ``refused``
requests; of ``clients`` robots at --rate each, ``in_time``, the share of all due observations that were answered within
--deadline ms. TLS needs the program openssl.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np
from result_file import ROOT, provenance, write_result

PARTS = ('cost', 'clients', 'camera', 'full', 'pings', 'drop', 'hostile', 'memory')
LARGE = (2, 224, 224, 3)  # two images of openpi's size: 301,056 bytes
_ALONE = 20.0             # observations a second of one robot that has the engine alone
_PLAN_BYTES = 400         # of an openpi answer
WARM_UP = 20              # requests that are not counted
START = 300.0             # s, for a model to load and to be measured
TOKEN, HOSTILE = 'benchmark', 'hostile'
CAMERA = '/v1/realtime/world/camera'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='tiny', help='a shipped model, a folder, or a preset (default: tiny)')
    parser.add_argument('--backend', default='auto')
    parser.add_argument('--rate', type=float, default=10.0, help='observations a second of one robot (default: 10)')
    parser.add_argument('--deadline', type=float, default=100.0, help='ms (default: 100)')
    parser.add_argument('--clients', type=int, nargs='+', default=[1, 2, 4, 8])
    parser.add_argument('--seconds', type=float, default=20.0, help='of each row (default: 20)')
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=list(PARTS))
    parser.add_argument('--connects', type=int, default=1000, help='hostile connections a second (default: 1000)')
    parser.add_argument('--hostile', nargs=3, help=argparse.SUPPRESS)  # kind, URL, certificate: this process is hostile
    parser.add_argument('--plain', nargs='*', help=argparse.SUPPRESS)  # certificate, key: this process is a plain server
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    if options.plain is not None:
        asyncio.run(serve_plainly(*options.plain))
        return 0
    if options.hostile:
        kind, url, certificate = options.hostile
        _give_way()
        if kind == 'stranger':
            connect_always(url, options.connects)
        else:
            asyncio.run(be_hostile(url, ssl.create_default_context(cafile=certificate)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for part in options.parts:
            print(f'{part} ...', file=sys.stderr, flush=True)
            getattr(bench, part)()
            bench.result['load_average'] = os.getloadavg()
            write_result(bench.result, options.json)  # after each part, so that its measurements are not lost
        write_result(bench.result, options.json, show=True)
    return 0


class Bench:
    """One method per part; each adds to ``result``."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.socket = folder / 'engine.sock'
        self.model = _model(options.model, folder)
        self.result = {**provenance(), 'model': options.model, 'backend': options.backend, 'rate_hz': options.rate,
                       'deadline_ms': options.deadline, 'seconds_of_a_row': options.seconds, 'rows': []}

    def cost(self) -> None:
        """
        Time one client, one request after the other: what the gateway adds; and, in turn, what bare WebSockets take, with a
        server that only waits as long as the engine took, and receives and sends as many bytes.
        """
        for tls in (False, True):
            with self.engine(), self.gateway(tls) as url:
                size = self.image_size(url)
                with self.plain(tls) as plain:
                    for shape in ((1, *size, 3), LARGE):
                        self.row(url, tls, [shape], _ALONE / 2, plain)

    def clients(self) -> None:
        """Run so many robots on one engine, with random phases."""
        with self.engine(sessions=max(self.options.clients)), self.gateway(False) as url:
            size = self.image_size(url)
            for count in self.options.clients:
                self.row(url, False, [(1, *size, 3)] * count, rate=self.options.rate)
        rows = [row for row in self.result['rows'] if 'in_time' in row and row.get('part') == 'clients']
        alone = next((row for row in rows if row['clients'] == 1), None)
        for row in rows if alone and alone['mean_ms'] else ():
            row['mean_to_alone'] = round(row['mean_ms'] / alone['mean_ms'], 3) if row['mean_ms'] else None

    def camera(self) -> None:
        """Run a camera-controlled world, one chunk of the model per request."""
        for tls in (False, True):
            with self.engine(), self.gateway(tls) as url:
                trips, costs, size, refused = asyncio.run(film(url, self.trust(url), self.options.seconds))
                self.result['rows'].append({'dialect': 'camera', 'clients': 1, 'bytes': size, 'tls': tls,
                                            'round_trip_ms': quantiles(trips), 'gateway_ms': quantiles(costs),
                                            'refused': refused, 'requests': len(trips)})

    def full(self) -> None:
        """Time the refusal of one session more than the engine takes."""
        with self.engine(sessions=2), self.gateway(False) as url:
            self.result['one_too_many_refused_ms'] = asyncio.run(one_too_many(url, self.image_size(url)))

    def pings(self) -> None:
        """Time the answers to pings while the engine is busy with one long request."""
        with self.engine(), self.gateway(False) as url:
            took, pings = asyncio.run(ping_while_busy(url))
        self.result['pings'] = {'engine_busy_s': round(took, 3), 'answered_ms': quantiles(pings), 'pings': len(pings)}

    def drop(self) -> None:
        """Time from a cut connection to the next answer of the same session."""
        with self.engine(), self.gateway(True) as url:
            gaps = asyncio.run(drop_often(url, self.trust(url), self.image_size(url), 20))
        self.result['reconnect_ms'] = {**quantiles(gaps), 'drops': len(gaps)}

    def hostile(self) -> None:
        """Run a robot over TLS: alone, next to a process that connects without a token, and next to a hostile client."""
        found, hostile = {}, ('stranger', 'client')
        cores = sorted(os.sched_getaffinity(0))
        for kind in ('quiet', 'stranger', 'quiet again', 'client', 'quiet at last'):
            with self.engine(), self.gateway(True, connects=20.0, accounts=True) as url:
                if len(cores) > 1:  # the engine has a core of its own
                    _pin(self.server.pid, cores[:1])
                    _pin(self.door.pid, cores[1:])
                    _pin(os.getpid(), cores[1:])
                attacker = None
                if kind in hostile:
                    attacker = subprocess.Popen([
                        sys.executable, __file__, '--hostile', kind, url, self.certificate[0], '--connects',
                        str(self.options.connects)], stdout=subprocess.PIPE, text=True)
                    attacker.stdout.readline()  # a stranger begins in 2 s
                before, begun = _cpu(self.door.pid), time.monotonic()
                row = asyncio.run(drive(url, self.trust(url), [(1, *self.image_size(url), 3)], _ALONE,
                                        self.options.deadline, self.options.seconds))
                row['gateway_cores'] = round((_cpu(self.door.pid) - before) / (time.monotonic() - begun), 4)
                if attacker:
                    attacker.send_signal(signal.SIGINT)
                    row[kind] = json.loads(attacker.communicate()[0])
                found[kind] = row
        _pin(os.getpid(), cores)
        slow = {kind: row['round_trip_ms']['p99'] for kind, row in found.items() if row['round_trip_ms']}
        quiet = [p99 for kind, p99 in slow.items() if kind not in hostile]
        for kind in hostile:
            found[kind]['p99_to_quiet'] = round(slow[kind] / np.mean(quiet), 3) if quiet and kind in slow else None
        self.result['hostile'] = found

    def memory(self) -> None:
        """Send messages of 16 MiB, which are refused, and record the growth of the gateway's peak resident memory."""
        with self.engine(), self.gateway(False) as url:
            def peak() -> int:
                return int(re.search(r'VmHWM:\s+(\d+)', Path(f'/proc/{self.door.pid}/status').read_text())[1]) * 1024
            asyncio.run(_once(url, self.image_size(url)))
            before = peak()
            closed = asyncio.run(send_large(url, 16 << 20, 20))
            self.result['hostile_16_MiB'] = {'sent': 20, 'closed_with': closed, 'peak_growth_bytes': peak() - before}

    def row(self, url: str, tls: bool, shapes: list[tuple[int, ...]], rate: float, plain: str = '') -> None:
        row = asyncio.run(drive(url, self.trust(url), shapes, rate, self.options.deadline, self.options.seconds, plain))
        self.result['rows'].append({'dialect': 'openpi', 'clients': len(shapes), 'bytes': row.pop('bytes'), 'tls': tls, **row,
                                    'part': 'cost' if plain else 'clients'})

    @cached_property
    def certificate(self) -> tuple[Path, Path]:
        return _certificate(self.folder)

    @contextmanager
    def engine(self, sessions: int = 8) -> Iterator[None]:
        """Run ``worldmodel serve`` until the end of the block."""
        self.server = process = _start(
            'serve', '--model', self.model, '--backend', self.options.backend, '--sessions', sessions, '--socket', self.socket,
            '--ticks', 0, '--questions', 0, '--session-directory', self.folder / 'sessions')
        try:
            from worldmodel_ros.serving.client.link import Unavailable, ask_status
            end = time.monotonic() + START
            while True:
                try:
                    ask_status(self.socket)
                    break
                except Unavailable:
                    if process.poll() is not None or time.monotonic() > end:
                        raise SystemExit('the engine has not started: worldmodel serve says why') from None
                    time.sleep(0.1)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()

    @contextmanager
    def gateway(self, tls: bool, connects: float = 0.0, accounts: bool = False) -> Iterator[str]:
        """Run ``worldmodel gateway`` until the end of the block; yield its URL."""
        arguments = ['--socket', self.socket, '--port', 0, '--connects', connects]
        arguments += ['--certificate', self.certificate[0], '--key', self.certificate[1]] if tls else []
        if accounts:
            from worldmodel_ros.serving.gateway.accounts import digest
            file = self.folder / 'accounts.yaml'
            file.write_text(f'accounts:\n  - {{name: robot, sha256: {digest(TOKEN)}}}\n'
                            f'  - {{name: other, sha256: {digest(HOSTILE)}}}\n')
            arguments += ['--accounts', file]
        self.door = process = _start('gateway', *arguments, stderr=subprocess.PIPE)
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r'is the gateway at (wss?)://[^:]+:(\d+)', line):
                    break
            else:
                raise SystemExit('the gateway has not started: ' + ''.join(said[-20:]))
            yield f'{found[1]}://127.0.0.1:{found[2]}'
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()

    @contextmanager
    def plain(self, tls: bool) -> Iterator[str]:
        """Run ``serve_plainly`` until the end of the block; yield its URL."""
        process = subprocess.Popen([sys.executable, __file__, '--plain', *(self.certificate if tls else ())],
                                   stdout=subprocess.PIPE, text=True)
        try:
            yield f'{"wss" if tls else "ws"}://127.0.0.1:{int(process.stdout.readline())}'
        finally:
            process.terminate()
            process.wait()

    def trust(self, url: str) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=self.certificate[0]) if url.startswith('wss') else None

    def image_size(self, url: str) -> tuple[int, int]:
        async def ask() -> tuple[int, int]:
            async with _connected(url, self.trust(url)) as connection:
                return tuple(_decode(await connection.recv())['image_size'])
        return asyncio.run(ask())


async def drive(url: str, trust: ssl.SSLContext, shapes: list[tuple[int, ...]], rate: float, deadline: float, seconds: float,
                plain: str = '') -> dict:
    """
    Run robots, each with an observation every period whatever became of the one before; return a summary of all. ``plain``:
    URL of ``serve_plainly``, to which each sends one, too, after each answer.
    """
    begin = time.monotonic() + 1.0
    phases = np.random.default_rng(1).uniform(0.0, 1.0 / rate, len(shapes))
    found = await asyncio.gather(*(robot(url, trust, f'robot{k}', shape, begin + phase, rate, deadline, seconds, plain)
                                   for k, (shape, phase) in enumerate(zip(shapes, phases))))
    trips, costs, refused, offered = ([value for each in found for value in each[k]] for k in range(4))
    alone = [value for each in found for value in each[5]]
    answered_in_time = sum(trip <= deadline for trip in trips)
    return {'bytes': int(np.prod(shapes[0])), 'round_trip_ms': quantiles(trips), 'gateway_ms': quantiles(costs),
            **({'plain_ms': quantiles(alone)} if alone else {}), 'refused': len(refused), 'offered': sum(offered),
            'in_time': round(answered_in_time / max(1, sum(offered)), 5),
            'mean_ms': round(float(np.mean(trips)), 3) if trips else None,
            'tiers': {tier: sum(each[4].count(tier) for each in found) for tier in sorted({t for e in found for t in e[4]})}}


async def robot(url: str, trust: ssl.SSLContext, name: str, shape: tuple[int, ...], begin: float, rate: float, deadline: float,
                seconds: float, plain: str) -> tuple:
    """Return round trips and the gateway's part of them [ms], refusals, number offered, tiers, and round trips without it."""
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    trips, costs, refused, tiers, alone, offered = [], [], [], [], [], 0
    async with _connected(url, trust) as connection, AsyncExitStack() as stack:
        other = await stack.enter_async_context(_connected(plain, trust)) if plain else None
        await connection.recv()
        await connection.send(_encode({'endpoint': 'reset', 'session_id': name}))  # steps begin again
        await connection.recv()
        count = round(seconds * rate)
        for step in range(-WARM_UP, count):
            due = begin + (step + WARM_UP) / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            late = max(0.0, time.monotonic() - due)
            if late > 1.0 / rate:  # the one before took too long: this one was offered, but its time has passed
                offered += step >= 0
                continue
            message = {'observation/image': images[0], 'prompt': 'red', 'session_id': name, 'step_id': step + WARM_UP,
                       'deadline_ms': deadline if step >= 0 else 5000.0}
            if len(images) > 1:
                message['observation/wrist_image'] = images[1]
            encoded, sent = _encode(message), time.monotonic()
            await connection.send(encoded)
            reply = await connection.recv()
            trip = 1e3 * (time.monotonic() - sent)
            if step < 0:
                continue
            offered += 1
            if isinstance(reply, str):
                refused.append(reply)
                continue
            timing = _decode(reply)['server_timing']
            trips.append(trip)
            costs.append(trip - timing['infer_ms'])
            tiers.append(timing['tier'])
            if other:
                alone.append(await exchange_plainly(other, len(encoded), timing['infer_ms']))
    return trips, costs, refused, [offered], tiers, alone


async def serve_plainly(certificate: str = '', key: str = '') -> None:
    """Answer each message with as many bytes as a plan has, after the wait [ms] that it begins with; print the port."""
    from websockets.asyncio.server import ServerConnection, serve

    async def answer(connection: ServerConnection) -> None:
        async for message in connection:
            begun = time.monotonic()
            await asyncio.sleep(1e-3 * struct.unpack_from('d', message)[0])
            await connection.send(struct.pack('d', 1e3 * (time.monotonic() - begun)) + bytes(_PLAN_BYTES))
    tls = None
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
    async with serve(answer, '127.0.0.1', 0, compression=None, max_size=None, ssl=tls) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.Future()


async def exchange_plainly(connection, size: int, wait: float) -> float:
    """Return the round trip [ms] of a message of ``size`` bytes to ``serve_plainly``, without its wait [ms]."""
    message, sent = struct.pack('d', wait) + bytes(size), time.monotonic()
    await connection.send(message)
    reply = await connection.recv()
    return 1e3 * (time.monotonic() - sent) - struct.unpack_from('d', reply)[0]


async def film(url: str, trust: ssl.SSLContext, seconds: float) -> tuple[list, list, int, int]:
    """Request a chunk of the model at a time, one after the other."""
    trips, costs, refused, size = [], [], 0, 0
    async with _connected(url + CAMERA, trust) as connection:
        about = _decode(await connection.recv())
        chunk, optical = about['latent_frames_per_chunk'], np.array(about['camera_in_base'])
        begin, x, first = time.monotonic(), 0.0, True
        while time.monotonic() - begin < seconds:
            count, poses = chunk + first, []
            for k in range(count):
                base = np.eye(4)
                x += 0.02 if not (first and k == 0) else 0.0
                base[0, 3] = x
                poses.append(base @ optical)
            request = {'prompt': '', 'camera': {'poses': np.array(poses), 'intrinsics': np.float32([32, 32, 32, 32])},
                       'session_id': 'film', 'extensions': {'frames': 'uint8', 'timings': True},
                       'extra_body': {'frames_per_chunk': count}}
            if first:
                request['image'] = np.zeros((*about['image_size'], 3), np.uint8)
            encoded, sent = _encode(request), time.monotonic()
            await connection.send(encoded)
            raw = await connection.recv()
            reply = _decode(raw)
            trip = 1e3 * (time.monotonic() - sent)
            if reply['type'] == 'error':
                refused += 1
                print(reply['message'], file=sys.stderr)
                break
            if not first:
                size = len(encoded) + len(raw)
                trips.append(trip)
                costs.append(trip - reply['timings']['imagine_ms'])
            first = False
    return trips, costs, size, refused


async def one_too_many(url: str, size: tuple[int, int]) -> float:
    """Return how soon the third robot is refused by an engine with two places [ms]."""
    connections = [await _connected(url, None) for _ in range(3)]
    try:
        for k, connection in enumerate(connections):
            await connection.recv()
            sent = time.monotonic()
            await connection.send(_encode({'observation/image': np.zeros((*size, 3), np.uint8), 'prompt': 'red',
                                           'session_id': f'r{k}', 'deadline_ms': 5000.0}))
            reply = await connection.recv()
        assert isinstance(reply, str) and 'sessions are open' in reply, reply
        return round(1e3 * (time.monotonic() - sent), 2)
    finally:
        for connection in connections:
            await connection.close()


async def ping_while_busy(url: str) -> tuple[float, list[float]]:
    """Return how long one long request took the engine [s], and how soon pings were answered meanwhile [ms]."""
    async with _connected(url + CAMERA, None) as busy, _connected(url, None) as other:
        about = _decode(await busy.recv())
        await other.recv()
        poses = np.tile(np.array(about['camera_in_base']), (about['max_poses'], 1, 1))
        await busy.send(_encode({'prompt': '', 'image': np.zeros((*about['image_size'], 3), np.uint8), 'camera': {
            'poses': poses, 'intrinsics': np.float32([32, 32, 32, 32])}, 'extensions': {'frames': 'uint8', 'timings': True},
            'extra_body': {'frames_per_chunk': 64}}))
        answer, pings = asyncio.create_task(busy.recv()), []
        while not answer.done():
            for connection in (busy, other):
                begun = time.monotonic()
                await (await connection.ping())
                pings.append(1e3 * (time.monotonic() - begun))
            await asyncio.sleep(0.01)
        return 1e-3 * _decode(answer.result())['timings']['imagine_ms'], pings


async def drop_often(url: str, trust: ssl.SSLContext, size: tuple[int, int], drops: int) -> list[float]:
    """Return ms from the loss of a connection to the first answer of the same session over a new one."""
    gaps, image = [], np.zeros((*size, 3), np.uint8)
    for step in range(drops + 1):
        lost = time.monotonic()
        connection = await _connected(url, trust)
        await connection.recv()
        await connection.send(_encode({'observation/image': image, 'prompt': 'red', 'session_id': 'r', 'step_id': step,
                                       'deadline_ms': 5000.0}))
        reply = _decode(await connection.recv())
        assert reply['episode'] == 1, 'the session has begun again'
        gaps.append(1e3 * (time.monotonic() - lost))
        connection.transport.abort()
    return gaps[1:]


async def _once(url: str, size: tuple[int, int]) -> None:
    async with _connected(url, None) as connection:
        await connection.recv()
        await connection.send(_encode({'observation/image': np.zeros((*size, 3), np.uint8), 'deadline_ms': 5000.0}))
        await connection.recv()


async def send_large(url: str, size: int, times: int) -> list[int]:
    """Send messages that are too long; return the codes with which the connections were closed."""
    from websockets.exceptions import ConnectionClosed
    codes = set()
    for _ in range(times):
        connection = await _connected(url, None)
        await connection.recv()
        try:
            await connection.send(b'\xc6' + (size - 5).to_bytes(4, 'big') + bytes(size - 5))
            await connection.recv()
        except ConnectionClosed as closed:
            codes.add(closed.rcvd.code if closed.rcvd else 1006)
    return sorted(codes)


def connect_always(url: str, rate: int) -> None:
    """
    Open ``rate`` connections a second without a token until interrupted; print the rate reached and this side's cost.

    Each sends a TLS ClientHello, which makes a server compute, and hangs up 50 ms later.
    """
    host, port = re.search(r'//([^:]+):(\d+)', url).groups()
    print('ready', flush=True)
    time.sleep(2.0)  # until the robot has connected
    over, hello, attempts, begin = [], _client_hello(), 0, time.monotonic()
    signal.signal(signal.SIGINT, lambda *_: over.append(True))
    waiting: deque[tuple[float, socket.socket]] = deque()
    while not over:
        now = time.monotonic()
        for _ in range(min(int((now - begin) * rate) - attempts, 100)):
            each = socket.socket()
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))  # else ports run out
            each.bind(('127.0.0.2', 0))  # limits are by address
            each.connect_ex((host, int(port)))
            with suppress(OSError):
                each.send(hello)  # a connection to this machine is established at once
            waiting.append((now + 0.05, each))
            attempts += 1
        while waiting and waiting[0][0] < now:
            waiting.popleft()[1].close()
        time.sleep(0.002)
    print(json.dumps({'a_second': round(attempts / (time.monotonic() - begin)),
                      'attacker_cores': round(time.process_time() / (time.monotonic() - begin), 3)}), flush=True)


async def be_hostile(url: str, trust: ssl.SSLContext | None) -> None:
    """
    Attack the gateway as a client with a valid token of its own, until interrupted: observations without an image, damaged
    ones, messages that are too long, as fast as they are accepted. Prints how many there were of each.
    """
    from websockets.exceptions import ConnectionClosed, InvalidHandshake
    print('ready', flush=True)
    loop, stop, counts = asyncio.get_running_loop(), asyncio.Event(), Counter()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    other = _encode({'observation/other_image': np.zeros((224, 224, 3), np.uint8), 'session_id': 'hostile'})
    messages = [('other', other)] * 20 + [('damaged', other[:-1])] + [('other', other)] * 20 + [('long', bytes(16 << 20))]

    async def attack() -> None:
        while not stop.is_set():
            try:
                async with _connected(url, trust, HOSTILE) as connection:
                    await connection.recv()
                    for kind, message in messages:
                        await connection.send(message)
                        counts[kind] += 1
                        reply = await connection.recv()
                        counts['refused'] += isinstance(reply, str)
            except (ConnectionClosed, InvalidHandshake, OSError, TimeoutError):
                counts['connections_lost'] += 1
    attacking = [asyncio.create_task(attack()) for _ in range(4)]
    await stop.wait()
    print(json.dumps(counts), flush=True)
    for task in attacking:
        task.cancel()
    os._exit(0)  # cut open connections


def _client_hello() -> bytes:
    """Return the first message of TLS 1.3, as a client sends it."""
    context, outgoing = ssl.create_default_context(), ssl.MemoryBIO()
    secured = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname='x')
    try:
        secured.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError('there is no other side')


def quantiles(values: list[float]) -> dict[str, float] | None:
    """Return p50 and p99 [ms]."""
    return {name: round(float(np.quantile(values, q)), 3) for name, q in (('p50', 0.5), ('p99', 0.99))} if values else None


def _connected(url: str, trust: ssl.SSLContext | None, token: str = TOKEN):
    from websockets.asyncio.client import connect
    return connect(url, compression=None, max_size=None, ping_interval=None, ssl=trust if url.startswith('wss') else None,
                   additional_headers={'Authorization': f'Bearer {token}'}, open_timeout=60.0, proxy=None)


def _encode(value: dict) -> bytes:
    from worldmodel_ros.serving.gateway.msgpack import encode
    return encode(value)


def _decode(data: bytes) -> dict:
    from worldmodel_ros.serving.gateway.msgpack import decode
    return decode(data)


def _start(*arguments: object, **options: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, '-m', 'worldmodel_ros.cli', *map(str, arguments)], text=True, env={
        **os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))},
        **{'stderr': None, **options})


def _model(name: str, folder: Path) -> str:
    """Return a model for ``worldmodel serve``: for a preset without shipped weights, a folder with random ones."""
    from worldmodel_ros.model.presets import PRESETS
    if name not in PRESETS or (ROOT / 'worldmodel_ros' / 'weights' / name).is_dir():
        return name
    import torch

    from worldmodel_ros.model import checkpoint
    from worldmodel_ros.model.world_model import WorldModel
    torch.manual_seed(0)
    model = WorldModel(PRESETS[name])
    checkpoint.save(model.eval().requires_grad_(False), folder / name, {'trained': False})
    return str(folder / name)


def _give_way() -> None:
    """Yield to all other processes of the benchmark: in use, this load would be another machine's."""
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    else:
        os.nice(19)


def _pin(pid: int, cores: list[int]) -> None:
    """Pin all threads of a process to these cores."""
    for thread in Path(f'/proc/{pid}/task').iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def _cpu(pid: int) -> float:
    """Return the CPU time of a process [s]."""
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def _certificate(folder: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate of this machine, valid for a day, and its key."""
    files = folder / 'host.pem', folder / 'host.key'
    subprocess.run(['openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes', '-days',
                    '1', '-subj', '/CN=127.0.0.1', '-addext', 'subjectAltName=IP:127.0.0.1', '-keyout', files[1], '-out',
                    files[0]], check=True, capture_output=True)
    return files


if __name__ == '__main__':
    sys.exit(main())
