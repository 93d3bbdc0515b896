//! A NIXL that moves nothing: it writes down its calls, and is at its requests for as long as a test wants.

use std::path::{Path, PathBuf};
use std::process::Command;

use towline::Routing;
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
/// What goes on: nothing; a file whose first letter is `f` fails everything, and any other keeps it in progress.
static int progress(void) {
    FILE *hold = getenv("TOWLINE_TEST_FAKE_HOLD") ? fopen(getenv("TOWLINE_TEST_FAKE_HOLD"), "r") : NULL;
    int letter = hold ? fgetc(hold) : 0;
    if (hold) fclose(hold);
    return !hold ? 0 : letter == 'f' ? -2 : 1;
}
struct list { int kind, ranges; size_t address, length; uint64_t device; };

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
    list->address = address; list->length += length; list->device = device; list->ranges++; return 0;
}
int nixl_capi_destroy_reg_dlist(struct list *list) { free(list); return 0; }
int nixl_capi_create_xfer_dlist(int kind, struct list **list) { return nixl_capi_create_reg_dlist(kind, list); }
int nixl_capi_xfer_dlist_add_desc(struct list *list, size_t address, size_t length, uint64_t device) {
    return nixl_capi_reg_dlist_add_desc(list, address, length, device, NULL, 0);
}
int nixl_capi_destroy_xfer_dlist(struct list *list) { free(list); return 0; }
static int call(const char *what, const char *agent, struct list *list) {
    char text[256];
    int end = snprintf(text, sizeof text, "%s %.4s kind %d device %d length %zu", what, agent, list->kind,
                       list->kind == 0 ? -1 : (int)list->device, list->length);
    if (list->ranges > 1) snprintf(text + end, sizeof text - (size_t)end, " in %d ranges", list->ranges);
    note(text);
    return 0;
}
int nixl_capi_register_mem(void *agent, struct list *list, void *args) { return call("register", agent, list); }
int nixl_capi_deregister_mem(void *agent, struct list *list, void *args) { return call("deregister", agent, list); }
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
    call(op == 0 ? "read into" : "write from", agent, near);
    call(op == 0 ? "read from" : "write into", peer, far);
    *request = malloc(1);
    return 0;
}
int nixl_capi_post_xfer_req(void *agent, void *request, void *args) { return progress(); }
int nixl_capi_get_xfer_status(void *agent, void *request) { return progress(); }
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

pub(super) const CHILD: &str = "TOWLINE_TEST_OWN_PROCESS";
const LOG: &str = "TOWLINE_TEST_FAKE_LOG";
pub(super) const HOLD: &str = "TOWLINE_TEST_FAKE_HOLD";

/// Runs that test of that module once more in a process that finds the fake, with these variables; says which calls the fake has had.
pub(super) fn in_a_child(module: &str, test: &str, variables: &[(&str, &str)]) -> Option<String> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&folder).unwrap();
    let library = fake(test, &folder)?;
    let log = folder.join("calls");
    for left in [&log, &folder.join("hold")] {
        let _ = std::fs::remove_file(left);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("{module}::{test}")]).env(CHILD, "1").env(LOG, &log);
    command.env(HOLD, folder.join("hold"));
    command.env("TOWLINE_NIXL", library).env_remove("UCX_TLS").env_remove("UCX_MODULES");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    Some(std::fs::read_to_string(log).unwrap_or_default())
}

pub(super) fn only_nixl() -> Routing {
    Routing::default().require("nixl").unwrap()
}
