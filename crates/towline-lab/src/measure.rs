//! Times: rounds that alternate between ours and the limit.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::outcome::Outcome;

/// A round shorter than this would measure the clock and the scheduler.
const ROUND: Duration = Duration::from_millis(8);

/// Single times per round of a latency.
const SINGLES: usize = 300;

/// How long a row is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    pub(crate) budget: Duration,
    pub(crate) fewest: usize,
    pub(crate) most: usize,
}

/// Of a row of which a figure is asked, the machine should be seen in more than one of its moods.
const ASKED: (Duration, usize) = (Duration::from_millis(700), 41);

/// A round over sockets is fast or slow by where the kernel has placed the threads of both sides, ours and the bare ones', and it leaves
/// them there for a tenth of a second and more.
const ASKED_OF_SOCKETS: (Duration, usize) = (Duration::from_millis(1600), 151);

impl Pace {
    /// For as long as a row needs of which a figure is asked.
    pub(crate) fn asked(self, sockets: bool) -> Pace {
        let (budget, most) = if sockets { ASKED_OF_SOCKETS } else { ASKED };
        Pace { budget: self.budget.max(budget), most: self.most.max(most), ..self }
    }
}

/// One thing to time.
pub(crate) type Step<'a> = dyn FnMut() -> Outcome<()> + 'a;

/// Seconds of one operation, ours and the limit's: medians, and ours that 99 of 100 stay below.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) ours: f64,
    pub(crate) limit: Option<f64>,
    pub(crate) p99: Option<f64>,
    pub(crate) rounds: usize,
}

/// Times operations that are long, or are repeated until a round is.
pub(crate) fn rates(pace: Pace, ours: &mut Step<'_>, mut limit: Option<&mut Step<'_>>) -> Outcome<Times> {
    let repeats = |step: &mut Step<'_>| -> Outcome<u32> {
        let once = time(1, step)?.max(1e-9);
        Ok((ROUND.as_secs_f64() / once).clamp(1.0, 100_000.0) as u32)
    };
    let our_repeats = repeats(ours)?;
    let limit_repeats = limit.as_deref_mut().map_or(Ok(1), repeats)?;
    let (mut ours_times, mut limit_times) = (Vec::new(), Vec::new());
    rounds(pace, |round| {
        // The first one changes, so that neither always finds what the other left in the caches.
        for turn in [round % 2, (round + 1) % 2] {
            match (turn, limit.as_deref_mut()) {
                (0, _) => ours_times.push(time(our_repeats, ours)?),
                (_, Some(limit)) => limit_times.push(time(limit_repeats, limit)?),
                (_, None) => {}
            }
        }
        Ok(())
    })?;
    let rounds = ours_times.len();
    Ok(Times { ours: median(&mut ours_times), limit: some_median(&mut limit_times), p99: None, rounds })
}

/// Times single operations, each by itself.
pub(crate) fn latencies(pace: Pace, ours: &mut Step<'_>, limit: Option<&mut Step<'_>>) -> Outcome<Times> {
    one_by_one(pace, SINGLES, ours, limit)
}

/// Times single operations, each by itself, of which a round has as many as fit.
pub(crate) fn medians(pace: Pace, ours: &mut Step<'_>, limit: Option<&mut Step<'_>>) -> Outcome<Times> {
    let once = time(1, ours)?.max(1e-9);
    let singles = (ROUND.as_secs_f64() / once).clamp(1.0, SINGLES as f64) as usize;
    one_by_one(pace, singles, ours, limit)
}

fn one_by_one(
    pace: Pace,
    count: usize,
    ours: &mut Step<'_>,
    mut limit: Option<&mut Step<'_>>,
) -> Outcome<Times> {
    let (mut ours_times, mut limit_times) = (Vec::new(), Vec::new());
    let singles = |step: &mut Step<'_>, times: &mut Vec<f64>| -> Outcome<()> {
        // The first ones warm what the other side has cooled.
        for _ in 0..count / 10 {
            step()?;
        }
        for _ in 0..count {
            times.push(time(1, step)?);
        }
        Ok(())
    };
    rounds(pace, |round| {
        for turn in [round % 2, (round + 1) % 2] {
            match (turn, limit.as_deref_mut()) {
                (0, _) => singles(ours, &mut ours_times)?,
                (_, Some(limit)) => singles(limit, &mut limit_times)?,
                (_, None) => {}
            }
        }
        Ok(())
    })?;
    let rounds = ours_times.len() / count;
    let ours = median(&mut ours_times);
    let p99 = ours_times.get(ours_times.len() * 99 / 100).copied();
    Ok(Times { ours, limit: some_median(&mut limit_times), p99, rounds })
}

fn rounds(pace: Pace, mut round: impl FnMut(usize) -> Outcome<()>) -> Outcome<()> {
    let start = Instant::now();
    for number in 0..pace.most {
        if number >= pace.fewest && start.elapsed() >= pace.budget {
            break;
        }
        round(number)?;
    }
    Ok(())
}

/// Seconds of one of that many operations.
fn time(repeats: u32, step: &mut Step<'_>) -> Outcome<f64> {
    let start = Instant::now();
    for _ in 0..repeats {
        step()?;
    }
    Ok(start.elapsed().as_secs_f64() / f64::from(repeats))
}

/// The middle one; the values come out sorted.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn some_median(values: &mut [f64]) -> Option<f64> {
    if values.is_empty() { None } else { Some(median(values)) }
}

/// How many threads of this process share the work of `step`, by the processor time that each of them gets.
pub(crate) fn busy_threads(step: &mut Step<'_>) -> Outcome<usize> {
    let before = thread_times();
    let start = Instant::now();
    let mut runs = 0;
    while runs < 3 || (start.elapsed() < ROUND * 2 && runs < 1000) {
        step()?;
        runs += 1;
    }
    let gained: Vec<u64> = thread_times()
        .into_iter()
        .map(|(thread, time)| time.saturating_sub(before.get(&thread).copied().unwrap_or(0)))
        .collect();
    // A caller that only prepares and waits is not counted. Not always the same threads come to work, so that more of
    // them can be seen than are at work at once.
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let busy = gained.iter().filter(|time| **time * 20 > gained.iter().sum()).count();
    Ok(busy.clamp(1, most))
}

/// Nanoseconds on a processor, by thread.
fn thread_times() -> HashMap<i32, u64> {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return HashMap::new() };
    threads
        .flatten()
        .filter_map(|thread| {
            let times = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
            let time = times.split_whitespace().next()?.parse().ok()?;
            Some((thread.file_name().to_str()?.parse().ok()?, time))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    #[test]
    fn both_sides_get_as_many_rounds_and_the_slower_one_shows() {
        let pace = Pace { budget: Duration::ZERO, fewest: 3, most: 3 };
        let mut slow = || {
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        };
        let mut fast = || Ok(());
        let times = rates(pace, &mut slow, Some(&mut fast)).unwrap();
        assert_eq!(times.rounds, 3);
        assert!(times.ours > times.limit.unwrap());
        let times = latencies(pace, &mut fast, None).unwrap();
        assert!(times.limit.is_none() && times.p99.unwrap() >= times.ours);
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&mut [5.0, 1.0, 3.0]), 3.0);
        assert!(median(&mut []).is_nan());
    }
}
