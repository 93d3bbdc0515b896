//! Two network namespaces with a cable between them, where the machine allows it.

use std::fs;
use std::net::IpAddr;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// Which end of the cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The first.
    A,
    /// The second.
    B,
}

impl End {
    fn other(self) -> End {
        if self == End::A { End::B } else { End::A }
    }
}

/// Two namespaces and a veth pair; removed on drop.
pub struct Network {
    /// Unique among the processes of this machine and within this one.
    tag: String,
}

impl Network {
    /// Builds it, or says why that is not possible here.
    pub fn build() -> Result<Network, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("network namespaces need root".into());
        }
        sweep();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let network = Network { tag: format!("tl{}x{number}", std::process::id()) };
        network.set_up()?;
        Ok(network)
    }

    fn set_up(&self) -> Result<(), String> {
        let (a, b) = (self.namespace(End::A), self.namespace(End::B));
        let (at_a, at_b) = (self.device(End::A), self.device(End::B));
        ip(&["netns", "add", &a])?;
        ip(&["netns", "add", &b])?;
        ip(&["link", "add", &at_a, "netns", &a, "type", "veth", "peer", "name", &at_b, "netns", &b])?;
        for end in [End::A, End::B] {
            ip(&["-n", &self.namespace(end), "link", "set", "lo", "up"])?;
            self.plug_in(end)?;
        }
        self.carries()
    }

    /// Waits until packets pass: the kernel takes note of what happens to a cable once a second at most.
    fn carries(&self) -> Result<(), String> {
        let mut seen = String::new();
        for _ in 0..500 {
            let states = [End::A, End::B]
                .map(|end| ip(&["-n", &self.namespace(end), "-br", "link", "show", &self.device(end)]));
            let [a, b] = states;
            seen = format!("{}{}", a?, b?);
            if seen.lines().all(|line| line.split_whitespace().nth(1) == Some("UP")) {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Err(format!("the cable does not carry: {seen}"))
    }

    fn plug_in(&self, end: End) -> Result<(), String> {
        let (namespace, device) = (self.namespace(end), self.device(end));
        ip(&["-n", &namespace, "link", "set", &device, "up"])?;
        ip(&[
            "-n",
            &namespace,
            "addr",
            "replace",
            &format!("{}/24", self.address(end, false)),
            "dev",
            &device,
        ])?;
        // IPv6 may be switched off; its tests notice. Without duplicate detection the address works at once.
        let v6 = format!("{}/64", self.address(end, true));
        let _ = ip(&["-n", &namespace, "addr", "replace", &v6, "dev", &device, "nodad"]);
        Ok(())
    }

    /// Pulls the plug at one end: packets are lost without a notice.
    pub fn cut(&self, end: End) {
        ip(&["-n", &self.namespace(end), "link", "set", &self.device(end), "down"]).unwrap();
    }

    /// Lets so many bits pass in a second, each way; or says why that is not possible here.
    pub fn slow_down(&self, bits: u64) -> Result<(), String> {
        for end in [End::A, End::B] {
            let (namespace, device, rate) = (self.namespace(end), self.device(end), format!("{bits}bit"));
            ip(&[
                "netns", "exec", &namespace, "tc", "qdisc", "add", "dev", &device, "root", "tbf", "rate",
                &rate, "burst", "16kb", "latency", "400ms",
            ])?;
        }
        Ok(())
    }

    /// Keeps what that end sends in the network, up to some megabytes of it, until [`let_pass`](Self::let_pass), and loses what the other
    /// end sends; or says why that is not possible here.
    pub fn hold_back(&self, end: End) -> Result<(), String> {
        self.shape(end.other(), "replace", "1gbit", "1b")?;
        self.shape(end, "replace", "8bit", "8mb")
    }

    /// Lets pass what was held back, so many bits in a second, as soon as that end sends something more.
    pub fn let_pass(&self, end: End, bits: u64) {
        for end in [end.other(), end] {
            self.shape(end, "change", &format!("{bits}bit"), "8mb").unwrap();
        }
    }

    fn shape(&self, end: End, how: &str, rate: &str, room: &str) -> Result<(), String> {
        let (namespace, device) = (self.namespace(end), self.device(end));
        ip(&[
            "netns", "exec", &namespace, "tc", "qdisc", how, "dev", &device, "root", "tbf", "rate", rate,
            "burst", "2kb", "limit", room,
        ])
        .map(drop)
    }

    /// Puts the plug back.
    pub fn heal(&self, end: End) {
        self.plug_in(end).and_then(|()| self.carries()).unwrap();
    }

    /// The name of the namespace at that end.
    pub fn namespace(&self, end: End) -> String {
        format!("{}{}", self.tag, if end == End::A { "a" } else { "b" })
    }

    fn device(&self, end: End) -> String {
        format!("v{}", self.namespace(end))
    }

    /// The address of that end.
    pub fn address(&self, end: End, v6: bool) -> IpAddr {
        let host = if end == End::A { 1 } else { 2 };
        match v6 {
            false => IpAddr::from([10, 77, 0, host]),
            true => IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, u16::from(host)]),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for end in [End::A, End::B] {
            let _ = ip(&["netns", "del", &self.namespace(end)]);
        }
    }
}

/// Removes what a killed run has left behind.
fn sweep() {
    let Ok(names) = fs::read_dir("/var/run/netns") else { return };
    for name in names.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let owner = name.strip_prefix("tl").and_then(|rest| rest.split('x').next()?.parse::<u32>().ok());
        if owner.is_some_and(|pid| !fs::exists(format!("/proc/{pid}")).unwrap_or(true)) {
            let _ = ip(&["netns", "del", &name]);
        }
    }
}

/// Runs the command and gives what it printed.
fn ip(arguments: &[&str]) -> Result<String, String> {
    match Command::new("ip").args(arguments).output() {
        Err(error) => Err(format!("the command ip cannot be run: {error}")),
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("ip {}: {}", arguments.join(" "), said.trim()))
        }
    }
}
