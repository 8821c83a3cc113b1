"""A status page of a fleet, for a browser on this machine."""
from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from worldmodel_ros.serving.transport.address import AddressError, is_address_or_localhost

HOST = '127.0.0.1'  # loopback only: there is no password

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>worldmodel fleet</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 2em; color: #222 } table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: .3em .8em; text-align: right; border-bottom: 1px solid #ddd } th { font-weight: 600 }
td:first-child, th:first-child { text-align: left } .lost { background: #fdd } .tight { background: #fe9 }
</style>
<h1>Fleet</h1><p id="about">no answer yet</p>
<table><thead><tr><th>server</th><th>process</th><th>state</th><th>sessions</th><th>load</th><th>busy</th><th>slack</th>
<th>tick</th><th>ticks</th><th>late</th><th>two steps</th></tr></thead><tbody id="servers"></tbody></table>
<h2>Claims</h2><table><thead><tr><th>session</th><th>server</th><th>generation</th></tr></thead>
<tbody id="claims"></tbody></table>
<script>
function row(body, cells, kind) {
  const line = body.insertRow(); line.className = kind || '';
  for (const text of cells) line.insertCell().textContent = text ?? '';
}
async function show() {
  try {
    const status = await (await fetch('status')).json(), fleet = status.fleet;
    document.getElementById('about').textContent =
      `up for ${status.uptime_s} s; ${fleet.placed || 0} placed, ${fleet.moved || 0} moved, ` +
      `${fleet.servers_lost || 0} servers lost`;
    const servers = document.getElementById('servers'), claims = document.getElementById('claims');
    servers.replaceChildren(); claims.replaceChildren();
    for (const s of fleet.servers.filter(s => s.wanted || s.alive || s.host))
      row(servers, [s.socket, s.pid, (s.host ? 'other host, ' : '') + (s.alive ? 'alive ' : 'lost ') + (s.pool || s.problem),
                    s.sessions + (s.places != null ? `, ${s.places} with pages` : ''), s.load, s.busy, s.slack_ms + ' ms',
                    s.tick_ms + ' ms', s.ticks, s.late, (100 * s.two_steps).toFixed(1) + ' %'],
          s.alive ? (s.slack_ms < 0 ? 'tight' : '') : 'lost');
    for (const c of fleet.claims) row(claims, [c.session, fleet.servers[c.server].socket, c.generation]);
  } catch (error) { document.getElementById('about').textContent = 'no answer: ' + error }
}
show(); setInterval(show, 1000);
</script></html>
"""


class Dashboard:
    """Serves the page at ``/`` and its numbers as JSON at ``/status``, from a thread of its own."""

    def __init__(self, status: Callable[[], dict[str, Any]], port: int) -> None:
        """``port``: 0 for any free one. Raises AddressError if it is in use."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not is_address_or_localhost(self.headers.get('Host', '')):
                    self.send_error(403)
                elif self.path == '/':
                    self._send('text/html; charset=utf-8', _PAGE)
                elif self.path == '/status':
                    self._send('application/json', json.dumps(status()))
                else:
                    self.send_error(404)

            def _send(self, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(200)
                self.send_header('Content-Type', kind)
                self.send_header('Content-Length', str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        try:
            self._server = ThreadingHTTPServer((HOST, port), Handler)
        except OSError as error:
            raise AddressError(f'the page cannot be shown at {HOST}:{port} ({error.strerror}): give another --page, 0 for any '
                               'free port or -1 for none') from error
        self._server.daemon_threads = True
        self.url = f'http://{HOST}:{self._server.server_port}/'
        threading.Thread(target=self._server.serve_forever, name='dashboard', daemon=True).start()

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
