//! Files: NIXL's plug-in POSIX, and what stands in its place.

use towline::memory::{DirectIo, MemoryAccess};
use towline::nixl::{
    AgentConfig, MemType, NixlAgent, NixlDescriptor, NixlRegisterExt, RegisteredView, XferDescList, XferOp,
};
use towline::{DiskStorage, Kind};

use crate::{bytes_of, engines, filled, pattern, run, skip, whole};

/// An agent with the backend POSIX, where the engine has it.
fn with_posix(test: &str, name: &str, engine: towline::nixl::Engine) -> Option<NixlAgent> {
    let config = AgentConfig { capture_telemetry: true, engine: Some(engine), ..AgentConfig::default() };
    let agent = NixlAgent::new_with_config(&format!("{name}-{engine}"), &config).unwrap();
    if !agent.get_available_plugins().unwrap().iter().any(|plugin| plugin == "POSIX") {
        skip(test, "nixl", "this NIXL has no plug-in POSIX");
        return None;
    }
    agent.add_backend("POSIX").unwrap();
    Some(agent)
}

#[test]
fn a_file_is_written_and_read_through_posix() {
    let test = "a_file_is_written_and_read_through_posix";
    for engine in engines(test) {
        let Some(agent) = with_posix(test, "files", engine) else { continue };
        for direct in [DirectIo::Try, DirectIo::Never] {
            let len = 256 << 10;
            let bytes = pattern(len, 3);
            let memory = filled(&bytes).register(&agent, None).unwrap();
            let file = DiskStorage::options().direct(direct).create(len).unwrap();
            let file = file.register(&agent, None).unwrap();
            assert_eq!(file.descriptor().mem_type, MemType::File);
            assert_eq!(file.descriptor().device_id, file.storage().fd());
            let (near, far) = (whole(&memory), whole(&file));
            let name = agent.name();
            let request = agent.create_xfer_req(XferOp::Write, &near, &far, &name, None).unwrap();
            run(&agent, &request, None);
            assert_eq!(request.get_telemetry().unwrap().total_bytes, len as u64);
            assert!(std::fs::read(file.storage().path()).unwrap() == bytes);
            memory.storage().memset(0, 0, len).unwrap();
            let request = agent.create_xfer_req(XferOp::Read, &near, &far, &name, None).unwrap();
            run(&agent, &request, None);
            assert!(bytes_of(memory.storage()) == bytes);

            // Parts of the file by their offsets, each a page.
            let mut pages = XferDescList::new(MemType::File).unwrap();
            let mut places = XferDescList::new(MemType::Dram).unwrap();
            for page in 0..4 {
                pages.add_desc((3 - page) * 8192, 4096, file.descriptor().device_id).unwrap();
                places.add_desc(memory.descriptor().addr as usize + page * 4096, 4096, 0).unwrap();
            }
            let request = agent.create_xfer_req(XferOp::Read, &places, &pages, &name, None).unwrap();
            run(&agent, &request, None);
            for page in 0..4 {
                let mut got = vec![0; 4096];
                memory.storage().read_at(page * 4096, &mut got).unwrap();
                assert!(got == bytes[(3 - page) * 8192..][..4096], "page {page} on {engine}");
            }
        }
    }
}

#[test]
fn a_file_is_registered_by_its_descriptor() {
    use std::os::fd::AsRawFd;
    let test = "a_file_is_registered_by_its_descriptor";
    for engine in engines(test) {
        let Some(agent) = with_posix(test, "fd", engine) else { continue };
        let len = 64 << 10;
        let bytes = pattern(len, 4);
        let path = std::env::temp_dir().join(format!("towline-fd-{}-{engine}", std::process::id()));
        std::fs::write(&path, &bytes).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let descriptor = NixlDescriptor {
            addr: 0,
            size: len,
            mem_type: MemType::File,
            device_id: file.as_raw_fd() as u64,
        };
        // SAFETY: the file stays open until the handle is gone.
        let handle = unsafe { agent.register_memory(&descriptor, None) };
        let mut handle = match handle {
            Ok(handle) => handle,
            // Some versions of the plug-in want to write.
            Err(error) if engine == towline::nixl::Engine::Nixl => {
                skip(test, "nixl", &format!("POSIX refuses the file: {error}"));
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let memory = filled(&vec![0; len]).register(&agent, None).unwrap();
        let mut far = XferDescList::new(MemType::File).unwrap();
        far.add_storage_desc(&descriptor).unwrap();
        let request =
            agent.create_xfer_req(XferOp::Read, &whole(&memory), &far, &agent.name(), None).unwrap();
        run(&agent, &request, None);
        assert!(bytes_of(memory.storage()) == bytes, "{engine}");
        drop(request);
        handle.deregister().unwrap();
        if engine == towline::nixl::Engine::Embedded {
            let closed = NixlDescriptor { device_id: 1 << 20, ..descriptor };
            // SAFETY: it names nothing.
            let error = unsafe { agent.register_memory(&closed, None) }.unwrap_err();
            assert!(matches!(error.kind(), Kind::NotFound | Kind::Native), "{error}");
        }
    }
}
