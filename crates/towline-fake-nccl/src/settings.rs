//! What the environment says, and the calls that fail because of it.

use std::collections::HashMap;
use std::ffi::c_int;
use std::io::Write;
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;

/// What a function gives back: nothing, or the code of an error.
pub(crate) type Done<T = ()> = Result<T, c_int>;

pub(crate) const CUDA: c_int = 1;
pub(crate) const INVALID_ARGUMENT: c_int = 4;
pub(crate) const INVALID_USAGE: c_int = 5;
pub(crate) const REMOTE: c_int = 6;
pub(crate) const IN_PROGRESS: c_int = 7;

pub(crate) struct Settings {
    pub(crate) version: c_int,
    pub(crate) windows: bool,
    pub(crate) mapped: bool,
    pub(crate) delay: Duration,
    stuck: Vec<String>,
    faults: Vec<(String, c_int, Option<u64>)>,
    log: Option<String>,
}

pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let text = |name: &str| std::env::var(name).unwrap_or_default();
        let list = |name: &str| text(name).split(',').map(|word| word.trim().to_owned()).collect::<Vec<_>>();
        let number = |name: &str, default: u64| text(name).parse().unwrap_or(default);
        let faults = list("FAKE_NCCL_FAIL").into_iter().filter_map(|fault| {
            let (call, rest) = fault.split_once(':')?;
            let (code, only) = rest.split_once('@').map_or((rest, None), |(code, n)| (code, n.parse().ok()));
            Some((call.to_owned(), code.parse().ok()?, only))
        });
        Settings {
            version: number("FAKE_NCCL_VERSION", 22907) as c_int,
            windows: !list("FAKE_NCCL_NO").iter().any(|word| word == "windows"),
            mapped: !list("FAKE_NCCL_NO").iter().any(|word| word == "mapping"),
            delay: Duration::from_millis(number("FAKE_NCCL_DELAY_MS", 5)),
            stuck: list("FAKE_NCCL_STUCK"),
            faults: faults.collect(),
            log: Some(text("FAKE_NCCL_LOG")).filter(|path| !path.is_empty()),
        }
    })
}

impl Settings {
    pub(crate) fn is_stuck(&self, call: &str) -> bool {
        self.stuck.iter().any(|stuck| stuck == call)
    }
}

/// Begins a call: writes it down, and gives the code of a fault that was asked for.
pub(crate) fn begin(call: &'static str) -> Done {
    static CALLS: Mutex<Option<HashMap<&'static str, u64>>> = Mutex::new(None);
    let settings = settings();
    let mut calls = CALLS.lock();
    let count = calls.get_or_insert_default().entry(call).or_default();
    *count += 1;
    if let Some(path) = &settings.log
        && let Ok(mut file) = std::fs::OpenOptions::new().append(true).create(true).open(path)
    {
        let _ = writeln!(file, "{call}");
    }
    let hit = |(name, _, only): &&(String, c_int, Option<u64>)| {
        name == call && only.is_none_or(|only| only == *count)
    };
    settings.faults.iter().find(hit).map_or(Ok(()), |(_, code, _)| Err(*code))
}

/// Turns what a function did into what NCCL returns.
pub(crate) fn code(done: Done) -> c_int {
    done.err().unwrap_or(0)
}
