//! What an owner keeps of a grant, and what it holds while a request acts on its region.

use std::any::Any;
use std::sync::{Arc, Weak};

use towline_proto::session::allowance::InFlight;
use towline_proto::session::owner::{Grant, Owner};

use super::Over;
use crate::budget::Charge;
use crate::region::{Counted, RegionCore, RegionUse, Served};
use crate::session::files::Source;
use crate::session::reply::Lending;
use crate::ticket::Claims;
use crate::{Error, Kind, Result};

/// What a handle of the peer stands for.
pub(in crate::session) struct Granting {
    pub(in crate::session) served: Arc<Served>,
    pub(in crate::session) claims: Claims,
    pub(in crate::session) lent: Lending,
    pub(super) _charge: Charge,
}

/// One ticket that a peer has proven to hold.
pub(in crate::session) type Standing = towline_proto::session::owner::Standing<RegionCore>;

/// What an owner keeps of a grant, besides what it keeps of the region for its session.
pub(super) const GRANT: usize = Owner::<Granting, Over>::GRANT;

/// What keeps a region where it is while a request acts on it.
pub(in crate::session) enum Hold {
    /// Its bytes are in memory.
    Memory(RegionUse),
    /// They are in a file, or on a GPU, and stop over in a buffer: who moves them there uses the region then.
    Bounced(Arc<RegionCore>, Source, InFlight),
}

impl Granting {
    pub(in crate::session) fn count(&self, what: Counted) {
        self.served.count(what);
    }
}

impl Grant for Granting {
    type Region = RegionCore;
    type Hold = Hold;

    fn claims(&self) -> &Claims {
        &self.claims
    }

    fn region(&self) -> &Weak<RegionCore> {
        self.served.region()
    }

    fn served(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::<Served>::clone(&self.served)
    }

    fn is_closed(region: &RegionCore) -> bool {
        region.is_closed()
    }

    fn hold(
        op: &'static str,
        region: Arc<RegionCore>,
        flight: Option<InFlight>,
    ) -> Result<Hold, (Error, Arc<RegionCore>)> {
        let using = match (Source::of(&region), flight) {
            (Some(source), Some(flight)) => return Ok(Hold::Bounced(region, source, flight)),
            (Some(_), None) => Err(Error::new(Kind::Internal, op, "memory has become a file")),
            (None, Some(flight)) => region.begin_use_with(op, flight),
            (None, None) => region.begin_use(op),
        };
        // What is used is held once more: the one that goes here is not the last.
        using.map(Hold::Memory).map_err(|error| (error, region))
    }
}
