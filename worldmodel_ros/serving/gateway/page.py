"""The status page of an account's sessions: answers by tier, their times, and the newest predicted frames."""
from __future__ import annotations

import base64
import hashlib

import cv2
import numpy as np

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777 }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem }
h1 { font-size: 1.3rem; margin: 0 } #model, #empty, figcaption { color: var(--dim) }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums }
th { font-weight: 600 } td.number, th.number { text-align: right } .scroll { overflow-x: auto }
#state { font-weight: 600 } #state.away { color: #c33 }
figure { margin: 1rem 0 }
img { image-rendering: pixelated; height: 8rem; max-width: 100%; object-fit: contain; border: 1px solid var(--line) }
"""

_SCRIPT = """
const at = path => new URL(path, location.origin), cell = (row, text, kind) => {
  const made = row.insertCell(); made.textContent = text ?? ''; if (kind) made.className = kind; return made };
const byId = id => document.getElementById(id), figures = new Map();
const say = (text, away) => { byId('state').textContent = text; byId('state').className = away ? 'away' : '' };
function picture(session) {
  let figure = figures.get(session.session_id);
  if (!figure) {
    figure = document.createElement('figure');
    const image = document.createElement('img'), caption = document.createElement('figcaption');
    image.alt = 'predicted frames of ' + session.session_id; caption.textContent = session.session_id;
    figure.append(image, caption); byId('frames').append(figure); figures.set(session.session_id, figure);
  }
  if (figure.dataset.number !== String(session.pictures)) {  // only what is new is fetched
    figure.dataset.number = session.pictures;
    const source = at('/v1/sessions/frames');
    source.search = new URLSearchParams({session_id: session.session_id, number: session.pictures});
    figure.firstChild.src = source;
  }
}
async function show() {
  try {
    const answer = await fetch(at('/v1/sessions'), {cache: 'no-store'});
    if (!answer.ok) throw new Error('HTTP ' + answer.status);
    const {sessions, engine} = await answer.json(), body = byId('sessions').tBodies[0];
    body.replaceChildren();
    for (const session of sessions) {
      const row = body.insertRow(), tiers = Object.entries(session).filter(([name]) => name.startsWith('tier_'))
        .map(([name, count]) => name.slice(5).replaceAll('_', ' ') + ' ' + count).join(', ');
      cell(row, session.session_id); cell(row, session.dialect); cell(row, session.connected ? 'yes' : 'no');
      cell(row, tiers || (session.imagined ? 'imagined ' + session.imagined : ''));
      for (const name of ['refused', 'late', 'p50_ms', 'p99_ms']) cell(row, session[name] ?? 0, 'number');
      if (session.pictures) picture(session);
    }
    for (const [name, figure] of figures)
      if (!sessions.some(session => session.session_id === name)) { figure.remove(); figures.delete(name) }
    byId('empty').hidden = sessions.length > 0;
    say(engine ? 'The engine answers.' : 'The engine does not answer.', !engine);
  } catch (error) { say('The gateway does not answer: ' + error.message, true) }
  setTimeout(show, 1000);
}
fetch(at('/v1/models')).then(answer => answer.json()).then(({data: [model]}) => {
  byId('model').textContent =
    `${model.id} on ${model.backend}, ${model.image_size.join('x')}, ${model.action_names.join(' and ')}`;
}).catch(() => {});
show();
"""

_BODY = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>worldmodel gateway</title><style>{style}</style></head>
<body><h1>worldmodel gateway</h1><div id="model"></div><p id="state" role="status">...</p>
<div class="scroll"><table id="sessions"><thead><tr><th>session</th><th>dialect</th><th>connected</th><th>answers by tier</th>
<th class="number">refused</th><th class="number">late</th><th class="number">p50 [ms]</th><th class="number">p99 [ms]</th>
</tr></thead><tbody></tbody></table></div>
<p id="empty">No sessions of yours are open.</p><div id="frames"></div><script>{script}</script></body></html>
"""

HTML = _BODY.format(style=_STYLE, script=_SCRIPT)
_JPEG_QUALITY = 85
_SHOWN = 8  # frames of one image


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Only the script above runs, and nothing is fetched from elsewhere.
HEADERS = {
    'Content-Security-Policy': f"default-src 'none'; script-src {_source(_SCRIPT)}; style-src {_source(_STYLE)}; "
                               "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
                               "frame-ancestors 'none'",
    'X-Content-Type-Options': 'nosniff', 'Referrer-Policy': 'no-referrer', 'Cache-Control': 'no-store'}


def strip(frames: np.ndarray) -> bytes:
    """Return predicted frames, uint8 (T, H, W, 3), next to each other as a JPEG; at most eight of them."""
    chosen = frames[np.linspace(0, len(frames) - 1, min(len(frames), _SHOWN)).round().astype(int)]
    image = np.concatenate(list(chosen), axis=1)
    return cv2.imencode('.jpg', image[..., ::-1], (cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY))[1].tobytes()
