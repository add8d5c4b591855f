//! First guesses of users of other programs: each works, or leads to the right command.

use crate::support::{Sandbox, words};

/// Command lines. Those before `=>` succeed, those before `->` fail; a part of the output follows.
const QEMU_IMG: &[&str] = &[
    "create new.bcow 10G => writable disk of 10 GiB",
    "create empty.bcow 10M => `bcow attach empty.bcow /dev/nbd0 && mkfs.ext4",
    "ls empty.bcow -> `bcow attach empty.bcow /dev/nbd0 && mkfs.ext4",
    "create -s 1.5G half.bcow => writable disk of 1.50 GiB",
    "create -f qcow2 x 1M -> the format of the file is BCoW",
    "create -b image.bcow -F qcow2 x -> a backing is a BCoW",
    "create -o cluster_size=64k x 1M -> `--block-size`",
    "create -b image.bcow over.bcow => `bcow create -b image.bcow --fs ext4 NEW.bcow`",
    "rebase -u -b image.bcow over.bcow => over image.bcow",
    "resize new.bcow +1G => disk of 11 GiB",
    "resize -f raw new.bcow 1G -> the format of the file is",
    "info image.bcow => image.bcow: sealed BCoW image",
    "info --output=json image.bcow => bcow.inspect/1",
    "info --backing-chain over.bcow => over.bcow: writable",
    "map --output json image.bcow => bcow.map/1",
    "check image.bcow =>",
    "check --output=json image.bcow => bcow.fsck/1",
    "check -r all image.bcow -> `bcow fsck --repair IMG`",
    "convert -f raw -O bcow disk.raw a => sealed disk of 64 KiB",
    "convert -p -f raw disk.raw b.bcow => sealed disk of 64 KiB",
    "convert -f raw -O qcow2 disk.raw c => disk of 64 KiB",
    "convert -f qcow2 -O raw c d.img => disk of 64 KiB",
    "convert -f qcow2 raw:disk.raw x -> for a name without a transport",
    "convert -f vmdk a.vmdk x -> `qemu-img convert` converts a qcow2",
    "convert -O vpc image.bcow x -> `qemu-img convert` converts a qcow2",
    "convert -c -O qcow2 c x -> `--compress zlib` for qcow2",
    "convert -n disk.raw x -> leave it out",
    "snapshot -c before new.bcow -> `bcow snapshot DISK NAME`",
    "compare a b.bcow -> `bcow diff A B`",
    "measure -O qcow2 disk.raw -> `bcow inspect IMG`",
    "bench new.bcow -> `bcow serve DISK --socket SOCK`",
    "dd if=new.bcow of=x -> `bcow export DISK --to raw -o FILE`",
    "serve -c /dev/nbd0 new.bcow -> `bcow attach DISK /dev/nbd0`",
    "serve -p 10809 new.bcow -> `--listen ADDR:PORT`",
];

const CONTAINERS: &[&str] = &[
    "pull debian:12 -> `bcow convert docker://NAME IMAGE.bcow`",
    "convert debian:12 x.bcow -> `bcow convert docker://debian:12 ",
    "convert alpine x.bcow -> `bcow convert docker://alpine ",
    "convert docker.io/library/debian x.bcow -> `bcow convert docker://docker.io/library/debian ",
    "pull localhost:1/x/y:1 x.bcow -> docker://localhost:1/x/y:1",
    "push image.bcow docker://localhost:1/x/y:1 -> docker://localhost:1/x/y:1",
    "mount quay.io/x/app mnt -> `bcow convert docker://quay.io/x/app ",
    "convert containers-storage:a x.bcow -> `skopeo copy containers-storage:a ",
    "convert docker-daemon:a:1 x.bcow -> `skopeo copy docker-daemon:a:1 ",
    "push image.bcow host.x/y -> `bcow copy IMG docker://HOST",
    "images -> `bcow cache list`",
    "image ls -> `bcow ps` lists mounts",
    "history image.bcow -> `bcow inspect IMG`",
    "run -it debian:12 sh -> `bcow convert docker://debian:12 ",
    "run --rm -it debian:12 -> `bcow convert docker://debian:12 ",
    "shell debian:12 -> `bcow convert docker://debian:12 ",
    "exec image.bcow sh -> `bcow run IMG [CMD]`",
    "rmi debian:12 -> rm(1)",
    "save -o x.tar image.bcow -> `bcow export IMG --to oci-archive:",
    "load -i x.tar -> `bcow convert FILE.tar IMAGE.bcow`",
    "tag a b -> `bcow copy IMG docker://HOST/REPO:TAG`",
    "cp image.bcow:/etc/motd . -> `bcow extract IMG PATH DIR`",
    "ps -a =>",
    "system prune -> `bcow cache prune --all`",
    "cache clear -> `bcow cache prune --all`",
    "pool ls -> `bcow pool list`",
    "commit -m text new.bcow -> leave it out",
    "login docker.io -> `skopeo login HOST`",
    "list-tags docker://debian -> `skopeo list-tags",
    "ls --tls-verify=false docker://h.x/y -> `--insecure` allows",
    "copy --dest-creds u:p image.bcow x -> `skopeo login`",
    "copy -f oci docker://a.x/b x -> byte for byte",
    "inspect --format {{.Name}} image.bcow -> `--json` prints all",
    "unpack --image oci:a:b bundle -> `bcow extract IMG DIR`",
    "verify image.bcow -> `bcow fsck --data IMG`",
];

const FILES: &[&str] = &[
    "mount =>",
    "mount -t bcow -o loop --fake image.bcow mnt =>",
    "mount -t erofs image.bcow mnt -> leave it out",
    "mount -o lowerdir=a,upperdir=b image.bcow mnt -> --upper UPPER",
    "mount -r image.bcow mnt -> `-o ro`",
    "mount -a -> `mount -a -t bcow`",
    "mount sample.tar mnt -> `bcow convert sample.tar IMAGE.bcow`",
    "mount root.tar.gz mnt -> `bcow convert root.tar.gz IMAGE.bcow` makes an image of it, which",
    "convert tar:root.tar.gz root.bcow => root.bcow: 1 layer",
    "mount root.bcow mnt --fake =>",
    "unmount mnt -> mnt",
    "umount -l mnt -> mnt",
    "umount -f mnt -> `bcow umount --lazy DIR`",
    "ls -lh image.bcow -> `bcow ls -l IMG`",
    "ls -1 image.bcow => etc",
    "tree image.bcow -> `bcow ls -R IMG`",
    "mksquashfs dir x.sqsh -> `bcow convert dir:DIR IMAGE.bcow`",
    "unsquashfs x.sqsh -> `bcow extract IMG DIR`",
    "extract -C out image.bcow -> the directory is the last word",
    "man mount => .TH bcow-mount 1",
    "completion bash => extract",
];

#[test]
fn first_guesses_work_or_lead_on() {
    let sandbox = Sandbox::with_image();
    sandbox.write("disk.raw", &[7; 64 << 10]);
    std::fs::create_dir(sandbox.path("mnt")).unwrap();
    let mut pack = std::process::Command::new("gzip");
    let packed = pack.arg("-c").arg(sandbox.path("sample.tar")).output();
    sandbox.write("root.tar.gz", &packed.unwrap().stdout);
    let guesses = [QEMU_IMG, CONTAINERS, FILES].concat();
    assert!(guesses.len() >= 60);
    // In this order: some use the files of others.
    for guess in guesses {
        let (line, part, succeeds) = match guess.split_once(" =>") {
            Some((line, part)) => (line, part, true),
            None => {
                let (line, part) = guess.split_once(" ->").expect(guess);
                (line, part, false)
            }
        };
        let output = sandbox.run(&words(line));
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert_eq!(output.status.success(), succeeds, "{line}: {text}");
        assert!(text.contains(part.trim_start()), "{line}: {text}");
        assert!(succeeds || !text.contains("tip: "), "{line}: {text}");
    }
    let left = ["x", "x.bcow", "mount"].map(|name| sandbox.path(name).exists());
    assert_eq!(left, [false; 3]);
}

#[test]
fn a_file_with_the_name_of_a_format_is_a_source() {
    let sandbox = Sandbox::with_image();
    sandbox.write("raw", &sandbox.read("image.bcow"));
    sandbox.write("new.bcow", b"old");
    let shown = sandbox.shown(&words("convert -f raw new.bcow"));
    assert!(shown.contains("exit status 0"), "{shown}");
    assert!(sandbox.read("new.bcow") != b"old");
}
