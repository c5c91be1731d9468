"""What a part prints of each way to train: one line of JSON, which `python -m benchmarks` reads."""

import json
import statistics

START = "ROW "


def print_row(**row) -> None:
    """Print a row of a part's table."""
    print(START + json.dumps(row), flush=True)


def read_row(line: str) -> dict | None:
    """Return the row that a line of a part holds; None if it is another one."""
    return json.loads(line.removeprefix(START)) if line.startswith(START) else None


def compare(step_s: list[float], first_step_s: list[float]) -> dict:
    """Return how the steps of a way compare with those of the first way: medians, and the lowest and highest
    round.

    step_s, first_step_s: the seconds of a step, a number for each round."""
    ratios = [seconds / first_s for seconds, first_s in zip(step_s, first_step_s)]
    median_s = statistics.median(step_s)
    return dict(
        ms_per_step=round(1e3 * median_s, 2),
        times_first=round(median_s / statistics.median(first_step_s), 3),
        lowest=round(min(ratios), 3),
        highest=round(max(ratios), 3),
        rounds=len(ratios),
    )
