//! Memory of GPUs, on a library that writes down what it is told and moves nothing: no GPU is needed to see what NIXL is told.
#![allow(unsafe_code, reason = "implements a storage that says it is on a GPU")]

use std::any::Any;
use std::path::{Path, PathBuf};
use std::process::Command;

use towline::memory::{MemoryDescription, Place, Storage, StorageKind};
use towline::{Access, Kind, Routing, SystemStorage};
use towline_testkit::bench::{options, options_for};
use towline_testkit::skip;

/// What a fake says of itself; the rest of its functions return 0.
const FAKE: &str = r#"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void note(const char *text) {
    FILE *log = fopen(getenv("TOWLINE_TEST_FAKE_LOG"), "a");
    fprintf(log, "%s\n", text);
    fclose(log);
}
struct list { int kind; size_t address, length; uint64_t device; };

int nixl_capi_create_configured_agent(const char *name, const void *config, void **agent) { *agent = strdup(name); return 0; }
int nixl_capi_destroy_agent(void *agent) { free(agent); return 0; }
int nixl_capi_get_plugin_params(void *agent, const char *name, void **kinds, void **params) {
    *kinds = malloc(1); *params = malloc(1); return 0;
}
int nixl_capi_mem_list_size(void *list, size_t *size) { *size = 2; return 0; }
int nixl_capi_mem_list_get(void *list, size_t at, int *kind) { *kind = (int)at; return 0; }
int nixl_capi_destroy_mem_list(void *list) { free(list); return 0; }
int nixl_capi_params_create_iterator(void *params, void **iterator) { *iterator = malloc(1); return 0; }
int nixl_capi_params_iterator_next(void *iterator, const char **key, const char **value, bool *more) {
    *key = NULL; *more = false; return 0;
}
int nixl_capi_params_destroy_iterator(void *iterator) { free(iterator); return 0; }
int nixl_capi_create_params(void **params) { *params = malloc(1); return 0; }
int nixl_capi_destroy_params(void *params) { free(params); return 0; }
int nixl_capi_create_backend(void *agent, const char *name, void *params, void **backend) { *backend = malloc(1); return 0; }
int nixl_capi_destroy_backend(void *backend) { free(backend); return 0; }
int nixl_capi_create_opt_args(void **args) { *args = malloc(1); return 0; }
int nixl_capi_destroy_opt_args(void *args) { free(args); return 0; }
int nixl_capi_create_reg_dlist(int kind, struct list **list) { *list = calloc(1, sizeof **list); (*list)->kind = kind; return 0; }
int nixl_capi_reg_dlist_add_desc(struct list *list, size_t address, size_t length, uint64_t device, const void *m, size_t n) {
    list->address = address; list->length = length; list->device = device; return 0;
}
int nixl_capi_destroy_reg_dlist(struct list *list) { free(list); return 0; }
int nixl_capi_create_xfer_dlist(int kind, struct list **list) { return nixl_capi_create_reg_dlist(kind, list); }
int nixl_capi_xfer_dlist_add_desc(struct list *list, size_t address, size_t length, uint64_t device) {
    return nixl_capi_reg_dlist_add_desc(list, address, length, device, NULL, 0);
}
int nixl_capi_destroy_xfer_dlist(struct list *list) { free(list); return 0; }
static int told(const char *what, const char *agent, struct list *list) {
    char text[256];
    snprintf(text, sizeof text, "%s %.4s kind %d device %d length %zu", what, agent, list->kind,
             list->kind == 0 ? -1 : (int)list->device, list->length);
    note(text);
    return 0;
}
int nixl_capi_register_mem(void *agent, struct list *list, void *args) { return told("register", agent, list); }
int nixl_capi_deregister_mem(void *agent, struct list *list, void *args) { return told("deregister", agent, list); }
int nixl_capi_get_local_partial_md(void *agent, struct list *list, void **data, size_t *length, void *args) {
    char text[256];
    *length = (size_t)snprintf(text, sizeof text, "%s %zx %d", (char *)agent, list->address, (int)list->device);
    *data = strdup(text);
    return 0;
}
int nixl_capi_load_remote_md(void *agent, const void *data, size_t length, char **name) {
    const char *end = memchr(data, ' ', length);
    *name = strndup(data, (size_t)(end - (const char *)data));
    return 0;
}
int nixl_capi_create_xfer_req(void *agent, int op, struct list *near, struct list *far, const char *peer, void **request, void *args) {
    told(op == 0 ? "read into" : "write from", agent, near);
    told(op == 0 ? "read from" : "write into", peer, far);
    *request = malloc(1);
    return 0;
}
int nixl_capi_destroy_xfer_req(void *request) { free(request); return 0; }
int nixl_capi_create_notif_map(void **map) { *map = malloc(1); return 0; }
int nixl_capi_destroy_notif_map(void *map) { free(map); return 0; }
int nixl_capi_notif_map_size(void *map, size_t *size) { *size = 0; return 0; }
"#;

/// Builds the fake; `None`, with a line that says so, where there is no compiler.
fn fake(test: &str, folder: &Path) -> Option<PathBuf> {
    let table = include_str!("../../../towline-sys/src/nixl/api.rs");
    let (required, optional) = (table.find("required {").unwrap(), table.find("optional {").unwrap());
    let functions = table[required..optional].split('"').filter(|part| part.starts_with("nixl_capi_"));
    let rest: String = functions
        .filter(|function| !FAKE.contains(&format!("{function}(")))
        .map(|function| format!("int {function}() {{ return 0; }}\n"))
        .collect();
    let (input, output) = (folder.join("fake.c"), folder.join("libnixl_capi.so"));
    std::fs::write(&input, format!("{FAKE}{rest}")).unwrap();
    match Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&output).arg(&input).status() {
        Ok(status) => {
            assert!(status.success(), "cc failed");
            Some(output)
        }
        Err(error) => {
            skip::skip(test, "cc", &format!("the fake library cannot be built: cc: {error}"));
            None
        }
    }
}

/// Host memory that says it is on a GPU.
#[derive(Debug)]
struct OnGpu {
    memory: SystemStorage,
    from: usize,
    ordinal: u32,
}

impl OnGpu {
    fn new(ordinal: u32, len: usize) -> OnGpu {
        OnGpu { memory: SystemStorage::new(len).unwrap(), from: 0, ordinal }
    }
}

impl MemoryDescription for OnGpu {
    fn addr(&self) -> usize {
        self.memory.addr() + self.from
    }

    fn size(&self) -> usize {
        self.memory.size() - self.from
    }

    fn storage_kind(&self) -> StorageKind {
        StorageKind::Device(self.ordinal)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

// SAFETY: the bytes are those of a `SystemStorage`, which keeps the contract; that they are host memory harms nobody.
unsafe impl Storage for OnGpu {
    fn place(&self) -> Place {
        Place::Cuda(self.ordinal)
    }
}

const LEN: usize = 65536;
const CHILD: &str = "TOWLINE_TEST_OWN_PROCESS";
const LOG: &str = "TOWLINE_TEST_FAKE_LOG";

/// Runs that test once more in a process that finds the fake, with these variables; says what the fake was told.
fn in_a_child(test: &str, variables: &[(&str, &str)]) -> Option<String> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&folder).unwrap();
    let library = fake(test, &folder)?;
    let log = folder.join("told");
    let _ = std::fs::remove_file(&log);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("gpus::{test}")]).env(CHILD, "1").env(LOG, &log);
    command.env("TOWLINE_NIXL", library).env_remove("UCX_TLS").env_remove("UCX_MODULES");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    Some(std::fs::read_to_string(log).unwrap_or_default())
}

fn only_nixl() -> Routing {
    Routing::default().require("nixl").unwrap()
}

#[test]
fn memory_of_a_gpu_is_told_to_nixl_as_such_on_both_sides() {
    let test = "memory_of_a_gpu_is_told_to_nixl_as_such_on_both_sides";
    if std::env::var_os(CHILD).is_none() {
        let Some(told) = in_a_child(test, &[]) else { return };
        let told: Vec<_> = told.lines().collect();
        let expected = [
            "register owne kind 1 device 3 length 65536",
            "register user kind 1 device 1 length 65536",
            "read into user kind 1 device 1 length 65536",
            "read from owne kind 1 device 3 length 65536",
            "register user kind 0 device -1 length 65536",
            "write from user kind 0 device -1 length 4096",
            "write into owne kind 1 device 3 length 4096",
            "deregister user kind 1 device 1 length 65536",
            "deregister user kind 0 device -1 length 65536",
            "deregister owne kind 1 device 3 length 65536",
        ];
        assert_eq!(told, expected);
        return;
    }
    let (owner, user) = (options_for("nixl", "owner").open().unwrap(), options("user").open().unwrap());
    let region = owner.register(OnGpu::new(3, LEN), Access::READ_WRITE).unwrap();
    let remote = user.import_with(&region.ticket().unwrap(), &only_nixl()).unwrap();
    assert_eq!((remote.path(), remote.place()), ("nixl", Place::Cuda(3)));
    let near = user.register(OnGpu::new(1, LEN), Access::NONE).unwrap();
    user.read(&remote, &near).start().unwrap().wait().unwrap();
    let host = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    user.write(&remote, &host).at(0, 0, 4096).start().unwrap().wait().unwrap();
    // Words on a GPU stay out of reach.
    let error = user.write(&remote, &host).at(0, 0, 8).signal(0, 1).start().unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported, "{error}");
    near.into_storage().unwrap();
    host.into_storage().unwrap();
    region.into_storage().unwrap();
}

#[test]
fn two_regions_that_share_memory_of_a_gpu_are_not_both_given_to_nixl() {
    let test = "two_regions_that_share_memory_of_a_gpu_are_not_both_given_to_nixl";
    if std::env::var_os(CHILD).is_none() {
        if let Some(told) = in_a_child(test, &[]) {
            assert_eq!(told.lines().filter(|line| line.starts_with("register")).count(), 2, "{told}");
        }
        return;
    }
    let (owner, user) = (options_for("nixl", "owner").open().unwrap(), options("user").open().unwrap());
    let storage = std::sync::Arc::new(OnGpu::new(0, LEN));
    let first = owner.register(std::sync::Arc::clone(&storage), Access::READ_WRITE).unwrap();
    let second = owner.register(storage, Access::READ_WRITE).unwrap();
    let remote = user.import_with(&first.ticket().unwrap(), &only_nixl()).unwrap();
    let error = user.import_with(&second.ticket().unwrap(), &only_nixl()).unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{error}");
    assert!(error.message().contains("cannot keep them apart"), "{error}");
    drop(remote);
    first.into_storage().unwrap();
    user.import_with(&second.ticket().unwrap(), &only_nixl()).unwrap();
}

#[test]
fn memory_of_a_gpu_is_not_offered_where_ucx_has_no_cuda() {
    let test = "memory_of_a_gpu_is_not_offered_where_ucx_has_no_cuda";
    if std::env::var_os(CHILD).is_none() {
        for variable in [("UCX_TLS", "tcp"), ("UCX_MODULES", "^cuda")] {
            if let Some(told) = in_a_child(test, &[variable]) {
                assert_eq!(told, "", "nothing was registered");
            }
        }
        return;
    }
    let (owner, user) = (options_for("nixl", "owner").open().unwrap(), options("user").open().unwrap());
    let region = owner.register(OnGpu::new(3, LEN), Access::READ_WRITE).unwrap();
    let error = user.import_with(&region.ticket().unwrap(), &only_nixl()).unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{error}");
    assert!(error.message().contains("the owner's UCX has no CUDA"), "{error}");
}
