//! Which path, and why.

use towline::{Access, Isolation, Kind, Routing, Verdict};

use crate::bench::{Bench, outcome, refused, routing};
use crate::oracle::Stamp;
use crate::paths::required;

/// Every path is named with what became of it; one is taken, and the transfer says which.
pub fn every_path_is_explained(bench: &Bench) {
    let region = bench.stamped(64, Access::READ_WRITE, Stamp::new(1, 1));
    let remote = bench.import(&region);
    let explanation = remote.explain();
    let names: Vec<_> = explanation.paths.iter().map(|one| one.path).collect();
    let known: Vec<_> = towline::paths().iter().map(|path| path.name).collect();
    assert_eq!(names, known);
    for one in &explanation.paths {
        assert!(!one.reason.is_empty(), "{explanation}");
        assert!(explanation.to_string().contains(one.path));
    }
    let taken: Vec<_> = explanation.paths.iter().filter(|one| one.verdict == Verdict::Taken).collect();
    assert_eq!(taken.len(), 1, "{explanation}");
    assert_eq!(
        (taken[0].path, explanation.taken(), remote.path()),
        (bench.path, Some(bench.path), bench.path)
    );
    let transfer = bench.user.read(&remote, &bench.local(64)).start().unwrap();
    transfer.wait().unwrap();
    assert_eq!(transfer.path(), bench.path);
    // Without any wish, the explanation still says why the others are not taken.
    let free = bench.user.import_with(&region.ticket(), &Routing::default()).unwrap();
    let free = free.explain();
    assert!(free.taken().is_some());
    for one in free.paths.iter().filter(|one| one.verdict == Verdict::Refused) {
        assert!(!one.reason.contains("the caller requires"), "{free}");
    }
}

/// What is required is taken or refused, what is forbidden is never taken, and isolation holds.
pub fn required_forbidden_and_isolated_paths_are_respected(bench: &Bench) {
    let region = bench.stamped(64, Access::READ_WRITE, Stamp::new(1, 1));
    let ticket = region.ticket();
    let import = |routing: &Routing| bench.user.import_with(&ticket, routing);
    let local = bench.local(64);

    let remote = import(&routing(bench.path)).unwrap();
    assert_eq!(remote.path(), bench.path);
    // A request may narrow what the import allowed, not widen it.
    outcome(bench.user.read(&remote, &local).routing(routing(bench.path)).start()).unwrap();
    let forbidden = Routing::default().forbid(bench.path).unwrap();
    if bench.helper().is_none() {
        let error = refused(
            bench.user.read(&remote, &local).routing(forbidden.clone()).start(),
            &[Kind::Unsupported],
        );
        assert!(error.message().contains(bench.path), "{error}");
    }
    if let Ok(remote) = import(&forbidden) {
        assert_ne!(remote.path(), bench.path, "{}", remote.explain());
        outcome(bench.user.read(&remote, &local).start()).unwrap();
    }
    let contradiction = required(bench.path).into_iter().try_fold(routing(bench.path), Routing::forbid);
    refused(import(&contradiction.unwrap()), &[Kind::Unavailable]);
    refused(Routing::default().require("carrier-pigeon"), &[Kind::Invalid]);
    refused(Routing::default().forbid(""), &[Kind::Invalid]);

    let enforced: Vec<_> =
        towline::paths().iter().filter(|path| path.enforced).map(|path| path.name).collect();
    let isolated = import(&Routing::default().isolation(Isolation::Enforced)).unwrap();
    assert!(enforced.contains(&isolated.path()), "{}", isolated.explain());
    let only = Routing::default().require(bench.path).unwrap().isolation(Isolation::Enforced);
    match import(&only) {
        Ok(remote) => assert_eq!((enforced.contains(&bench.path), remote.path()), (true, bench.path)),
        Err(error) => {
            assert!(!enforced.contains(&bench.path), "{error}");
            assert_eq!(error.kind(), Kind::Unavailable, "{error}");
        }
    }
}
