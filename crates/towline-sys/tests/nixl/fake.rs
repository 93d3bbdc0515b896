//! Libraries that call themselves `libnixl_capi.so`, built here with `cc`.

use std::path::PathBuf;
use std::process::Command;

use towline_sys::Error;
use towline_sys::nixl::{AgentConfig, Nixl};

use crate::skip;

/// Every function that the table asks for, taken from the table itself.
fn functions() -> Vec<&'static str> {
    let source = include_str!("../../src/nixl/api.rs");
    let (required, optional) = (source.find("required {").unwrap(), source.find("optional {").unwrap());
    source[required..optional].split('"').filter(|part| part.starts_with("nixl_capi_")).collect()
}

/// Builds a fake in a folder of its own; `None`, with a line that says so, where there is no compiler.
fn build(test: &str, source: &str) -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&folder).unwrap();
    let (input, output) = (folder.join("fake.c"), folder.join("libnixl_capi.so"));
    std::fs::write(&input, source).unwrap();
    let _ = std::fs::remove_file(&output);
    match Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&output).arg(&input).status() {
        Ok(status) => {
            assert!(status.success(), "cc failed");
            Some(output)
        }
        Err(error) => {
            skip(test, "cc", &format!("the fake library cannot be built: cc: {error}"));
            None
        }
    }
}

/// All functions, each of which returns `code`, but for those that `own` defines.
fn all_return(code: i32, own: &str) -> String {
    let mut source = String::from("#include <stdbool.h>\n#include <stddef.h>\n#include <stdlib.h>\n");
    for function in functions() {
        if !own.contains(&format!("{function}(")) {
            source.push_str(&format!("int {function}() {{ return {code}; }}\n"));
        }
    }
    source + own
}

/// An agent that can be made and goes.
const AGENT: &str = "
int nixl_capi_create_configured_agent(const char *name, const void *config, void **agent) {
    *agent = malloc(8);
    return 0;
}
int nixl_capi_destroy_agent(void *agent) { free(agent); return 0; }
";

fn reason_of(result: Result<Nixl, Error>) -> String {
    let Err(Error::NotLoaded(why)) = result else { panic!("it should not load: {result:?}") };
    assert_eq!(why.attempts.len(), 1, "{why}");
    why.attempts[0].reason.clone()
}

#[test]
fn a_library_that_is_not_there_is_unavailable_and_names_the_place() {
    let error = Nixl::load_from("/nowhere/libnixl_capi.so").unwrap_err();
    assert!(error.is_unavailable());
    assert!(error.to_string().contains("/nowhere/libnixl_capi.so (named by the program): No such file"));
    assert!(error.to_string().contains("pip install nixl-cu12"));
}

#[test]
fn a_file_that_is_no_library_is_unavailable() {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("no-library.so");
    std::fs::write(&file, "this is a text").unwrap();
    let reason = reason_of(Nixl::load_from(&file));
    assert!(reason.contains("file too short") || reason.contains("invalid ELF header"), "{reason}");
}

#[test]
fn a_library_without_some_functions_is_refused_and_they_are_named() {
    let source = "int nixl_capi_destroy_agent() { return 0; }";
    let Some(library) = build("a_library_without_some_functions", source) else { return };
    let reason = reason_of(Nixl::load_from(&library));
    let expected = format!(
        "it lacks the functions nixl_capi_create_configured_agent, nixl_capi_get_available_plugins, \
         nixl_capi_string_list_size, nixl_capi_string_list_get and {} more",
        functions().len() - 5
    );
    assert_eq!(reason, expected);
}

#[test]
fn a_library_of_an_older_version_is_refused_by_its_extra_functions() {
    let source = all_return(0, "int nixl_capi_xfer_dlist_is_sorted() { return 0; }");
    let Some(library) = build("a_library_of_an_older_version", &source) else { return };
    assert!(reason_of(Nixl::load_from(&library)).contains("before 1.0"));
}

#[test]
fn a_stub_is_refused() {
    let source = all_return(0, "bool nixl_capi_is_stub() { return true; }");
    let Some(library) = build("a_stub", &source) else { return };
    assert!(reason_of(Nixl::load_from(&library)).contains("is a stub"));
}

#[test]
fn a_library_that_needs_another_one_says_which() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("needy");
    std::fs::create_dir_all(&folder).unwrap();
    let Some(other) = build("needy-dependency", "int towline_other() { return 0; }") else { return };
    let other_name = folder.join("libtowline_other.so");
    std::fs::copy(other, &other_name).unwrap();
    let (input, library) = (folder.join("fake.c"), folder.join("libnixl_capi.so"));
    std::fs::write(&input, "int towline_other(); int x() { return towline_other(); }").unwrap();
    let built = Command::new("cc")
        .current_dir(&folder)
        .args(["-shared", "-fPIC", "-o", "libnixl_capi.so", "fake.c", "-L.", "-ltowline_other"])
        .status();
    assert!(built.unwrap().success());
    std::fs::remove_file(other_name).unwrap();
    let reason = reason_of(Nixl::load_from(&library));
    assert!(reason.contains("libtowline_other.so"), "{reason}");
}

#[test]
fn a_refusal_names_the_call_the_code_and_its_name() {
    let Some(library) = build("a_refusal", &all_return(-2, "")) else { return };
    let nixl = Nixl::load_from(&library).unwrap();
    assert_eq!(nixl.version(), None);
    assert!(!nixl.is_wheel());
    let error = nixl.agent("a", &AgentConfig::default()).unwrap_err();
    assert!(!error.is_unavailable());
    assert_eq!(error.to_string(), "nixl_capi_create_configured_agent returned -2 (backend error)");
}

#[test]
fn a_code_that_nobody_knows_is_still_an_error() {
    let Some(library) = build("an_unknown_code", &all_return(-77, AGENT)) else { return };
    let nixl = Nixl::load_from(&library).unwrap();
    let agent = nixl.agent("a", &AgentConfig::default()).unwrap();
    let error = agent.plugins().unwrap_err();
    assert_eq!(error.to_string(), "nixl_capi_get_available_plugins returned -77 (unknown code)");
}

#[test]
fn success_without_a_result_is_an_error_and_no_null_pointer_is_followed() {
    let Some(library) = build("an_empty_success", &all_return(0, AGENT)) else { return };
    let nixl = Nixl::load_from(&library).unwrap();
    let agent = nixl.agent("a", &AgentConfig::default()).unwrap();
    for error in [
        agent.plugins().unwrap_err(),
        agent.plugin("UCX").unwrap_err(),
        agent.load_metadata(b"x").unwrap_err(),
        agent.notifications().unwrap_err(),
    ] {
        assert!(error.to_string().contains("returned 0 (success, but nothing was made)"), "{error}");
    }
    assert_eq!(agent.metadata().unwrap(), b"");
}

#[test]
fn a_name_with_a_zero_byte_never_reaches_the_library() {
    let Some(library) = build("a_zero_byte", &all_return(0, AGENT)) else { return };
    let nixl = Nixl::load_from(&library).unwrap();
    let error = nixl.agent("a\0b", &AgentConfig::default()).unwrap_err();
    assert!(matches!(error, Error::Argument { .. }));
}

#[test]
fn an_optional_function_that_is_missing_is_unavailable_only_when_it_is_used() {
    let own = format!("{AGENT}int nixl_capi_create_opt_args(void **args) {{ *args = malloc(8); return 0; }}");
    let Some(library) = build("an_optional_function", &all_return(0, &own)) else { return };
    let nixl = Nixl::load_from(&library).unwrap();
    let agent = nixl.agent("a", &AgentConfig::default()).unwrap();
    let options = towline_sys::nixl::Options { custom: Some(b"x"), ..Default::default() };
    let error = agent.connect("b", &options).unwrap_err();
    assert!(error.is_unavailable());
    assert_eq!(error.to_string(), "this NIXL has no function nixl_capi_opt_args_set_custom_param");
    agent.connect("b", &Default::default()).unwrap();
}
