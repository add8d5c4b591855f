//! bcow
fn main() {}
