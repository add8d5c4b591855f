"""The documents: plots show the figures of the tables, links lead to files and headings, the site
has every page."""

import json
import os
import pathlib
import re
import sys
import unittest

from support import TOP

ROOT = pathlib.Path(TOP)
DOCS = ROOT / "docs"
sys.path.append(str(ROOT / "benches"))

import plots  # noqa: E402

LINK = re.compile(r"\[[^][]*(?:\[[^][]*\][^][]*)*\]\(([^()\s]+)\)")


def prose(path):
    """The text of a document without blocks of code and inline code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("]", " ").strip("`"), text)


def anchors(path):
    """The names of the headings, as mdBook and GitHub make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
    return found


def words(text):
    """The text with single spaces."""
    return " ".join(text.split())


def documents():
    """The Markdown files of the project."""
    for directory, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name != "target" and not name.startswith(".")]
        yield from (pathlib.Path(directory, name) for name in files if name.endswith(".md"))


class Documents(unittest.TestCase):
    def test_plots_are_what_the_program_draws(self):
        drawn = plots.drawn()
        self.assertEqual(set(drawn), set(plots.DIRECTORY.glob("*.svg")))
        for path, text in drawn.items():
            self.assertEqual(path.read_text(), text, f"{path}: run benches/plots.py")

    def test_plotted_tables_are_those_of_the_document(self):
        def cells(row):
            return [re.sub(r"\*\*", "", cell).strip() for cell in row]

        page = (DOCS / "benchmarks.md").read_text()
        rows = [cells(line.strip("|").split("|")) for line in page.splitlines() if line[:1] == "|"]
        files = sorted(plots.DIRECTORY.glob("*.json"))
        self.assertGreater(len(files), 3)
        for file in files:
            for table in json.loads(file.read_text())["tables"]:
                for row in table["rows"]:
                    self.assertIn(cells(row), rows, file)

    def test_links_lead_to_files_and_headings(self):
        checked = 0
        for path in documents():
            for link in LINK.findall(prose(path)):
                if re.match("[a-z]+:", link):
                    continue
                name, _, heading = link.partition("#")
                to = (path.parent / name).resolve() if name else path
                place = f"{path.relative_to(ROOT)}: {link}"
                self.assertTrue(to.exists(), place)
                if heading:
                    self.assertIn(heading, anchors(to), place)
                checked += 1
        self.assertGreater(checked, 200)

    def test_site_has_every_page(self):
        """docs/SUMMARY.md is the table of contents of mdBook, which leaves out other pages."""
        pages = {path.relative_to(DOCS) for path in DOCS.rglob("*.md")}
        listed = re.findall(r"\]\((.*)\)", (DOCS / "SUMMARY.md").read_text())
        self.assertEqual(len(listed), len(set(listed)))
        # It also has pages above docs/, whose existence is checked as that of all links.
        inside = {pathlib.Path(name) for name in listed if not name.startswith("../")}
        self.assertEqual(inside, pages - {pathlib.Path("SUMMARY.md")})


class Reliability(unittest.TestCase):
    """docs/reliability.md: each promise is one of docs/semantics.md, and has a test."""

    # About speed.
    NOT_THERE = {"**As fast as the kernel allows.**"}

    def setUp(self):
        self.semantics = words((DOCS / "semantics.md").read_text())
        page = (DOCS / "reliability.md").read_text()
        tables = re.findall(r"^\| promise \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
        rows = [re.split(r" \| ", row.strip("| ")) for row in "".join(tables).splitlines()]
        self.rows = [(row[0], row[2]) for row in rows]
        self.assertGreater(len(self.rows), 30)

    def test_each_promise_is_one_of_semantics(self):
        for promise, _ in self.rows:
            self.assertIn(promise, self.semantics)

    def test_each_promise_has_a_test(self):
        for promise, attack in self.rows:
            names = re.findall(r"`([^`]+)`", attack)
            files = [name for name in names if re.fullmatch(r"[\w/-]+\.(py|rs)", name)]
            self.assertTrue(files, promise)
            texts = ""
            for name in files:
                path = ROOT / name if "/" in name else ROOT / "tests" / "e2e" / name
                texts += path.read_text()
            for name in names:
                if name.startswith("test_") and name not in files:
                    self.assertIn(f"def {name}(", texts, promise)

    def test_the_promises_of_three_sections_are_there(self):
        text = (DOCS / "semantics.md").read_text()
        for heading in ("## Tenets", "### Durability", "### Space and faults"):
            section = text.partition(f"\n{heading}\n")[2].partition("\n#")[0]
            items = re.findall(r"^(?:-|\d\.) (.*?)(?=^(?:-|\d\.) |\Z)", section,
                               re.MULTILINE | re.DOTALL)
            self.assertGreater(len(items), 4)
            for item in map(words, items):
                if not any(item.startswith(start) for start in self.NOT_THERE):
                    self.assertTrue(any(promise in item for promise, _ in self.rows), item)


if __name__ == "__main__":
    unittest.main()
