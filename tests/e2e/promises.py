"""docs/semantics.md, held to what it says: a test quotes the sentences that it tries, and fails when they are gone."""

import functools
import os
import re

import support

PAGE = os.path.join(support.TOP, "docs", "semantics.md")
# What the tests quoted, and what cannot be tried.
QUOTED = set()
UNTRIED = {"While it is mounted, nobody else may change the upper: the kernel keeps names and attributes as it was told them, and would not notice."}


def words(text):
    return " ".join(text.split())


def page():
    with open(PAGE, encoding="utf-8") as file:
        return file.read()


def promise(*sentences):
    """Says which sentences of the page a test is about."""
    QUOTED.update(map(words, sentences))

    def decorate(test):
        @functools.wraps(test)
        def checked(self, *arguments):
            text = words(page())
            for sentence in sentences:
                self.assertTrue(words(sentence) in text, f"docs/semantics.md does not promise this any more: {sentence}")
            return test(self, *arguments)
        return checked
    return decorate


def made():
    """The promises about writable mounts: each item of the lists there."""
    section = page().partition("\n## Writable mounts\n")[2].partition("\n## ")[0]
    return [words(item) for item in re.findall(r"^- (.*?)(?=^- |^#|^$)", section, re.MULTILINE | re.DOTALL)]


def untested():
    """Promises of which no test quotes a word."""
    known = QUOTED | {words(sentence) for sentence in UNTRIED}
    return [item for item in made() if not any(sentence in item for sentence in known)]
