"""Changes of a directory that follow from a number: the guest makes them durable one by one, and
the host looks for them after a power cut."""

import os
import random

# Each change has its own part of the big file.
PART = 100_000
BIG = "big"


def content(name):
    """A file's bytes: random, repeated and zero pieces, of odd lengths."""
    dice = random.Random(name)
    pieces = []
    for _ in range(dice.randrange(6)):
        length = dice.choice((1, 511, 4096, 5000, 65536, 100_001, 700_000))
        kind = dice.randrange(4)
        pieces.append(bytes(length) if kind == 0 else dice.randbytes(64) * (length // 64)
                      if kind == 1 else dice.randbytes(length))
    return b"".join(pieces)


def data_of(number):
    return (content(f"change{number}") or b"x")[:PART - 1]


def kind_of(number):
    return ("file", "directory", "rename", "overwrite")[number % 4]


def path_of(where, number):
    inside = "/file" if kind_of(number) == "directory" else ""
    return f"{where}/change{number:03}{inside}"


def make(where, number):
    """Makes a change: a new file, a new directory with a file, a new file under its second name, or
    a write into the big file. It is durable when the function returns."""
    data, path = data_of(number), path_of(where, number)
    if kind_of(number) == "overwrite":
        with open(f"{where}/{BIG}", "r+b", buffering=0) as file:
            file.seek(number * PART)
            file.write(data)
            os.fsync(file.fileno())
        return
    first = path
    if kind_of(number) == "directory":
        os.mkdir(os.path.dirname(path))
    if kind_of(number) == "rename":
        first += ".new"
    with open(first, "xb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
    os.rename(first, path)
    for directory in {os.path.dirname(path), where}:
        flush_directory(directory)


def flush_directory(path):
    directory = os.open(path, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def is_made(where, number):
    """Whether a change is there, whole."""
    data = data_of(number)
    try:
        with open(path_of(where, number) if kind_of(number) != "overwrite" else f"{where}/{BIG}",
                  "rb") as file:
            if kind_of(number) != "overwrite":
                return file.read() == data
            file.seek(number * PART)
            return file.read(len(data)) == data
    except FileNotFoundError:
        return False
