"""Small pieces of HTML: text, tables, images as data; and the names of the one or two evaluations of a report."""
from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import cv2
import numpy as np

from worldmodel_ros.evaluate.drive.compare import names
from worldmodel_ros.evaluate.drive.evaluation import Evaluation

JPEG_QUALITY = 92
DIFFERENCE_WHITE = 96  # of 255: a difference that is drawn at full brightness

KINDS = ('a', 'b')  # style classes, in the order of the evaluations

__all__ = ['Run', 'bounds', 'difference', 'escape', 'number', 'picture', 'runs', 'section', 'signed', 'table']


@dataclass(frozen=True)
class Run:
    """``name``, as HTML: what tells this evaluation from the other one, after its ``letter`` if there are two.

    ``kind``: its style class.
    """

    letter: str
    name: str
    kind: str
    evaluation: Evaluation


def runs(evaluations: Sequence[Evaluation]) -> list[Run]:
    """One or two evaluations, named by what differs between them."""
    if not 1 <= len(evaluations) <= len(KINDS):
        raise ValueError(f'a report shows one evaluation or two, not {len(evaluations)}')
    told = ['model'] if len(evaluations) == 1 else names(evaluations)
    letters = ('',) if len(evaluations) == 1 else ('A', 'B')
    return [Run(letter, f'{letter}: {escape(name)}' if letter else name, kind, e)
            for letter, name, kind, e in zip(letters, told, KINDS, evaluations)]


def section(anchor: str, title: str, *body: str, lead: str = '') -> str:
    """A section with its heading and a sentence on what it shows."""
    text = f'<p class="lead">{lead}</p>' if lead else ''
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{text}{"".join(body)}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = '') -> str:
    """A table of ready HTML cells; all columns but the first are aligned as numbers."""
    def line(cells: Sequence[str], tag: str) -> str:
        first, *rest = cells
        scope = ' scope="row"' if tag == 'td' else ' scope="col"'
        others = ''.join(f'<{tag}{" scope=col" if tag == "th" else ""}>{cell}</{tag}>' for cell in rest)
        return f'<tr><th{scope}>{first}</th>{others}</tr>'
    title = f'<caption>{caption}</caption>' if caption else ''
    return (f'<div class="scroll"><table>{title}<thead>{line(head, "th")}</thead>'
            f'<tbody>{"".join(line(row, "td") for row in rows)}</tbody></table></div>')


def picture(pixels: np.ndarray, alternative: str) -> str:
    """An image element that holds the pixels, uint8 (H, W, 3) RGB, as a JPEG."""
    good, data = cv2.imencode('.jpg', pixels[..., ::-1], [
        cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444])
    if not good:
        raise ValueError(f'cannot encode an image of {pixels.dtype} {pixels.shape}')
    height, width = pixels.shape[:2]
    return (f'<img src="data:image/jpeg;base64,{base64.b64encode(data).decode()}" width="{width}" height="{height}" '
            f'alt="{escape(alternative)}">')


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two images differ, in false colours: black for not at all, bright from DIFFERENCE_WHITE of 255 on."""
    gap = np.abs(a.astype(np.float32) - b.astype(np.float32)).mean(2) * (255.0 / DIFFERENCE_WHITE)
    return cv2.applyColorMap(np.clip(gap, 0, 255).astype(np.uint8), cv2.COLORMAP_INFERNO)[..., ::-1]


def number(value: float | None, digits: int = 1, unit: str = '') -> str:
    """A number, or a dash where there is none."""
    return '&ndash;' if value is None else f'{value:.{digits}f}{unit and "&#8239;" + unit}'.replace('-', '&minus;')


def signed(value: float | None, digits: int = 1, unit: str = '') -> str:
    """A number that always has its sign."""
    return '&ndash;' if value is None else f'{value:+.{digits}f}{unit and "&#8239;" + unit}'.replace('-', '&minus;')


def bounds(interval: dict, digits: int = 1, sign: bool = False) -> str:
    """The bounds of an interval's dict, small; empty where it has none."""
    if interval['low'] is None:
        return ''
    show = signed if sign else number
    return f'<small>{show(interval["low"], digits)} to {show(interval["high"], digits)}</small>'
