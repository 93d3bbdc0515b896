//! An attacker on the network path between two endpoints.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;
use towline::{Endpoint, Tls};

use crate::tcp;

/// An attacker on the network path: passes bytes on both ways, remembers them, and flips a bit where the test asks for it.
pub(crate) struct Middle {
    address: SocketAddr,
    owner: Arc<Mutex<Option<SocketAddr>>>,
    pub(crate) seen: Arc<Mutex<Vec<u8>>>,
    /// After so many bytes, counted over both directions, a bit is flipped. Once.
    flip_at: Arc<AtomicUsize>,
    flipped: Arc<AtomicBool>,
    passed: Arc<AtomicUsize>,
}

impl Middle {
    pub(crate) fn new() -> Middle {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let middle = Middle {
            address: listener.local_addr().unwrap(),
            owner: Arc::default(),
            seen: Arc::default(),
            flip_at: Arc::new(AtomicUsize::new(usize::MAX)),
            flipped: Arc::default(),
            passed: Arc::default(),
        };
        let (owner, seen) = (Arc::clone(&middle.owner), Arc::clone(&middle.seen));
        let (flip_at, flipped) = (Arc::clone(&middle.flip_at), Arc::clone(&middle.flipped));
        let passed = Arc::clone(&middle.passed);
        thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                let Some(owner) = *owner.lock() else { continue };
                let Ok(far) = TcpStream::connect(owner) else { continue };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (seen, passed) = (Arc::clone(&seen), Arc::clone(&passed));
                    let (flip_at, flipped) = (Arc::clone(&flip_at), Arc::clone(&flipped));
                    thread::spawn(move || {
                        let mut some = vec![0; 16 << 10];
                        while let Ok(len @ 1..) = from.read(&mut some) {
                            let before = passed.fetch_add(len, Ordering::SeqCst);
                            let flip = flip_at.load(Ordering::SeqCst);
                            if before + len > flip && !flipped.swap(true, Ordering::SeqCst) {
                                some[flip.saturating_sub(before).min(len - 1)] ^= 4;
                            }
                            let mut seen = seen.lock();
                            if seen.len() < 4 << 20 {
                                seen.extend_from_slice(&some[..len]);
                            }
                            drop(seen);
                            if to.write_all(&some[..len]).is_err() {
                                break;
                            }
                        }
                        let _ = from.shutdown(std::net::Shutdown::Both);
                        let _ = to.shutdown(std::net::Shutdown::Both);
                    });
                }
            }
        });
        middle
    }

    /// Flips a bit once so many more bytes have passed.
    pub(crate) fn flip_after(&self, bytes: usize) {
        self.flipped.store(false, Ordering::SeqCst);
        self.flip_at.store(self.passed.load(Ordering::SeqCst) + bytes, Ordering::SeqCst);
    }

    pub(crate) fn has_flipped(&self) -> bool {
        self.flipped.load(Ordering::SeqCst)
    }

    /// An owner whose tickets lead here.
    pub(crate) fn owner(&self, tls: Option<Tls>, checksums: bool) -> Endpoint {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let options = Endpoint::options("owner").routing(tcp()).listen(free).advertise(self.address);
        let options = options.checksums(checksums);
        let owner = tls.into_iter().fold(options, towline::EndpointOptions::tls).open().unwrap();
        *self.owner.lock() = Some(free);
        owner
    }
}
