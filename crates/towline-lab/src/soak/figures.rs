//! The figures that the campaigns are to reach, and whether they did.

use serde::Serialize;
use towline::{Contact, PathProperties};
use towline_testkit::paths::properties;

use super::report::{CampaignReport, Sample, time};

/// One figure.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Figure {
    pub(super) name: String,
    pub(super) value: String,
    pub(super) target: String,
    pub(super) met: bool,
}

/// Which part of the samples counts.
#[derive(Clone, Copy)]
enum Part {
    Median,
    P99,
    Most,
}

struct Target {
    name: &'static str,
    campaign: &'static str,
    /// Only the lanes of such paths, where it matters.
    lanes: Option<Which>,
    sample: &'static str,
    part: Part,
    limit: Limit,
}

enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

type Which = fn(&PathProperties) -> bool;

const ANY: Option<Which> = None;

/// On one host, from and to host memory.
const ON_THIS_HOST: Option<Which> = Some(|path| path.contact == Contact::Unix && path.serves.has_words());

const OVER_TCP: Option<Which> = Some(|path| path.contact == Contact::Tcp);

/// The lines of the reliability tables that are times or rates.
const TARGETS: &[Target] = &[
    Target {
        name: "a killed owner on this host is noticed",
        campaign: "kill",
        lanes: ON_THIS_HOST,
        sample: "detected",
        part: Part::P99,
        limit: Limit::AtMost(0.020),
    },
    Target {
        name: "of that: its death is known here",
        campaign: "kill",
        lanes: ON_THIS_HOST,
        sample: "known",
        part: Part::P99,
        limit: Limit::AtMost(0.020),
    },
    Target {
        name: "the same with a large process",
        campaign: "kill",
        lanes: ON_THIS_HOST,
        sample: "detected with a large process",
        part: Part::P99,
        limit: Limit::AtMost(0.020),
    },
    Target {
        name: "a killed owner over tcp is noticed",
        campaign: "kill",
        lanes: OVER_TCP,
        sample: "detected",
        part: Part::P99,
        limit: Limit::AtMost(0.250),
    },
    Target {
        name: "a read from a stopped owner ends (limit 1 s)",
        campaign: "stop",
        lanes: ANY,
        sample: "read ended",
        part: Part::Most,
        limit: Limit::AtMost(1.6),
    },
    Target {
        name: "a write to a stopped owner ends (limit 1 s)",
        campaign: "stop",
        lanes: ANY,
        sample: "write ended",
        part: Part::Most,
        limit: Limit::AtMost(1.6),
    },
    Target {
        name: "a try of an import ends (limit 1 s)",
        campaign: "stop",
        lanes: ANY,
        sample: "import ended",
        part: Part::Most,
        limit: Limit::AtMost(1.6),
    },
    Target {
        name: "a pulled cable is noticed (limit 1 s)",
        campaign: "partition",
        lanes: ANY,
        sample: "detected",
        part: Part::Most,
        limit: Limit::AtMost(2.5),
    },
    Target {
        name: "a rank that stands still is noticed by the others (limit 2 s)",
        campaign: "ranks",
        lanes: ANY,
        sample: "learnt of a standstill",
        part: Part::Most,
        limit: Limit::AtMost(2.6),
    },
    Target {
        name: "a cut between ranks is noticed by all (limit 2 s)",
        campaign: "ranks",
        lanes: ANY,
        sample: "learnt of a cut",
        part: Part::Most,
        limit: Limit::AtMost(2.6),
    },
    Target {
        name: "a cancelled transfer ends",
        campaign: "cancel",
        lanes: ANY,
        sample: "ended after",
        part: Part::P99,
        limit: Limit::AtMost(0.050),
    },
    Target {
        name: "throughput kept beside a stopped peer",
        campaign: "neighbour",
        lanes: ANY,
        sample: "share kept",
        part: Part::Median,
        limit: Limit::AtLeast(0.9),
    },
    Target {
        name: "a new client is served among unauthenticated connections",
        campaign: "unauthenticated",
        lanes: ANY,
        sample: "a new client is served",
        part: Part::P99,
        limit: Limit::AtMost(0.100),
    },
];

/// The figures of those campaigns that were run.
pub(super) fn of(campaigns: &[CampaignReport]) -> Vec<Figure> {
    TARGETS.iter().filter_map(|target| target.measure(campaigns)).collect()
}

impl Target {
    fn measure(&self, campaigns: &[CampaignReport]) -> Option<Figure> {
        let campaign = campaigns.iter().find(|one| one.name == self.campaign)?;
        let values: Vec<f64> = campaign
            .lanes
            .iter()
            .filter(|lane| {
                self.lanes.is_none_or(|which| properties(lane.lane).is_some_and(|path| which(&path)))
            })
            .flat_map(|lane| &lane.samples)
            .filter(|sample| sample.name == self.sample)
            .flat_map(|sample| sample.values.iter().copied())
            .collect();
        if values.is_empty() {
            return None;
        }
        let sample = Sample::new(self.sample, values);
        let (part, value) = match self.part {
            Part::Median => ("median", sample.p50),
            Part::P99 => ("p99", sample.p99),
            Part::Most => ("most", sample.most),
        };
        let show = |value: f64| if sample.is_time() { time(value) } else { format!("{value:.2}") };
        let (target, met) = match self.limit {
            Limit::AtMost(limit) => (format!("≤ {}", show(limit)), value <= limit),
            Limit::AtLeast(limit) => (format!("≥ {}", show(limit)), value >= limit),
        };
        let name = format!("{}, {part} of {}", self.name, sample.count);
        Some(Figure { name, value: show(value), target, met })
    }
}
