//! With a plain process of NIXL: the wheel's own Python API, in a process that has nothing of this library.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use data_encoding::BASE64;
use serde_json::{Value, json};
use towline::memory::{MemoryAccess, MemoryDescription};
use towline::nixl::{Engine, NixlRegisterExt, XferDescList, XferOp};

use crate::{agent, bytes_of, filled, notified, notifying, pattern, run, skip, there};

/// The process. It ends when its standard input does.
struct Plain {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// The Python of the environment in which NIXL is, where it has what the wheel's API needs.
fn python() -> Result<PathBuf, String> {
    let environment = std::env::var_os("VIRTUAL_ENV").ok_or("VIRTUAL_ENV is not set")?;
    let python = PathBuf::from(environment).join("bin/python");
    let asked = Command::new(&python)
        .args(["-c", "import numpy, importlib.util as u; assert any(map(u.find_spec, ('nixl', 'nixl_cu12', 'nixl_cu13')))"])
        .output()
        .map_err(|error| format!("{} cannot be started: {error}", python.display()))?;
    let said = String::from_utf8_lossy(&asked.stderr);
    let last = said.trim().lines().last().unwrap_or_default().to_owned();
    if asked.status.success() {
        Ok(python)
    } else {
        Err(format!("the wheel's Python API is not usable: {last}"))
    }
}

impl Plain {
    /// Starts it with an agent and `bytes` bytes of memory; or says why the test is skipped.
    fn start(test: &str, name: &str, bytes: usize, seed: usize) -> Option<Plain> {
        if !there(test) {
            return None;
        }
        let python = match python() {
            Ok(python) => python,
            Err(reason) => {
                skip(test, "nixl", &reason);
                return None;
            }
        };
        let mut child = Command::new(python)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nixl/peer.py"))
            .env("UCX_MODULES", "^efa")
            .env("NIXL_LOG_LEVEL", "WARN")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (orders, answers) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut plain = Plain { child, orders, answers };
        plain.ask(json!({"do": "start", "name": name, "bytes": bytes, "seed": seed}));
        Some(plain)
    }

    fn ask(&mut self, order: Value) -> Value {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
        assert_eq!(answer.get("error"), None, "{order}");
        answer
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

fn decoded(value: &Value) -> Vec<u8> {
    BASE64.decode(value.as_str().unwrap().as_bytes()).unwrap()
}

#[test]
fn a_plain_process_is_read_and_written_and_told() {
    let len = 1 << 20;
    let name = "interop-plain-passive";
    let Some(mut plain) = Plain::start("a_plain_process_is_read_and_written_and_told", name, len, 3) else {
        return;
    };
    let ours = agent("interop-active", Engine::Nixl, &["UCX"]);
    let memory = filled(&vec![0; len]).register(&ours, None).unwrap();
    let offer = plain.ask(json!({"do": "offer"}));
    assert_eq!(ours.load_remote_md(&decoded(&offer["metadata"])).unwrap(), name);
    let remote = XferDescList::deserialize(&decoded(&offer["descs"])).unwrap();
    assert_eq!(remote.len().unwrap(), 2);
    let mut local = XferDescList::new(remote.get_type().unwrap()).unwrap();
    local.add_desc(memory.addr(), len / 2, 0).unwrap();
    local.add_desc(memory.addr() + len / 2, len / 2, 0).unwrap();

    let request = ours.create_xfer_req(XferOp::Read, &local, &remote, name, None).unwrap();
    run(&ours, &request, Some(&notifying(b"read")));
    assert!(bytes_of(memory.storage()) == pattern(len, 3));
    let said = plain.ask(json!({"do": "notified"}));
    assert_eq!((said["from"].as_str(), said["message"].as_str()), (Some(&*ours.name()), Some("read")));

    let bytes = pattern(len, 200);
    memory.storage().write_at(0, &bytes).unwrap();
    let request = ours.create_xfer_req(XferOp::Write, &local, &remote, name, None).unwrap();
    run(&ours, &request, Some(&notifying(b"written")));
    assert_eq!(plain.ask(json!({"do": "notified"}))["message"], "written");
    assert!(decoded(&plain.ask(json!({"do": "bytes"}))["bytes"]) == bytes);
}

#[test]
fn a_plain_process_reads_and_writes_here_and_tells() {
    let len = 1 << 20;
    let name = "interop-plain-active";
    let Some(mut plain) = Plain::start("a_plain_process_reads_and_writes_here_and_tells", name, len, 5)
    else {
        return;
    };
    let ours = agent("interop-passive", Engine::Nixl, &["UCX"]);
    let bytes = pattern(len, 77);
    let memory = filled(&bytes).register(&ours, None).unwrap();
    let mut list = XferDescList::new(towline::nixl::MemType::Dram).unwrap();
    for half in 0..2 {
        list.add_desc(memory.addr() + half * len / 2, len / 2, 0).unwrap();
    }
    let package = plain.ask(json!({"do": "offer"}))["package"].as_str().unwrap().to_owned();
    let metadata = BASE64.encode(&ours.get_local_md().unwrap());
    let descs = BASE64.encode(&list.serialize_for(&package).unwrap());
    assert_eq!(plain.ask(json!({"do": "know", "metadata": metadata}))["peer"], ours.name());

    let mine = decoded(&plain.ask(json!({"do": "bytes"}))["bytes"]);
    assert!(mine == pattern(len, 5));
    for (op, message) in [("WRITE", "put"), ("READ", "taken")] {
        if op == "READ" {
            memory.storage().write_at(0, &bytes).unwrap();
        }
        let order = json!({"do": "move", "op": op, "descs": descs, "peer": ours.name(), "message": message});
        assert_eq!(plain.ask(order)["state"], "DONE");
        assert_eq!(notified(&ours).get_notifications(name), [message.as_bytes()]);
        if op == "WRITE" {
            assert!(bytes_of(memory.storage()) == mine);
        } else {
            assert!(decoded(&plain.ask(json!({"do": "bytes"}))["bytes"]) == bytes);
        }
    }
}
