"""Robots of a fleet for its benchmarks and tests: real frames to real servers, real answers back."""
from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.serving.client.link import Link, Unavailable, ask_status, open_link
from worldmodel_ros.serving.client.network import Endpoint, server_address
from worldmodel_ros.serving.gateway.accounts import digest, new_token
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.connection import ConnectionLost

GOAL = 'red'


class ServerProcess:
    """``worldmodel serve`` as a process of its own. ``path``: of its socket."""

    def __init__(self, path: Path, store: Path | str, sessions: int = 8, options: tuple[str, ...] = (),
                 priority: int = 0) -> None:
        """``priority``: of its threads, under SCHED_FIFO, as ``--realtime-priority``."""
        self.path = path
        self._log = open(path.with_suffix('.log'), 'w')
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'worldmodel_ros.cli', 'serve', '--socket', str(path), '--store', str(store), '--sessions',
             str(sessions), '--ticks', '0', '--realtime-priority', str(priority), *options], stdout=self._log, stderr=self._log,
            env=dict(os.environ))

    def wait(self, patience: float = 300.0) -> ServerProcess:
        """Return self once it serves. Raises RuntimeError with its log if it does not."""
        end = time.monotonic() + patience
        while time.monotonic() < end and self.process.poll() is None:
            try:
                ask_status(self.path)
                return self
            except Unavailable:
                time.sleep(0.1)
        raise RuntimeError(f'the server at {self.path} has not come up: {self.log()}')

    def status(self) -> dict:
        """Return the server's status."""
        return ask_status(self.path)

    def log(self) -> str:
        """Return what it has printed."""
        return self.path.with_suffix('.log').read_text()

    def stop(self, kill: bool = False) -> int:
        """Stop it; return its exit code."""
        if self.process.poll() is None:
            (self.process.kill if kill else self.process.terminate)()
        code = self.process.wait(30)
        self._log.close()
        return code


class FleetFiles:
    """Certificates, a token and accounts of a fleet's hosts, in a folder. ``files``: as ``Endpoint.files``."""

    def __init__(self, folder: Path, accounts: Sequence[dict[str, Any]] = ()) -> None:
        """``accounts``: in addition to the fleet's own."""
        import trustme
        self.folder, self._authority = folder, trustme.CA()
        self._authority.cert_pem.write_to_path(folder / 'ca.pem')
        token = new_token()
        (folder / 'token').write_text(token)
        own = {'name': 'fleet', 'sha256': digest(token), 'certificate': 'fleet', 'fleet': True, 'sessions': 64, 'messages': 0,
               'megabytes': 0, 'openings': 0}
        (folder / 'accounts.yaml').write_text(yaml.safe_dump({'accounts': [own, *accounts]}))
        issued = self._authority.issue_cert(common_name='fleet')
        issued.private_key_and_cert_chain_pem.write_to_path(folder / 'fleet.pem')
        self.files = str(folder / 'token'), str(folder / 'ca.pem'), str(folder / 'fleet.pem')

    def issue(self, address: str, name: str) -> tuple[Path, Path]:
        """Return a certificate and key for a host."""
        issued = self._authority.issue_cert(address)
        issued.cert_chain_pems[0].write_to_path(self.folder / f'{name}.pem')
        issued.private_key_pem.write_to_path(self.folder / f'{name}.key')
        return self.folder / f'{name}.pem', self.folder / f'{name}.key'


class HostGateway:
    """``worldmodel gateway`` of a fleet's host as a process; ``url``: its own, at ``address``."""

    def __init__(self, fleet: FleetFiles, name: str, address: str, socket: Path, store: Path | None = None) -> None:
        """``socket``: of the server behind it; ``store``: folder that this host keeps for the others. Waits for the gateway.
        Raises RuntimeError."""
        folder, self.files, self.address = fleet.folder, fleet.files, address
        certificate, key = fleet.issue(address, name)
        self._log = open(folder / f'{name}.gateway.log', 'w+')
        self._gateway = subprocess.Popen(
            [sys.executable, '-m', 'worldmodel_ros.cli', 'gateway', '--host', address, '--port', '0', '--socket',
             str(socket), '--accounts', str(folder / 'accounts.yaml'), '--certificate', str(certificate),
             '--key', str(key), '--client-ca', str(folder / 'ca.pem'), '--connects', '0',
             *(('--store', str(store)) if store else ())], stderr=self._log, env=dict(os.environ))
        self.port = self._port()
        self.url = f'wss://{address}:{self.port}'
        self.endpoint = Endpoint(self.url, *self.files)

    def stop_gateway(self, kill: bool = False) -> int:
        """Stop it; return its exit code."""
        (self._gateway.kill if kill else self._gateway.terminate)()
        code = self._gateway.wait(30)
        self._log.close()
        return code

    def _port(self) -> int:
        end, log = time.monotonic() + 60.0, Path(self._log.name)
        while time.monotonic() < end and self._gateway.poll() is None:
            if ' wss://' in (said := log.read_text()):
                return int(said.partition(' wss://')[2].split()[0].rpartition(':')[2])
            time.sleep(0.05)
        raise RuntimeError(f'the gateway at {self.address} has not come up: {log.read_text()}')


class Host(HostGateway):
    """A server and the gateway in front of it, as two processes."""

    def __init__(self, fleet: FleetFiles, name: str, address: str, store: str = '', sessions: int = 8,
                 options: tuple[str, ...] = (), priority: int = 0) -> None:
        """``store``: URL of another host's; empty: this one keeps it. Waits for the gateway only. Raises RuntimeError."""
        self.folder = folder = fleet.folder
        super().__init__(fleet, name, address, folder / f'{name}.sock', None if store else folder / 'store')
        self.server = ServerProcess(folder / f'{name}.sock', store or folder / 'store', sessions, (
            '--host-address', self.url, '--host-token', self.files[0], '--host-ca', self.files[1], '--host-certificate',
            self.files[2], *options), priority)

    def stop(self, kill: bool = False) -> tuple[int, int]:
        """Stop both; return their exit codes."""
        return self.server.stop(kill), self.stop_gateway(kill)


@dataclass(frozen=True, eq=False)
class Answer:
    """``seconds`` from the frame to its answer; ``moves`` of the session in between."""

    number: int
    tier: Tier
    plan: np.ndarray | None
    reason: str
    seconds: float
    server: Path | Endpoint
    generation: int
    moves: int
    actions: np.ndarray | None = None  # for the images, if these were waited for
    frames: np.ndarray | None = None
    collision_risk: np.ndarray | None = None


class Robot:
    """A robot that ticks. ``twin``: a session of a local engine that sees the same frames, and is never moved."""

    def __init__(self, seed: int, server: Path | Endpoint, twin: Engine | None = None, session: str = '',
                 files: tuple[str, str, str] = ('', '', '')) -> None:
        """``files``: as ``Endpoint.files``, for a session that moves to another host."""
        self._files = files
        self._rng = np.random.default_rng(seed)
        self.session = session or uuid.uuid4().hex
        self.twin = twin.open_session() if twin else None
        self._number, self._moves = 0, 0
        self.link: Link | None = None
        self.server = server
        self.generation = 0
        self.connect(server)

    def connect(self, server: Path | Endpoint, patience: float = 10.0) -> Link:
        """Open the session at a server."""
        self.close()
        self.link = open_link(server, f'/{self.session}', None, self.session, self.generation, patience, files=self._files)
        self.server, self.generation = server, self.link.generation
        return self.link

    def close(self) -> None:
        """Close the connection."""
        if self.link:
            self.link.connection.close()
            self.link = None

    def tick(self, due: float = 5.0, shown: bool = False, patience: float = 30.0) -> Answer:
        """Send a frame and wait for its answer; ``shown``: for the images, too."""
        start = self.send(due)
        return self.answer(start, shown, patience)

    def send(self, due: float = 5.0) -> float:
        """Send a frame that is to be answered within ``due`` s; return when it was sent."""
        spec = self.link.spec
        self._number += 1
        self.image = self._rng.integers(0, 256, (*spec.image_size, 3), dtype=np.uint8)
        self.executed = self._rng.uniform(-0.3, 0.5, spec.actions).astype(np.float32)
        start = time.monotonic()
        self._tick = messages.Tick(self._number, self._number % len(self.link.slots), time.time_ns(), 1, GOAL, start + due,
                                   True, self.executed)
        self._send()
        return start

    def _send(self) -> None:
        self.link.slots.write(self._tick.slot, self._tick.number, self.image)
        try:
            self.link.connection.send(self._tick)
        except ConnectionLost:
            pass  # the server's last messages, such as where the session is now, are still to be read

    def answer(self, start: float, shown: bool = False, patience: float = 30.0) -> Answer:
        """Wait for the answer to the frame that was sent at ``start``; follow the session if it moves."""
        found, before = None, self._moves
        end = time.monotonic() + patience
        while time.monotonic() < end:
            received = self.link.receive(max(0.0, end - time.monotonic()))
            if received is None:
                break
            message, frames = received
            if isinstance(message, messages.Moved):
                self._follow(message, resend=found is None)
                if found:
                    return found
            elif isinstance(message, messages.Imagined):
                if found and message.number == self._number:
                    return replace(found, actions=message.actions, frames=frames, collision_risk=message.collision_risk)
            elif isinstance(message, (messages.Planned, messages.Refused, messages.Failed)):
                if message.number != self._number:
                    raise RuntimeError(f'an answer to {message.number}, and {self._number} was asked')
                planned = isinstance(message, messages.Planned)
                found = Answer(self._number, Tier(message.tier) if planned else Tier.NONE, message.plan if planned else None,
                               message.reason, time.monotonic() - start, self.server, self.generation, self._moves - before)
                if not shown or not planned:
                    return found
            elif isinstance(message, (messages.Rejected, messages.Idle)):
                raise RuntimeError(message.reason)
        raise TimeoutError(f'tick {self._number} of {self.session} is not answered after {patience} s')

    def idle(self, seconds: float) -> None:
        """Let time pass; follow the session if it moves meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            received = self.link.receive(left)
            if received is None:
                return
            message, _ = received
            if isinstance(message, messages.Moved):
                self._follow(message, resend=False)

    def _follow(self, moved: messages.Moved, resend: bool) -> None:
        if moved.generation <= self.generation:
            raise RuntimeError(f'it was sent to generation {moved.generation}, and has been at {self.generation}')
        self.generation = moved.generation
        self.connect(server_address(moved.address, *self._files))
        self._moves += 1
        if resend:
            self._send()

    def twin_answers(self, tier: Tier) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Show the twin the newest frame; return its plan, collision risk and images."""
        self.twin.observe(self.image, self.executed)
        if tier is Tier.NONE:
            return None, None, None
        plan = self.twin.plan(GOAL)
        future = self.twin.imagine(plan, 2 if tier is Tier.TWO_STEP else 1)
        return plan, future.collision_risk, self.twin.decode(future)
