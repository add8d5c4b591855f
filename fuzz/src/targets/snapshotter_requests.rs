//! What containerd, a kubelet and the disk give to bcow-snapshotter, as far as it reads it itself:
//! filters, labels, names, descriptors, records. The first byte selects one.

pub fn fuzz(bytes: &[u8]) {
    bcow_snapshotter::fuzz_request(bytes);
}
