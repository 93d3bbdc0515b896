//! `towline bench comm`: groups of real processes on this host, beside the machine, Open MPI and gloo; and one rank on a GPU,
//! beside NCCL's bare calls.

mod group;
mod nccl;
mod one_sided;
mod peers;
mod reduce;
mod windows;

use self::peers::Peers;
use super::{Found, Options, Progress, Session};
use crate::outcome::{Failure, Outcome};

/// The sizes of the groups.
const RANKS: [usize; 2] = [2, 4];

/// A row, or rows that are measured together.
struct Case {
    ranks: usize,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    OneSided(&'static str),
    Reduce(reduce::Size),
    Window(&'static str),
    Nccl(&'static str),
}

impl Case {
    fn label(&self) -> String {
        let name = match self.what {
            What::OneSided(name) | What::Window(name) | What::Nccl(name) => name.to_owned(),
            What::Reduce(size) => reduce::name(size),
        };
        format!("{}-ranks/{name}", self.ranks)
    }
}

fn cases() -> Vec<Case> {
    let one_sided = [one_sided::PING, one_sided::PUT, one_sided::GET].map(What::OneSided);
    let mut cases: Vec<Case> = one_sided.into_iter().map(|what| Case { ranks: 2, what }).collect();
    let both =
        reduce::SIZES.map(What::Reduce).into_iter().chain([windows::LARGE, windows::MANY].map(What::Window));
    let both: Vec<What> = both.collect();
    cases
        .extend(RANKS.into_iter().flat_map(|ranks| both.iter().map(move |what| Case { ranks, what: *what })));
    cases.extend(nccl::NAMES.map(|name| Case { ranks: 1, what: What::Nccl(name) }));
    cases
}

pub(super) fn run(options: &Options, progress: &dyn Progress) -> Outcome<Found> {
    let cases: Vec<Case> = cases().into_iter().filter(|case| options.wants(&case.label())).collect();
    if cases.is_empty() {
        return Err(Failure::usage("no row has such a label; towline bench comm --list shows them all"));
    }
    if options.list {
        return Ok(Found::Labels(cases.iter().map(Case::label).collect()));
    }
    progress.begins(cases.len());
    let mut session = Session::new(options, progress);
    // Looking for peers takes seconds: an interpreter loads torch.
    let compared = |what| matches!(what, What::Reduce(_) | What::OneSided(one_sided::PING));
    let peers = if !options.alone && cases.iter().any(|case| compared(case.what)) {
        session.progress.says("looking for Open MPI and gloo");
        Peers::find()?
    } else {
        Peers::none()
    };
    for ranks in RANKS {
        let mine = || cases.iter().filter(|case| case.ranks == ranks).map(|case| case.what);
        let one_sided: Vec<_> = mine().filter_map(What::one_sided).collect();
        let sizes: Vec<_> = mine().filter_map(What::reduce).collect();
        let windows: Vec<_> = mine().filter_map(What::window).collect();
        if !one_sided.is_empty() {
            one_sided::run(&mut session, &peers, &one_sided);
        }
        if !sizes.is_empty() {
            reduce::run(&mut session, &peers, ranks, &sizes, options.quick);
        }
        if !windows.is_empty() {
            windows::run(&mut session, ranks, &windows);
        }
    }
    let on_gpu: Vec<_> = cases.iter().filter_map(|case| case.what.nccl()).collect();
    if !on_gpu.is_empty() {
        nccl::run(&mut session, &on_gpu);
    }
    Ok(session.finish())
}

impl What {
    fn one_sided(self) -> Option<&'static str> {
        if let What::OneSided(name) = self { Some(name) } else { None }
    }

    fn reduce(self) -> Option<reduce::Size> {
        if let What::Reduce(size) = self { Some(size) } else { None }
    }

    fn nccl(self) -> Option<&'static str> {
        if let What::Nccl(name) = self { Some(name) } else { None }
    }

    fn window(self) -> Option<&'static str> {
        if let What::Window(name) = self { Some(name) } else { None }
    }
}
