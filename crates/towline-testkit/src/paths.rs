//! What tests know of a path: what it says of itself in the list of transports, and nothing by its name.

use towline::{Capabilities, Contact, PathProperties, Routing, Serves};

/// What that path says of itself; `None` where there is no such path.
pub fn properties(path: &str) -> Option<PathProperties> {
    towline::path_properties().into_iter().find(|one| one.name == path)
}

/// What that path says of itself. Panics where there is no such path.
pub fn known(path: &str) -> PathProperties {
    properties(path).unwrap_or_else(|| panic!("no path is called {path:?}"))
}

/// The path that does what that one cannot: atomics and reductions in host memory. `None` where it can do all, and where there
/// are no words to do that with.
pub fn helper(path: &PathProperties) -> Option<&'static str> {
    if !path.serves.has_words() || path.capabilities.contains(Capabilities::ALL) {
        return None;
    }
    let helps = |one: &PathProperties| {
        one.contact == Contact::Unix
            && one.serves == Serves::Anything
            && one.capabilities.contains(Capabilities::ALL)
    };
    towline::path_properties().into_iter().find(helps).map(|one| one.name)
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
