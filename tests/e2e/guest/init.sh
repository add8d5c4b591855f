#!/bin/busybox sh
# The first process of a virtual machine with one or more disks. `mode=` on the kernel's command line
# is `make` (make a file system on each disk and fill it), `verify` (compare its content) or `root`
# (run /run/script with the first disk as root). The process ends by switching the power off,
# without unmounting what was written last. The host looks for the lines that begin with `@`.
export PATH=/bin
fail() {
    echo "! $*"
    busybox poweroff -f
}

busybox mkdir -p /proc /sys /dev /mnt /tmp
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
while read -r module; do
    busybox insmod "/modules/$module" || fail "insmod $module"
done < /modules/order

for word in $(busybox cat /proc/cmdline); do
    case $word in
    mode=*) mode=${word#mode=} ;;
    disks=*) disks=${word#disks=} ;;
    esac
done

if [ "$mode" = root ]; then
    busybox mkdir -p /mnt/root
    busybox mount -t ext4 /dev/vda /mnt/root || fail "mount the root"
    busybox mount -t tmpfs run /mnt/root/run || fail "mount /run"
    busybox cp -r /run/. /mnt/root/run || fail "copy the script"
    for place in dev proc sys; do
        busybox mount --move /$place /mnt/root/$place || fail "move /$place"
    done
    exec busybox switch_root -c /dev/console /mnt/root /bin/sh /run/script
fi

# Sums of all files but the list itself; `sync FILE` of busybox is fsync.
sums() {
    (cd "$1" && busybox find . -type f ! -name sums -exec busybox sha256sum {} + | busybox sort)
}

device=/dev/vd
letters="a b c d"
for kind in $(echo "$disks" | busybox tr , ' '); do
    letter=${letters%% *}
    letters=${letters#* }
    disk=$device$letter
    at=/mnt/$kind
    busybox mkdir -p "$at"
    case $mode in
    make)
        case $kind in
        ext4) mkfs.ext4 -q -F "$disk" ;;
        xfs) mkfs.xfs -q -f "$disk" ;;
        esac || fail "mkfs.$kind"
        busybox mount -t "$kind" -o discard "$disk" "$at" || fail "mount $kind"
        count=0
        while [ $count -lt 20 ]; do
            count=$((count + 1))
            busybox dd if=/dev/urandom of="$at/random$count" bs=$((count * 1777)) \
                count=$count 2>/dev/null || fail dd
            busybox dd if=/dev/zero of="$at/zero$count" bs=4096 count=$count 2>/dev/null || fail dd
        done
        busybox cp -r /modules "$at" || fail cp
        busybox sync
        # Space that was used goes back to the disk and is used again.
        busybox rm "$at"/random?
        busybox fstrim "$at" || fail fstrim
        busybox dd if=/dev/urandom of="$at/late" bs=65536 count=40 2>/dev/null || fail dd
        sums "$at" > "$at/sums"
        busybox sync
        ;;
    verify)
        busybox mount -t "$kind" "$disk" "$at" || fail "mount $kind"
        sums "$at" > /tmp/sums
        busybox cmp /tmp/sums "$at/sums" || fail "$kind has other files than were written"
        [ "$(busybox wc -l < /tmp/sums)" -gt 30 ] || fail "$kind has too few files"
        busybox umount "$at" || fail umount
        case $kind in
        ext4) fsck.ext4 -f -n "$disk" ;;
        xfs) xfs_repair -n "$disk" ;;
        esac || fail "fsck of $kind"
        ;;
    esac
    queue=/sys/block/vd$letter/queue
    cache=$(busybox cat $queue/write_cache)
    echo "@ $kind $mode $cache, discard $(busybox cat $queue/discard_max_bytes)"
done
echo "@ done"
busybox poweroff -f
