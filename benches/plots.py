#!/usr/bin/python3
"""Draws the plots of the documents from the tables in docs/benchmarks/*.json.

    benches/plots.py            writes docs/benchmarks/*.svg

Each benchmark writes its tables into a file in this form with BCOW_BENCH_JSON=FILE (measure.py). To
draw a new run, replace the file in docs/benchmarks, and run this.
"""

import json
import math
import pathlib
import re
from html import escape

DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
WIDTH = 760
# A system in all plots: the pattern of its name in the tables, its name, its class below.
OVERLAY = (r"overlayfs( snapshotter)?", "overlayfs", "overlay")
FUSE_OVERLAY = ("fuse-overlayfs", "fuse-overlayfs", "peer")
EXT4 = ("ext4", "ext4, no copy-on-write", "limit")
FUSE = ("bcow(, FUSE driver)?", "bcow, FUSE driver", "fuse")
KERNEL = ("bcow, kernel driver", "bcow, kernel driver", "kernel")
# Colours that people with colour blindness can tell apart, for light and dark pages.
STYLE = """
svg { font: 13px system-ui, 'DejaVu Sans', sans-serif }
.page { fill: #ffffff } text { fill: #1f2328 } .note { fill: #59636e } .grid { stroke: #d1d9e0 }
.title { font-size: 16px; font-weight: 600 } .overlay { color: #d55e00 } .peer { color: #b58900 }
.limit { color: #818b98 } .fuse { color: #56a9e0 } .kernel { color: #0063a8 }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } text { fill: #e6edf3 } .note { fill: #9198a1 } .grid { stroke: #3d444d }
.overlay { color: #ff8a3d } .peer { color: #d9b021 } .limit { color: #8b949e }
.fuse { color: #9dd3f7 } .kernel { color: #2f8ee0 } }
"""


class Run:
    """The tables of one run of a benchmark."""

    def __init__(self, name):
        self.about = json.loads((DIRECTORY / f"{name}.json").read_text())

    def rows(self, wanted):
        """The rows whose title and first cells match a pattern: the match, and cells by heading."""
        found = []
        for table in self.about["tables"]:
            above = ""
            for row in table["rows"]:
                cells = [re.sub("[*`]", "", cell) for cell in row]
                # An empty first cell means that of the row above.
                above = cells[0] = cells[0] or above
                match = re.search(wanted, f"{table['title']}: {cells[0]}: {cells[1]}")
                if match:
                    head = [re.sub(r"\*", "", heading) for heading in table["head"]]
                    found.append((match, list(zip(head, cells))))
        if not found:
            raise SystemExit(f"plots.py: no row matches {wanted}")
        return found

    def note(self):
        about = self.about
        return f"{about['command']}: {about['machine']}; {about['date']}, commit {about['commit']}"


def number(cells, heading):
    """The value below the first heading that matches, None if it was not measured."""
    for head, cell in cells:
        if re.fullmatch(heading, head):
            return None if cell == "-" else float(cell.replace(",", ""))
    raise SystemExit(f"plots.py: no heading matches {heading}: {cells}")


def text(x, y, content, kind="", anchor="start"):
    return (f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">'
            f'{escape(content)}</text>')


def line(x1, y1, x2, y2, kind="grid"):
    return f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" class="{kind}"/>'


def page(title, subtitle, run, height, parts):
    """A plot with its title above, and below it the command that measured."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" role="img">',
        f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="6" class="page"/>',
        text(20, 30, title, "title"), text(20, 50, subtitle, "note"), *parts,
        text(20, height - 14, run.note(), "note"), "</svg>", ""])


def first_write(run):
    """A line for each system: the time of a first write against the size of the file."""
    left, right, top, bottom = 80, 530, 75, 345
    low, high = 5e-5, 5.0
    rows = run.rows(r": (\d+)([KMG]): first write, cold")
    size = lambda match: int(match[1]) << {"K": 10, "M": 20, "G": 30}[match[2]]
    # What was measured with overlayfs too.
    rows = [row for row in rows if number(row[1], OVERLAY[0])]
    sizes = [size(match) for match, _ in rows]
    x = lambda value: left + (right - left) * math.log(value / sizes[0]) / math.log(
        sizes[-1] / sizes[0])
    y = lambda value: bottom - (bottom - top) * math.log(value / low) / math.log(high / low)
    parts = []
    for tick in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        parts += [line(left, y(tick), right, y(tick)),
                  text(left - 10, y(tick) + 4, seconds(tick), "note", "end")]
    for match, value in zip((match for match, _ in rows), sizes):
        parts.append(text(x(value), bottom + 20, f"{match[1]} {match[2]}B", "note", "middle"))
    parts.append(text((left + right) / 2, bottom + 40, "size of the file in the image", "note",
                      "middle"))
    ends = []
    for heading, name, kind in (OVERLAY, FUSE_OVERLAY, FUSE, KERNEL, EXT4):
        values = [(size(match), number(cells, heading)) for match, cells in rows]
        points = [(at, value / 1e6) for at, value in values if value]
        if not points:
            continue
        path = " ".join(f"{x(at):.0f},{y(value):.0f}" for at, value in points)
        parts.append(f'<polyline points="{path}" class="{kind}" fill="none" stroke="currentColor" '
                     f'stroke-width="2.5"/>')
        parts += [f'<circle cx="{x(at):.0f}" cy="{y(value):.0f}" r="4" class="{kind}" '
                  f'fill="currentColor"/>' for at, value in points]
        ends.append((y(points[-1][1]), x(points[-1][0]), f"{name}: {seconds(points[-1][1])}"))
    lowest = math.inf
    for at, beside, label in sorted(ends, reverse=True):
        # Labels do not cover each other.
        lowest = min(at, lowest - 17)
        parts.append(text(beside + 10, lowest + 4, label))
    return page("First write of one byte to a file of the image",
                "Time of open, write and close with an empty page cache; both axes are logarithmic",
                run, bottom + 80, parts)


def seconds(value):
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= unit * 0.9995:
            return f"{value / unit:.{0 if value >= 9.95 * unit else 1}f} {name}".replace(".0 ", " ")
    return "0 s"


def bars(title, subtitle, run, groups, base=0.0):
    """Groups of bars, each (name, [(class, length, text)]). With a base, the bars begin there, and
    the axis is logarithmic."""
    left, width = 235, 17
    every = [one for _, group in groups for one in group]
    if base:
        low, high = (edge(length for _, length, _ in every) for edge in (min, max))
        x = lambda value: left + 45 + 440 * math.log(value / low) / math.log(high / low)
    else:
        # So that the longest label ends before the edge.
        scale = min((WIDTH - 30 - 7.3 * len(label) - left) / length for _, length, label in every)
        x = lambda value: left + scale * value
    parts, y = [], 72
    for name, group in groups:
        middle = y + width * len(group) / 2
        parts.append(text(left - 12, middle + 4, name, "", "end"))
        for kind, length, label in group:
            begin, end = sorted((x(length), x(base)))
            parts.append(f'<rect x="{begin:.0f}" y="{y + 1}" width="{max(end - begin, 1):.0f}" '
                         f'height="{width - 3}" rx="2" class="{kind}" fill="currentColor"/>')
            beside = (begin - 6, "end") if base and length < base else (end + 6, "start")
            parts.append(text(beside[0], y + 13, label, "", beside[1]))
            y += width
        y += 9
    parts.append(line(x(base), 66, x(base), y - 4))
    return page(title, subtitle, run, y + 30, parts)


def work(run):
    """How many times as fast as overlayfs each driver does the work of a container."""
    groups = []
    for name, wanted, unit in (
            ("tar x of 50,000 files", r"tar x( of [\d,]+ files)?: ms", "ms"),
            ("cp -a of them", "cp -a of them", "ms"), ("git clone", "git clone.*, cold", "ms"),
            ("dpkg -i of 6 packages", "dpkg -i", "ms"), ("compileall", "compileall", "ms"),
            ("write 4 KiB, fdatasync", "fdatasync, next", "per s"),
            ("pgbench, 4 clients", "pgbench.*transactions, next.*per s", "per s"),
            ("sysbench, 4 clients", "sysbench.*transactions, next.*per s", "per s")):
        [(_, cells)] = run.rows(wanted)
        rival = number(cells, OVERLAY[0])
        group = []
        for heading, _, kind in (FUSE, KERNEL):
            ours = number(cells, heading)
            factor = ours / rival if unit == "per s" else rival / ours
            group.append((kind, factor, f"{factor:.2g}"))
        groups.append((name, group))
    return bars("Work in a container: times as fast as overlayfs",
                "Right of the line, bcow is faster. Pale: FUSE driver; strong: kernel driver",
                run, groups, 1.0)


def conversion(run):
    groups = []
    for name, wanted, kind in (
            ("zstd -3 of the tar, the limit", "zstd -3 -T1", "limit"),
            ("bcow", "bcow, zstd 3, -j2: ", "kernel"),
            ("bcow --plain", "bcow --plain, -j2: ", "kernel"),
            ("mksquashfs, zstd 3", "mksquashfs", "peer"),
            ("bcow, from gzip layers", "bcow.*from the gzip layers", "kernel"),
            ("gzip -dc of these layers", "gzip -dc", "limit"),
            ("umoci unpack of them", "umoci", "overlay")):
        [(_, cells)] = run.rows(wanted)
        cpu, size = number(cells, "CPU s"), number(cells, "MB")
        groups.append((name, [(kind, cpu, f"{cpu:.1f} s" + (f", {size:,.0f} MB" if size else "")
                               + f", {number(cells, 'peak RSS MiB'):,.0f} MiB")]))
    return bars("Conversion of an image of 1,369 MB",
                "CPU seconds; then the size of the file, and the peak memory", run, groups)


def memory(run):
    groups = []
    for count in (20, 50, 100):
        group = []
        for wanted, kind in ((r"overlayfs", "overlay"), (r"bcow-snapshotter, in a pool$", "kernel"),
                             (r"bcow.*--share off", "fuse")):
            for _, cells in run.rows(rf": {count}: .*"):
                if re.search(wanted, cells[1][1]):
                    value = number(cells, "memory.*")
                    group.append((kind, value, f"{value:,.0f} MiB, " + {
                        "overlay": "overlayfs", "kernel": "bcow, in a pool",
                        "fuse": "bcow, page cache not shared"}[kind]))
        groups.append((f"{count} containers", group))
    return bars("Memory of containers that read the same files",
                "What the machine uses more, page cache included; each maps and reads 100 MB",
                run, groups)


def start(run):
    groups = []
    for name, program in (("git --version", "git"), ("import numpy", "numpy"),
                          ("PostgreSQL, first query", "PostgreSQL")):
        group = []
        for way, kind, label in (("pull, then mount", "overlay", "pull, then mount"),
                                 ("lazy", "fuse", "bcow mount"),
                                 ("listed", "kernel", "bcow mount, with a prefetch list")):
            [(_, cells)] = run.rows(rf"{program}.*: {way}$")
            value = number(cells, "seconds")
            group.append((kind, value, f"{value:.1f} s, {label}"))
        groups.append((name, group))
    return bars("Start of a program from an image in a registry",
                "Seconds with 100 Mbit/s, 20 ms and empty caches; the image has 374 MiB", run,
                groups)


# The file of each plot, the run, and the function that draws it.
PLOTS = {"first-write": ("union", first_write), "work": ("union", work),
         "conversion": ("conversion", conversion), "memory": ("containers", memory),
         "start": ("remote", start)}


def drawn():
    """The text of each SVG file, by its path."""
    return {DIRECTORY / f"{name}.svg": draw(Run(run)) for name, (run, draw) in PLOTS.items()}


if __name__ == "__main__":
    for path, content in drawn().items():
        path.write_text(content)
