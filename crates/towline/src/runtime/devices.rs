//! Threads that wait for devices: disks, GPUs, and libraries that look for some. One that hangs keeps those that wait for it, and no others.

use std::collections::{HashMap, TryReserveError, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::pool::{Job, Pool, Refused};
use crate::{Error, Kind};

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Device {
    /// The disk, or whatever it is, behind the file system with that number.
    Disk(u64),
    /// The GPU with that ordinal.
    Gpu(u32),
    /// Answers queries about the path with that number.
    Path(u8),
    /// The device that has the pages of the memory at that address, which was lent.
    Lent(usize),
}

/// Threads of one device, at a time: enough to keep a disk busy.
pub(crate) const EACH: usize = 4;

/// Threads of all: so many devices may hang that others go on.
const ALL: usize = 32;

static POOL: Pool = Pool::new("towline-device", ALL);

/// The jobs of devices.
pub(crate) struct Devices(Mutex<Option<HashMap<Device, Queue>>>);

#[derive(Default)]
struct Queue {
    running: usize,
    /// Each with the number of what it is for.
    waiting: VecDeque<(u64, Job)>,
}

impl Devices {
    pub(super) const fn new() -> Devices {
        Devices(Mutex::new(None))
    }

    /// Has a thread run a job that waits for that device, when it is its turn. Handed back where no thread can be started.
    pub(crate) fn spawn(&'static self, device: Device, job: Job) -> Result<(), Refused> {
        self.spawn_for(device, 0, job)
    }

    /// The same for something that has a number, by which it can be [withdrawn](Self::withdraw).
    pub(crate) fn spawn_for(&'static self, device: Device, number: u64, job: Job) -> Result<(), Refused> {
        {
            let mut all = self.0.lock();
            let all = all.get_or_insert_default();
            if let Err(cause) = all.try_reserve(1) {
                return Err(no_room(job, cause));
            }
            let queue = all.entry(device).or_default();
            if queue.running >= EACH {
                if let Err(cause) = queue.waiting.try_reserve(1) {
                    return Err(no_room(job, cause));
                }
                queue.waiting.push_back((number, job));
                return Ok(());
            }
            queue.running += 1;
        }
        self.run(device, job)
    }

    /// Drops the jobs for what has that number, as far as none of the device's threads has begun them.
    pub(crate) fn withdraw(&self, device: Device, number: u64) {
        let mut withdrawn = Vec::new();
        {
            let mut all = self.0.lock();
            let Some(queue) = all.as_mut().and_then(|all| all.get_mut(&device)) else { return };
            let mut at = 0;
            while at < queue.waiting.len() {
                match queue.waiting[at].0 == number {
                    true => withdrawn.extend(queue.waiting.remove(at)),
                    false => at += 1,
                }
            }
        }
        // Without the lock: what a job keeps alive may come back here when it goes.
        drop(withdrawn);
    }

    /// How many jobs wait for that device, and have no thread.
    #[cfg(test)]
    pub(crate) fn waiting(&self, device: Device) -> usize {
        self.0.lock().as_ref().and_then(|all| all.get(&device)).map_or(0, |queue| queue.waiting.len())
    }

    /// The place is taken.
    fn run(&'static self, device: Device, job: Job) -> Result<(), Refused> {
        let job = Arc::new(Mutex::new(Some(job)));
        let (mine, turn) = (Arc::clone(&job), Turn { devices: self, device });
        let refused = POOL.spawn(Box::new(move || {
            let job = mine.lock().take();
            let _turn = turn;
            if let Some(job) = job {
                job();
            }
        }));
        refused.map_err(|Refused { job: wrapped, error }| {
            let job = job.lock().take().unwrap_or_else(|| Box::new(|| ()));
            drop(wrapped);
            Refused { job, error }
        })
    }
}

fn no_room(job: Job, cause: TryReserveError) -> Refused {
    let message = "no memory for what waits for a disk or the like";
    Refused { job, error: Error::new(Kind::Exhausted, "wait for a device", message).caused_by(cause) }
}

/// A place among those who wait for a device; the next one gets it, also where a job has panicked.
struct Turn {
    devices: &'static Devices,
    device: Device,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let next = {
            let mut all = self.devices.0.lock();
            let Some(queue) = all.as_mut().and_then(|all| all.get_mut(&self.device)) else { return };
            let next = queue.waiting.pop_front();
            if next.is_none() {
                queue.running -= 1;
                if queue.running == 0
                    && let Some(all) = all.as_mut()
                {
                    all.remove(&self.device);
                }
            }
            next
        };
        if let Some((_, next)) = next
            && let Err(refused) = self.devices.run(self.device, next)
        {
            tracing::warn!(error = %refused.error, "waiting for a device is not possible");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const WATCHDOG: Duration = Duration::from_secs(30);

    #[test]
    fn a_device_that_hangs_keeps_few_threads_and_others_go_on() {
        static DEVICES: Devices = Devices::new();
        let (free, hung) = mpsc::channel::<()>();
        let hung = Arc::new(Mutex::new(hung));
        let (begun, begins) = mpsc::channel();
        for number in 0..20 {
            let (hung, begun) = (Arc::clone(&hung), begun.clone());
            let job = move || {
                begun.send(number).unwrap();
                // Ends when the other side is dropped; who waits for the lock waits as long.
                let _ = hung.lock().recv();
            };
            DEVICES.spawn(Device::Disk(1), Box::new(job)).unwrap();
        }
        for _ in 0..EACH {
            begins.recv_timeout(WATCHDOG).unwrap();
        }
        let (done, ends) = mpsc::channel();
        for device in [Device::Disk(2), Device::Gpu(1), Device::Path(1)] {
            for number in 0..20 {
                let done = done.clone();
                let job = move || {
                    done.send(number).unwrap();
                    // More of them than there are places.
                    assert!(number % 3 != 0, "a job that panics leaves its place to the next");
                };
                DEVICES.spawn(device, Box::new(job)).unwrap();
            }
        }
        for _ in 0..60 {
            ends.recv_timeout(WATCHDOG).unwrap();
        }
        assert!(begins.try_recv().is_err(), "too many threads wait for one device");
        drop(free);
        for _ in EACH..20 {
            begins.recv_timeout(WATCHDOG).unwrap();
        }
    }
}
