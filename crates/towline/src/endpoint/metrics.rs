//! What an endpoint has done, in the text form that Prometheus reads.

use std::fmt::Write;

use super::core::EndpointCore;

impl EndpointCore {
    /// All counters. Regions are not told apart: there may be a hundred thousand of them, and they come and go.
    pub(super) fn metrics(&self) -> String {
        let stats = self.stats();
        let mut page = Page::default();
        let identity = self.identity();
        page.family("towline_endpoint_info", "gauge", "Who this is.");
        let who = [("name", identity.name.as_str()), ("incarnation", &identity.incarnation.to_string())];
        page.sample(&who, 1);

        page.single("towline_regions", "gauge", "Regions that are registered now.", stats.regions as u64);
        let waiting = "Operations that wait for a peer, or for the one that has claimed them.";
        page.single("towline_operations", "gauge", waiting, stats.operations as u64);
        let parked = "Storages of dropped registrations that a peer has not let go yet.";
        page.single("towline_parked_storages", "gauge", parked, stats.parked.0 as u64);
        page.single("towline_parked_bytes", "gauge", "The bytes of these storages.", stats.parked.1 as u64);
        page.single("towline_peers", "gauge", "Sessions of peers that are served.", stats.peers as u64);
        let unauthenticated = "Connections that have not proven themselves yet.";
        page.single("towline_unauthenticated", "gauge", unauthenticated, stats.unauthenticated as u64);
        let requests = "Requests of peers that are being served.";
        page.single("towline_requests_in_flight", "gauge", requests, stats.in_flight.0 as u64);
        let memory = "The bytes of this process's memory that peers take.";
        page.single("towline_peer_memory_bytes", "gauge", memory, stats.peer_memory);
        page.single("towline_bytes_in_flight", "gauge", "The bytes of these requests.", stats.in_flight.1);
        page.single(
            "towline_refused_total",
            "counter",
            "What this endpoint refused to serve.",
            stats.refused,
        );
        page.family(
            "towline_refused_handshakes_total",
            "counter",
            "Connections that did not become sessions, by reason.",
        );
        for (reason, count) in self.sessions.refusals.by_reason() {
            page.sample(&[("reason", reason)], count);
        }

        page.family(
            "towline_transfers_total",
            "counter",
            "Transfers that this endpoint started and that ended well.",
        );
        for path in &stats.paths {
            let labels = |direction| [("peer", &*path.peer), ("path", path.path), ("direction", direction)];
            page.sample(&labels("read"), path.reads.0);
            page.sample(&labels("write"), path.writes.0);
        }
        page.family("towline_transferred_bytes_total", "counter", "The bytes of these transfers.");
        for path in &stats.paths {
            let labels = |direction| [("peer", &*path.peer), ("path", path.path), ("direction", direction)];
            page.sample(&labels("read"), path.reads.1);
            page.sample(&labels("write"), path.writes.1);
        }
        page.family(
            "towline_transfer_failures_total",
            "counter",
            "Transfers that this endpoint started and that failed.",
        );
        for path in &stats.paths {
            page.sample(&[("peer", &path.peer), ("path", path.path)], path.failures);
        }

        // Lives of one peer are added up, so that a restart is not a new line.
        let audit = self.registry.ledger.audit();
        let mut served: std::collections::BTreeMap<&str, [u64; 6]> = std::collections::BTreeMap::new();
        for peer in &audit.peers {
            let sum = served.entry(&peer.peer).or_default();
            let one = [
                peer.reads.0,
                peer.writes.0,
                peer.reads.1,
                peer.writes.1,
                peer.refused,
                u64::from(peer.unseen),
            ];
            sum.iter_mut().zip(one).for_each(|(sum, one)| *sum += one);
        }
        page.family(
            "towline_served_requests_total",
            "counter",
            "Requests of peers that this endpoint served.",
        );
        for (peer, sum) in &served {
            page.sample(&[("peer", peer), ("direction", "read")], sum[0]);
            page.sample(&[("peer", peer), ("direction", "write")], sum[1]);
        }
        page.family("towline_served_bytes_total", "counter", "The bytes of these requests.");
        for (peer, sum) in &served {
            page.sample(&[("peer", peer), ("direction", "read")], sum[2]);
            page.sample(&[("peer", peer), ("direction", "write")], sum[3]);
        }
        page.family(
            "towline_served_refused_total",
            "counter",
            "Requests and tickets of peers that were refused.",
        );
        for (peer, sum) in &served {
            page.sample(&[("peer", peer)], sum[4]);
        }
        let unseen = "Whether the peer was given memory to copy by itself, which served bytes do not count.";
        page.family("towline_peer_unseen", "gauge", unseen);
        for (peer, sum) in &served {
            page.sample(&[("peer", peer)], u64::from(sum[5] > 0));
        }
        page.text
    }
}

/// The text as far as it is written.
#[derive(Default)]
struct Page {
    text: String,
    name: &'static str,
}

impl Page {
    fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.name = name;
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn single(&mut self, name: &'static str, kind: &str, help: &str, value: u64) {
        self.family(name, kind, help);
        self.sample(&[], value);
    }

    fn sample(&mut self, labels: &[(&str, &str)], value: u64) {
        self.text.push_str(self.name);
        for (number, (label, text)) in labels.iter().enumerate() {
            let open = if number == 0 { '{' } else { ',' };
            let _ = write!(self.text, "{open}{label}=\"{}\"", escaped(text));
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }
}

/// A label's text: names of peers are whatever the peers say.
fn escaped(text: &str) -> String {
    text.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_the_form_that_prometheus_reads() {
        let mut page = Page::default();
        page.single("plain", "gauge", "One number.", 3);
        page.family("labelled", "counter", "Some.");
        page.sample(&[("peer", "a\"b\\c"), ("path", "tcp")], 7);
        let expected = "# HELP plain One number.\n# TYPE plain gauge\nplain 3\n\
             # HELP labelled Some.\n# TYPE labelled counter\nlabelled{peer=\"a\\\"b\\\\c\",path=\"tcp\"} 7\n";
        assert_eq!(page.text, expected);
    }
}
