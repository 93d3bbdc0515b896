//! `towline inspect`: what a ticket says, or who used a region that is served. The tag is what makes a ticket a
//! capability, and is never shown.

use std::io::Read;
use std::path::Path;

use clap::Args;
use serde::Serialize;
use towline::ticket::{Caveat, MAX_TICKET};
use towline::{Layout, Ticket};
use towline_lab::outcome::{Exit, Failure, Outcome};
use towline_lab::size;

use crate::output::Output;
use crate::pages;

/// A text ticket is longer than its bytes; more than this cannot be one.
const LONGEST: u64 = 2 * MAX_TICKET as u64;

#[derive(Args)]
pub(crate) struct Options {
    /// The ticket's text, or a file that holds it as text or bytes, or - for standard input; or the http:// address of a
    /// `towline serve --metrics`: then, who used its region
    ticket: String,
}

#[derive(Serialize)]
struct Report<'a> {
    owner: &'a str,
    endpoint: String,
    incarnation: String,
    reach: Vec<String>,
    region: u32,
    generation: u64,
    region_bytes: u64,
    place: String,
    issued_access: &'static str,
    issued_ms: u64,
    issued_layout: Option<&'a Layout>,
    caveats: Vec<String>,
    rights: Rights<'a>,
    encoded_bytes: usize,
    text_bytes: usize,
}

/// What is left after the caveats.
#[derive(Serialize)]
struct Rights<'a> {
    offset: u64,
    bytes: u64,
    access: &'static str,
    expires_ms: Option<u64>,
    layout: Option<&'a Layout>,
}

pub(crate) fn run(options: &Options, output: &Output) -> Outcome {
    if options.ticket.starts_with("http://") {
        return show_audit(&options.ticket, output);
    }
    let ticket = find_ticket(&options.ticket)?;
    let body = ticket.body();
    let report = Report {
        owner: &body.identity.name,
        endpoint: body.identity.id.to_string(),
        incarnation: body.identity.incarnation.to_string(),
        reach: body.reach.iter().map(ToString::to_string).collect(),
        region: body.row,
        generation: body.generation,
        region_bytes: body.length,
        place: body.place.to_string(),
        issued_access: body.access.name(),
        issued_ms: body.issued_ms,
        issued_layout: body.layout.as_ref(),
        caveats: ticket.caveats().iter().map(describe).collect(),
        rights: Rights {
            offset: ticket.range().start,
            bytes: ticket.length(),
            access: ticket.access().name(),
            expires_ms: ticket.expires_ms(),
            layout: ticket.layout(),
        },
        encoded_bytes: ticket.encode().len(),
        text_bytes: ticket.to_string().len(),
    };
    output.text(report.lines().join("\n"));
    output.document(&report);
    Ok(Exit::Fine)
}

/// Shows who used a region of a running process.
fn show_audit(url: &str, output: &Output) -> Outcome {
    let audit = pages::fetch_audit(url)?;
    output.text(format!(
        "region {} of {}, {}: {}",
        audit.generation,
        audit.endpoint,
        size::bytes(audit.bytes),
        if audit.peers.is_empty() { "no peer has connected" } else { "who came" }
    ));
    let rows: Vec<Vec<String>> = audit
        .peers
        .iter()
        .map(|peer| {
            vec![
                peer.peer.clone(),
                peer.incarnation.chars().take(8).collect(),
                peer.reads.to_string(),
                size::bytes(peer.read_bytes),
                peer.writes.to_string(),
                size::bytes(peer.written_bytes),
                peer.refused.to_string(),
                if peer.unseen { "may copy by itself: not counted" } else { "all counted" }.to_owned(),
            ]
        })
        .collect();
    let header = ["peer", "life", "reads", "bytes", "writes", "bytes", "refused", "seen"];
    output.table(&header, &rows, &[2, 3, 4, 5, 6]);
    output.document(&audit);
    Ok(Exit::Fine)
}

impl Report<'_> {
    fn lines(&self) -> Vec<String> {
        let line = |name: &str, value: String| format!("{name:<12} {value}");
        let mut lines = vec![
            line("owner", format!("{} (endpoint {})", self.owner, self.endpoint)),
            line("incarnation", self.incarnation.clone()),
            line("reach", self.reach.join(", ")),
            line("region", format!("{}, generation {}, {}", self.region, self.generation, self.place)),
            line("length", format!("{} ({} bytes)", size::bytes(self.region_bytes), self.region_bytes)),
            line("access", self.issued_access.to_owned()),
            line("issued", format!("{} ms after the owner opened", self.issued_ms)),
            line("layout", self.issued_layout.map_or("none".to_owned(), describe_layout)),
        ];
        match self.caveats.as_slice() {
            [] => lines.push(line("caveats", "none".to_owned())),
            caveats => lines.extend(caveats.iter().map(|caveat| line("caveat", caveat.clone()))),
        }
        let until = self
            .rights
            .expires_ms
            .map_or("without end".to_owned(), |ms| format!("until {ms} ms after the owner opened"));
        lines.push(line(
            "allows",
            format!(
                "{} of bytes {}..{}, {until}",
                self.rights.access,
                self.rights.offset,
                self.rights.offset + self.rights.bytes
            ),
        ));
        lines.push(line("size", format!("{} bytes ({} as text)", self.encoded_bytes, self.text_bytes)));
        lines.push(line("tag", "present, not shown; only the owner can tell whether it is right".to_owned()));
        lines
    }
}

fn describe(caveat: &Caveat) -> String {
    match caveat {
        Caveat::Range { offset, len } => format!("only bytes {offset}..{}", offset + len),
        Caveat::Access(access) => format!("only {access}"),
        Caveat::Expiry { ms } => format!("only until {ms} ms after the owner opened"),
        other => format!("{other:?}"),
    }
}

fn describe_layout(layout: &Layout) -> String {
    let dims: Vec<_> =
        layout.dims().iter().map(|dim| format!("{} × stride {}", dim.count, dim.stride)).collect();
    format!(
        "{} blocks of {} bytes from offset {} ({})",
        layout.block_count(),
        layout.block_len(),
        layout.base(),
        dims.join(", ")
    )
}

/// Takes a ticket from the command line: its text, a file with its text or bytes, or `-` for standard input.
pub(crate) fn find_ticket(argument: &str) -> Outcome<Ticket> {
    let mut bytes = Vec::new();
    if argument == "-" {
        let read = std::io::stdin().lock().take(LONGEST).read_to_end(&mut bytes);
        read.map_err(|error| Failure::os("standard input", error))?;
    } else if !argument.starts_with("towline1:") && Path::new(argument).is_file() {
        let read = std::fs::File::open(argument).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes));
        read.map_err(|error| Failure::os(argument, error))?;
    } else {
        bytes.extend_from_slice(argument.as_bytes());
    }
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Outcome<Ticket> {
    if bytes.trim_ascii().is_empty() {
        return Err(Failure::failed("there is no ticket: the input is empty"));
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if text.trim_start().starts_with("towline1:") => Ok(text.parse()?),
        _ => Ticket::decode(bytes).map_err(|error| match std::str::from_utf8(bytes) {
            // What is neither a ticket nor a file is most often a mistyped file name.
            Ok(text) if text.len() < 256 && !text.contains('\n') => {
                Failure::failed(format!("{text:?} is neither a ticket nor a file: {}", error.message()))
            }
            _ => error.into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use towline::memory::Place;
    use towline::ticket::{RegionKey, TicketBody};
    use towline::{Access, Identity, Incarnation, Reach};

    use super::*;

    fn ticket() -> Ticket {
        let body = TicketBody {
            identity: Identity::new("prefill-0", Incarnation([7; 16])).unwrap(),
            reach: vec![Reach::Unix],
            row: 5,
            generation: 1,
            length: 1 << 20,
            place: Place::Host,
            access: Access::READ_WRITE,
            issued_ms: 0,
            layout: None,
        };
        Ticket::mint(&body, &RegionKey::derive(&[1; 32], 5, 1)).unwrap()
    }

    #[test]
    fn text_and_bytes_give_the_same_ticket() {
        let ticket = ticket();
        assert_eq!(parse(ticket.to_string().as_bytes()).unwrap(), ticket);
        assert_eq!(parse(format!("  {ticket}\n").as_bytes()).unwrap(), ticket);
        assert_eq!(parse(&ticket.encode()).unwrap(), ticket);
    }

    #[test]
    fn what_is_no_ticket_is_refused() {
        let mut damaged = ticket().encode();
        damaged[20] ^= 1;
        for bytes in
            [&b""[..], b"\n", b"towline1:", b"towline1:AAAA", b"no-such-file", &damaged, &[0xff; 300]]
        {
            assert_eq!(parse(bytes).unwrap_err().exit, Exit::Failed, "{bytes:?}");
        }
    }
}
