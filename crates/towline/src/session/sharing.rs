//! Whether memory may be shared: may this process and the one at the other end of a Unix socket share memory?
//!
//! A process with the same user number need not be one that the kernel lets look into this process: two containers often run as one
//! user. So pages, files and handles go, and are taken, only where the kernel lets this process look at the other (its links in
//! `/proc/<pid>/ns` can be read) and both are in the same user and pid namespaces, or where this side was set to share with other
//! containers. Each side asks for itself, about the other. [Who shares memory](../../../../../docs/decisions/0039-who-shares-memory.md).

use std::fmt;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};

use crate::fence::life::has_exited;
use crate::runtime::socket::Socket;
use crate::{Error, Kind, Result};

/// The setting that lets containers share, as errors name it.
pub(super) const SETTING: &str = "share_between_containers";

/// Begins the reasons for which the other process cannot be looked at.
const UNKNOWN: &str = "a process of which nothing is known";

/// A process with which this one may share memory.
pub(super) struct Neighbour {
    /// Its number, where it has one in this process's pid namespace.
    pub(super) pid: Option<i32>,
    /// The process itself: stays this process, also when another gets its number later.
    pub(super) process: OwnedFd,
    /// What is between the two, where only the setting lets them share.
    pub(super) between: Option<Apart>,
}

/// Why two processes share no memory, in plain words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Apart(String);

impl fmt::Display for Apart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn apart<T>(reason: impl Into<String>) -> Result<T, Apart> {
    Err(Apart(reason.into()))
}

/// Whether this process may share memory with the one that made the other end of the socket. The outer error is for what may pass,
/// such as a process that has no descriptor left.
pub(super) fn may_share(socket: &Socket, between_containers: bool) -> Result<Result<Neighbour, Apart>> {
    let peer = socket.peer_credentials()?;
    let ours = geteuid().as_raw();
    if peer.uid != ours {
        let reason = format!("another user's process (uid {}, and this one has {ours})", peer.uid);
        return Ok(apart(reason));
    }
    // Opened before anything is looked up by the number, and looked at afterwards: what was found is then about this process.
    let process = match process_of(socket) {
        Ok(process) => process,
        Err(error) if error.kind() == Kind::Exhausted => return Err(error),
        Err(error) => return Ok(apart(format!("a process that cannot be watched ({error})"))),
    };
    let pid = Pid::from_raw(peer.pid);
    let between = looks_like_us(pid).err();
    if has_exited(&process) {
        return Ok(apart("a process that has ended"));
    }
    match between {
        Some(between) if !between_containers => {
            Ok(apart(format!("{between}; {SETTING} on both sides would let them share")))
        }
        between => Ok(Ok(Neighbour { pid: pid.map(Pid::as_raw_pid), process, between })),
    }
}

/// Whether the kernel lets this process look into the other, and both are in the same user and pid namespaces.
fn looks_like_us(pid: Option<Pid>) -> Result<(), Apart> {
    let Some(pid) = pid else {
        return apart("a process in another pid namespace, in which this one cannot see it");
    };
    let proc = Path::new("/proc");
    shows_our_namespace(proc)?;
    let pid = pid.as_raw_nonzero();
    for kind in ["user", "pid"] {
        let ours = fs::read_link(proc.join("self/ns").join(kind));
        let theirs = fs::read_link(proc.join(pid.to_string()).join("ns").join(kind));
        match (ours, theirs) {
            (Ok(ours), Ok(theirs)) if ours == theirs => {}
            (Ok(_), Ok(_)) => return apart(format!("a process in another {kind} namespace")),
            (Err(error), _) => {
                return apart(format!("{UNKNOWN}: /proc/self/ns/{kind} cannot be read ({error})"));
            }
            (_, Err(error)) => {
                return apart(format!(
                    "a process that the kernel does not let this one look into: /proc/{pid}/ns/{kind}: {error}"
                ));
            }
        }
    }
    Ok(())
}

/// Whether the numbers there are those of this process's pid namespace. Another namespace's `/proc` shows other processes under the
/// same numbers.
fn shows_our_namespace(proc: &Path) -> Result<(), Apart> {
    let status = match fs::read_to_string(proc.join("self/status")) {
        Ok(status) => status,
        Err(error) => return apart(format!("{UNKNOWN}: /proc cannot be read here ({error})")),
    };
    // One number for each namespace from that of this /proc down to the process's own.
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let same = match numbers {
        Some(numbers) => numbers.split_whitespace().count() == 1,
        None => fs::read_link(proc.join("self")).is_ok_and(|own| own == Path::new(&own_pid())),
    };
    if same { Ok(()) } else { apart(format!("{UNKNOWN}: /proc is that of another pid namespace here")) }
}

fn own_pid() -> String {
    rustix::process::getpid().as_raw_nonzero().to_string()
}

/// The process that made the other end of the socket.
pub(super) fn process_of(socket: &Socket) -> Result<OwnedFd> {
    #[cfg(test)]
    if tests::BEFORE_LINUX_6_5.get() {
        return by_number(socket, socket.peer_credentials()?.pid);
    }
    match socket.peer_process() {
        Err(Errno::NOPROTOOPT) => by_number(socket, socket.peer_credentials()?.pid),
        other => other.map_err(|error| Error::os("contact", "SO_PEERPIDFD", error)),
    }
}

/// The same before Linux 6.5, by the number that the kernel took down when the connection was made. Who has it now is that process only if it
/// was there by then, and if nobody has hung up since.
fn by_number(socket: &Socket, pid: i32) -> Result<OwnedFd> {
    let unknown = |message: &'static str| Error::new(Kind::Unavailable, "contact", message);
    let pid = Pid::from_raw(pid)
        .ok_or_else(|| unknown("before Linux 6.5 a process of another pid namespace cannot be named here"))?;
    let process =
        pidfd_open(pid, PidfdFlags::empty()).map_err(|error| Error::os("contact", "pidfd_open", error))?;
    let began = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    let began = began.ok().and_then(|stat| began_at(&stat));
    // What was read is about the process that was opened: its number is nobody else's before it has ended.
    match began {
        _ if has_exited(&process) || socket.hung_up() => Err(unknown("the process has ended")),
        None => Err(unknown("before Linux 6.5 a process is known by its start, which /proc does not show")),
        Some(began) if began > socket.made_at_tick(rustix::param::clock_ticks_per_second()) => {
            Err(unknown("a process that began after the connection was made has its number by now"))
        }
        Some(_) => Ok(process),
    }
}

/// In which tick since the machine started the process began whose `/proc/<pid>/stat` that is.
fn began_at(stat: &str) -> Option<u64> {
    // The name, which is the second field, may have spaces and brackets in it.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Whether the process that made the other end of the socket has ended, as far as the kernel shows.
pub(super) fn has_ended(socket: &Socket) -> bool {
    match socket.peer_process() {
        Ok(process) => has_exited(&process),
        // Gone for so long that it cannot be named any more; which of the two depends on the kernel.
        Err(error) => matches!(error, Errno::SRCH | Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::cell::Cell;
    use std::process::{Command, Stdio};

    use super::*;

    thread_local! {
        /// This thread sees a kernel that does not name processes by descriptors.
        pub(super) static BEFORE_LINUX_6_5: Cell<bool> = const { Cell::new(false) };
    }

    fn pair() -> (Socket, Socket) {
        let name = format!("towline-sharing-{}-{:?}", own_pid(), std::thread::current().id());
        let listener = Socket::listen_unix_abstract(name.as_bytes(), 1).unwrap();
        let user = Socket::connect_unix_abstract(name.as_bytes()).unwrap();
        (listener.accept().unwrap().unwrap().0, user)
    }

    #[test]
    fn a_process_may_share_with_itself() {
        let (one, other) = pair();
        for (socket, before) in [(&one, false), (&other, false), (&one, true), (&other, true)] {
            BEFORE_LINUX_6_5.set(before);
            let neighbour = may_share(socket, false).unwrap().unwrap_or_else(|apart| panic!("{apart}"));
            assert_eq!(neighbour.pid, Some(rustix::process::getpid().as_raw_nonzero().get()));
            assert_eq!(neighbour.between, None);
            assert!(!has_exited(&neighbour.process));
        }
    }

    #[test]
    fn before_linux_6_5_a_process_that_began_after_the_connection_is_not_taken_for_the_peer() {
        let (one, _other) = pair();
        loop {
            let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            let pid = i32::try_from(child.id()).unwrap();
            let outcome = by_number(&one, pid);
            drop(child.stdin.take());
            child.wait().unwrap();
            // Within one tick of the kernel's nobody can tell.
            let Err(error) = outcome else { continue };
            assert!(error.message().contains("began after"), "{error}");
            assert!(by_number(&one, pid).is_err(), "nobody has the number");
            return;
        }
    }

    #[test]
    fn before_linux_6_5_who_has_hung_up_is_not_known_by_its_number() {
        let (one, other) = pair();
        drop(other);
        let error = by_number(&one, rustix::process::getpid().as_raw_nonzero().get()).unwrap_err();
        assert!(error.message().contains("has ended"), "{error}");
    }

    #[test]
    fn the_start_of_a_process_is_found_behind_any_name() {
        let stat = "7 (a ) S 1 (b) R 1 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 8812 5 6";
        assert_eq!(began_at(stat), Some(8812));
        assert_eq!(began_at("7 (cut) R 1"), None);
    }

    #[test]
    fn a_process_without_a_number_here_is_in_another_pid_namespace() {
        let reason = looks_like_us(None).unwrap_err();
        assert!(reason.to_string().contains("pid namespace"), "{reason}");
    }

    #[test]
    fn a_process_that_has_ended_is_known_by_its_descriptor() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        assert!(!has_exited(&process));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(has_exited(&process));
        assert!(looks_like_us(Some(pid)).is_err());
    }

    #[test]
    fn a_proc_that_cannot_be_read_lets_nobody_share() {
        let reason = shows_our_namespace(Path::new("/nowhere")).unwrap_err();
        assert!(reason.to_string().contains("/proc"), "{reason}");
    }
}
