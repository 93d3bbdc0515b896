//! What a command prints: text for people, JSON for programs.

use std::cell::Cell;
use std::io::{ErrorKind, IsTerminal, Write};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;
use towline_lab::outcome::Failure;

/// Where the results of a command go.
pub(crate) struct Output {
    json: bool,
    terminal: bool,
    /// Whether the one document is printed already.
    answered: Cell<bool>,
}

/// What a program gets where a command failed before it had anything to tell.
#[derive(Serialize)]
struct Failed<'a> {
    ok: bool,
    error: &'a str,
    causes: &'a [String],
    exit: u8,
}

impl Output {
    pub(crate) fn new(json: bool) -> Output {
        Output { json, terminal: std::io::stdout().is_terminal(), answered: Cell::new(false) }
    }

    /// Whether a program asked.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Whether a person looks on: then progress may be shown, on standard error.
    pub(crate) fn shows_progress(&self) -> bool {
        !self.json && self.terminal && std::io::stderr().is_terminal()
    }

    /// Prints text, unless a program asked.
    pub(crate) fn text(&self, text: impl AsRef<str>) {
        if !self.json {
            write(text.as_ref());
        }
    }

    /// Prints the one JSON document, if a program asked.
    pub(crate) fn document(&self, document: &impl Serialize) {
        if self.json {
            self.answered.set(true);
            match serde_json::to_string_pretty(document) {
                Ok(text) => write(&text),
                Err(error) => eprintln!("towline: the result cannot be written as JSON: {error}"),
            }
        }
    }

    /// Prints a table, unless a program asked: with lines on a terminal, plain columns elsewhere.
    pub(crate) fn table(&self, header: &[&str], rows: &[Vec<String>], right: &[usize]) {
        if self.json || rows.is_empty() {
            return;
        }
        let mut table = Table::new();
        let mut style = if self.terminal { presets::UTF8_HORIZONTAL_ONLY } else { presets::NOTHING };
        style.row_separator = presets::NOTHING.row_separator;
        table.load_style(style);
        table.set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(header.to_vec());
        for row in rows {
            table.add_row(row);
        }
        for column in right {
            if let Some(column) = table.column_mut(*column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let lines: Vec<_> = table.lines().map(|line| line.trim_end().to_owned()).collect();
        write(&lines.join("\n"));
    }

    /// Prints why the command failed: one line, and the causes where they are asked for. A program gets a document all the same.
    pub(crate) fn failure(&self, failure: &Failure, verbose: bool) {
        if !self.answered.get() {
            let (error, causes) = (failure.message.as_str(), failure.causes.as_slice());
            self.document(&Failed { ok: false, error, causes, exit: failure.exit as u8 });
        }
        eprintln!("towline: {}", failure.message);
        if verbose {
            for cause in &failure.causes {
                eprintln!("  caused by: {cause}");
            }
        }
    }
}

/// Writes a line; a reader that has gone away (`towline bench | head`) is no error.
fn write(text: &str) {
    let mut stdout = std::io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => eprintln!("towline: standard output: {error}"),
        Ok(()) => {}
    }
}
