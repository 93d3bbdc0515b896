//! Collectives and point to point on host memory: which algorithm, over which path, and why.
