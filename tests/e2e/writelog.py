"""The log of dm-log-writes: what reached a device, in order, with flushes and marks.

Format: Linux, Documentation/admin-guide/device-mapper/log-writes.rst and
drivers/md/dm-log-writes.c. A superblock in sector 0, then for each request a sector-sized head and
the data behind it.
"""

import collections
import os
import random
import struct

MAGIC = 0x6A736677736872
FLUSH, FUA, DISCARD, MARK, METADATA = 1, 2, 4, 8, 16
SECTOR = 512

# `at` is where the data lies in the log, `text` that of a mark.
Entry = collections.namedtuple("Entry", "sector sectors flags at text")


class Log:
    """The entries of a log that lies in a file."""

    def __init__(self, path):
        self.file = open(path, "rb")
        magic, version, count, self.size = struct.unpack("<QQQI", self.file.read(28))
        if (magic, version, self.size) != (MAGIC, 1, SECTOR):
            raise AssertionError(f"{path}: not a log of dm-log-writes with sectors of 512 bytes")
        self.entries = []
        position = self.size
        for _ in range(count):
            self.file.seek(position)
            sector, sectors, flags, length = struct.unpack("<QQQQ", self.file.read(32))
            text = self.file.read(length).rstrip(b"\0").decode() if flags & MARK else None
            position += self.size
            self.entries.append(Entry(sector, sectors, flags, position, text))
            if not flags & (MARK | DISCARD):
                position += sectors * SECTOR

    def close(self):
        self.file.close()

    def marks(self):
        """Where each mark is, in the order of the log: (number of the entry, text)."""
        return [(number, entry.text) for number, entry in enumerate(self.entries)
                if entry.flags & MARK]

    def unsafe(self, end):
        """The writes before entry `end` that a power cut may undo: no flush followed them."""
        loose = []
        for number, entry in enumerate(self.entries[:end]):
            if entry.flags & FLUSH:
                loose.clear()
            if not entry.flags & (FUA | MARK) and entry.sectors:
                loose.append(number)
        return loose

    def replay(self, device, end, lost=(), begin=0):
        """Writes the entries from `begin` up to `end` to a file, without the lost ones."""
        lost = set(lost)
        file = os.open(device, os.O_WRONLY)
        try:
            for number in range(begin, end):
                entry = self.entries[number]
                if entry.flags & MARK or not entry.sectors or number in lost:
                    continue
                length = entry.sectors * SECTOR
                if entry.flags & DISCARD:
                    data = bytes(length)
                else:
                    data = os.pread(self.file.fileno(), length, entry.at)
                os.pwrite(file, data, entry.sector * SECTOR)
        finally:
            os.close(file)

    def cuts(self, count, seed):
        """Power cuts: (end, lost writes, last mark before it). Each mark is one, with nothing lost
        behind it; the others are at random places and lose random writes that nothing flushed."""
        dice = random.Random(seed)
        marks = self.marks()
        first = marks[0][0]
        for number, (end, text) in enumerate(marks):
            yield end, (), text
        for _ in range(count):
            end = dice.randrange(first + 1, len(self.entries) + 1)
            loose = self.unsafe(end)
            share = dice.choice((0.1, 0.5, 0.9, 1.0))
            lost = [one for one in loose if dice.random() < share]
            yield end, lost, [text for at, text in marks if at < end][-1]
