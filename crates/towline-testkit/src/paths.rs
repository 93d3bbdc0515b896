//! What tests know of a path: what it says of itself in the list of transports, and nothing by its name.

use towline::{Capabilities, Contact, PathProperties, Routing};

/// What that path says of itself; `None` where there is no such path.
pub fn properties(path: &str) -> Option<PathProperties> {
    towline::path_properties().into_iter().find(|one| one.name == path)
}

/// What that path says of itself. Panics where there is no such path.
pub fn known(path: &str) -> PathProperties {
    properties(path).unwrap_or_else(|| panic!("no path is called {path:?}"))
}

/// Those for which that holds, in order of preference.
pub fn names(is_one: impl Fn(&PathProperties) -> bool) -> Vec<&'static str> {
    towline::path_properties().into_iter().filter(is_one).map(|path| path.name).collect()
}

/// Whether the owner serves every access on that path, from another process or elsewhere in this one.
pub fn is_served(path: &PathProperties) -> bool {
    path.enforced && path.contact != Contact::Nothing
}

/// Whether the owner serves every access on that path, on one host.
pub fn is_served_here(path: &PathProperties) -> bool {
    is_served(path) && path.contact == Contact::Unix
}

/// Whether this process itself, or a GPU of it, copies from and to memory of a process on this host, which takes no part.
pub fn is_direct(path: &PathProperties) -> bool {
    !path.enforced && path.contact == Contact::Unix
}

/// Whether an engine of others moves the bytes over whatever it finds, which what it is at cannot be taken from.
pub fn is_by_an_engine(path: &PathProperties) -> bool {
    path.contact == Contact::Any
}

/// Whether the owner is in this process.
pub fn is_here(path: &PathProperties) -> bool {
    path.contact == Contact::Nothing
}

/// Whether all that can be done to words can be done by it, over a contact with the owner.
pub fn is_complete(path: &PathProperties) -> bool {
    path.capabilities.contains(Capabilities::ALL) && !is_here(path)
}

/// The path that does what the given one cannot: atomics and reductions in host memory. `None` where it can do all, and where there
/// are no words to do that with.
pub fn helper(path: &PathProperties) -> Option<&'static str> {
    if !path.serves.has_words() || path.capabilities.contains(Capabilities::ALL) {
        return None;
    }
    names(|one| is_served_here(one) && is_complete(one)).first().copied()
}

/// That path, and the one that helps it out.
pub fn required(path: &str) -> Vec<&'static str> {
    let path = known(path);
    std::iter::once(path.name).chain(helper(&path)).collect()
}

/// What allows that path only, and the one that helps it out.
pub fn routing(path: &str) -> Routing {
    required(path).into_iter().try_fold(Routing::default(), Routing::require).unwrap()
}
