"""Twenty mounts of two images in one pool, all of which share files. In each, a program opens,
maps, runs and changes files at random, mounts the upper again or begins a new one, and compares
what it finds with a model (`share_model.py`), while the process of the pool is killed and replaced
and the kernel drops its caches.

BCOW_SECONDS=3600 runs for longer, BCOW_SEED=2 with other programs.
"""

import contextlib
import fcntl
import json
import os
import random
import shutil
import tempfile
import time

import test_pool
from support import WORK, bcow, drop_caches, need_kernel, write_file

SECONDS = int(os.environ.get("BCOW_SECONDS") or 25)
SEED = int(os.environ.get("BCOW_SEED") or 1)
MOUNTS = 20
# Of the mounts, in turn. With a limit, the kernel writes no files of the upper itself.
OPTIONS = ([], [], ["--size-limit", "1G"], [], ["--verify", "merkle"], ["--sync", "batch=8"])
# A program that makes no round for so long hangs.
PATIENCE = 1200


class Stress(test_pool.PoolCase):
    timeout = PATIENCE

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        need_kernel(6, 12, "passthrough to other files")
        cls.images = [cls.make_image(number) for number in range(2)]

    @classmethod
    def make_image(cls, number):
        """Gives a tree and its image."""
        tree = cls.path(f"tree{number}")
        source = random.Random(number)
        for directory in ("d0/e", "d1"):
            os.makedirs(os.path.join(tree, directory))
            for program in ("echo", "sleep"):
                shutil.copy(shutil.which(program), os.path.join(tree, directory, program))
        write_file(os.path.join(tree, "large"), source.randbytes(2_000_000))
        for name, size in (("d0/f0", 100_000), ("d0/f1", 5000), ("d0/f2", 60_000),
                           ("d0/e/f3", 20_000), ("d0/e/empty", 0), ("d1/f0", 300_000),
                           ("d1/f1", 40_000), ("d1/f2", 70_000)):
            write_file(os.path.join(tree, name), source.randbytes(size))
        os.link(os.path.join(tree, "d0/f0"), os.path.join(tree, "hard"))
        os.link(os.path.join(tree, "d1/f1"), os.path.join(tree, "d0/e/hard"))
        os.symlink("target", os.path.join(tree, "d1/link"))
        image = cls.path(f"image{number}.bcow")
        bcow("convert", f"dir:{tree}", image, timeout=PATIENCE)
        return tree, image

    def begin(self, number, uppers, lock):
        """Mounts an image; gives the program for it."""
        tree, image = self.images[number % 5 % 2]
        upper = os.path.join(uppers, str(number))
        options = ["-o", "allow_other", *OPTIONS[number % len(OPTIONS)]]
        where = self.mount("--upper", upper, *options, image=image)
        described = json.dumps({"image": image, "upper": upper, "lock": lock,
                                "options": ["--pool", "pool", *options]})
        return test_pool.Program(where, tree, SEED * 1000 + number, described,
                                 model="share_model.py", env=self.env)

    def disturb_for_a_while(self, programs, lock):
        """Kills and replaces the process of the pool, and drops caches, until the time is over."""
        source, end = random.Random(SEED), time.monotonic() + SECONDS
        last = [(0, time.monotonic())] * len(programs)
        while time.monotonic() < end:
            time.sleep(source.uniform(0.2, 4))
            drop_caches()
            if source.random() < 0.5:
                with open(lock) as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    self.disturb(1, lambda: None)
            for index, program in enumerate(programs):
                if program.process.poll() is not None:
                    program.finish()
                rounds, since = last[index]
                if program.rounds != rounds:
                    last[index] = program.rounds, time.monotonic()
                elif time.monotonic() > since + PATIENCE:
                    self.fail(f"the program with seed {program.seed} hangs: {program.lines[-9:]}")

    def test_programs_find_what_their_models_have(self):
        print(f"BCOW_SEED={SEED} BCOW_SECONDS={SECONDS}", flush=True)
        uppers = tempfile.mkdtemp(prefix="uppers-", dir=WORK)
        self.addCleanup(shutil.rmtree, uppers, ignore_errors=True)
        lock = self.path("lock", b"")
        self.start("pool", "--memory", "16M")
        with contextlib.ExitStack() as stack:
            programs = [stack.enter_context(self.begin(number, uppers, lock))
                        for number in range(MOUNTS)]
            self.disturb_for_a_while(programs, lock)
            for program in programs:
                program.ask_to_end()
            for program in programs:
                program.finish(PATIENCE)
            print(f"{sum(program.rounds for program in programs)} rounds, "
                  f"{self.disturbed} processes of the pool", flush=True)
        for where in self.mounts:
            found = self.json("stats", where)
            self.assertEqual(found["share"], {"on": True, "reason": None})
            self.assertEqual(found["errors"]["total"], 0, found["errors"])
        self.bcow("pool", "stop", "--force", "pool")
        for upper in os.listdir(uppers):
            bcow("fsck", os.path.join(uppers, upper), timeout=PATIENCE)
