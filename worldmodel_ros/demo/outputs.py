"""Writes the results of a run: summary.json and the plots."""
from __future__ import annotations

import json
from pathlib import Path

from worldmodel_ros.demo import charts, film, futures, what_if_picture
from worldmodel_ros.demo.prediction import PredictionScorer
from worldmodel_ros.demo.recording import Recording


def write_summary(directory: Path, summary: dict) -> Path:
    """Write summary.json; return its path."""
    path = directory / 'summary.json'
    path.write_text(json.dumps(summary, indent=2, allow_nan=False) + '\n')
    return path


def draw_all(directory: Path, recording: Recording, scorer: PredictionScorer, summary: dict) -> list[Path]:
    """Write every plot for which there is data; return their paths."""
    drawn: list[Path] = []

    def target(name: str) -> Path:
        drawn.append(directory / name)
        return drawn[-1]

    machine = f'{summary["machine"]["cpu"]}, {summary["machine"]["cores"]} cores'
    if summary['camera_to_command_ms']['commands']:
        load = ' while another program burnt every core' if summary['loaded'] else ''
        commands = summary['camera_to_command_ms']['commands']
        note = f'{commands} commands over ROS 2 in {summary["seconds"]:.0f} s{load}; {machine}'
        charts.draw_latency(target('latency.png'), recording, summary['deadline_ms'] / 1e3, note)
    if len(recording.poses) > 1:
        charts.draw_path(target('path.png'), recording, summary['seconds'])
    chosen = futures.moments(recording, scorer.tolerance)
    if chosen:
        futures.draw_futures(target('futures.png'), recording, chosen, scorer.tolerance)
        futures.draw_animation(target('futures.gif'), recording, scorer.tolerance)
    strip = film.moments(recording, scorer)
    if strip:
        film.draw_film_strip(target('film_strip.png'), strip)
        film.draw_animation(target('prediction.gif'), recording, scorer.tolerance)
    answer = what_if_picture.most_telling(recording.what_ifs)
    if answer is not None:
        observed = recording.image_at(answer.stamp, scorer.tolerance)
        what_if_picture.draw_what_if(target('what_if.png'), answer, observed)
    return drawn
