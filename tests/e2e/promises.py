"""Checks docs/semantics.md against the tests: a test quotes the sentences that it checks, and fails
if the page no longer contains them."""

import functools
import os
import re

import support

PAGE = os.path.join(support.TOP, "docs", "semantics.md")
# Sentences that tests quote, and sentences that no test can check.
QUOTED = set()
UNTRIED = {"Do not change an upper with another program while it is mounted: the kernel caches "
           "names and attributes and does not notice such changes."}


def words(text):
    return " ".join(text.split())


def page():
    with open(PAGE, encoding="utf-8") as file:
        return file.read()


def promise(*sentences):
    """Decorates a test with the sentences of the page that the test checks."""
    QUOTED.update(map(words, sentences))

    def decorate(test):
        @functools.wraps(test)
        def checked(self, *arguments):
            text = words(page())
            for sentence in sentences:
                self.assertTrue(words(sentence) in text, f"not in docs/semantics.md: {sentence}")
            return test(self, *arguments)
        return checked
    return decorate


def made():
    """The promises about writable mounts: each list item of that section."""
    section = page().partition("\n## Writable mounts\n")[2].partition("\n## ")[0]
    return [words(item)
            for item in re.findall(r"^- (.*?)(?=^- |^#|^$)", section, re.MULTILINE | re.DOTALL)]


def untested():
    """Promises from which no test quotes a sentence."""
    known = QUOTED | {words(sentence) for sentence in UNTRIED}
    return [item for item in made() if not any(sentence in item for sentence in known)]
