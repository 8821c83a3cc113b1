"""The matrix as text: what is expected, for docs/faults.md, and what was observed."""

from collections.abc import Iterable

from faults.matrix import Case, Result


def of_cases(cases: Iterable[Case]) -> str:
    """Return the Markdown table of what is expected."""
    lines = ['| case | what happens | outcome | reaction, at most |', '|---|---|---|---|']
    lines += [f'| `{row.name}` | {row.what} | {row.outcome} | {row.reaction}: {_time(row.bound)} |' for row in cases]
    return '\n'.join(lines)


def of_results(results: Iterable[Result], head: bool = True) -> str:
    """Return the table of what was observed, as text."""
    lines = [f'{"case":34} {"outcome":36} {"reaction":>9} {"bound":>7} {"late":>4} {"lost":>4} {"s":>5}'] if head else []
    for result in results:
        if result.skipped:
            lines.append(f'{result.name:34} skipped: {result.skipped}')
            continue
        reaction = '' if result.reaction_ms is None else f'{result.reaction_ms:.0f} ms'
        lines.append(f'{result.name:34} {result.outcome or "-":36.36} {reaction:>9} {result.bound_ms:>4.0f} ms '
                     f'{_number(result.late):>4} {_number(result.lost):>4} {result.seconds:>5.1f}')
        lines += [f'    played again, since {reason}' for reason in result.played_again]
        lines += [f'    FAILED: {failure}' for failure in result.failures]
    return '\n'.join(lines)


def _number(value: int | None) -> str:
    return '-' if value is None else str(value)


def _time(seconds: float) -> str:
    return f'{seconds:g} s' if seconds >= 2.0 else f'{seconds * 1e3:.0f} ms'
