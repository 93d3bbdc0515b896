//! Bare sockets between two processes: what the socket paths are compared with.
//!
//! The client names a number of bytes and how to move them. Reading, the server sends that many from a buffer;
//! writing, it receives that many into a buffer and answers with one byte.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::net::{RecvFlags, sockopt};
use towline::SystemStorage;

use super::protocol::{Medium, Op};
use crate::outcome::{Failure, Outcome};

/// How a bare copy uses the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    /// How much is handed to the kernel in one call.
    call: u32,
    /// Whether a receiving call waits until all of it is there, instead of taking what has come.
    whole: bool,
}

impl Style {
    /// Styles that are worth trying; which of them is the fastest depends on the machine.
    pub(crate) const ALL: [Style; 3] = [
        Style { call: 4 << 20, whole: false },
        Style { call: 1 << 20, whole: true },
        Style { call: 256 << 10, whole: true },
    ];
}

impl Default for Style {
    fn default() -> Style {
        Style::ALL[0]
    }
}

/// The library's socket buffers for bulk on one host; the bare copy gets the same.
const BULK_BUFFER: usize = 212_992;

/// And the same congestion control.
const CONGESTION: &str = "reno";

fn tune_tcp(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // As in the library, a connection does without where the kernel refuses.
    let _ = sockopt::set_tcp_congestion(stream.as_fd(), CONGESTION);
    Ok(())
}

fn tune(stream: &dyn Stream) -> io::Result<()> {
    sockopt::set_socket_send_buffer_size(stream.as_fd(), BULK_BUFFER)?;
    sockopt::set_socket_recv_buffer_size(stream.as_fd(), BULK_BUFFER)?;
    Ok(())
}

/// What the client asks for.
struct Request {
    count: u64,
    style: Style,
}

impl Request {
    fn encode(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.count.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.style.call.to_le_bytes());
        bytes[12] = u8::from(self.style.whole);
        bytes
    }

    fn decode(bytes: [u8; 16]) -> Request {
        let [count @ .., _, _, _, _, _, _, _, _] = bytes;
        let [_, _, _, _, _, _, _, _, a, b, c, d, whole, ..] = bytes;
        let style = Style { call: u32::from_le_bytes([a, b, c, d]), whole: whole != 0 };
        Request { count: u64::from_le_bytes(count), style }
    }
}

trait Stream: Read + Write + AsFd + Send {}
impl<S: Read + Write + AsFd + Send> Stream for S {}

/// Waits for the next connection.
type Accept = Box<dyn FnMut() -> io::Result<Box<dyn Stream>> + Send>;

/// Listens and serves that many connections, each in a thread of its own; returns where.
pub(super) fn serve(medium: Medium, op: Op, streams: usize, buffer: u64, bulk: bool) -> Outcome<String> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let refused = |error| Failure::os("listen", error);
    let (address, mut accept): (String, Accept) = match medium {
        Medium::Tcp => {
            let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(refused)?;
            let address = listener.local_addr().map_err(refused)?.to_string();
            let accept = move || {
                let (stream, _) = listener.accept()?;
                tune_tcp(&stream)?;
                Ok(Box::new(stream) as Box<dyn Stream>)
            };
            (address, Box::new(accept))
        }
        Medium::Unix => {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("towline-bench/{}/{number}", std::process::id());
            let address = SocketAddr::from_abstract_name(&name).map_err(refused)?;
            let listener = UnixListener::bind_addr(&address).map_err(refused)?;
            (name, Box::new(move || Ok(Box::new(listener.accept()?.0) as Box<dyn Stream>)))
        }
    };
    thread::spawn(move || {
        for _ in 0..streams {
            let Ok(mut stream) = accept() else { return };
            if bulk && tune(&*stream).is_err() {
                return;
            }
            // An error here is the client hanging up.
            thread::spawn(move || serve_one(&mut *stream, op, touched(buffer)?.as_mut_slice()));
        }
    });
    Ok(address)
}

fn serve_one(stream: &mut dyn Stream, op: Op, buffer: &mut [u8]) -> io::Result<()> {
    loop {
        let mut request = [0; 16];
        stream.read_exact(&mut request)?;
        let request = Request::decode(request);
        match op {
            Op::Read => send(stream, buffer, &request)?,
            Op::Write => {
                receive(stream, buffer, &request)?;
                stream.write_all(&[1])?;
            }
        }
    }
}

/// One connection to a bare server, with a buffer of its own.
pub(crate) struct Client {
    stream: Box<dyn Stream>,
    op: Op,
    buffer: SystemStorage,
}

impl Client {
    pub(crate) fn connect(
        medium: Medium,
        address: &str,
        op: Op,
        buffer: u64,
        bulk: bool,
    ) -> io::Result<Client> {
        let stream: Box<dyn Stream> = match medium {
            Medium::Tcp => {
                let stream = TcpStream::connect(address)?;
                tune_tcp(&stream)?;
                Box::new(stream)
            }
            Medium::Unix => Box::new(UnixStream::connect_addr(&SocketAddr::from_abstract_name(address)?)?),
        };
        if bulk {
            tune(&*stream)?;
        }
        Ok(Client { stream, op, buffer: touched(buffer)? })
    }

    /// Moves that many bytes; they are here, or acknowledged, when this returns.
    pub(crate) fn transfer(&mut self, count: u64, style: Style) -> io::Result<()> {
        self.ask(count, style)?;
        self.move_asked(count, style)
    }

    /// The request alone.
    pub(crate) fn ask(&mut self, count: u64, style: Style) -> io::Result<()> {
        self.stream.write_all(&Request { count, style }.encode())
    }

    /// What follows the request.
    pub(crate) fn move_asked(&mut self, count: u64, style: Style) -> io::Result<()> {
        let request = Request { count, style };
        match self.op {
            Op::Read => receive(&mut *self.stream, self.buffer.as_mut_slice(), &request),
            Op::Write => {
                send(&mut *self.stream, self.buffer.as_mut_slice(), &request)?;
                self.stream.read_exact(&mut [0])
            }
        }
    }
}

fn send(stream: &mut dyn Stream, buffer: &[u8], request: &Request) -> io::Result<()> {
    parts(buffer.len(), request).try_for_each(|range| stream.write_all(&buffer[range]))
}

fn receive(stream: &mut dyn Stream, buffer: &mut [u8], request: &Request) -> io::Result<()> {
    for mut range in parts(buffer.len(), request) {
        while request.style.whole && !range.is_empty() {
            match rustix::net::recv(stream.as_fd(), &mut buffer[range.clone()], RecvFlags::WAITALL) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((read, _)) => range.start += read,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        stream.read_exact(&mut buffer[range])?;
    }
    Ok(())
}

/// The ranges of a buffer that carry that many bytes, from its start again when it is shorter.
fn parts(len: usize, request: &Request) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
    let (mut at, mut left) = (0, request.count);
    let call = request.style.call.max(1) as usize;
    std::iter::from_fn(move || {
        if left == 0 || len == 0 {
            return None;
        }
        let step = call.min(len - at).min(left.min(usize::MAX as u64) as usize);
        let range = at..at + step;
        left -= step as u64;
        at = if at + step == len { 0 } else { at + step };
        Some(range)
    })
}

/// A buffer whose pages are there already: memory of the same kind as the library's, huge pages included.
fn touched(len: u64) -> io::Result<SystemStorage> {
    let mut storage = SystemStorage::new(len as usize).map_err(io::Error::other)?;
    storage.as_mut_slice().fill(1);
    Ok(storage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_count_and_stay_in_the_buffer() {
        let style = Style { call: 1000, whole: false };
        for (len, count) in [(10, 25), (2005, 3000), (7, 7), (7, 0)] {
            let ranges: Vec<_> = parts(len, &Request { count, style }).collect();
            assert_eq!(ranges.iter().map(|range| range.len() as u64).sum::<u64>(), count);
            assert!(ranges.iter().all(|range| range.end <= len && !range.is_empty()));
        }
    }

    #[test]
    fn a_request_survives_the_wire() {
        for style in Style::ALL {
            let request = Request::decode(Request { count: 1 << 40, style }.encode());
            assert_eq!((request.count, request.style), (1 << 40, style));
        }
    }
}
