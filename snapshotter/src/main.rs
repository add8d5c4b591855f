//! The program `bcow-snapshotter`.

fn main() -> std::process::ExitCode {
    bcow_snapshotter::main()
}
