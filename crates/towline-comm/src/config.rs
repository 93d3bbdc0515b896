//! What can be set when a communicator is made.

use std::net::SocketAddr;
use std::time::Duration;

use towline::{Limits, NixlOptions, Patience, Quotas, Routing, Tls};

use crate::team::TeamOptions;
use crate::{Error, Result};

/// What can be set when a communicator is made. `contexts` and `signals` must be equal on all ranks.
///
/// ```
/// use std::time::Duration;
/// use towline_comm::Config;
/// let patient = Config { timeout: Duration::from_secs(600), name: "training".into(), ..Config::default() };
/// ```
#[derive(Debug, Clone)]
pub struct Config {
    /// Whether calls wait for their end. If false they return immediately, their work runs in order on a thread of the
    /// communicator, and [`get_async_error`](crate::Communicator::get_async_error) says how far it is.
    pub blocking: bool,
    /// The longest wait for another rank.
    pub timeout: Duration,
    /// How many contexts one-sided signals have.
    pub contexts: u32,
    /// How many signals each context has.
    pub signals: u32,
    /// The addresses on which this rank listens for ranks of other hosts. Without any: loopback only.
    pub listen: Vec<SocketAddr>,
    /// The addresses by which other hosts reach this rank, where they differ from those it listens on.
    pub advertise: Vec<SocketAddr>,
    /// What this communicator is called in errors and logs.
    pub name: String,
    /// Which paths to other ranks are allowed.
    pub routing: Routing,
    /// The GPU, for a group that meets by an id of NCCL's; 0 where not set.
    pub gpu: Option<u32>,
    /// How long a waiter spins and yields before it sleeps; chosen from ranks and cores where not set.
    pub patience: Option<Patience>,
    /// How what goes over TCP between ranks is encrypted; all ranks must agree. A certificate is for the communicator's
    /// [`name`](Self::name).
    pub tls: Option<Tls>,
    /// How much of this rank another rank may use, and how many unauthenticated connections it takes.
    pub quotas: Quotas,
    /// Whether memory is shared with ranks of the same user in other containers of this host, where they say so too: see
    /// [`EndpointOptions::share_between_containers`](towline::EndpointOptions::share_between_containers).
    pub share_between_containers: bool,
    /// How NIXL is used between ranks of different hosts: not at all, unless [`lend_over`](NixlOptions::lend_over) lends this rank's
    /// windows and says over which devices.
    pub nixl: NixlOptions,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            blocking: true,
            timeout: Duration::from_secs(30),
            contexts: 4,
            signals: 32,
            listen: Vec::new(),
            advertise: Vec::new(),
            name: "comm".into(),
            routing: Routing::default(),
            gpu: None,
            patience: None,
            tls: None,
            quotas: Quotas::default(),
            share_between_containers: false,
            nixl: NixlOptions::default(),
        }
    }
}

/// The most contexts times signals: they take room in every rank's control region for every other rank.
const MOST_SIGNALS: u64 = 1 << 16;

impl Config {
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        let signals = u64::from(self.contexts) * u64::from(self.signals);
        if signals == 0 || signals > MOST_SIGNALS {
            let message = format!("contexts times signals is {signals}; it must be 1 to {MOST_SIGNALS}");
            return Err(Error::invalid(op, message));
        }
        if self.timeout.is_zero() {
            return Err(Error::invalid(op, "the timeout is zero"));
        }
        if self.name.len() > 64 {
            return Err(Error::invalid(op, "the name is longer than 64 bytes"));
        }
        Ok(())
    }

    pub(crate) fn team_options(&self, nranks: usize) -> TeamOptions {
        let cores = match std::thread::available_parallelism().map_or(1, usize::from) {
            // A rank that is bound to a core: launchers do that where every rank gets one of its own.
            1 => online_cores().unwrap_or(1),
            several => several,
        };
        // A spinning waiter takes the core that the rank it waits for needs.
        let crowded = Patience { spin: Duration::ZERO, yielding: Duration::from_micros(100) };
        let patience = self.patience.unwrap_or(if nranks <= cores { Patience::default() } else { crowded });
        TeamOptions { timeout: self.timeout, contexts: self.contexts, signals: self.signals, patience }
    }

    /// How long an access to a far rank's memory may take: no longer than any other wait for that rank.
    pub(crate) fn limits(&self) -> Limits {
        let usual = Limits::default();
        Limits { no_progress: usual.no_progress.min(self.timeout), total: self.timeout, ..usual }
    }

    /// What must be equal on all ranks.
    pub(crate) fn digest(&self) -> u64 {
        u64::from(self.contexts) << 32 | u64::from(self.signals)
    }
}

/// The cores of this host, whatever this process may use of them.
fn online_cores() -> Option<usize> {
    count_cores(&std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?)
}

/// How many cores a list like `0-3,8` names.
fn count_cores(list: &str) -> Option<usize> {
    list.trim().split(',').try_fold(0usize, |count, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        count.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    #[test]
    fn the_list_of_cores_is_counted() {
        assert_eq!(count_cores("0-1\n"), Some(2));
        assert_eq!(count_cores("0,2-5,7"), Some(6));
        assert_eq!(count_cores("3-1"), None);
        assert_eq!(count_cores(""), None);
    }
}
