"""The papers' measurements for the rows of benches/union.py, on other machines: mostly E5-2630 v4
and NVMe."""

# (part, prefix of the row) -> the paper's result. The longest matching prefix counts.
RESULTS = {
    ("write-once", "1K: first write, cold"): "BAOverlay Fig. 7: 170 to 180 us; overlay2 3,595; "
                                             "AUFS 225; native 22. TranslayFS Fig. 10: 336 to 339 "
                                             "us",
    ("write-once", "64K: first write, cold"): "BAOverlay: 170 to 180 us. TranslayFS: 336 to 339 us",
    ("write-once", "4M: first write, cold"):
        "BAOverlay: 170 to 180 us; overlay2 11,944; AUFS 4,007. TranslayFS: 336 to 339 us",
    ("write-once", "100M: first write, cold"): "TranslayFS: 336 to 339 us, as for any size",
    ("write-once", "1G: first write, cold"): "TranslayFS: 336 to 339 us, as for any size. "
                                             "BAOverlay Table 1, 2 GB: 189 us; overlay2 24 s; AUFS "
                                             "1.8 s; native 27 to 777 us",
    ("write-once", "10G: first write, cold"): "TranslayFS: 336 to 339 us; overlayfs 51 s",
    ("write-once", "4M: write to the same block again"):
        "TranslayFS Fig. 11a: 4 to 9 us more than overlayfs",
    ("write-once", "4M: first write to another block"):
        "TranslayFS Fig. 11b: 75 to 89 us more than overlayfs",
    ("write-many", "lower cold: all writes"):
        "BAOverlay Table 1, 2 GB: 3.39 s; overlay2 26.2; AUFS 9.65; native 232",
    ("write-many", "lower cold: mean of"):
        "BAOverlay Table 1: 6.47 us; overlay2 49.98 with the first; AUFS 17.5; native 443",
    ("write-many", "lower cold: first write"):
        "BAOverlay Table 1: 189 us; overlay2 24,096,098; AUFS 1,785,295; native 777",
    ("write-many", "lower cached: all writes"): "BAOverlay Table 1, 2 GB: native 1.39 s",
    ("write-many", "lower cached: mean of the writes after"): "BAOverlay Table 1: native 2.65 us",
    ("write-many", "lower cached: first write"): "BAOverlay Table 1: native 27 us",
    ("write-many", "lower cached: 5 %"):
        "TranslayFS Fig. 14, 410 B at random: 4.5 times overlayfs's throughput",
    ("write-many", "then 20 % of the blocks read at once"):
        "BAOverlay Table 2, fills deferred for good: 447 us; overlay2 and native 3.4; AUFS 5.4",
    ("write-many", "then 20 % of the blocks read: mean"): "BAOverlay Table 2, fills done: 3.4 us",
    ("write-many", "then 20 % of the blocks read, cache dropped"):
        "BAOverlay Table 2, limited cache: native 239 us; overlay2 246; AUFS 77",
    ("write-many", "mounted again"): "BAOverlay Table 3, block tables there: 3.74 us, being made: "
                                     "5.75; overlay2 50; AUFS 17.5; native 2.66",
    ("write-many", "upper after it"): "grows with what is written (BAOverlay 6.1, no number)",
    ("fio", "sequential writes of 4K, first"):
        "BAOverlay Fig. 8, 40 GB: 54 s, overlay2 142 s (2.62 times)",
    ("fio", "sequential writes of 1M, first"):
        "BAOverlay Fig. 8, 40 GB: 36 s, overlay2 135 s (3.75 times)",
    ("fio", "sequential writes of 1K of each 4K, first"):
        "BAOverlay Fig. 10: 1,092 s, overlay2 1,208 s, CPU 2 to 5 % more",
    ("fio", "random writes of 4K, first"):
        "TranslayFS Fig. 14, 1 % of 10 GB: 12 times overlayfs. BAOverlay Fig. 8: close to native",
    ("fio", "sequential reads of 4K"):
        "TranslayFS Fig. 15: 0.5 % slower than overlayfs. BAOverlay Fig. 8: close to native",
    ("instances", "first write of 4 KiB to files of 128 KiB, 20 at once"):
        "CAST Fig. 15, lower files on 20 cores: 2.56 times overlayfs",
    ("instances", "unlink of files of the lower, half of them written, 20 at once"):
        "CAST Fig. 15, on 20 cores: 5.5 times overlayfs",
    ("append", "20 at once: until"):
        "Danaus Fig. 11a, 2 GB, 32 at once: up to 46 % less time than AUFS on kernel Ceph",
    ("sync", "all"): "Mizusawa and others synchronise after 50 copy-ups instead of each (a figure "
                     "without numbers: \"significantly improved\").",
    ("postgres", "transactions, first"):
        "BAOverlay Fig. 11, MySQL 5.5: twice overlay2's throughput over 300 s",
    ("postgres", "start to first answer, cold"):
        "BAOverlay Fig. 12, MongoDB with 20 GB: overlay2 stalls for 14 s at the start",
    ("mariadb", "transactions, first"):
        "BAOverlay Fig. 11, MySQL 5.5: twice overlay2's throughput over 300 s",
    ("mariadb", "start to first answer, cold"):
        "BAOverlay Fig. 12, MongoDB with 20 GB: overlay2 stalls for 14 s at the start"}


def result(part, row):
    fits = [beginning for of, beginning in RESULTS if of == part and row.startswith(beginning)]
    # The paper has no result for rows with these endings.
    return (RESULTS[part, max(fits, key=len)]
            if fits and not row.endswith((": p99", "fio's", " s: mean")) else "-")
