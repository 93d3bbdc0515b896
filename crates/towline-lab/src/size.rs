//! Numbers of bytes, seconds and rates as people write and read them.

/// Reads a number of bytes: `4096`, `64K`, `256M`, `2G` (powers of 1024; `KiB` and the like are fine too).
///
/// # Errors
/// What is wrong with the text.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| format!("{text:?} is not a number of bytes"))?;
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        other => return Err(format!("{other:?} is not a unit of bytes; use K, M or G")),
    };
    match number.checked_mul(1 << shift) {
        Some(0) => Err("zero bytes are too few".to_owned()),
        Some(bytes) if bytes <= isize::MAX as u64 => Ok(bytes),
        _ => Err(format!("{text} is more than can be addressed")),
    }
}

/// A number of bytes, in the largest unit that keeps it short.
pub fn bytes(count: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    for (shift, unit) in units {
        if count >= 1 << shift {
            let value = count as f64 / (1u64 << shift) as f64;
            return if value.fract() == 0.0 {
                format!("{value:.0} {unit}")
            } else {
                format!("{value:.2} {unit}")
            };
        }
    }
    format!("{count} B")
}

/// A time in seconds, in the unit that keeps it readable.
pub fn seconds(time: f64) -> String {
    if time >= 1.0 {
        format!("{time:.2} s")
    } else if time >= 1e-3 {
        format!("{:.2} ms", time * 1e3)
    } else {
        format!("{:.2} µs", time * 1e6)
    }
}

/// GiB per second.
pub fn gib_per_second(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64 / seconds.max(1e-12)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, expected) in [("4096", 4096), ("64K", 65536), ("3 MiB", 3 << 20), ("2g", 2 << 30)] {
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
        for text in ["", "K", "0", "12 parsecs", "99999999999G", "-1"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_and_times_are_shown_in_fitting_units() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(64 << 20), "64 MiB");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(seconds(0.000_012), "12.00 µs");
        assert_eq!(seconds(0.25), "250.00 ms");
    }
}
