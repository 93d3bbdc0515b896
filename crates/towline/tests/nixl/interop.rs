//! With a plain process of NIXL.
