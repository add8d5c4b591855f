//! The program of a filter (seccomp(2)): a binary search for the number of a call. When a process
//! gets a filter, the kernel runs it once for each number. `seccompiler` compares one number after
//! the other, which took most of the time of the sandbox.

use std::collections::BTreeMap;

use seccompiler::{BackendError, BpfProgram, sock_filter};

/// What a filter does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    Allow,
    /// The call fails with this error.
    Refuse(i32),
    /// Another program looks at the arguments.
    Examine,
}

/// The values of `arch` in `struct seccomp_data`: a machine of elf(5), with 64 bits, and little
/// endian.
#[cfg(target_arch = "x86_64")]
const MACHINE: u32 = 0xc000_0000 | libc::EM_X86_64 as u32;
#[cfg(target_arch = "aarch64")]
const MACHINE: u32 = 0xc000_0000 | libc::EM_AARCH64 as u32;
#[cfg(target_arch = "riscv64")]
const MACHINE: u32 = 0xc000_0000 | libc::EM_RISCV as u32;

/// The offsets of `nr` and `arch` in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;

/// The second numbering of x86-64 begins here.
const X32: u32 = 0x4000_0000;

/// Decides for each number of a call; allows those that are missing. clone3(2) does not exist,
/// because its flags are in memory, and the C library then calls clone(2). `examination` is a
/// program of its own. A call of another architecture, or of x32, is no call of this process.
pub fn decide(
    decisions: &BTreeMap<u32, Decision>,
    examination: BpfProgram,
) -> Result<BpfProgram, BackendError> {
    let mut all = decisions.clone();
    all.insert(libc::SYS_clone3 as u32, Decision::Refuse(libc::ENOSYS));
    let tree = Tree::of(&ranges(&all));
    let mut program = vec![
        load(ARCHITECTURE),
        jump(libc::BPF_JEQ, 1, 0, MACHINE),
        end(libc::SECCOMP_RET_KILL_PROCESS),
        load(NUMBER),
    ];
    program.extend(tree.assemble()?);
    program.extend(examination);
    Ok(program)
}

/// The first number of each range with one decision.
fn ranges(decisions: &BTreeMap<u32, Decision>) -> Vec<(u32, Decision)> {
    let mut ranges = vec![(0, Decision::Allow)];
    let mut add = |first, decision| match ranges.last_mut() {
        Some(last) if last.0 == first => last.1 = decision,
        Some(last) if last.1 == decision => {}
        _ => ranges.push((first, decision)),
    };
    for (&number, &decision) in decisions {
        add(number, decision);
        add(number + 1, Decision::Allow);
    }
    add(X32, Decision::Refuse(libc::EPERM));
    // A number can have removed the end of the range before it.
    ranges.dedup_by_key(|range| range.1);
    ranges
}

/// Where a comparison continues.
#[derive(Debug, Clone, Copy)]
enum Next {
    Comparison(usize),
    End(Decision),
}

/// Comparisons with a number, each with the way below it, and the way from it on.
struct Tree(Vec<(u32, Next, Next)>);

impl Tree {
    fn of(ranges: &[(u32, Decision)]) -> Self {
        let mut tree = Tree(Vec::with_capacity(ranges.len()));
        tree.add(ranges);
        tree
    }

    fn add(&mut self, ranges: &[(u32, Decision)]) -> Next {
        if let [(_, decision)] = ranges {
            return Next::End(*decision);
        }
        let (below, from) = ranges.split_at(ranges.len() / 2);
        let this = self.0.len();
        let (first, decision) = from[0];
        self.0
            .push((first, Next::End(decision), Next::End(decision)));
        let ways = (self.add(below), self.add(from));
        self.0[this] = (first, ways.0, ways.1);
        Next::Comparison(this)
    }

    /// The comparisons, and behind them the ends that several have. Behind those is the
    /// examination.
    fn assemble(&self) -> Result<BpfProgram, BackendError> {
        let mut ends: Vec<Decision> = Vec::new();
        for next in self.0.iter().flat_map(|&(_, below, from)| [below, from]) {
            match next {
                Next::End(end) if end != Decision::Examine && !ends.contains(&end) => {
                    ends.push(end);
                }
                _ => {}
            }
        }
        let place = |next| match next {
            Next::Comparison(place) => place,
            Next::End(end) => {
                let among = ends.iter().position(|one| *one == end);
                self.0.len() + among.unwrap_or(ends.len())
            }
        };
        let mut program = Vec::with_capacity(self.0.len() + ends.len());
        for (at, &(first, below, from)) in self.0.iter().enumerate() {
            let distance = |next| {
                let skipped = place(next) - at - 1;
                u8::try_from(skipped).map_err(|_| BackendError::FilterTooLarge(skipped))
            };
            program.push(jump(
                libc::BPF_JGE,
                distance(from)?,
                distance(below)?,
                first,
            ));
        }
        program.extend(ends.iter().map(|decision| match decision {
            Decision::Refuse(errno) => end(libc::SECCOMP_RET_ERRNO | *errno as u32),
            _ => end(libc::SECCOMP_RET_ALLOW),
        }));
        Ok(program)
    }
}

fn load(offset: u32) -> sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset)
}

fn end(action: u32) -> sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, 0, 0, action)
}

/// Skips `jt` instructions if the loaded value compares with `k` so, and `jf` otherwise.
fn jump(comparison: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    instruction(libc::BPF_JMP | comparison | libc::BPF_K, jt, jf, k)
}

fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Marks the end of a program here: an action that no filter of bcow has.
    const EXAMINED: u32 = libc::SECCOMP_RET_LOG;

    /// The action of a program, and after how many instructions.
    fn run(program: &[sock_filter], machine: u32, number: u32) -> (u32, usize) {
        let (mut at, mut loaded) = (0, 0);
        for steps in 1.. {
            let one = &program[at];
            at += 1;
            let class = u32::from(one.code) & 0x07;
            let taken = |applies: bool| usize::from(if applies { one.jt } else { one.jf });
            match (class, u32::from(one.code) & 0xf0) {
                (libc::BPF_RET, _) => return (one.k, steps),
                (libc::BPF_JMP, libc::BPF_JEQ) => at += taken(loaded == one.k),
                (libc::BPF_JMP, libc::BPF_JGE) => at += taken(loaded >= one.k),
                (libc::BPF_LD, _) => loaded = if one.k == NUMBER { number } else { machine },
                other => panic!("no such instruction: {other:?}"),
            }
        }
        unreachable!("no program has so long a way")
    }

    fn program(decisions: &BTreeMap<u32, Decision>) -> BpfProgram {
        decide(decisions, vec![end(EXAMINED)]).unwrap()
    }

    #[test]
    fn each_number_has_its_decision_in_few_steps() {
        let refused = |errno: i32| libc::SECCOMP_RET_ERRNO | errno as u32;
        for count in 0..130 {
            // Some are neighbours, and some of these have the same decision.
            let numbers = (0..count).map(|number| number * number / 50 + number);
            let decisions: BTreeMap<u32, Decision> = numbers
                .map(|number| match number % 5 {
                    0 => (number, Decision::Examine),
                    1 => (number, Decision::Refuse(libc::ENOENT)),
                    _ => (number, Decision::Refuse(libc::EPERM)),
                })
                .collect();
            let program = program(&decisions);
            for number in (0..600).chain([X32 - 1, X32, X32 + 1, u32::MAX]) {
                let wanted = match decisions.get(&number) {
                    _ if number >= X32 => refused(libc::EPERM),
                    _ if i64::from(number) == libc::SYS_clone3 => refused(libc::ENOSYS),
                    Some(Decision::Refuse(errno)) => refused(*errno),
                    Some(Decision::Examine) => EXAMINED,
                    Some(Decision::Allow) | None => libc::SECCOMP_RET_ALLOW,
                };
                let (action, steps) = run(&program, MACHINE, number);
                assert_eq!(action, wanted, "{number} of {decisions:?}");
                assert!(steps <= 14, "{steps} of {}", program.len());
            }
        }
    }

    #[test]
    fn a_call_of_another_architecture_ends_the_process() {
        // That of i386.
        let other = 0x4000_0003;
        let program = program(&BTreeMap::new());
        for number in [0, 59, libc::SYS_clone3 as u32, u32::MAX] {
            let (action, _) = run(&program, other, number);
            assert_eq!(action, libc::SECCOMP_RET_KILL_PROCESS);
        }
    }

    #[test]
    fn a_program_that_is_too_large_is_an_error() {
        let refused = |number: u32| (2 * number, Decision::Refuse(libc::EPERM));
        let decisions = (0..400).map(refused).collect();
        assert!(decide(&decisions, Vec::new()).is_err());
    }
}
