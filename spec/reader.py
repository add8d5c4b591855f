#!/usr/bin/env python3
"""A second reader of BCoW files, written from bcow-v1.md alone.

It is slow and plain on purpose: where it and another reader disagree, one of them or the text is
wrong. "Section n" is a section of bcow-v1.md.

    reader.py info    FILE                    header, backings and metadata as JSON
    reader.py map     FILE                    the map, one line per entry
    reader.py check   FILE                    the full check of section 12
    reader.py extract FILE OUT                the address space, as a sparse file

    --store DIR   a directory of backings named by digest; may be given more than once
    --names DIR   a directory of backings named by file name, and of those named by digest for which
                  the metadata has a file name

Exit codes: 0 ok; 1 rejected, with `error-code: message` on stderr; 2 usage, or something outside
the file (it cannot be opened, a backing is not found, there is no zstd module).

The output of `map` is text, all numbers are decimal. The first line is

    bcow-map-1 size=N region_shift=N regions=N file_bytes=N use=U state=S slot=L generation=N
    incompatible=N read_only_compatible=N compatible=N backings=N

(one line, single spaces), with U one of image, disk, sketch; S one of writable, sealed; L one of A,
B. Then one line for each root entry that is not a table, and one for each entry of a sub-block
table, in the order of the address space, nothing merged, and as the record log leaves them:

    LBA LENGTH absent 0 0
    LBA LENGTH zero 0 0
    LBA LENGTH raw UBA STORED CHECK
    LBA LENGTH zstd UBA STORED CHECK
    LBA LENGTH open UBA STORED 0
    LBA LENGTH window ADDRESS SHOWN INDEX
    LBA LENGTH fragment ADDRESS SHOWN INDEX

LBA and LENGTH are in bytes, LENGTH that of the block, or of the region for a root entry. STORED is
the entry's length, CHECK its check. For a window and a fragment ADDRESS is the byte offset in the
backing, SHOWN the bytes shown (of a window, sectors times 4096), INDEX that of the backing.

The output of `check` is the line `ok`, or `error-code place`. Places: `file`, `slot-a`, `slot-b`,
`header`, `root`, `root[region]`, `table[region]`, `table[region][block]`, `backing`,
`backing[index]`, `metadata`, `free`, `free[index]`, `log[sequence]`, `log[sequence][mapping]`,
`merkle[level][hash]`, `merkle`.
"""

import argparse
import bisect
import copy
import hashlib
import json
import os
import signal
import struct
import sys

KIB = 1024
MIB = 1024 * KIB
SECTOR = 4096  # section 1
SLOT_BYTES = 512  # section 3
CONTENT_START = 4096  # section 2: everything but the slots lies here or later
SLOTS_END = 1024
PIECE = 64 * KIB  # bytes of one read where the size does not matter


class Rejected(Exception):
    """The file breaks the format. `code` is one of section 12, `place` says where."""

    def __init__(self, code, place, message):
        super().__init__(code, place, message)
        self.code = code
        self.place = place
        self.message = message
        self.path = None  # of the file, known where it is opened

    def __str__(self):
        return f"{self.code}: {self.path}: {self.place}: {self.message}"


class Unable(Exception):
    """Something outside the file is missing: no statement about the file."""


# --------------------------------------------------------------------------------------------------
# CRC32C (the text before section 1)


def _crc_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = _crc_table()


def crc32c_bytewise(data, register):
    """The definition: the CRC register after `data`, without initial value and final XOR."""
    for byte in data:
        register = (register >> 8) ^ CRC_TABLE[(register ^ byte) & 0xFF]
    return register


# The CRC of data does not change when a multiple of the CRC polynomial is added to it. Taken as one
# integer, least significant bit first, 1 + y^454 + y^505 + y^510 + y^532 + y^563 is such a
# multiple; and as squaring keeps sums in GF(2), so it is with all exponents doubled, any number of
# times. Adding it, times the first 454 * 2^k bits, clears these bits. So a few shifts of a big
# integer halve the data, and the byte-wise loop only sees the last hundred bytes.
FOLD = (454, 505, 510, 532, 563)


def crc32c_folded(data, register):
    """The same as crc32c_bytewise, some twenty times faster."""
    bits = 8 * len(data)
    if len(data) < 256:
        return crc32c_bytewise(data, register)
    value = int.from_bytes(data, "little") ^ register
    for doublings in range((bits // (FOLD[0] + FOLD[-1])).bit_length() - 1, -1, -1):
        step = FOLD[0] << doublings
        while bits >= (FOLD[0] + FOLD[-1]) << doublings:
            first = value & ((1 << step) - 1)
            value >>= step
            bits -= step
            for term in FOLD:
                value ^= first << ((term - FOLD[0]) << doublings)
    # Zeros before the data do not change a CRC that starts with zero.
    whole = (bits + 7) // 8
    value <<= 8 * whole - bits
    return crc32c_bytewise(value.to_bytes(whole, "little"), 0)


def crc32c(data):
    """CRC32C of bytes."""
    return crc32c_of_pieces(data[at : at + PIECE] for at in range(0, len(data), PIECE))


def crc32c_of_pieces(pieces):
    """CRC32C of an iterable of bytes. Pieces of 64 KiB keep the big integers in the processor's
    cache."""
    register = 0xFFFFFFFF
    for piece in pieces:
        register = crc32c_folded(piece, register)
    return register ^ 0xFFFFFFFF


# --------------------------------------------------------------------------------------------------
# zstd frames (section 5, RFC 8878)

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class BadFrame(Exception):
    """The data is not exactly one zstd frame of the wanted length."""


def walk_frame(data):
    """Follow the structure of one frame (RFC 8878, 3.1.1), which must be all of `data`.

    Returns (content size or None, has checksum, blocks), each block as (type, size, position).
    """

    def need(at, count):
        if at + count > len(data):
            raise BadFrame("the frame is cut off")
        return data[at : at + count]

    if need(0, 4) != ZSTD_MAGIC:
        raise BadFrame("no zstd frame")
    descriptor = need(4, 1)[0]
    single_segment = bool(descriptor & 0x20)
    has_checksum = bool(descriptor & 0x04)
    if descriptor & 0x08:
        raise BadFrame("a reserved bit is set in the frame header")
    at = 5
    if not single_segment:
        need(at, 1)
        at += 1
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
    if int.from_bytes(need(at, dictionary_bytes), "little") != 0:
        raise BadFrame("the frame wants a dictionary")
    at += dictionary_bytes
    size_bytes = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    content_size = None
    if size_bytes:
        content_size = int.from_bytes(need(at, size_bytes),
                                      "little") + (256 if size_bytes == 2 else 0)
    at += size_bytes
    blocks = []
    last = False
    while not last:
        header = int.from_bytes(need(at, 3), "little")
        at += 3
        last = bool(header & 1)
        kind, size = (header >> 1) & 3, header >> 3
        if kind == 3:
            raise BadFrame("reserved block type")
        stored = 1 if kind == 1 else size
        need(at, stored)
        blocks.append((kind, size, at))
        at += stored
    if has_checksum:
        need(at, 4)
        at += 4
    if at != len(data):
        raise BadFrame(f"{len(data) - at} bytes behind the frame")
    return content_size, has_checksum, blocks


def decompress(data, length):
    """The content of `data`, one zstd frame of exactly `length` bytes."""
    content_size, has_checksum, blocks = walk_frame(data)
    if content_size is not None and content_size != length:
        raise BadFrame(f"the frame says it holds {content_size} bytes, not {length}")
    library = zstd_library()
    if library is not None:
        content = library(data, length)
    elif has_checksum or any(kind == 2 for kind, _, _ in blocks):
        raise Unable(
            "this file needs a zstd module: `zstandard` (python3-zstandard), or Python 3.14")
    else:
        content = without_library(data, blocks, length)
    if len(content) != length:
        raise BadFrame(f"the frame holds {len(content)} bytes, not {length}")
    return content


def without_library(data, blocks, length):
    """Frames of raw and run-length blocks only need no zstd module."""
    if sum(size for _, size, _ in blocks) != length:
        raise BadFrame(f"the frame does not hold {length} bytes")
    return b"".join(
        data[at : at + size] if kind == 0 else data[at : at + 1] * size for kind, size, at in blocks
    )


def zstd_library():
    """A function (frame, greatest length) -> content, or None."""
    try:
        import zstandard
    except ImportError:
        pass
    else:

        def with_zstandard(data, length):
            try:
                return zstandard.ZstdDecompressor().decompress(data, max_output_size=length)
            except zstandard.ZstdError as error:
                raise BadFrame(str(error)) from None

        return with_zstandard
    try:
        from compression import zstd
    except ImportError:
        return None

    def with_compression_zstd(data, length):
        try:
            # One byte more than wanted: this detects a frame that is too long, and limits one that
            # is far too long.
            return zstd.ZstdDecompressor().decompress(data, max_length=length + 1)
        except zstd.ZstdError as error:
            raise BadFrame(str(error)) from None

    return with_compression_zstd


# --------------------------------------------------------------------------------------------------
# Header slots (section 3) and features (section 4)

MAGIC = b"BCoW\r\n\x1a\n"
VERSION = 1
USES = {1: "image", 2: "disk", 3: "sketch"}
STATES = {0: "writable", 1: "sealed"}

INCOMPATIBLE = {0: "zstd", 1: "backing", 2: "records", 3: "windows", 4: "plain", 5: "fragments",
                6: "views", 7: "urls"}
ZSTD, BACKING, RECORDS, WINDOWS, PLAIN, FRAGMENTS, VIEWS, URLS = (1 << bit for bit in INCOMPATIBLE)
MERKLE = 1 << 0  # read-only-compatible

HEADER = struct.Struct(
    "<8sHHIQQQQ"  # magic version slot_bytes slot_crc generation, three feature masks
    "BBBBI"  # use state region_shift merkle_chunk_shift reserved
    "QQ"  # size file_bytes
    "QII"  # root
    "QII"  # metadata
    "QIIII"  # backing table, count, reserved
    "QQ32s"  # merkle
    "QQ"  # log
    "QII"  # free list
    "304s"  # reserved
)
assert HEADER.size == SLOT_BYTES
HEADER_FIELDS = (
    "magic version slot_bytes slot_crc generation incompatible read_only_compatible compatible "
    "use state region_shift merkle_chunk_shift reserved_52 size file_bytes "
    "root_offset root_entries root_crc metadata_offset metadata_bytes metadata_crc "
    "backing_offset backing_bytes backing_crc backing_count reserved_124 "
    "merkle_offset merkle_bytes merkle_root log_offset log_bytes free_offset free_bytes free_crc "
    "reserved_208").split()


class Header:
    """The fields of a slot, by the names of section 3."""

    def __init__(self, slot, raw):
        self.slot = slot  # "A" or "B"
        self.raw = raw
        for name, value in zip(HEADER_FIELDS, HEADER.unpack(raw), strict=True):
            setattr(self, name, value)

    @property
    def region_bytes(self):
        return 1 << self.region_shift

    @property
    def root_bytes(self):
        return 16 * self.root_entries

    def region_length(self, region):
        """Section 6: the last region has what is left of the size."""
        return min(self.region_bytes, self.size - region * self.region_bytes)

    def sections(self):
        """What the header names: (name, offset, length)."""
        return [
            ("root", self.root_offset, self.root_bytes),
            ("metadata", self.metadata_offset, self.metadata_bytes),
            ("backing", self.backing_offset, self.backing_bytes),
            ("merkle", self.merkle_offset, self.merkle_bytes),
            ("log", self.log_offset, self.log_bytes),
            ("free", self.free_offset, self.free_bytes),
        ]


def choose_slot(start):
    """Section 3, "Choosing a slot". `start` is the first 1024 bytes of the file, or what there is
    of them."""
    intact = []
    others = []
    magics = 0
    for name, at in (("A", 0), ("B", SLOT_BYTES)):
        slot = start[at : at + SLOT_BYTES]
        if slot[:8] != MAGIC:
            continue
        magics += 1
        version = int.from_bytes(slot[8:10], "little") if len(slot) >= 10 else VERSION
        other = Rejected("version", f"slot-{name.lower()}", f"version {version}, not {VERSION}")
        if version != VERSION:
            others.append(other)
        if len(slot) < SLOT_BYTES:
            continue
        header = Header(name, slot)
        if (header.slot_bytes == SLOT_BYTES
            and header.slot_crc == crc32c(slot[:12] + bytes(4) + slot[16:])):
            if version != VERSION:
                raise other
            intact.append(header)
    if not magics:
        raise Rejected("not-bcow", "file", "neither header slot begins with the magic")
    if not intact and others:
        raise others[0]
    if not intact:
        raise Rejected("header-crc", "file", "no header slot is intact")
    # max() takes the first of equals: slot A.
    return max(intact, key=lambda header: header.generation)


def check_features(header):
    """Section 4: unknown incompatible bits."""
    for bit in range(64):
        if header.incompatible >> bit & 1 and bit not in INCOMPATIBLE:
            raise Rejected("unknown-feature", "header",
                           f"incompatible feature bit {bit} is not known")


def check_fields(h):
    """Section 3, "Checks on a header", up to the length of the file."""

    def must(condition, message):
        if not condition:
            raise Rejected("header-field", "header", message)

    must(h.generation >= 1, "generation is 0")
    must(h.use in USES, f"use {h.use}")
    must(h.state in STATES, f"state {h.state}")
    must(h.use != 1 or h.state == 1, "an image that is not sealed")
    must(12 <= h.region_shift <= 30, f"region_shift {h.region_shift}")
    must(h.merkle_chunk_shift == 0 or 12 <= h.merkle_chunk_shift <= 20,
         f"merkle_chunk_shift {h.merkle_chunk_shift}")
    must(h.reserved_52 == 0, "the reserved bytes at 52")
    must(h.reserved_124 == 0, "the reserved bytes at 124")
    must(h.reserved_208 == bytes(304), "the reserved bytes at 208")
    must(h.size % SECTOR == 0 and h.size <= 1 << 48, f"size {h.size}")
    must(CONTENT_START <= h.file_bytes <= 1 << 48, f"file_bytes {h.file_bytes}")
    must(not h.incompatible & RECORDS or h.file_bytes % SECTOR == 0,
         f"file_bytes {h.file_bytes} beside a log")
    must(h.root_entries == -(-h.size // h.region_bytes), f"root_entries {h.root_entries}")
    must(h.root_entries <= 1 << 22, f"root_entries {h.root_entries}")
    must(h.root_offset % 16 == 0, f"root_offset {h.root_offset}")
    must(h.metadata_bytes <= 16 * MIB, f"metadata_bytes {h.metadata_bytes}")
    must(h.backing_offset % 16 == 0, f"backing_offset {h.backing_offset}")
    must(h.backing_bytes <= 16 * MIB, f"backing_bytes {h.backing_bytes}")
    must(h.backing_count <= 65536, f"backing_count {h.backing_count}")
    must(h.backing_bytes >= 64 * h.backing_count, f"backing_bytes {h.backing_bytes}")
    must(h.backing_count or not h.backing_bytes, "backing_bytes without backing_count")
    for name, offset, length in h.sections():
        if length == 0:
            must(offset == 0, f"{name}: an offset and no length")
        else:
            must(offset >= CONTENT_START, f"{name}: offset {offset}")
            must(offset + length <= h.file_bytes, f"{name}: ends behind file_bytes")
            must(not h.incompatible & RECORDS or offset % SECTOR == 0,
                 f"{name}: offset {offset} beside a log")
    must(h.root_entries or h.root_crc == 0, "root_crc without root table")
    must(h.metadata_bytes or h.metadata_crc == 0, "metadata_crc without metadata")
    must(h.backing_bytes or h.backing_crc == 0, "backing_crc without backing table")
    must(h.free_bytes or h.free_crc == 0, "free_crc without free list")
    # Section 4.
    must(not h.incompatible & (BACKING | WINDOWS | FRAGMENTS) or h.backing_count >= 1,
         "backing, windows or fragments without backing table")
    must(not h.incompatible & PLAIN or not h.incompatible & BACKING,
         "a plain file with the feature backing")
    must(not h.incompatible & PLAIN or not h.incompatible & RECORDS,
         "a plain file with the feature records")
    must(not h.incompatible & FRAGMENTS or not h.incompatible & (PLAIN | RECORDS),
         "fragments in a file that is plain or has a record log")
    must(bool(h.read_only_compatible & MERKLE) == bool(h.merkle_chunk_shift),
         "bit merkle against merkle_chunk_shift")
    # The record log and the free list.
    must(bool(h.incompatible & RECORDS) == bool(h.log_bytes), "bit records against log_bytes")
    must(h.log_offset % SECTOR == 0, f"log_offset {h.log_offset}")
    must(h.log_bytes % SECTOR == 0 and h.log_bytes <= 64 * MIB, f"log_bytes {h.log_bytes}")
    must(h.free_offset % 16 == 0, f"free_offset {h.free_offset}")
    must(h.free_bytes % 16 == 0 and h.free_bytes <= 16 * MIB, f"free_bytes {h.free_bytes}")
    must(h.state == 0 or not (h.log_bytes or h.free_bytes),
         "a record log or free list in a sealed file")
    # Section 9.
    if h.merkle_chunk_shift:
        must(h.state == 1, "a Merkle tree in a file that is not sealed")
        must(h.merkle_bytes and h.merkle_root != bytes(32), "the Merkle tree is not given whole")
        must(h.merkle_offset + h.merkle_bytes == h.file_bytes,
             "the Merkle tree does not end the file")
        wanted = sum(merkle_levels(h.merkle_offset, h.merkle_chunk_shift))
        must(h.merkle_bytes == wanted, f"merkle_bytes {h.merkle_bytes}, not {wanted}")
    else:
        must(not h.merkle_bytes and h.merkle_root == bytes(32),
             "Merkle fields without merkle_chunk_shift")


def merkle_levels(covered, chunk_shift):
    """The lengths in bytes of the levels of a tree over `covered` bytes (section 9)."""
    chunk = 1 << chunk_shift
    lengths = [32 * -(-covered // chunk)]
    while lengths[-1] > 32:
        lengths.append(32 * -(-lengths[-1] // chunk))
    return lengths


# --------------------------------------------------------------------------------------------------
# Entries (section 5)

ENTRY = struct.Struct("<BB6sII")
KINDS = {0: "absent", 1: "zero", 2: "raw", 3: "zstd", 4: "table", 5: "window", 6: "open",
         7: "fragment"}


class Entry:
    """One entry: its fields and its place."""

    def __init__(self, raw, place, lba, block_length):
        self.kind, self.reserved, address, self.length, self.check = ENTRY.unpack(raw)
        self.address = int.from_bytes(address, "little")
        self.place = place
        self.lba = lba
        self.block_length = block_length  # of the block, or of the region for a root entry
        self.logged = False  # whether a record brought it

    @property
    def name(self):
        return KINDS[self.kind]

    @property
    def shown(self):
        """Bytes of a backing that a window or fragment shows."""
        return self.length * SECTOR if self.name == "window" else self.length


def check_entry(entry, header, in_root, code, file_bytes):
    """Sections 5, 6 and 11, as far as the entry and the header alone decide."""

    def must(condition, message, code=code):
        if not condition:
            raise Rejected(code, entry.place, message)

    must(entry.kind in KINDS, f"kind {entry.kind}")
    kind = entry.name
    must(in_root or kind not in ("table", "window"), f"kind {kind} in a sub-block table")
    must(entry.reserved == 0, "the reserved byte")
    if kind in ("absent", "zero"):
        must(entry.address == 0 and entry.length == 0 and entry.check == 0,
             f"{kind} with other fields than 0")
    elif kind == "window":
        must(header.incompatible & WINDOWS, "a window without the feature windows")
        must(entry.address % SECTOR == 0, f"address {entry.address}")
        must(entry.length >= 1, "a window of 0 sectors")
        # Section 8. The check against the backing's size follows after the backing table is read.
        must(entry.length * SECTOR <= entry.block_length, "more sectors than the region has",
             "window-range")
        must(entry.check < header.backing_count, f"backing {entry.check}", "window-range")
    elif kind == "fragment":
        must(header.incompatible & FRAGMENTS, "a fragment without the feature fragments")
        must(entry.length >= 1, "a fragment of no bytes")
        # Section 8. In a sub-block table the code stays that of the table.
        range_code = "window-range" if in_root else code
        must(entry.length <= entry.block_length, "more bytes than the block has", range_code)
        must(entry.check < header.backing_count, f"backing {entry.check}", range_code)
    else:
        plain = header.incompatible & PLAIN
        at_zero = entry.address == 0 and plain and kind == "raw"
        # Section 10, "Places".
        must(not header.incompatible & RECORDS or entry.address % SECTOR == 0,
             f"address {entry.address} beside a log")
        must(entry.address >= CONTENT_START or at_zero, f"address {entry.address}")
        must(entry.address + entry.length <= file_bytes, "the stored range ends behind file_bytes")
        if kind == "table":
            must(entry.address % 16 == 0, f"address {entry.address}")
            return
        must(not in_root or header.region_shift <= 24,
             f"a block of a region of shift {header.region_shift}")
        if kind == "raw":
            must(entry.length == entry.block_length,
                 f"length {entry.length}, not {entry.block_length}")
            must(not plain or entry.address == entry.lba, "UBA is not LBA in a plain file")
        elif kind == "open":
            must(header.incompatible & RECORDS, "an open block without the feature records")
            must(not plain, "an open block in a plain file")
            must(entry.length == entry.block_length,
                 f"length {entry.length}, not {entry.block_length}")
            must(entry.check == 0, "the check of an open block")
        else:
            must(header.incompatible & ZSTD, "a zstd block without the feature zstd")
            must(not plain, "a zstd block in a plain file")
            must(1 <= entry.length < entry.block_length, f"length {entry.length}")


# --------------------------------------------------------------------------------------------------
# Sub-block tables (section 7) and backing tables (section 8)

TABLE_HEADER = struct.Struct("<4sB3sQ")
TABLE_MAGIC = b"BCST"
BACKING_ENTRY = struct.Struct("<BBHIQI12s32s")


class Backing:
    """One entry of the backing table."""

    def __init__(self, kind, size, digest, name):
        self.kind, self.size, self.digest, self.name = kind, size, digest, name

    def __str__(self):
        return f"sha256:{self.digest.hex()}" if self.kind == 1 else repr(self.name)


def decode_backing(table, index, header, count=None):
    """The entry `index` of the backing table, or of the table of one entry in a view."""
    place = f"backing[{index}]"
    entries = header.backing_count if count is None else count

    def must(condition, message):
        if not condition:
            raise Rejected("backing-entry", place, message)

    start = 0 if count is not None else 64 * index
    must(start + 64 <= len(table), "the entry ends behind the table")
    (kind, reserved, name_bytes, name_offset, size, layout, reserved_20,
     digest) = BACKING_ENTRY.unpack_from(table, start)
    must(kind in (1, 2, 4) or kind == 3 and count is None, f"kind {kind}")
    must(reserved == 0 and reserved_20 == bytes(12), "reserved bytes")
    must(kind == 3 or layout == 0, "a layout in an entry that is no view")
    must(size % SECTOR == 0 and size <= 1 << 48, f"size {size}")
    if kind == 1:
        must(name_bytes == 0 and name_offset == 0, "a name in an entry by digest")
        return Backing(kind, size, digest, None)
    must(64 * entries <= name_offset, "the name lies in the entries")
    must(name_offset + name_bytes <= len(table), "the name ends behind the backing table")
    if kind == 3:
        must(header.use == 2, "a view in a file that is not a disk")
        must(header.incompatible & VIEWS, "a view without the feature views")
        must(layout >= 1 and digest != bytes(32), "a view without layout or identity")
        image = decode_backing(table[name_offset : name_offset + name_bytes], index, header, 1)
        return Backing(kind, size, digest, f"view of {image}")
    if kind == 2:
        must(header.use != 1, "an image with a backing by file name")
        must(1 <= name_bytes <= 255, f"name_bytes {name_bytes}")
    else:
        must(header.use == 2, "a URL in a file that is not a disk")
        must(header.incompatible & URLS, "a URL without the feature urls")
        must(digest != bytes(32), "a URL without a Merkle root")
        must(1 <= name_bytes <= 2048, f"name_bytes {name_bytes}")
    try:
        name = table[name_offset : name_offset + name_bytes].decode("utf-8")
    except UnicodeDecodeError:
        raise Rejected("backing-entry", place, "the name is not UTF-8") from None
    must(is_file_name(name) if kind == 2 else is_url(name), f"the name {name!r}")
    return Backing(kind, size, digest, name)


def is_url(name):
    """Section 8: the rules of URLs."""
    scheme, separator, rest = name.partition("://")
    if not separator or any(c < " " or c == "\x7f" for c in name):
        return False
    if scheme == "s3":
        return rest != ""
    server = rest.split("/")[0]
    return (scheme in ("https", "http", "docker") and server != "" and "@" not in server
            and "?" not in rest and "#" not in rest)


def is_file_name(name):
    """Section 8: the rules of file names."""
    try:
        length = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return False
    return 1 <= length <= 255 and "/" not in name and "\0" not in name and name not in (".", "..")


# --------------------------------------------------------------------------------------------------
# Records and free list (section 10)

RECORD = struct.Struct("<4sIQQIIQQ")
RECORD_MAGIC = b"BCRC"
MAPPING_BYTES = 24


class Mapping:
    """One mapping of a record: its fields and its entry."""

    def __init__(self, raw, place, header, file_bytes):
        def must(condition, message):
            if not condition:
                raise Rejected("record", place, message)

        self.place = place
        self.lba = int.from_bytes(raw[:6], "little") * SECTOR
        self.shift, reserved = raw[6], raw[7]
        must(reserved == 0, "the reserved byte")
        must(self.lba < header.size, f"byte {self.lba} lies behind the address space")
        must(12 <= self.shift <= header.region_shift, f"shift {self.shift}")
        must(self.lba % (1 << self.shift) == 0, f"byte {self.lba} with shift {self.shift}")
        self.region, self.start = divmod(self.lba, header.region_bytes)
        length = min(1 << self.shift, header.region_length(self.region) - self.start)
        self.entry = Entry(raw[8:24], place, self.lba, length)
        self.entry.logged = True
        self.whole = self.shift == header.region_shift
        check_entry(self.entry, header, self.whole, "record", file_bytes)
        must(self.entry.name not in ("table", "window"), f"a {self.entry.name}")
        self.stores = self.entry.name in ("raw", "zstd", "open")
        must(not self.stores or self.shift <= 24, f"a block of shift {self.shift}")


class Record:
    """An intact record that follows the rules."""

    def __init__(self, raw, sequence, header, least_file_bytes):
        place = f"log[{sequence}]"

        def must(condition, message):
            if not condition:
                raise Rejected("record", place, message)

        self.sequence, self.bytes = sequence, len(raw)
        *_, count, size, self.file_bytes = RECORD.unpack_from(raw)
        mapped = MAPPING_BYTES * count
        must(len(raw) == -(-(RECORD.size + mapped) // 16) * 16,
             f"{len(raw)} bytes for {count} mappings")
        must(size == header.size, f"size {size}")
        must(least_file_bytes <= self.file_bytes <= 1 << 48, f"file_bytes {self.file_bytes}")
        must(self.file_bytes % SECTOR == 0, f"file_bytes {self.file_bytes}")
        must(not any(raw[RECORD.size + mapped :]), "the padding")
        self.mappings = [
            Mapping(raw[at : at + MAPPING_BYTES], f"{place}[{index}]", header, self.file_bytes)
            for index, at in enumerate(range(RECORD.size, RECORD.size + mapped, MAPPING_BYTES))
        ]
        end = 0
        for start, stored_end in sorted((e.address, e.address + e.length) for e in self.stored()):
            must(start >= end, f"two stored ranges overlap at {start}")
            end = stored_end

    def stored(self):
        return [mapping.entry for mapping in self.mappings if mapping.stores]


def decode_free_list(raw, header):
    """The ranges of the free list, as (start, length)."""
    ranges = []
    end = SECTOR - 1
    for index, (start, length) in enumerate(struct.iter_unpack("<QQ", raw)):
        right = start % SECTOR == 0 and length % SECTOR == 0 and start > end and length > 0
        if not right or start + length > header.file_bytes:
            raise Rejected("free-list", f"free[{index}]", f"{length} bytes at {start}")
        end = start + length
        ranges.append((start, length))
    return ranges


# --------------------------------------------------------------------------------------------------
# Metadata (section 13)


def decode_metadata(raw):
    """The metadata's object."""

    def refuse_constant(name):
        raise ValueError(f"{name} is not JSON")

    def number(text):
        # Python limits the digits it converts; JSON does not.
        return int(text) if len(text) < 4000 else float(text)

    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=refuse_constant, parse_int=number)
    except (ValueError, RecursionError) as error:
        raise Rejected("metadata-json", "metadata", str(error)) from None
    if not isinstance(value, dict):
        raise Rejected("metadata-json", "metadata", "not an object")
    return value


# --------------------------------------------------------------------------------------------------
# The file


class Bcow:
    """An open file with a checked header, root table and backing table."""

    def __init__(self, path, stores=(), names=(), depth=0):
        self.path = path
        self.stores, self.names, self.depth = list(stores), list(names), depth
        self._table = (None, None)  # the last one used: (region, (block_shift, entries))
        self.mappings = {}  # the records' mappings, in order, by region
        self.last_sequence = 0
        self._backings = {}  # the open ones, by index
        self.file = open(path, "rb")
        try:
            self.load_header()
        except BaseException as error:
            self.file.close()
            if isinstance(error, Rejected):
                error.path = path
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        for below in self._backings.values():
            below.__exit__()

    def load_header(self):
        self.real_bytes = self.file.seek(0, os.SEEK_END)
        # The order of section 12.
        self.header = choose_slot(self.read_at(0, min(SLOTS_END, self.real_bytes)))
        check_features(self.header)
        check_fields(self.header)
        if self.real_bytes < self.header.file_bytes:
            raise Rejected("truncated", "file",
                           f"{self.real_bytes} bytes of {self.header.file_bytes}")

    def read_at(self, offset, length):
        self.file.seek(offset)
        data = self.file.read(length)
        if len(data) != length:
            raise Rejected("truncated", "file", f"no {length} bytes at {offset}")
        return data

    def pieces_at(self, offset, length):
        for at in range(offset, offset + length, PIECE):
            yield self.read_at(at, min(PIECE, offset + length - at))

    def section(self, name, offset, length, crc):
        """The bytes of a section, after its CRC (section 15, rule 2)."""
        if crc32c_of_pieces(self.pieces_at(offset, length)) != crc:
            raise Rejected(f"{name}-crc", name,
                           f"the CRC of the {length} bytes at {offset} is wrong")
        return self.read_at(offset, length)

    # Section 6

    def load(self):
        """Root table, then backing table, then record log."""
        self.load_root()
        self.load_backings()
        self.load_log()
        return self

    def load_root(self):
        h = self.header
        self.root = self.section("root", h.root_offset, h.root_bytes, h.root_crc)
        for region in range(h.root_entries):
            check_entry(self.root_entry(region), h, True, "root-entry", h.file_bytes)

    def root_entry(self, region):
        return Entry(
            self.root[16 * region : 16 * region + 16],
            f"root[{region}]",
            region * self.header.region_bytes,
            self.header.region_length(region),
        )

    # Section 8

    def load_backings(self):
        h = self.header
        table = self.section("backing", h.backing_offset, h.backing_bytes, h.backing_crc)
        self.backings = [decode_backing(table, index, h) for index in range(h.backing_count)]
        if not h.incompatible & (WINDOWS | FRAGMENTS):
            return
        for region in range(h.root_entries):
            self.check_shown(self.root_entry(region), "window-range")

    def check_shown(self, entry, code):
        """The end of a window or fragment against the size of its backing."""
        if entry.name in ("window", "fragment"):
            size = self.backings[entry.check].size
            if entry.address + entry.shown > size:
                raise Rejected(code, entry.place, f"the backing has {size} bytes")

    def backing(self, index):
        """The open backing `index`: looked up only in the user's directories (section 15, rule
        3)."""
        if index not in self._backings:
            self.open_backing(index)
        return self._backings[index]

    def open_backing(self, index):
        wanted = self.backings[index]
        place = f"backing[{index}]"
        if self.depth >= 128:
            raise Rejected("backing-entry", place, "the chain of backings is more than 128 deep")
        if wanted.kind == 3:
            raise Unable(f"{self.path}: {place} is a {wanted.name}; this reader makes no views")
        if wanted.kind == 4:
            raise Unable(f"{self.path}: {place} is {wanted.name}; this reader has no network")
        if wanted.kind == 1:
            digest = wanted.digest.hex()
            candidates = [
                os.path.join(store, *form)
                for store in self.stores
                for form in ((digest,), ("sha256", digest), ("blobs", "sha256", digest))
            ]
            candidates += [os.path.join(directory, name) for name in self.names_of(digest)
                           for directory in self.names]
        else:
            candidates = [os.path.join(directory, wanted.name) for directory in self.names]
        for path in candidates:
            if not os.path.isfile(path):
                continue
            if wanted.kind == 1:
                with open(path, "rb") as file:
                    if hashlib.file_digest(file, "sha256").digest() != wanted.digest:
                        raise Rejected("backing-entry", place, f"{path} has another digest")
            below = Bcow(path, self.stores, self.names, self.depth + 1)
            self._backings[index] = below  # it is closed together with this file
            try:
                below.load()
            except Rejected as error:
                error.path = error.path or path
                raise
            if below.header.size != wanted.size:
                raise Rejected("backing-entry", place,
                               f"size {below.header.size}, not {wanted.size}")
            if wanted.kind == 2 and wanted.digest not in (bytes(32), below.identity()):
                raise Rejected("backing-entry", place,
                               f"identity {below.identity().hex()}: it has changed since")
            return
        raise Unable(
            f"{self.path}: {place} ({wanted}) is not in a directory that --store or --names gives")

    def names_of(self, digest):
        """Section 13, `backings`: the file names that the metadata has for a backing by digest."""
        try:
            described = (self.metadata() or {}).get("backings")
        except Rejected:
            return  # damaged metadata names no file; only the digest is used
        for one in described if isinstance(described, list) else []:
            name = (one.get("name")
                    if isinstance(one, dict) and one.get("digest") == f"sha256:{digest}" else None)
            if isinstance(name, str) and is_file_name(name):
                yield name

    def identity(self):
        """Section 8: the identity check of a backing by file name."""
        if self.header.merkle_chunk_shift:
            return self.header.merkle_root
        return hashlib.sha256(self.header.raw + struct.pack("<Q", self.last_sequence)).digest()

    # Section 10

    def load_log(self):
        """Replay: the records that count, checked, and their mappings by region."""
        h = self.header
        if not h.log_bytes:
            return
        records, at = [], 0
        file_bytes = h.file_bytes
        while (record := self.record_at(at, len(records) + 1, file_bytes)) is not None:
            records.append(record)
            at += record.bytes
            file_bytes = record.file_bytes
        self.check_end(at, len(records) + 1)
        if records and not self.is_complete(records[-1]):
            records.pop()
        self.last_sequence = len(records)
        for record in records:
            for entry in record.stored():
                if entry.address + entry.length > self.real_bytes:
                    raise Rejected("truncated", "file",
                                   f"{self.real_bytes} bytes, {entry.place} needs more")
        for record in records:
            for mapping in record.mappings:
                self.apply(mapping)

    def record_at(self, at, sequence, least_file_bytes):
        """The record at byte `at` of the log, or None if the log ends there."""
        h = self.header
        left = h.log_bytes - at
        if left < RECORD.size:
            return None
        head = self.read_at(h.log_offset + at, RECORD.size)
        magic, record_crc, generation, found_sequence, length, *_ = RECORD.unpack(head)
        if (magic, generation, found_sequence) != (RECORD_MAGIC, h.generation, sequence):
            return None
        if length < RECORD.size or length % 16 or length > left:
            return None
        raw = self.read_at(h.log_offset + at, length)
        if crc32c(raw[:4] + bytes(4) + raw[8:]) != record_crc:
            return None
        return Record(raw, sequence, h, least_file_bytes)

    def check_end(self, end, expected):
        """No header of a later record lies behind the end of the log."""
        h = self.header
        log = self.read_at(h.log_offset, h.log_bytes)
        at = log.find(RECORD_MAGIC, end + 16)
        while 0 <= at <= h.log_bytes - RECORD.size:
            _, _, generation, sequence, *_ = RECORD.unpack_from(log, at)
            if at % 16 == 0 and generation == h.generation and sequence > expected:
                raise Rejected("record", f"record {expected}",
                               f"is damaged, and record {sequence} follows at byte {at} of the log")
            at = log.find(RECORD_MAGIC, at + 1)

    def is_complete(self, record):
        """Whether the blocks of the last record are there."""
        for entry in record.stored():
            if entry.name == "open":
                continue
            if entry.address + entry.length > self.real_bytes:
                return False
            if crc32c_of_pieces(self.pieces_at(entry.address, entry.length)) != entry.check:
                return False
        return True

    def apply(self, mapping):
        """Check one mapping against the region as the mappings before left it."""
        if mapping.whole:
            # The earlier content of the place does not matter any more.
            self.mappings[mapping.region] = [mapping]
            return
        shift, name = self.shape(mapping.region)
        if shift is None:
            if name not in ("absent", "zero") or mapping.shift > 24:
                raise Rejected("record", mapping.place,
                               f"shift {mapping.shift} in a region that is {name}")
        elif mapping.shift != shift and (mapping.stores or mapping.shift < shift):
            raise Rejected("record", mapping.place,
                           f"shift {mapping.shift} in a region of block_shift {shift}")
        self.mappings.setdefault(mapping.region, []).append(mapping)

    def shape(self, region):
        """block_shift of a region, or None and the kind of its root entry, as the mappings leave
        it."""
        mappings = self.mappings.get(region, [])
        root_entry = self.root_entry(region)
        if mappings and mappings[0].whole:
            root_entry, mappings = mappings[0].entry, mappings[1:]
        elif root_entry.name == "table":
            return self.table(root_entry, region)[0], "table"
        return (mappings[0].shift if mappings else None), root_entry.name

    def free_list(self):
        h = self.header
        raw = self.read_at(h.free_offset, h.free_bytes)
        if h.free_bytes and crc32c(raw) != h.free_crc:
            raise Rejected("free-list", "free",
                           f"the CRC of the {h.free_bytes} bytes at {h.free_offset} is wrong")
        return decode_free_list(raw, h)

    # Section 13

    def metadata(self):
        h = self.header
        raw = self.section("metadata", h.metadata_offset, h.metadata_bytes, h.metadata_crc)
        return decode_metadata(raw) if h.metadata_bytes else None

    # Section 7

    def table(self, root_entry, region):
        """block_shift and the checked entries of a sub-block table."""
        if self._table[0] != region:
            self._table = (region, self.load_table(root_entry, region))
        return self._table[1]

    def load_table(self, root_entry, region):
        h = self.header
        place = f"table[{region}]"

        def must(condition, message):
            if not condition:
                raise Rejected("table-header", place, message)

        offset, length = root_entry.address, root_entry.length
        if crc32c_of_pieces(self.pieces_at(offset, length)) != root_entry.check:
            raise Rejected("table-crc", place,
                           f"the CRC of the {length} bytes at {offset} is wrong")
        must(length >= TABLE_HEADER.size, f"{length} bytes")
        magic, block_shift, reserved, index = TABLE_HEADER.unpack(
            self.read_at(offset, TABLE_HEADER.size))
        must(magic == TABLE_MAGIC, "the magic")
        must(12 <= block_shift <= min(24, h.region_shift), f"block_shift {block_shift}")
        must(reserved == bytes(3), "the reserved bytes")
        must(index == region, f"it belongs to region {index}")
        block_bytes = 1 << block_shift
        count = -(-root_entry.block_length // block_bytes)
        must(length == 16 + 16 * count, f"{length} bytes, not {16 + 16 * count}")
        raw = self.read_at(offset + 16, 16 * count)
        entries = []
        for block in range(count):
            entry = Entry(
                raw[16 * block : 16 * block + 16],
                f"table[{region}][{block}]",
                root_entry.lba + block * block_bytes,
                min(block_bytes, root_entry.block_length - block * block_bytes),
            )
            check_entry(entry, h, False, "table-entry", h.file_bytes)
            entries.append(entry)
        # Section 8. After all entries, as the end of a window is checked after the root table.
        for entry in entries:
            self.check_shown(entry, "table-entry")
        return block_shift, entries

    # The map

    def entries_of_region(self, region):
        root_entry = self.root_entry(region)
        mappings = self.mappings.get(region, [])
        if mappings and mappings[0].whole:
            root_entry, mappings = mappings[0].entry, mappings[1:]
        if root_entry.name == "table":
            shift, entries = self.table(root_entry, region)
            entries = list(entries)
        elif mappings:
            shift = mappings[0].shift
            entries = self.spread(root_entry, shift, root_entry.lba, root_entry.block_length)
        else:
            return [root_entry]
        for mapping in mappings:
            first = mapping.start >> shift
            blocks = self.spread(mapping.entry, shift, mapping.lba, mapping.entry.block_length)
            entries[first : first + len(blocks)] = blocks
        return entries

    def spread(self, entry, shift, lba, length):
        """An entry for each block of a range that one entry describes."""
        blocks = []
        for at in range(0, length, 1 << shift):
            block = copy.copy(entry)
            block.lba, block.block_length = lba + at, min(1 << shift, length - at)
            blocks.append(block)
        return blocks

    def entries(self, start, end):
        """The entries that map the bytes start..end of the address space."""
        if start >= end:
            return
        for region in range(start // self.header.region_bytes, -(-end // self.header.region_bytes)):
            for entry in self.entries_of_region(region):
                if entry.lba < end and start < entry.lba + entry.block_length:
                    yield entry

    # Content

    def block(self, entry):
        """The content of a stored block, after its CRC where it has one."""
        stored = self.read_at(entry.address, entry.length)
        if entry.name == "open":
            return stored
        if entry.address == 0:
            # Section 11. An address of 0 has passed check_entry only in a plain file.
            stored = bytes(SLOTS_END) + stored[SLOTS_END:]
        if crc32c(stored) != entry.check:
            raise Rejected("block-crc", entry.place,
                           f"the CRC of the {entry.length} bytes at {entry.address} is wrong")
        if entry.name == "raw":
            return stored
        try:
            return decompress(stored, entry.block_length)
        except BadFrame as error:
            raise Rejected("block-data", entry.place, str(error)) from None

    def copy(self, start, end, write, shift):
        """Call write(at + shift, bytes) for the bytes start..end of the address space; what is not
        written is zero."""
        for entry in self.entries(start, end):
            first = max(start, entry.lba)
            last = min(end, entry.lba + entry.block_length)
            if entry.name in ("raw", "zstd", "open"):
                write(first + shift, self.block(entry)[first - entry.lba : last - entry.lba])
            elif entry.name == "absent" and self.header.incompatible & BACKING:
                below = self.backing(0)
                below.copy_named(first, min(last, below.header.size), write, shift)
            elif entry.name in ("window", "fragment") and first < entry.lba + entry.shown:
                below = self.backing(entry.check)
                moved = entry.address - entry.lba
                last = min(last, entry.lba + entry.shown)
                below.copy_named(first + moved, last + moved, write, shift - moved)

    def copy_named(self, *args):
        """copy(), for a backing: an error names the backing's file."""
        try:
            self.copy(*args)
        except Rejected as error:
            error.path = error.path or self.path
            raise

    # Section 9

    def check_merkle(self):
        h = self.header
        chunk = 1 << h.merkle_chunk_shift
        canonical = bytearray(h.raw)
        canonical[12:24] = bytes(12)  # slot_crc and generation
        canonical[144:176] = bytes(32)  # merkle_root
        canonical += bytes(512)

        def covered():
            for at in range(0, h.merkle_offset, chunk):
                data = self.read_at(at, min(chunk, h.merkle_offset - at))
                yield bytes(canonical) + data[SLOTS_END:] if at == 0 else data

        below, prefix = covered(), b"\x00"  # the first level has many pieces, read one by one
        at = h.merkle_offset
        for level, length in enumerate(merkle_levels(h.merkle_offset, h.merkle_chunk_shift)):
            stored = self.read_at(at, length)
            for index, piece in enumerate(below):
                if hashlib.sha256(prefix + piece).digest() != stored[32 * index : 32 * index + 32]:
                    raise Rejected("merkle", f"merkle[{level}][{index}]", "the hash is wrong")
            below, prefix = [stored[i : i + chunk] for i in range(0, length, chunk)], b"\x01"
            at += length
        if stored != h.merkle_root:
            raise Rejected("merkle", "merkle", "the last level is not merkle_root")


# --------------------------------------------------------------------------------------------------
# The full check (section 12)


class Ranges:
    """The stored ranges seen so far, to find two that overlap (end of section 5)."""

    def __init__(self):
        self.starts, self.ends = [], []
        self.shareable = {}

    def add(self, start, length, share, place):
        """`share` is what must be equal for the same range to be named twice, or None."""
        if length == 0 or (share is not None and self.shareable.get((start, length)) == share):
            return
        at = bisect.bisect_right(self.starts, start)
        if (at and self.ends[at - 1]
            > start) or (at < len(self.starts) and self.starts[at] < start + length):
            raise Rejected("overlap", place,
                           f"the stored range at {start} of {length} bytes overlaps another")
        self.starts.insert(at, start)
        self.ends.insert(at, start + length)
        if share is not None:
            self.shareable[start, length] = share


def full_check(file):
    """Raise the first error in the order of section 12, from the fields on."""
    header = file.header
    file.load_root()
    file.load_backings()
    file.metadata()
    free = file.free_list()
    file.load_log()

    stored = [(offset, length, None, name, False) for name, offset, length in header.sections()]

    def stores(entry):
        share = entry.check if header.state == 1 else None
        stored.append((entry.address, entry.length, share, entry.place, entry.logged))

    decoded = set()
    for region in range(header.root_entries):
        entries = file.entries_of_region(region)
        mappings = file.mappings.get(region, [])
        root_entry = file.root_entry(region)
        if root_entry.name == "table" and not (mappings and mappings[0].whole):
            stores(root_entry)
        for entry in entries:
            if entry.name in ("raw", "zstd", "open"):
                stores(entry)
        for entry in entries:
            what = (entry.kind, entry.address, entry.length, entry.check, entry.block_length)
            if entry.name in ("raw", "zstd") and what not in decoded:
                file.block(entry)
                decoded.add(what)
    # Blocks of records may be in ranges that were free before.
    ranges, settled = Ranges(), Ranges()
    for start, length, share, place, logged in stored:
        ranges.add(start, length, share, place)
        if not logged:
            settled.add(start, length, share, place)
    for index, (start, length) in enumerate(free):
        settled.add(start, length, None, f"free[{index}]")
    if header.merkle_chunk_shift:
        file.check_merkle()
    # Beyond section 12, and only if the user gave directories: check the backings' identity.
    if file.stores or file.names:
        for index, backing in enumerate(file.backings):
            if backing.kind in (1, 2):
                file.backing(index)


# --------------------------------------------------------------------------------------------------
# Commands


def command_info(args):
    with Bcow(args.file, args.store, args.names) as file:
        print(json.dumps(info_of(file.load()), indent=2))


def info_of(file):
    h = file.header
    info = {"slot": h.slot}
    for name in HEADER_FIELDS:
        value = getattr(h, name)
        if name != "magic" and not name.startswith("reserved"):
            info[name] = value.hex() if isinstance(value, bytes) else value
    info["use"], info["state"] = USES[h.use], STATES[h.state]
    info["backings"] = [{"size": b.size, **({"sha256": b.digest.hex()} if b.kind == 1
                                            else {"name": b.name, "identity": b.digest.hex()})}
                        for b in file.backings]
    info["records"] = file.last_sequence
    info["identity"] = file.identity().hex()
    info["metadata"] = file.metadata()
    return info


def map_lines(file):
    h = file.header
    yield (f"bcow-map-1 size={h.size} region_shift={h.region_shift} regions={h.root_entries} "
           f"file_bytes={h.file_bytes} use={USES[h.use]} state={STATES[h.state]} slot={h.slot} "
           f"generation={h.generation} incompatible={h.incompatible} "
           f"read_only_compatible={h.read_only_compatible} compatible={h.compatible} "
           f"backings={h.backing_count}")
    for e in file.entries(0, h.size):
        if e.name in ("absent", "zero"):
            yield f"{e.lba} {e.block_length} {e.name} 0 0"
        else:
            yield f"{e.lba} {e.block_length} {e.name} {e.address} {e.shown} {e.check}"


def command_map(args):
    with Bcow(args.file, args.store, args.names) as file:
        for line in map_lines(file.load()):
            print(line)


def command_check(args):
    try:
        with Bcow(args.file, args.store, args.names) as file:
            full_check(file)
    except Rejected as error:
        print(error.code, error.place)
        raise
    print("ok")


def command_extract(args):
    # The file gets its name only after all of it is correct.
    part = args.out + ".part"
    try:
        with Bcow(args.file, args.store, args.names) as file, open(part, "wb") as out:
            file.load()
            out.truncate(file.header.size)

            def write(at, data):
                out.seek(at)
                out.write(data)

            file.copy(0, file.header.size, write, 0)
        os.replace(part, args.out)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function in (
        ("info", command_info),
        ("map", command_map),
        ("check", command_check),
        ("extract", command_extract),
    ):
        command = commands.add_parser(name)
        command.add_argument("file", metavar="FILE")
        if name == "extract":
            command.add_argument("out", metavar="OUT")
        command.add_argument("--store", metavar="DIR", action="append", default=[])
        command.add_argument("--names", metavar="DIR", action="append", default=[])
        command.set_defaults(function=function)
    args = parser.parse_args(arguments)
    # `map FILE | head` ends quietly.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        args.function(args)
    except Rejected as error:
        error.path = error.path or args.file
        print(error, file=sys.stderr)
        return 1
    except (Unable, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
