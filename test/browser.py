"""A real headless browser: renders pages and evaluates expressions in them."""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable')
# Neither the browser itself nor any page may reach the network.
OPTIONS = ('--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--hide-scrollbars',
           '--disable-background-networking', '--disable-component-update', '--disable-sync', '--disable-dev-shm-usage',
           '--disable-extensions', '--host-resolver-rules=MAP * ~NOTFOUND', '--enable-logging=stderr', '--v=0')
_RESULT = re.compile(r'<title>(.*?)</title>', re.DOTALL)


@dataclass(frozen=True)
class Browser:
    """``folder``: for its profile and screenshots."""

    program: str
    folder: Path

    def draw(self, page: Path, width: int, height: int, dark: bool = False) -> tuple[np.ndarray, list[str]]:
        """Return the rendered upper part of the page, uint8 (height, width, 3), and its console messages."""
        picture = self.folder / f'{page.stem}_{width}.png'
        scheme = ['--blink-settings=preferredColorScheme=0'] if dark else []
        done = self._run([*scheme, f'--window-size={width},{height}', f'--screenshot={picture}', page.as_uri()])
        return np.asarray(Image.open(picture).convert('RGB')), [
            line for line in done.stderr.splitlines() if 'CONSOLE' in line]

    def ask(self, page: Path, expression: str, width: int = 1100) -> dict:
        """Evaluate a JavaScript expression on the loaded page, with the page's ban on scripts lifted."""
        html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', '', page.read_text())
        asking = self.folder / 'asking.html'
        asking.write_text(html.replace('</body>', '<script>addEventListener("load", () => { document.title = '
                                       f'JSON.stringify({expression}); }});</script></body>'))
        done = self._run([f'--window-size={width},900', '--dump-dom', asking.as_uri()])
        return json.loads(unescape(_RESULT.search(done.stdout).group(1)))

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess:
        done = subprocess.run([self.program, *OPTIONS, f'--user-data-dir={self.folder / "profile"}', *arguments],
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr[-2000:]
        return done


def browser(folder: Path) -> Browser:
    """Return the browser; skip the test if there is none, except in continuous integration."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        missing = 'no Chromium to look at the report with: apt-get install chromium'
        if os.environ.get('CI', '').lower() in ('1', 'true'):
            pytest.fail(missing)
        pytest.skip(missing)
    return Browser(program, folder)
