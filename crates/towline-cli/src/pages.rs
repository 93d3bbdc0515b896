//! Two small pages over HTTP/1.0: the metrics of an endpoint for Prometheus, and who used the region that is served.
//!
//! One request at a time and nothing but GET: users that need more put a real server in front.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use towline_lab::outcome::{Failure, Outcome};

/// Neither side waits longer than this for the other.
const PATIENCE: Duration = Duration::from_secs(1);

/// The longest request that is read, and the longest reply.
const LONGEST_REQUEST: usize = 8 << 10;
const LONGEST_ANSWER: u64 = 16 << 20;

/// What the pages show, made anew for each request.
pub(crate) trait Source: Send + 'static {
    fn metrics(&self) -> String;
    fn audit(&self) -> AuditReport;
}

/// Who used a region.
#[derive(Serialize, Deserialize)]
pub(crate) struct AuditReport {
    pub(crate) endpoint: String,
    pub(crate) generation: u64,
    pub(crate) bytes: u64,
    /// Some peer was given the memory itself, so that the numbers are not all there is.
    pub(crate) incomplete: bool,
    pub(crate) peers: Vec<PeerReport>,
}

/// What one peer did.
#[derive(Serialize, Deserialize)]
pub(crate) struct PeerReport {
    pub(crate) peer: String,
    pub(crate) incarnation: String,
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    pub(crate) writes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) refused: u64,
    pub(crate) unseen: bool,
}

impl AuditReport {
    pub(crate) fn new(endpoint: &str, generation: u64, bytes: u64, audit: &towline::Audit) -> AuditReport {
        let peers = audit.peers.iter().map(|peer| PeerReport {
            peer: peer.peer.clone(),
            incarnation: peer.incarnation.to_string(),
            reads: peer.reads.0,
            read_bytes: peer.reads.1,
            writes: peer.writes.0,
            written_bytes: peer.writes.1,
            refused: peer.refused,
            unseen: peer.unseen,
        });
        AuditReport {
            endpoint: endpoint.to_owned(),
            generation,
            bytes,
            incomplete: audit.is_incomplete(),
            peers: peers.collect(),
        }
    }
}

/// Answers on that address until the process ends; returns the address that it listens on.
pub(crate) fn serve(address: SocketAddr, source: impl Source) -> Outcome<SocketAddr> {
    let failed = |error| Failure::os(format!("the address {address}"), error);
    let listener = TcpListener::bind(address).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    std::thread::Builder::new()
        .name("metrics".into())
        .spawn(move || {
            for stream in listener.incoming() {
                match stream {
                    // A client that does not take its reply gets none.
                    Ok(stream) => drop(answer(stream, &source)),
                    // No descriptor is left, perhaps: not a reason to spin.
                    Err(_) => std::thread::sleep(PATIENCE),
                }
            }
        })
        .map_err(|error| Failure::os("a thread for the metrics", error))?;
    Ok(bound)
}

fn answer(mut stream: TcpStream, source: &impl Source) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = Vec::new();
    let mut some = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < LONGEST_REQUEST {
        match stream.read(&mut some)? {
            0 => break,
            read => request.extend_from_slice(&some[..read]),
        }
    }
    let line = String::from_utf8_lossy(request.split(|byte| *byte == b'\r').next().unwrap_or_default());
    let mut words = line.split_whitespace();
    let (status, kind, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/metrics")) => {
            ("200 OK", "text/plain; version=0.0.4; charset=utf-8", source.metrics())
        }
        (Some("GET"), Some("/audit")) => {
            let body = serde_json::to_string_pretty(&source.audit()).map_err(std::io::Error::other)?;
            ("200 OK", "application/json", body)
        }
        (Some("GET"), _) => ("404 Not Found", "text/plain", "there are /metrics and /audit\n".to_owned()),
        _ => ("400 Bad Request", "text/plain", "GET /metrics or GET /audit\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.0 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// Asks a running `towline serve --metrics` who used its region.
pub(crate) fn fetch_audit(url: &str) -> Outcome<AuditReport> {
    let rest = url.strip_prefix("http://").unwrap_or(url);
    let address = rest.split('/').next().unwrap_or(rest);
    let failed = |error| Failure::os(url, error);
    let mut addresses = address.to_socket_addrs().map_err(failed)?;
    let address = addresses.next().ok_or_else(|| Failure::failed(format!("{url} has no address")))?;
    let asked = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE * 5)?;
        stream.set_read_timeout(Some(PATIENCE * 5))?;
        stream.write_all(b"GET /audit HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        stream.take(LONGEST_ANSWER).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = asked().map_err(failed)?;
    let body = text.split_once("\r\n\r\n").filter(|(head, _)| head.contains(" 200 ")).map(|(_, body)| body);
    body.and_then(|body| serde_json::from_str(body).ok())
        .ok_or_else(|| Failure::failed(format!("{url} is not a `towline serve --metrics`")))
}
