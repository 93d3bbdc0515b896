//! The report page: one file, no foreign script, plots as SVG.

use std::fmt::Write;

use super::report::{Report, Sample};

/// A plot's size, and the room for its labels.
const WIDTH: f64 = 640.0;
const ROW: f64 = 26.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 16.0;

/// At most this many points of a sample are drawn.
const POINTS: usize = 400;

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2733;background:#fff}\
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;width:100%}\
td,th{padding:.25rem .6rem;border-bottom:1px solid #dde3ea;text-align:left;vertical-align:top}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}.ok{color:#12733f}.bad{color:#b3261e;font-weight:600}\
.dim{color:#66758a}pre{background:#f4f6f9;padding:.6rem;overflow:auto}svg text{font:12px system-ui,sans-serif;fill:#44546a}\
@media(prefers-color-scheme:dark){body{background:#12171d;color:#dfe6ee}td,th{border-color:#2b3540}pre{background:#1b222a}svg text{fill:#a9b7c6}}";

/// The whole page.
pub(super) fn html(report: &Report) -> String {
    let mut page = String::new();
    let verdict =
        if report.ok { "<span class=ok>all passed</span>" } else { "<span class=bad>failed</span>" };
    let machine = &report.machine;
    let _ = write!(
        page,
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">\
         <title>towline soak</title><style>{STYLE}</style><h1>Towline under faults: {verdict}</h1>\
         <p class=dim>commit {}, {}, seed {}, {:.0} s, {} build on {} cores of {}, {}</p>\
         <table><tr><th>campaign<th>verdict<th class=n>rounds<th class=n>time<th>what must hold</tr>",
        escape(&report.commit),
        escape(&report.date),
        report.seed,
        report.seconds,
        machine.build,
        machine.cores,
        escape(&machine.cpu),
        escape(&machine.kernel),
    );
    for one in &report.campaigns {
        let verdict = match (one.ok, one.rounds) {
            (false, _) => "<span class=bad>failed</span>".to_owned(),
            (true, 0) => format!("<span class=dim>skipped: {}</span>", escape(&one.skipped.join("; "))),
            (true, _) => "<span class=ok>passed</span>".to_owned(),
        };
        let _ = write!(
            page,
            "<tr><td><a href=\"#{0}\">{0}</a><td>{verdict}<td class=n>{1}<td class=n>{2:.1} s<td>{3}</tr>",
            one.name,
            one.rounds,
            one.seconds,
            escape(one.summary)
        );
    }
    page.push_str("</table>");
    if !report.figures.is_empty() {
        page.push_str(
            "<h2>Figures</h2><table><tr><th>figure<th class=n>measured<th class=n>target<th>met</tr>",
        );
        for figure in &report.figures {
            let met = if figure.met { "<span class=ok>yes</span>" } else { "<span class=bad>no</span>" };
            let _ = write!(
                page,
                "<tr><td>{}<td class=n>{}<td class=n>{}<td>{met}</tr>",
                escape(&figure.name),
                escape(&figure.value),
                escape(&figure.target)
            );
        }
        page.push_str("</table>");
    }
    for one in &report.campaigns {
        let mut names: Vec<&'static str> =
            one.lanes.iter().flat_map(|lane| lane.samples.iter().map(|sample| sample.name)).collect();
        names.sort_unstable();
        names.dedup();
        let failures = one.lanes.iter().any(|lane| !lane.failures.is_empty());
        if names.is_empty() && !failures {
            continue;
        }
        let _ = write!(page, "<h2 id=\"{0}\">{0}</h2>", one.name);
        for name in names {
            let rows: Vec<(&str, &Sample)> = one
                .lanes
                .iter()
                .filter_map(|lane| Some((lane.lane, lane.samples.iter().find(|sample| sample.name == name)?)))
                .collect();
            page.push_str(&plot(name, &rows));
        }
        for lane in &one.lanes {
            for failure in &lane.failures {
                let _ = write!(
                    page,
                    "<p class=bad>{} over {}, round {}</p><pre>{}\n\n{}</pre>",
                    one.name,
                    lane.lane,
                    failure.round,
                    escape(&failure.message),
                    escape(&failure.replay)
                );
            }
        }
    }
    page.push_str("</html>\n");
    page
}

/// One row of points for each lane, on one axis; a bar marks the median. Times have a logarithmic axis.
fn plot(name: &str, rows: &[(&str, &Sample)]) -> String {
    let logarithmic = rows.iter().all(|(_, sample)| sample.is_time());
    let least = rows.iter().map(|(_, sample)| sample.least).fold(f64::INFINITY, f64::min);
    let most = rows.iter().map(|(_, sample)| sample.most).fold(0.0, f64::max);
    let (low, high) = match logarithmic {
        true => (least.max(1e-7).log10().floor(), most.max(1e-6).log10().ceil()),
        false => (0.0, if most > 0.0 { most * 1.05 } else { 1.0 }),
    };
    let span = if high > low { high - low } else { 1.0 };
    let x = |value: f64| {
        let value = if logarithmic { value.max(1e-7).log10() } else { value };
        LEFT + (value - low) / span * (WIDTH - LEFT - RIGHT)
    };
    let height = ROW * rows.len() as f64 + 44.0;
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=img aria-label=\"{0}\"><text x=0 y=14>{0}</text>",
        escape(name)
    );
    let ticks: Vec<f64> = match logarithmic {
        true => (low as i32..=high as i32).map(|power| 10f64.powi(power)).collect(),
        false => (0..=4).map(|step| high * f64::from(step) / 4.0).collect(),
    };
    for tick in ticks {
        let shown = rows.first().map_or_else(String::new, |(_, sample)| sample.show(tick));
        let _ = write!(
            svg,
            "<line x1={0:.1} x2={0:.1} y1=22 y2={1:.1} stroke=\"#8fa0b3\" stroke-opacity=.35 /><text x={0:.1} y={2:.1} text-anchor=middle>{shown}</text>",
            x(tick),
            height - 20.0,
            height - 6.0
        );
    }
    for (index, (lane, sample)) in rows.iter().enumerate() {
        let y = 22.0 + ROW * (index as f64 + 0.5);
        let _ = write!(svg, "<text x=0 y={:.1}>{lane} ({})</text>", y + 4.0, sample.count);
        let step = sample.values.len().div_ceil(POINTS).max(1);
        for value in sample.values.iter().step_by(step).chain(sample.values.last()) {
            let _ =
                write!(svg, "<circle cx={:.1} cy={y:.1} r=3 fill=\"#2f6fb2\" fill-opacity=.35 />", x(*value));
        }
        let _ = write!(
            svg,
            "<line x1={0:.1} x2={0:.1} y1={1:.1} y2={2:.1} stroke=\"#c2571a\" stroke-width=3 />",
            x(sample.p50),
            y - 9.0,
            y + 9.0
        );
    }
    svg.push_str("</svg>");
    svg
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
