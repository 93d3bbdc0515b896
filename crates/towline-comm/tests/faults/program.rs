//! A random program that all ranks of a group run in step until something goes wrong. Whatever a call reports as
//! received is compared with what must have been sent.

use towline::{Dtype, SystemStorage};
use towline_comm::{
    Communicator, Error, Memory, Op, RegisteredBuffer, Result, WaitSignal, Window, WindowFlag, group,
    mem_alloc,
};
use towline_testkit::executor::block_on;
use towline_testkit::random::Random;

/// A room has four parts. From the first a rank sends, into the second it receives: it is still busy there when others
/// are in their next step, so what they put (each in its own place) and what they get lies elsewhere.
const HALF: usize = 512 << 10;
const PUTS: usize = 2 * HALF;
const GETS: usize = PUTS + 5 * MOST;
const ROOM: usize = GETS + MOST;
/// The most bytes of one block: five of them fit into a half.
const MOST: usize = 96 << 10;

/// Runs until the first error, and gives it back.
pub(crate) fn run(comm: &Communicator, seed: u64) -> Error {
    let outcome = Room::new(comm).and_then(|room| {
        // The same numbers on all ranks: each knows what the others do.
        let mut random = Random::new(seed ^ 0x5eed);
        for number in 1.. {
            Step { comm, room: &room, number, rank: room.rank, nranks: room.nranks }.take(&mut random)?;
        }
        Ok(())
    });
    outcome.expect_err("the numbers of steps do not end")
}

struct Room {
    rank: usize,
    nranks: usize,
    shared: Window,
    private: Window,
    buffer: RegisteredBuffer,
    loose: Memory,
}

impl Room {
    fn new(comm: &Communicator) -> Result<Room> {
        let shared = comm.register_window(mem_alloc(ROOM)?, WindowFlag::DEFAULT)?;
        let private = comm.register_window(SystemStorage::new(ROOM)?, WindowFlag::STRICT_ORDERING)?;
        Ok(Room {
            rank: comm.rank()?,
            nranks: comm.nranks()?,
            shared: shared.unwrap(),
            private: private.unwrap(),
            buffer: comm.register_buffer(mem_alloc(ROOM)?)?,
            loose: comm.memory(mem_alloc(ROOM)?)?,
        })
    }

    fn memory(&self, random: &mut Random) -> Result<Memory> {
        match random.below(4) {
            0 => self.shared.memory(),
            1 => self.private.memory(),
            2 => self.buffer.memory(),
            _ => Ok(self.loose.clone()),
        }
    }
}

/// Bytes that tell the step, who sent them and to whom.
fn pattern(step: u64, from: usize, to: usize, len: usize) -> Vec<u8> {
    let mut word = step << 16 | (from as u64) << 8 | to as u64;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// To whom something goes that goes to every rank.
const ALL: usize = 255;

struct Step<'a> {
    comm: &'a Communicator,
    room: &'a Room,
    number: u64,
    rank: usize,
    nranks: usize,
}

impl Step<'_> {
    fn take(&self, random: &mut Random) -> Result<()> {
        let len = 8 << random.below(14);
        let len = (len + 8 * random.below(len / 8 + 1)).min(MOST as u64) as usize;
        match random.below(10) {
            0 => self.comm.barrier(),
            1 => self.all_reduce(len, random),
            2 => self.all_gather(len, random),
            3 => self.broadcast(len, random),
            4 => self.all_to_all(len, random),
            5 => self.register(len, random),
            6 | 7 => self.put_and_signal(len, random),
            8 => self.get(len, random),
            _ => self.send_and_receive(len, random),
        }
    }

    fn mine(&self, to: usize, len: usize) -> Vec<u8> {
        pattern(self.number, self.rank, to, len)
    }

    fn expect(&self, what: &str, memory: &Memory, from: usize, to: usize) -> Result<()> {
        let mut got = vec![0; memory.len()];
        memory.read_at(0, &mut got)?;
        self.compare(what, &got, &pattern(self.number, from, to, got.len()));
        Ok(())
    }

    fn compare(&self, what: &str, got: &[u8], expected: &[u8]) {
        let (rank, number) = (self.rank, self.number);
        if let Some(at) = got.iter().zip(expected).position(|(got, expected)| got != expected) {
            panic!(
                "WRONG BYTES: {what} of {} bytes in step {number} on rank {rank}, from {at} on",
                got.len()
            );
        }
    }

    fn all_reduce(&self, len: usize, random: &mut Random) -> Result<()> {
        let memory = self.room.memory(random)?;
        let (send, recv) = (memory.part(0, len)?, memory.part(HALF, len)?);
        send.write_at(0, &self.mine(ALL, len))?;
        self.comm.all_reduce(&send, &recv, Dtype::U64, Op::Sum)?;
        let mut got = vec![0; len];
        recv.read_at(0, &mut got)?;
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap());
        let mut sums = vec![0u64; len / 8];
        for from in 0..self.nranks {
            let theirs = pattern(self.number, from, ALL, len);
            sums.iter_mut()
                .zip(theirs.chunks_exact(8))
                .for_each(|(sum, one)| *sum = sum.wrapping_add(word(one)));
        }
        let sums: Vec<u8> = sums.into_iter().flat_map(u64::to_ne_bytes).collect();
        self.compare("all_reduce", &got, &sums);
        Ok(())
    }

    fn all_gather(&self, len: usize, random: &mut Random) -> Result<()> {
        let memory = self.room.memory(random)?;
        let (send, recv) = (memory.part(0, len)?, memory.part(HALF, len * self.nranks)?);
        send.write_at(0, &self.mine(ALL, len))?;
        self.comm.all_gather(&send, &recv, Dtype::U8)?;
        (0..self.nranks)
            .try_for_each(|from| self.expect("all_gather", &recv.part(from * len, len)?, from, ALL))
    }

    fn broadcast(&self, len: usize, random: &mut Random) -> Result<()> {
        let memory = self.room.memory(random)?;
        let root = random.below(self.nranks as u64) as usize;
        let (send, recv) = (memory.part(0, len)?, memory.part(HALF, len)?);
        send.write_at(0, &self.mine(ALL, len))?;
        self.comm.broadcast((self.rank == root).then_some(&send), Some(&recv), Dtype::U8, root)?;
        self.expect("broadcast", &recv, root, ALL)
    }

    fn all_to_all(&self, len: usize, random: &mut Random) -> Result<()> {
        let memory = self.room.memory(random)?;
        let (send, recv) = (memory.part(0, len * self.nranks)?, memory.part(HALF, len * self.nranks)?);
        for to in 0..self.nranks {
            send.write_at(to * len, &self.mine(to, len))?;
        }
        self.comm.all_to_all(&send, &recv, Dtype::U8)?;
        let of = |from: usize| recv.part(from * len, len);
        (0..self.nranks).try_for_each(|from| self.expect("all_to_all", &of(from)?, from, self.rank))
    }

    /// A window for one step, written by the rank before this one.
    fn register(&self, len: usize, random: &mut Random) -> Result<()> {
        let window = if random.below(2) == 0 {
            self.comm.register_window(mem_alloc(len)?, WindowFlag::DEFAULT)?
        } else {
            self.comm.register_window(SystemStorage::new(len)?, WindowFlag::DEFAULT)?
        };
        let window = window.unwrap();
        let (next, before) = ((self.rank + 1) % self.nranks, (self.rank + self.nranks - 1) % self.nranks);
        window.put_bytes(next, 0, &self.mine(next, len))?.wait()?;
        window.fence()?;
        self.expect("put", &window.memory()?, before, self.rank)
    }

    fn put_and_signal(&self, len: usize, random: &mut Random) -> Result<()> {
        let window = if random.below(2) == 0 { &self.room.shared } else { &self.room.private };
        let far = 1 + random.below(self.nranks as u64 - 1) as usize;
        let (next, before) = ((self.rank + far) % self.nranks, (self.rank + self.nranks - far) % self.nranks);
        let put = window.put_signal_bytes(next, PUTS + self.rank * MOST, &self.mine(next, len), 0, 0)?;
        self.comm.wait_signal(&[WaitSignal::from_rank(before)])?;
        self.expect("put_signal", &window.memory()?.part(PUTS + before * MOST, len)?, before, self.rank)?;
        if random.below(2) == 0 {
            put.wait()?
        } else {
            block_on(put)?
        };
        // Nobody writes there again before this rank has looked.
        self.comm.signal(before, 1, 3)?.wait()?;
        self.comm.wait_signal(&[WaitSignal { context: 1, index: 3, ..WaitSignal::from_rank(next) }])
    }

    fn get(&self, len: usize, random: &mut Random) -> Result<()> {
        let window = if random.below(2) == 0 { &self.room.shared } else { &self.room.private };
        let peer = (self.rank + random.below(self.nranks as u64) as usize) % self.nranks;
        window.memory()?.write_at(GETS, &self.mine(ALL, len))?;
        window.fence()?;
        let mut got = vec![0; len];
        window.get_bytes(peer, GETS, &mut got)?;
        self.compare("get", &got, &pattern(self.number, peer, ALL, len));
        window.fence()
    }

    fn send_and_receive(&self, len: usize, random: &mut Random) -> Result<()> {
        let memory = self.room.memory(random)?;
        let far = 1 + random.below(self.nranks as u64 - 1) as usize;
        let (next, before) = ((self.rank + far) % self.nranks, (self.rank + self.nranks - far) % self.nranks);
        let (send, recv) = (memory.part(0, len)?, memory.part(HALF, len)?);
        send.write_at(0, &self.mine(next, len))?;
        group(|| {
            self.comm.send(&send, Dtype::U8, next)?;
            self.comm.recv(&recv, Dtype::U8, before)
        })?;
        self.expect("recv", &recv, before, self.rank)
    }
}
