"""The results of benches/union.py: values by row and subject, and their tables."""

import statistics

import papers
from measure import MIB, table

# Units in which more is better; in all other units less is better.
RATES = ("MB/s", "per s", "IOPS")


def shown(value):
    if value == 0:
        return "0"
    return (f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
            if value >= 0.1 else f"{value:.3f}")


def mib(amount):
    return None if amount is None else amount / MIB


class Results:
    def __init__(self):
        # (part, row, unit) -> subject -> a value for each round.
        self.values = {}

    def note(self, part, row, unit, subject, value):
        # A row keeps its place even if the first subject has no value for it.
        values = self.values.setdefault((part, row, unit), {})
        if value is not None:
            values.setdefault(subject.name, []).append(value)

    def show(self, part, title, measured):
        rows = []
        for (of, row, unit), values in self.values.items():
            if of != part or not values:
                continue
            middle = {name: statistics.median(list_) for name, list_ in values.items()}
            cells = [shown(middle[one.name]) if one.name in middle else "-" for one in measured]
            rows.append([row, unit, *cells, times(middle, "native", unit),
                         times(middle, "overlay", unit), papers.result(part, row)])
        if rows:
            table(f"### {title}", ["", "unit", *[one.title for one in measured], "against ext4",
                                   "against overlayfs", "the paper"], rows)


def times(middle, rival, unit):
    """The factor by which bcow is better than a rival."""
    ours, theirs = middle.get("bcow"), middle.get(rival)
    if not ours or not theirs:
        return "-"
    return shown(ours / theirs if unit in RATES else theirs / ours)
