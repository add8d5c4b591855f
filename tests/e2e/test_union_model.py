"""Random sequences of system calls have the same results on a writable mount and on a plain
directory: every return value, and the final tree.

BCOW_MODEL_SEEDS=1000-9999 runs other and more sequences, BCOW_MODEL_LENGTH=300 longer ones. A
sequence that fails is reduced and printed; BCOW_MODEL_REPLAY=FILE runs the printed sequence again.
"""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import traceback
import unittest

import model
import operations
import subjects
import support
from support import read_bytes, write_file
from promises import promise
from union import LowerCase

LENGTH = int(os.environ.get("BCOW_MODEL_LENGTH") or 120)
SEEDS = os.environ.get("BCOW_MODEL_SEEDS") or "1-16"
SECONDS = 120
# The number of processes that use one mount at the same time.
CROWD = 6


def seeds():
    first, _, last = SEEDS.partition("-")
    return range(int(first), int(last or first) + 1)


def play(name, lower, seed=None, sequence=None):
    """Runs a sequence in its own process; returns (operations, the failure or None)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            done, wrong = [], None
            os.setsid()
            signal.alarm(SECONDS)
            try:
                wrong = inside(name, lower, seed, sequence, done)
            except BaseException:
                wrong = traceback.format_exc()
            with open(writer, "wb") as out:
                pickle.dump((done, wrong), out)
        finally:
            os._exit(0)
    os.close(writer)
    data = read_bytes(reader)
    _, status = os.waitpid(child, 0)
    if status:
        # The journal of the process has its operations.
        return (journal(child), f"the client ended with {os.waitstatus_to_exitcode(status)} (14: "
                                f"not done in {SECONDS} s)")
    return pickle.loads(data)


def journal_path(process):
    return os.path.join(support.WORK, f"model-{process}")


def journal(process):
    with open(journal_path(process)) as lines:
        done = [json.loads(line) for line in lines]
    os.unlink(journal_path(process))
    return done


def inside(name, lower, seed, sequence, done):
    pair = None
    notes = journal_path(os.getpid())
    try:
        with (subjects.shown("plain", lower) as copy, subjects.shown(name, lower) as subject,
              open(notes, "w") as log):
            try:
                pair = model.Pair(subject, copy.where)
                steps = model.Generator(seed,
                                        pair).sequence(LENGTH) if sequence is None else sequence
                for step in steps:
                    done.append(list(step))
                    log.write(json.dumps(step) + "\n")
                    log.flush()
                    pair.step(*step)
            except model.Mismatch as error:
                return str(error)
            finally:
                if pair:
                    pair.close()
    finally:
        os.unlink(notes)
    return None


def shrink(name, lower, sequence, wrong):
    """Removes operations while the sequence still fails."""
    size = max(1, len(sequence) // 2)
    tries = 300
    while size and tries:
        at = 0
        while at < len(sequence) and tries:
            shorter = sequence[:at] + sequence[at + size:]
            tries -= 1
            done, found = play(name, lower, sequence=shorter)
            if found:
                sequence, wrong = done, found
            else:
                at += size
        size //= 2
    return sequence, wrong


class Alone(operations.Side):
    """One of several processes that change the same tree, without a model."""

    def __init__(self, root):
        super().__init__(root)
        self.model = self.subject = self

    def entries(self):
        """A path that existed a moment ago."""
        found = {}
        for path, folders, files in os.walk(self.root):
            for name in folders + files:
                full = os.path.join(path, name)
                with contextlib.suppress(OSError):
                    found[os.path.relpath(full, self.root)] = os.lstat(full)
        return found


def crowd(where, seed, steps):
    """Makes calls and ignores their errors."""
    one = Alone(where)
    for name, arguments in model.Generator(seed, one).sequence(steps):
        # A truncation by another process under a mapping raises a signal.
        if name not in ("compare", "remount", "map", "map_read", "map_write"):
            with contextlib.suppress(operations.NoSlot):
                one.do(name, arguments)
    one.forget_all()


class Model(LowerCase):
    kinds = (*subjects.KINDS, "bcow+writeback", subjects.KERNEL)

    @promise("A writable mount answers each system call like an ordinary directory on ext4: with "
             "the same result or the same error.")
    def test_sequences_have_the_results_of_a_plain_directory(self):
        work = [(name, seed) for seed in seeds() for name in self.names]
        failed = []
        # Processes, since each forks again.
        with concurrent.futures.ProcessPoolExecutor(2) as pool:
            names, numbers = zip(*work)
            for (name, seed), (done, wrong) in zip(
                    work, pool.map(play, names, [self.lower] * len(work), numbers)):
                if wrong:
                    failed.append((name, seed, done, wrong))
        for name, seed, done, wrong in failed[:5]:
            with self.subTest(subject=name, seed=seed):
                done, wrong = shrink(name, self.lower, done, wrong)
                kept = os.path.join(support.WORK, f"model-{name}-{seed}.json")
                write_file(kept, "\n".join(json.dumps(step) for step in done))
                self.fail(f"BCOW_MODEL_SEEDS={seed} BCOW_SUBJECTS={name}, cut down in {kept}:\n"
                          + "\n".join(map(json.dumps, done)) + f"\n{wrong}")
        self.assertEqual([(name, seed) for name, seed, *_ in failed], [])

    def test_concurrent_changes_survive_a_remount(self):
        """No process hangs, and the next mount shows the final tree."""
        for name in self.names:
            with self.subTest(subject=name), subjects.shown(name, self.lower) as subject:
                running = [multiprocessing.Process(target=crowd, args=(subject.where, seed, LENGTH))
                           for seed in range(CROWD)]
                for one in running:
                    one.start()
                for one in running:
                    one.join(SECONDS)
                    alive = one.is_alive()
                    if alive:
                        subject.kill()
                        one.kill()
                    self.assertEqual((alive, one.exitcode), (False, 0))
                seen, inodes = operations.Side(subject.where).snapshot()
                subject.remount()
                again, numbers = operations.Side(subject.where).snapshot()
                if "+writeback" in name:
                    # The kernel shows an old time after a truncation to the same size until the
                    # next mount (docs/shortcomings.md). Only such a file may have another time,
                    # and only the time of the truncation.
                    for path, facts in again.items():
                        if path in seen and facts.get("mtime") == "now":
                            seen[path]["mtime"] = "now"
                self.assertEqual([f"{path!r}: {again.get(path)} instead of {seen.get(path)}"
                                  for path in sorted(again.keys() | seen.keys())
                                  if again.get(path) != seen.get(path)], [])
                self.assertEqual({path: info.st_ino for path, info in numbers.items()},
                                 {path: info.st_ino for path, info in inodes.items()})
                subject.unmount()
                subject.check()

    @unittest.skipUnless(os.environ.get("BCOW_MODEL_REPLAY"), "BCOW_MODEL_REPLAY names no file")
    def test_replay(self):
        with open(os.environ["BCOW_MODEL_REPLAY"]) as lines:
            sequence = [json.loads(line) for line in lines if line.strip()]
        for name in self.names:
            with self.subTest(subject=name):
                _, wrong = play(name, self.lower, sequence=sequence)
                self.assertIsNone(wrong)
