//! Ranks that do not come, leave, or give up.

use std::thread;

use towline::Kind;

use super::*;
use crate::Error;
use crate::team::record;

/// The limit of a team in tests that wait for it: all ranks but the one that is missed must come well before it, on a busy
/// machine too.
const SHORT: Duration = Duration::from_secs(4);

#[test]
fn a_timeout_names_the_rank_that_did_not_come() {
    with_all_links(|links| {
        let errors = with_ranks(4, links, SHORT, |team| {
            team.barrier().unwrap();
            if team.rank() == 2 {
                while team.failure().is_none() {
                    thread::sleep(Duration::from_millis(5));
                }
            }
            let first = team.barrier().unwrap_err();
            let again = team.all_gather_bytes("tickets", b"x").unwrap_err();
            assert_eq!((again.kind(), again.ranks()), (first.kind(), first.ranks()));
            first
        });
        for error in errors {
            assert_eq!((error.kind(), error.ranks()), (Kind::Timeout, &[2][..]), "{links:?}: {error}");
        }
    });
}

#[test]
fn the_rank_that_holds_up_a_ring_is_named_and_not_its_victims() {
    with_all_links(|links| {
        let errors = with_ranks(4, links, SHORT, |team| {
            team.barrier().unwrap();
            let rank = team.rank();
            let mut into = [0; 8];
            if rank == 0 {
                while team.failure().is_none() {
                    thread::sleep(Duration::from_millis(5));
                }
                return team.recv(3, &mut into).unwrap_err();
            }
            // Rank 1 waits for 0, rank 2 for 1, rank 3 for 2.
            team.recv(rank - 1, &mut into).unwrap_err()
        });
        for error in errors {
            assert_eq!((error.kind(), error.ranks()), (Kind::Timeout, &[0][..]), "{links:?}: {error}");
        }
    });
}

/// Runs a test with every kind of links, all at the same time: most of the time they wait for limits.
fn with_all_links(test: impl Fn(Links) + Sync) {
    thread::scope(|scope| {
        let test = &test;
        let threads: Vec<_> = ALL_LINKS.map(|links| scope.spawn(move || test(links))).into();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Runs until the team has failed elsewhere, or for ever.
fn never_come(team: &Team) {
    while team.failure().is_none() {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_rank_at_the_end_of_waits_of_all_kinds_is_named_whoever_gives_up_first() {
    with_all_links(|links| {
        // A rank that is in another round, or waits for something that is no collective, is held up all the same.
        let done = Barrier::new(5);
        let errors = with_ranks(5, links, SHORT, |team| {
            team.barrier().unwrap();
            let mut into = [0; 8];
            let error = match team.rank() {
                0 | 1 => team.barrier().unwrap_err(),
                2 => team.recv(3, &mut into).unwrap_err(),
                3 => team.wait("wait_signal", || vec![4], || None::<()>).unwrap_err(),
                _ => {
                    never_come(team);
                    team.failure().unwrap()
                }
            };
            // One that leaves is gone, which is another story.
            done.wait();
            error
        });
        for error in errors {
            assert_eq!((error.kind(), error.ranks()), (Kind::Timeout, &[4][..]), "{links:?}: {error}");
        }
    });
}

#[test]
fn a_rank_that_was_stopped_in_a_wait_is_named_though_it_says_for_whom_it_waits() {
    with_all_links(|links| {
        let errors = with_ranks(4, links, SHORT, |team| {
            team.barrier().unwrap();
            let mut into = [0; 8];
            match team.rank() {
                // As if it had been stopped while it waited for rank 1, which has come since.
                0 => {
                    team.links.held_up(&[1]);
                    never_come(team);
                    team.failure().unwrap()
                }
                rank => team.recv(rank - 1, &mut into).unwrap_err(),
            }
        });
        for error in errors {
            assert_eq!((error.kind(), error.ranks()), (Kind::Timeout, &[0][..]), "{links:?}: {error}");
        }
    });
}

#[test]
fn one_that_has_given_up_on_a_rank_that_waits_for_it_is_named_itself() {
    with_all_links(|links| {
        let errors = with_ranks(3, links, SHORT, |team| {
            team.barrier().unwrap();
            if team.rank() == 2 {
                // Rank 1 owes it nothing, and waits for it in the barrier.
                let error = team.wait("wait_signal", || vec![1], || None::<()>).unwrap_err();
                assert!(error.kind() == Kind::Timeout, "{links:?}: {error}");
                never_come(team);
                return team.failure().unwrap();
            }
            // Only now does any rank wait for it.
            thread::sleep(SHORT / 2);
            team.barrier().unwrap_err()
        });
        for error in errors {
            assert_eq!((error.kind(), error.ranks()), (Kind::Timeout, &[2][..]), "{links:?}: {error}");
        }
    });
}

#[test]
fn one_that_leaves_or_revokes_because_of_another_names_that_one_too() {
    with_all_links(|links| {
        for revokes in [false, true] {
            let (gave_up, done) = (Barrier::new(2), Barrier::new(2));
            let errors = with_ranks(3, links, SHORT, |team| {
                team.barrier().unwrap();
                match team.rank() {
                    0 => {
                        gave_up.wait();
                        let error = team.recv(1, &mut [0; 8]).unwrap_err();
                        done.wait();
                        Some(error)
                    }
                    1 => {
                        // Waits without success for rank 2, and goes.
                        team.wait("wait_signal", || vec![2], || None::<()>).unwrap_err();
                        gave_up.wait();
                        if revokes {
                            team.revoke();
                        }
                        None
                    }
                    _ => {
                        done.wait();
                        None
                    }
                }
            });
            let error = errors[0].as_ref().unwrap();
            assert_eq!(error.ranks(), [1, 2], "{links:?}: {error}");
            assert!(error.message().contains("without success for rank 2"), "{links:?}: {error}");
        }
    });
}

#[test]
fn an_abort_unblocks_everybody_with_its_cause() {
    for links in ALL_LINKS {
        let errors = with_ranks(4, links, LONG, |team| match team.rank() {
            0 => {
                thread::sleep(Duration::from_millis(50));
                team.abort(
                    &Error::new(Kind::Native, "all_reduce", "the caller has had enough").about([0, 3]),
                );
                team.failure().unwrap()
            }
            1 => team.barrier().unwrap_err(),
            2 => team.recv(1, &mut [0; 8]).unwrap_err(),
            _ => team.wait("wait_signal", || vec![1], || None::<()>).unwrap_err(),
        });
        for (rank, error) in errors.iter().enumerate() {
            assert_eq!(
                (error.kind(), error.ranks()),
                (Kind::Native, &[0, 3][..]),
                "{links:?} {rank}: {error}"
            );
            assert!(error.message().contains("has had enough"));
        }
        assert_eq!(errors[1].op(), "barrier");
    }
}

#[test]
fn an_abort_that_reached_one_rank_reaches_all() {
    for links in ALL_LINKS {
        let errors = with_ranks(4, links, LONG, |team| {
            if team.rank() == 0 {
                // As if this rank had died after it had sent its record to the first.
                let error = Error::new(Kind::Native, "all_reduce", "half sent").about([2]);
                let _ = team.links.send_abort(1, &record::encode(&error, 0)).unwrap();
            }
            team.recv((team.rank() + 1) % 4, &mut [0; 8]).unwrap_err()
        });
        for error in errors {
            assert_eq!((error.kind(), error.ranks()), (Kind::Native, &[2][..]), "{links:?}: {error}");
            assert!(error.message().starts_with("rank 0 gave up"), "{error}");
        }
    }
}

#[test]
fn an_abort_unblocks_other_threads_of_the_same_rank() {
    with_ranks(2, Links::Near, LONG, |team| {
        if team.rank() == 0 {
            thread::scope(|scope| {
                let waiting = scope.spawn(|| team.recv(1, &mut [0; 8]).unwrap_err());
                thread::sleep(Duration::from_millis(20));
                team.abort(&Error::new(Kind::Canceled, "abort", "stopped"));
                assert_eq!(waiting.join().unwrap().kind(), Kind::Canceled);
            });
        } else {
            assert_eq!(team.barrier().unwrap_err().kind(), Kind::Canceled);
        }
    });
}

#[test]
fn a_revoked_team_is_canceled_everywhere() {
    for links in ALL_LINKS {
        with_ranks(3, links, LONG, |team| {
            if team.rank() == 1 {
                team.revoke();
            }
            let error = team.barrier().unwrap_err();
            assert_eq!((error.kind(), error.ranks()), (Kind::Canceled, &[1][..]), "{links:?}: {error}");
        });
    }
}

#[test]
fn a_timeout_of_a_plain_wait_leaves_the_team_usable() {
    with_ranks(2, Links::Near, SHORT, |team| {
        let error = team.wait("wait_signal", || vec![1 - team.rank()], || None::<()>).unwrap_err();
        assert_eq!((error.kind(), error.ranks()), (Kind::Timeout, &[1 - team.rank()][..]));
        team.barrier().unwrap();
    });
}

#[test]
fn who_waits_for_a_rank_that_has_left_is_told_so() {
    for links in ALL_LINKS {
        let errors = with_ranks(3, links, LONG, |team| {
            team.barrier().unwrap();
            if team.rank() == 1 {
                return None;
            }
            Some(team.barrier().unwrap_err())
        });
        assert!(errors[1].is_none());
        for error in errors.into_iter().flatten() {
            assert_eq!((error.kind(), error.ranks()), (Kind::Disconnected, &[1][..]), "{links:?}: {error}");
        }
    }
}

#[test]
fn a_rank_that_leaves_after_its_last_round_disturbs_nobody() {
    for links in ALL_LINKS {
        for _ in 0..10 {
            with_ranks(4, links, LONG, |team| {
                if team.rank() % 2 == 0 {
                    team.send((team.rank() + 1) % 4, &[7; 1000]).unwrap();
                } else {
                    thread::sleep(Duration::from_millis(1));
                    team.recv(team.rank() - 1, &mut [0; 1000]).unwrap();
                }
                team.barrier().unwrap();
            });
        }
    }
}
