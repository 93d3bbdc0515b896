//! Calls that are collected and launched together.
