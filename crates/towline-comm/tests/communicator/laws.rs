//! The laws of one-sided access as one rank of a group keeps and checks them: whether the ranks are processes of one host
//! or of two, all of them run this.

use towline::{Kind, SystemStorage};
use towline_comm::{Communicator, Result, WaitSignal, Window, WindowFlag, mem_alloc};

const SIZE: usize = 64 << 10;
/// Where the words are that all ranks update; puts stay below.
const WORDS: usize = 40 << 10;

/// Checks bounds, visibility, order and atomicity on windows of every kind of memory. Collective.
pub(super) fn hold(comm: &Communicator) -> Result<()> {
    let window = |shared: bool, flags| -> Result<Window> {
        let window = if shared {
            comm.register_window(mem_alloc(SIZE)?, flags)?
        } else {
            comm.register_window(SystemStorage::new(SIZE)?, flags)?
        };
        Ok(window.unwrap())
    };
    for shared in [true, false] {
        let plain = window(shared, WindowFlag::DEFAULT)?;
        bounds(comm, &plain)?;
        visibility(comm, &plain)?;
        atomicity(comm, &plain)?;
        order(comm, &window(shared, WindowFlag::STRICT_ORDERING)?)?;
    }
    Ok(())
}

fn neighbours(comm: &Communicator) -> Result<(usize, usize)> {
    let (rank, nranks) = (comm.rank()?, comm.nranks()?);
    Ok(((rank + 1) % nranks, (rank + nranks - 1) % nranks))
}

/// Nothing goes past the end of its target, and what is refused moves nothing.
fn bounds(comm: &Communicator, window: &Window) -> Result<()> {
    let (next, _) = neighbours(comm)?;
    let wide = comm.memory(SystemStorage::new(SIZE + 1)?)?;
    wide.write_at(0, &vec![9; SIZE + 1])?;
    let refusals = [
        window.put_bytes(next, SIZE - 8, &[9; 16]).unwrap_err(),
        window.put_bytes(next, usize::MAX, &[9; 16]).unwrap_err(),
        window.put(next, 0, &wide).unwrap_err(),
        window.put_signal(next, 0, &wide, 0, 0).unwrap_err(),
        window.get(next, 0, &wide).unwrap_err(),
        window.get_bytes(next, SIZE, &mut [0]).unwrap_err(),
        window.fetch_add(next, SIZE, 9).unwrap_err(),
        window.compare_swap(next, SIZE - 4, 0, 9).unwrap_err(),
    ];
    for error in refusals {
        assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[next][..]), "{error}");
    }
    window.fence()?;
    let mut bytes = vec![1; SIZE];
    window.memory()?.read_at(0, &mut bytes)?;
    assert!(bytes.iter().all(|byte| *byte == 0), "a refused access has left something");
    window.fence()
}

/// A rank that sees a signal sees what was put before it.
fn visibility(comm: &Communicator, window: &Window) -> Result<()> {
    let (next, before) = neighbours(comm)?;
    let source = comm.memory(mem_alloc(WORDS)?)?;
    for round in 1..=40u8 {
        source.write_at(0, &vec![round; WORDS])?;
        // Earlier plain puts count too, not only the one that carries the signal.
        drop(window.put_bytes(next, 0, &vec![round; WORDS / 2])?);
        window.put_signal(next, WORDS / 2, &source.part(0, WORDS / 2)?, 0, 0)?.wait()?;
        comm.wait_signal(&[WaitSignal::from_rank(before)])?;
        let mut bytes = vec![0; WORDS];
        window.memory()?.read_at(0, &mut bytes)?;
        assert!(bytes.iter().all(|byte| *byte == round), "round {round}");
        comm.signal(before, 0, 1)?.wait()?;
        comm.wait_signal(&[WaitSignal { index: 1, ..WaitSignal::from_rank(next) }])?;
    }
    Ok(())
}

/// No update of a word is lost, and no value is seen twice.
fn atomicity(comm: &Communicator, window: &Window) -> Result<()> {
    const ROUNDS: u64 = 100;
    let (rank, nranks) = (comm.rank()? as u64, comm.nranks()? as u64);
    let mut seen = Vec::new();
    for _ in 0..ROUNDS {
        seen.push(window.fetch_add(0, WORDS, 1)?.wait()?);
        let mut word = [0; 8];
        window.get_bytes(0, WORDS + 8, &mut word)?;
        let mut old = u64::from_ne_bytes(word);
        loop {
            let found = window.compare_swap(0, WORDS + 8, old, old + rank + 1)?.wait()?;
            if found == old {
                break;
            }
            old = found;
        }
    }
    assert!(seen.is_sorted_by(|one, next| one < next), "one rank's values grow");
    window.fence()?;
    let mut words = [0; 16];
    window.get_bytes(0, WORDS, &mut words)?;
    let word = |at: usize| u64::from_ne_bytes(words[at..at + 8].try_into().unwrap());
    assert_eq!((word(0), word(8)), (ROUNDS * nranks, ROUNDS * nranks * (nranks + 1) / 2));
    window.fence()
}

/// Puts of one rank to another become visible in the order of the calls.
fn order(comm: &Communicator, window: &Window) -> Result<()> {
    const ROUNDS: u64 = 200;
    let (next, before) = neighbours(comm)?;
    let memory = window.memory()?;
    let read = |offset| -> Result<u64> {
        let mut word = [0; 8];
        memory.read_at(offset, &mut word)?;
        Ok(u64::from_ne_bytes(word))
    };
    let mut looked = 0;
    for round in 1..=ROUNDS {
        drop(window.put_bytes(next, 0, &round.to_ne_bytes())?);
        drop(window.put_bytes(next, 2048, &round.to_ne_bytes())?);
        // The later one is looked at first.
        let (later, earlier) = (read(2048)?, read(0)?);
        assert!(earlier >= later && later >= looked, "{earlier} after {later}, {looked} before");
        looked = later;
    }
    window.flush(next)?;
    while looked < ROUNDS && comm.dead_ranks()?.is_empty() {
        let (later, earlier) = (read(2048)?, read(0)?);
        assert!(earlier >= later && later >= looked, "{earlier} after {later}, {looked} before");
        looked = later;
    }
    assert_eq!((read(0)?, read(2048)?), (ROUNDS, ROUNDS), "from rank {before}");
    window.fence()
}
