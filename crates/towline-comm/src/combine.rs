//! How elements of several ranks become one (pure).
